"""The rule `shfl-exited`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "shfl-exited",
    judges=r"shfl",
    rows=(
        Row(
            "A shuffle reads from lanes that are there: what the mask names has not exited",
        ),
    ),
)
