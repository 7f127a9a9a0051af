"""The rule `nc-load`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "nc-load",
    judges=r"ld\.global.*\.nc",
    rows=(
        Row(
            "`ld.global.nc` does not read what its own kernel wrote (9.7.9.9)",
            suite="nc-load",
        ),
    ),
)
