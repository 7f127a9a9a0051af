"""The rule `cancel-failed`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import CancelRead, CancelRequested
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "cancel-failed"


def _requested(checks: Any, event: CancelRequested) -> None:
    seen = checks.notes(event.group.warp.cta.cluster).get(KIND)
    if seen is not None:
        checks.report.add(
            KIND,
            f"no request may follow one that is known to have failed: line "
            f"{checks.report.place(event.line)} of "
            f"{event.group.warp} tries to cancel another cluster, after line "
            f"{checks.report.place(seen)} read "
            "that there is none",
            event.line,
            other=seen,
        )


def _read(checks: Any, event: CancelRead) -> None:
    if event.canceled:
        return
    if event.query == "is_canceled":
        checks.notes(event.group.warp.cta.cluster).setdefault(KIND, event.line)
        return
    checks.report.add(
        KIND,
        f"no CTA was cancelled: line {checks.report.place(event.line)} of {event.group.warp} reads "
        f"{event.query} of a request that failed",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    """Returns kernels with a grid of one cluster: there is nothing to cancel."""
    kernel: dict[str, Any] = {"shape": {"block": (32, 1, 1)}}
    ask = """
    @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 16;
    @%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r10], [%r11];
    """
    wait = "W{0}: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], {0}; @!%p10 bra W{0};"
    query = "clusterlaunchcontrol.query_cancel."
    start = f"""
    .reg .b128 %q1; @%p0 mbarrier.init.shared.b64 [%r11], 1; @%p0 fence.mbarrier_init.release.cluster;
    bar.warp.sync -1; {ask} {wait.format(0)} ld.shared.b128 %q1, [%r10];
    {query}is_canceled.pred.b128 %p11, %q1; setp.eq.b32 %p12, %r2, %r2;
    """
    pairs = []
    for name, text in (
        ("get_first_ctaid", "get_first_ctaid.v4.b32.b128 {%r20, %r21, %r22, %r23}, %q1;"),
        ("get_first_ctaid::x", "get_first_ctaid::x.b32.b128 %r20, %q1;"),
        ("get_first_ctaid::y", "get_first_ctaid::y.b32.b128 %r20, %q1;"),
    ):
        body = f"{start} @|P| {query}{text}"
        pairs.append(Pair(f"{name} of a request that failed", body, {"|P|": "%p12"}, {"|P|": "%p11"}, kernel))
    again = f"{start} @|P| bra A; bra E; A: {ask} {wait.format(1)} E:"
    pairs.append(
        Pair(
            "another request after one that was seen to fail", again, {"|P|": "%p12"}, {"|P|": "%p11"}, kernel
        )
    )
    return tuple(pairs)


RULE = Rule(
    KIND,
    judges=r"clusterlaunchcontrol",
    rows=(
        Row(
            "No `clusterlaunchcontrol.try_cancel` follows one that is known to have failed, and no CTA of a "
            "failed request is read (9.7.13.18)",
            suite=KIND,
        ),
    ),
    on={CancelRequested: _requested, CancelRead: _read},
    pairs=_pairs(),
)
