"""The rule `host-race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "host-race",
    judges="",
    rows=(
        Row(
            "The host reads and writes pinned memory after it has waited for the work that writes"
            ' or reads it: copies with `non_blocking=True` (which `.to("cpu")` makes pinned), '
            "kernels that use its address",
        ),
    ),
    setting="scripts",
)
