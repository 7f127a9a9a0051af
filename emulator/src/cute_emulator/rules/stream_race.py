"""The rule `stream-race`."""

from cute_emulator.rules.rule import Row, Rule

RULE = Rule(
    "stream-race",
    judges="",
    rows=(
        Row(
            "Works of two streams (kernels, torch's operations, copies, replays of a graph) that "
            "touch the same bytes, one of them writing, are ordered: by their stream, an event, "
            "`wait_stream`, or a host that waited for the first before it issued the second. "
            "Launches that run side by side are judged access by access, as `race`",
            kinds="`stream-race`, `race`",
        ),
    ),
    setting="scripts",
)
