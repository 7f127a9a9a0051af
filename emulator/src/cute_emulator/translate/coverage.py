"""What of a kernel ran, and what the rules had to judge there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from cute_emulator.errors import KINDS, Coverage
from cute_emulator.source import line_of_source
from cute_emulator.translate.program import Program

_ASYNC = r"cp\.(reduce\.)?async|wgmma\.mma_async|tcgen05\.(mma|cp)"
_GLOBAL = r"(ld|st|atom|red|multimem)\.(?!param|const|local|shared)|cp\.(reduce\.)?async"
_TENSOR_MEMORY = r"tcgen05\.(ld|st|mma|cp|dealloc)"
JUDGED = {
    "alias-fence": r"multimem",
    "barrier-exit": r"bar(rier)?(\.cta)?\.(sync|red)",
    "exit-pending": rf"{_ASYNC}|tcgen05\.commit",
    "exit-remote": r"mapa|.*(shared|multicast)::cluster",
    "exit-tx": r"mbarrier.*expect_tx",
    "host-race": _GLOBAL,
    "lane-race": r"(ld|st)\.(?!param|const|local)",
    "mbarrier-init": r"mbarrier\.init",
    "mbarrier-race": r"mbarrier\.init",
    "nc-load": r"ld\.global.*\.nc",
    "proxy-fence": rf"{_ASYNC}",
    "race": _GLOBAL,
    "reuse-race": _GLOBAL,
    "setmaxnreg": r"setmaxnreg",
    "shared-race": rf"(ld|st|atom|red)\.(?!param|const|local|global)|(ld|st)matrix|{_ASYNC}|{_TENSOR_MEMORY}",
    "shfl-exited": r"shfl",
    "stream-race": _GLOBAL,
    "sync-mask": r"shfl|vote|match|redux|elect|bar\.warp",
    "tmem-fence": _TENSOR_MEMORY,
    "tmem-freed": _TENSOR_MEMORY,
    "tmem-leak": r"tcgen05\.alloc",
    "tmem-unwaited": _TENSOR_MEMORY,
    "wgmma-fence": r"wgmma\.mma_async",
    "wgmma-registers": r"wgmma\.mma_async",
}
"""Kind of a finding -> instructions that it judges, as a pattern of how their names begin."""
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in JUDGED.items()}
assert tuple(JUDGED) == KINDS


def coverage(program: Program, items: Iterable[int]) -> Coverage:
    """What ran of a program, given its items that did."""
    ran = {id(ins): ins for item in items for ins in program.instructions_of(item)}  # a line may hold several
    every = [ins for function in program.translated() for ins in function.instructions]
    text = program.module.text
    missed = {line_of_source(text, ins.line) for ins in every if id(ins) not in ran}
    missed -= {line_of_source(text, ins.line) for ins in ran.values()}
    judged = Counter(
        kind for ins in ran.values() for kind, pattern in _PATTERNS.items() if pattern.match(ins.opcode)
    )
    return Coverage(program.entry.name, len(ran), len(every), tuple(sorted(filter(None, missed))), judged)
