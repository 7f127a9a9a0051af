"""The rule `tmem-freed`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "tmem-freed",
    judges=r"tcgen05\.(ld|st|mma|cp|dealloc)",
    rows=(
        Row(
            "Tensor memory is not used after its dealloc",
        ),
    ),
)
