"""The rule `race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "race",
    judges=r"(ld|st|atom|red|multimem)\.(?!param|const|local|shared)|cp\.(reduce\.)?async",
    rows=(
        Row(
            "Conflicting accesses to global memory by two warps are ordered, or both strong at "
            "scopes that include each other (8.7, 8.10); payload that is polled for itself "
            "(Lamport, LL) is stored and loaded by strong accesses",
            suite="races",
        ),
        Row(
            "A programmatic dependent launch runs beside the launch before it from when all CTAs "
            "of that have executed `griddepcontrol.launch_dependents` or ended, and knows nothing"
            " of it before `griddepcontrol.wait` (9.7.13.13)",
            suite="programmatic launch",
        ),
    ),
)
