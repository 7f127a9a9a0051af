"""The rule `nc-load`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import GlobalIncoherent
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "nc-load"


def _look(checks: Any, event: GlobalIncoherent) -> None:
    place = checks.report.place
    checks.report.add(
        KIND,
        f"not coherent, with any fence or barrier between: the ld.global.nc of line "
        f"{place(event.line)} by {event.agent.warp} reads {event.spot}, which "
        f"{event.owner.warp} of the same kernel wrote in line {place(event.first)}",
        event.line,
        key=(event.line, event.first),
        other=event.first,
    )


def _pairs() -> list[Pair]:
    """Returns loads by `ld.global.nc` of what the same kernel writes."""
    rule, cases = "nc-load", []
    nc, plain = "ld.global.nc.b32 %r20, [%d11];", "ld.global.b32 %r20, [%d11];"
    texts: dict[str, tuple[str, dict[str, Any]]] = {
        "in one thread": ("st.global.b32 [%d11], %r0; |L|", {}),
        "after a barrier": ("@%p1 st.global.b32 [%d11], %r0; bar.sync 0; |L|", ptx.TWO),
        "after a flag": (
            f"@!%p4 bra R; st.global.b32 [%d11], %r0; bar.sync 0; {ptx.FLAG} bra E; R: {ptx.ACQUIRE} |L| E:",
            {**ptx.TWO, **ptx.PEER_CTA},
        ),
        "after a fence": ("st.global.b32 [%d11], %r0; fence.acq_rel.gpu; |L|", {}),
        "of vectors": ("st.global.b32 [%d11], %r0; bar.sync 0; |L|", ptx.TWO),
        "after an atomic": ("red.global.add.u32 [%d11], %r0; bar.sync 0; |L|", ptx.TWO),
        "after a bulk store": (f"{ptx.STORE} {ptx.SHARED} bar.sync 0; {ptx.OUT} bar.sync 0; |L|", ptx.TWO),
    }  # fmt: skip
    for variant, (text, shape) in texts.items():
        wrong, good = nc, plain
        if variant == "of vectors":
            wrong = "ld.global.nc.v2.b32 {%r20, %r21}, [%d1];"
            good = wrong.replace(".nc", "")
        name = f"ld.global.nc reads what the kernel wrote, {variant}"
        cases.append(pair(name, rule, "nc-load", text, {"|L|": wrong}, {"|L|": good}, shape=shape))
    return cases


RULE = Rule(
    KIND,
    judges=r"ld\.global.*\.nc",
    rows=(
        Row(
            "`ld.global.nc` does not read what its kernel wrote (9.7.9.9)",
            suite="nc-load",
        ),
    ),
    check="race",
    on={GlobalIncoherent: _look},
    pairs=tuple(_pairs()),
)
