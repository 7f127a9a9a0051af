"""The rule `exit-remote`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "exit-remote",
    judges=r"mapa|.*(shared|multicast)::cluster",
    rows=(
        Row(
            "A CTA ends when no peer may still use its shared memory",
        ),
    ),
)
