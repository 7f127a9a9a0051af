import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests/compiled last.

    A compile that makes host code, outside the emulator, loads the DSL's own CUDA runtime into the process
    for good. What the DSL's JIT makes in an emulator opened after that finds this one
    (cudaErrorInsufficientDriver); only TVM-FFI functions, made from object files, find the emulator's.
    """
    items.sort(key=lambda item: "compiled" in item.path.parts)


def pytest_report_header() -> str | None:
    """Says what a machine without a CUDA device does not run."""
    return None if torch.cuda.is_available() else "no CUDA device: tests/gpu is not collected"
