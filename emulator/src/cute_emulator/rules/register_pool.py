"""The end of a run: `setmaxnreg.inc` without registers that are free."""

from __future__ import annotations

from typing import Any

from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "register-pool"


TWO_GROUPS: dict[str, Any] = {"shape": {"block": (256, 1, 1)}, "arch": "sm_90a"}
GROUP0 = "setp.lt.u32 %p13, %r0, 128;"


def _pairs() -> list[Pair]:
    rule = "register pool"
    by_group = f"""
    {GROUP0} @%p13 bra A;
    setmaxnreg.dec.sync.aligned.u32 |D|; bra B; A: setmaxnreg.inc.sync.aligned.u32 |I|; B:
    """
    cases = [
        pair(f"a warpgroup asks for {more} registers, where the other keeps {less} of 128", rule, "Deadlock",
             by_group, {"|D|": str(less), "|I|": str(more)}, {"|D|": str(less), "|I|": str(right)},
             head=".maxnreg 128", **TWO_GROUPS)
        for less, more, right in ((40, 224, 216), (96, 168, 160), (24, 240, 232))
    ]  # fmt: skip
    never = f"{GROUP0} @%p13 bra A; |D| bra B; A: setmaxnreg.inc.sync.aligned.u32 152; B:"
    cases.append(
        pair("nobody gives registers back", rule, "Deadlock", never, {"|D|": ""},
             {"|D|": "setmaxnreg.dec.sync.aligned.u32 104;"}, head=".maxnreg 128", **TWO_GROUPS)
    )  # fmt: skip
    return cases


RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "`setmaxnreg.inc` waits for registers of the CTA's pool, of the size at launch: "
            "`.maxnreg`, else what fits (9.7.19.5)",
            suite="register pool",
        ),
    ),
    pairs=tuple(_pairs()),
    ends="deadlock",
)
