"""The rule `barrier-exit`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "barrier-exit",
    judges=r"bar(rier)?(\.cta)?\.(sync|red)",
    rows=(
        Row(
            "A barrier that names no count is reached by every warp of the CTA",
        ),
    ),
    setting="strict",
)
