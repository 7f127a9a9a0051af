"""The rule `wgmma-fence`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "wgmma-fence",
    judges=r"wgmma\.mma_async",
    rows=(
        Row(
            "A wgmma's registers are fenced: before the first, and after any access to its "
            "accumulator or to A in registers (9.7.15.5)",
            suite="wgmma.fence",
        ),
    ),
)
