from collections.abc import Callable, Iterator

import pytest

from overlap_gemm.testing.ranks import Ranks

PRELOAD = ("overlap_gemm.nn", "overlap_gemm.parallel", "transformers.models.llama.modeling_llama")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(P)`: a set of P processes that the tests of a session share."""
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size, preload=PRELOAD)
        return pools[size]

    yield pool
    for pool_of_size in pools.values():
        pool_of_size.close()
