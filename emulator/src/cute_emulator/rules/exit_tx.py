"""The rule `exit-tx`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "exit-tx",
    judges=r"mbarrier.*expect_tx",
    rows=(
        Row(
            "Bytes that an mbarrier expects come before the end",
            setting="strict, and where somebody waits",
        ),
    ),
    setting="strict",
)
