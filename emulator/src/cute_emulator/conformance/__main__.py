"""``python -m cute_emulator.conformance``: runs every pair, and prints which pairs fail."""

from __future__ import annotations

import sys
import time

from cute_emulator.conformance import CASES, findings


def main() -> int:
    """Prints one line for each pair; returns 1 if a bug has no finding or a fixed twin has one."""
    begin, bad = time.perf_counter(), 0
    for case in CASES:
        wrong, right = findings(case.broken, case.strict), findings(case.fixed, case.strict)
        ok = bool(set(wrong) & set(case.kinds)) and not right
        bad += not ok
        verdict = "ok" if ok else f"NOT AS IT SHOULD BE (fixed: {', '.join(right) or 'clean'})"
        print(f"{case.rule:24} {case.name:64} {', '.join(wrong) or 'nothing':24} {verdict}")
    print(f"{len(CASES)} pairs, {bad} not as they should be, {time.perf_counter() - begin:.1f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
