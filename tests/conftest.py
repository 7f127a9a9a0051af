import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests/compiled last.

    A compile that makes host code, outside the emulator, loads the DSL's own CUDA runtime into the process
    for good; functions made in an emulator opened after that find this one (cudaErrorInsufficientDriver).
    """
    items.sort(key=lambda item: "compiled" in item.path.parts)


def pytest_report_header() -> str | None:
    """Says what a machine without a CUDA device does not run."""
    return None if torch.cuda.is_available() else "no CUDA device: tests/gpu is not collected"
