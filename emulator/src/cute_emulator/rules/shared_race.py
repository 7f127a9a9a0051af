"""The rule `shared-race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "shared-race",
    judges=(
        r"(ld|st|atom|red)\.(?!param|const|local|global)|(ld|st)matrix|cp\.(reduce\.)?asyn"
        r"c|wgmma\.mma_async|tcgen05\.(mma|cp)|tcgen05\.(ld|st|mma|cp|dealloc)"
    ),
    rows=(
        Row(
            "Accesses in shared and tensor memory are ordered, those of asynchronous units "
            "included: a copy is known "
            "by its mbarrier's phase, a bulk store's read by `wait_group.read`, its write by a "
            "full `wait_group`, a wgmma by its `wait_group`, a product by a `tcgen05.commit` of "
            "the *same thread* (9.7.16.12)",
            suite="tcgen05.commit",
            kinds="`shared-race`, `race`",
        ),
        Row(
            "A product, a load and a commit are issued by each lane that executes them",
            suite="one for each lane",
            kinds="error, `shared-race`, deadlock",
        ),
    ),
)
