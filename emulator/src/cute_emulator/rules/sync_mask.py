"""The rule `sync-mask`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "sync-mask",
    judges=r"shfl|vote|match|redux|elect|bar\.warp",
    rows=(
        Row(
            "A lane that executes a `.sync` instruction is in its mask",
        ),
    ),
)
