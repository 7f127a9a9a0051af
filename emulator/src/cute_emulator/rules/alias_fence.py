"""The rule `alias-fence`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "alias-fence",
    judges=r"multimem",
    rows=(
        Row(
            "Between accesses by a multicast address and by a rank's own lies a `fence.proxy.alias` (8.7)",
        ),
    ),
)
