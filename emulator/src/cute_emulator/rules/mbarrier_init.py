"""The rule `mbarrier-init`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "mbarrier-init",
    judges=r"mbarrier\.init",
    rows=(
        Row(
            "Other CTAs and the async proxy use an mbarrier after a fence of its init "
            "(`fence.mbarrier_init`, or one at least as strong)",
        ),
    ),
)
