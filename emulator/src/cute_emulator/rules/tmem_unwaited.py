"""The rule `tmem-unwaited`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "tmem-unwaited",
    judges=r"tcgen05\.(ld|st|mma|cp|dealloc)",
    rows=(
        Row(
            "A product does not overwrite tensor memory, and a dealloc does not free it, before "
            "`tcgen05.wait` of those who access it",
        ),
    ),
    setting="strict",
)
