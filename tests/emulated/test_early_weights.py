"""`launch="dependent_weights"`: the weight is read early where it is the caller's memory alone, as it lies.

A copy that the call makes is written by the kernel in front, which has not ended when early loads begin.
"""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm import nn
from overlap_gemm.api.kept_weights import STORED, Stored
from overlap_gemm.api.quantization import quantize_rows
from overlap_gemm.backends.fused import gather_plans as gather
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.runtime.peers import local_peers
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import ARGUMENTS, OPS
from overlap_gemm.tuning.settings import configured
from tests.support.ops import SHARDED

EARLY, LATE = "dependent_weights", "dependent"
M, N, K = 16, 64, 64


@pytest.fixture
def launched(monkeypatch):
    """When the kernels of the calls begin; nothing is compiled or run."""
    found = []

    def compiled(executor, config, *others, **options):
        return lambda *arguments: found.append(config.launch)

    monkeypatch.setattr(plans, "compiled_kernel", compiled)
    monkeypatch.setattr(gather, "compiled_gather", compiled)
    return found


@pytest.fixture(params=[1, 2])
def group(request):
    """Rank 0 of virtual ranks, which are told to read weights early."""
    with (
        Emulator("sm_90a", request.param) as emulator,
        VirtualWorld(request.param, emulator=emulator) as world,
        configured(launch=EARLY, mma="swap_ab", tile=(16, 64)),
    ):
        yield world.names[0]


def call(op, group, weight, x=None):
    """An op with bfloat16 rows, unless `x` is passed, and a weight."""
    x = torch.ones(M, weight.shape[1], dtype=torch.bfloat16) if x is None else x
    extent = {ARGUMENTS[OPS[op].unresolved_axis]: "equal"} if OPS[op].unresolved_axis else {}
    return getattr(overlap_gemm, op)(x, weight, group=group, backend="fused", **extent)


def weights(depth=K, offset=0, dtype=torch.bfloat16):
    """`[N, depth]`, which begins so many elements after a multiple of 16 bytes."""
    return torch.ones(N * depth + offset, dtype=dtype)[offset:].view(N, depth)


@pytest.mark.parametrize("op", SHARDED)
def test_a_weight_of_the_callers_is_read_early_and_a_copy_is_not(op, group, launched):
    call(op, group, weights())
    call(op, group, weights(depth=61))
    call(op, group, weights(offset=4))
    call(op, group, weights())
    assert launched == [EARLY, LATE, LATE, EARLY]


def test_one_copied_weight_of_several_makes_all_late(group, launched):
    """Checks one kernel for both, or two in a group of one."""
    call("all_gather_gemm", group, [weights(), weights(offset=4)], torch.ones(M, K, dtype=torch.bfloat16))
    assert set(launched) == {LATE}


@pytest.mark.parametrize("op", SHARDED)
def test_what_autocast_has_cast_is_not_read_early(op, group, launched):
    x = torch.ones(M, K)
    with torch.autocast("cpu", torch.bfloat16):
        call(op, group, weights(dtype=torch.float32), x)
        call(op, group, weights(), x)
    assert launched == [LATE, EARLY]


def test_in_a_compiled_function_too(group, launched):
    x, own, other = torch.ones(M, K), weights(), weights(dtype=torch.float32)

    @torch.compile(backend="eager", fullgraph=True)
    def both(x, own, other):
        with torch.autocast("cpu", torch.bfloat16):
            return call("gemm_all_reduce", group, own, x), call("gemm_all_reduce", group, other, x)

    both(x, own, other)
    assert launched == [EARLY, LATE]


def test_a_gradients_weight_is_not_read_early(group, launched):
    x = torch.ones(M, K, dtype=torch.bfloat16, requires_grad=True)
    call("gemm_reduce_scatter", group, weights(), x).sum().backward()
    assert launched == [EARLY, LATE]


def test_weights_quantised_at_the_call_are_not_read_early_and_kept_ones_are(group, launched):
    x = torch.ones(M, K, dtype=torch.bfloat16)
    nn.Float8().gemm_all_reduce(x, weights(), group=group, backend="fused")
    STORED.gemm_all_reduce(x, Stored(*quantize_rows(weights())), group=group, backend="fused")
    assert launched == [LATE, EARLY]


@pytest.mark.parametrize("op", SHARDED)
def test_ranks_prepare_one_kernel_whether_it_reads_early_or_not(op, group, launched):
    """A rank whose weight is copied would otherwise wait for its peers to prepare another one."""
    call(op, group, weights())
    (peers,) = local_peers(group)
    before = set(peers.prepared)
    call(op, group, weights(offset=4))
    assert launched == [EARLY, LATE] and peers.prepared == before
