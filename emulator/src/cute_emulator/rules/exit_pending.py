"""The rule `exit-pending`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "exit-pending",
    judges=r"cp\.(reduce\.)?async|wgmma\.mma_async|tcgen05\.(mma|cp)|tcgen05\.commit",
    rows=(
        Row(
            "A CTA ends when nothing of its own is in flight",
        ),
    ),
)
