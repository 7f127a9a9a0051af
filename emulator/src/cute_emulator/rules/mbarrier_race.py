"""The rule `mbarrier-race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "mbarrier-race",
    judges=r"mbarrier\.init",
    rows=(
        Row(
            "An mbarrier is used after its init, by order",
        ),
    ),
)
