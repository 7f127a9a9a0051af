"""The rule `proxy-fence`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "proxy-fence",
    judges=r"cp\.(reduce\.)?async|wgmma\.mma_async|tcgen05\.(mma|cp)",
    rows=(
        Row(
            "What an async unit reads (bulk and TMA stores, loads of global memory, wgmma, "
            "tcgen05.mma and .cp) and ordinary stores wrote has passed a `fence.proxy.async` of "
            "its space that stands *after* the stores, on the writer's or the reader's side (8.6,"
            " 8.7, 9.7.13.4)",
            suite="proxy-fence: read",
        ),
        Row(
            "What an async copy overwrites (bulk and TMA loads into shared memory; bulk and TMA "
            "stores and reductions into global memory) and ordinary stores wrote has, too",
            suite="proxy-fence: write",
        ),
        Row(
            "`cp.async` writes through the generic proxy: async units read its data after its "
            "wait *and then* a fence (9.7.9.25.3)",
            suite="proxy-fence: cp.async",
        ),
    ),
)
