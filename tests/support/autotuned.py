"""A process that knows nothing yet of what was measured."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from overlap_gemm.backends import group_measurements
from overlap_gemm.runtime.group import clear_groups
from overlap_gemm.tuning.measured import AUTOTUNE_VARIABLE, FILE_VARIABLE


@contextmanager
def begun_anew(file: Path | str, policy: str | None = None) -> Iterator[None]:
    """Within the block a rank knows nothing yet of its groups, and has this file and policy."""
    group_measurements._stored.clear()
    clear_groups(single_process=False)
    said = {FILE_VARIABLE: str(file)} | ({AUTOTUNE_VARIABLE: policy} if policy else {})
    with mock.patch.dict(os.environ, said):
        if policy is None:
            os.environ.pop(AUTOTUNE_VARIABLE, None)
        yield
    group_measurements._stored.clear()
    clear_groups(single_process=False)
