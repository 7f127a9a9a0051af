"""Process that prints complete failure records to stderr although no call follows.

    python -I -S watcher.py PARENT PAGE RECORDS TEXTS

`runtime.memory.records` starts it as a script, one for each process that has records. It imports neither
torch nor, before a failure, the package, so its start costs about 20 ms of another core. It ends within
`PERIOD` after its parent, in whatever way that ends; processes that the parent has forked do not count.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PERIOD = 0.1
"""Seconds between two polls."""


def watch(parent: int, page: int, records: int, texts: int) -> None:
    """Prints every record once when it is complete, until the parent has ended.

    Args:
        parent: Process identifier of the parent.
        page: Bytes of a record's page; its first ``uint32`` is not 0 when the record is complete.
        records: File of records.
        texts: File of signatures' texts and of ops, a line of JSON each (`records.note`).
    """
    printed: set[int] = set()
    is_last = False
    while not is_last:
        time.sleep(PERIOD)
        is_last = os.getppid() != parent  # before the look, which thus includes the parent's last failure
        for offset in range(0, os.fstat(records).st_size, page):
            if any(os.pread(records, 4, offset)) and offset not in printed:
                printed.add(offset)
                words = memoryview(os.pread(records, page, offset)).cast("I")  # written before the first
                os.write(2, f"overlap_gemm: {_text(words, texts)}\n".encode())


def _text(words: Sequence[int], texts: int) -> str:
    """Returns the name and the text of a record's error."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from overlap_gemm.runtime import failures, identity
    from overlap_gemm.spec import OPS, OpSpec

    for line in os.pread(texts, os.fstat(texts).st_size, 0).splitlines():
        signature, text, ops = json.loads(line)
        identity.described[signature] = text
        OPS.update((op[0], OpSpec(*op)) for op in ops)
    error = failures.error_of(words)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
