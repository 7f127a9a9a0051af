"""The rule `setmaxnreg`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "setmaxnreg",
    judges=r"setmaxnreg",
    rows=(
        Row(
            "All warps of a warpgroup execute the same `setmaxnreg`",
            suite="setmaxnreg",
        ),
    ),
)
