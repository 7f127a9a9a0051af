"""The rule `tmem-leak`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "tmem-leak",
    judges=r"tcgen05\.alloc",
    rows=(
        Row(
            "Tensor memory is freed before its CTA ends",
        ),
    ),
)
