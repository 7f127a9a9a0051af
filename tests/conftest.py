import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests/compiled last.

    A compile that makes host code, outside the emulator, loads the DSL's own CUDA runtime into the process
    for good; functions made in an emulator opened after that find this one (cudaErrorInsufficientDriver).
    """
    items.sort(key=lambda item: "compiled" in item.path.parts)
