"""The rule `tmem-fence`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "tmem-fence",
    judges=r"tcgen05\.(ld|st|mma|cp|dealloc)",
    rows=(
        Row(
            "Tensor memory is used by two threads with `tcgen05.fence::before_thread_sync` after "
            "the one and `::after_thread_sync` before the other (9.7.16.6.3). By default: where "
            "the one has the first fence; in a kernel that has an after-fence anywhere: "
            "throughout; before a dealloc, in a kernel that has any. NVIDIA's CuTe DSL GEMMs have"
            " none, which is let pass",
            suite="tcgen05.fence",
            setting="default, in full: `--also tmem-fence`",
        ),
    ),
)
