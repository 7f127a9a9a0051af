import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests/compiled last.

    A compile outside the emulator loads the DSL's own CUDA runtime into the process, for good; an emulator opened
    after that could not put its stand-in there (its kernels fail with cudaErrorInsufficientDriver).
    """
    items.sort(key=lambda item: "compiled" in item.path.parts)
