"""The rule `lane-race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "lane-race",
    judges=r"(ld|st)\.(?!param|const|local)",
    rows=(
        Row(
            "What one lane stored another lane, or an async operation that it issues, uses only "
            "after `bar.warp.sync`, a barrier, or a release and an acquire. A shuffle, a vote, an"
            " election, a `redux` and a fence are none (9.7.13.2)",
            suite="lanes",
        ),
        Row(
            "A release by some lanes (a flag, an arrival) tells of their stores alone; who "
            "acquires it and uses the others' is named",
            suite="lanes",
        ),
    ),
)
