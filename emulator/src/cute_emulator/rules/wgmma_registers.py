"""The rule `wgmma-registers`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "wgmma-registers",
    judges=r"wgmma\.mma_async",
    rows=(
        Row(
            "Registers of a wgmma in flight, A's and D's, are left alone until a `wait_group` that covers it",
            suite="wgmma registers",
        ),
    ),
)
