"""The rule `reuse-race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "reuse-race",
    judges="",
    rows=(
        Row(
            "Memory that is freed may be the next allocation's of the same stream: what other "
            "streams still do to it is in `record_stream`, or ordered before the new owner's "
            "first use. Pinned memory waits for copies, not for kernels. A graph that is replayed"
            " finds what it captured still allocated",
        ),
    ),
    setting="scripts",
)
