"""`overlap_gemm.init()` as a launcher's processes see it. test_launchers.py starts this file with pytest."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlap_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from tests.support.references import reference

LAUNCHER = os.environ["EXPECTED_LAUNCHER"]
RANKS = int(os.environ["EXPECTED_RANKS"])

# pytest-mpi then runs this file with --only-mpi, and only if it can see mpirun's world.
pytestmark = [pytest.mark.mpi] if LAUNCHER == "mpirun" else []


passed: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def world():
    place = overlap_gemm.init(device="cpu", timeout=60)
    yield place
    overlap_gemm.finalize()
    assert not dist.is_initialized()
    overlap_gemm.finalize()
    (Path(os.environ["REPORTS"]) / str(place.rank)).write_text("\n".join(passed))


@pytest.fixture(autouse=True)
def note(request, world):
    yield
    passed.append(request.node.name)


def test_the_world_is_the_launchers(world):
    assert (world.launcher, world.size) == (LAUNCHER, RANKS)
    assert (world.rank, world.size) == (dist.get_rank(), dist.get_world_size())
    assert world.local_rank == world.rank
    assert world.device == torch.device("cpu")
    if LAUNCHER == "mpirun":
        from mpi4py import MPI

        assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (world.rank, world.size)


def test_init_is_idempotent(world):
    assert overlap_gemm.init() is world
    with pytest.raises(ValueError, match="already initialised on cpu"):
        overlap_gemm.init(device="cuda")


@pytest.mark.parametrize("backend", ["sequential", "decomposed", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_ops(world, op, backend):
    given, layout = operands(Case(op, 7, 6, 5, torch.float64)), LAYOUTS[op]
    x, weight, bias = (
        layout.part(getattr(given, name), getattr(layout, name), world.rank, world.size)
        for name in ("x", "weight", "bias")
    )
    lengths = OPS[op].arguments(7, 6, 5, least=True)
    out = getattr(overlap_gemm, op)(x, weight, bias=bias, backend=backend, **lengths)
    wanted = layout.part(reference(given).out, layout.out, world.rank, world.size)
    torch.testing.assert_close(out, wanted)


def test_a_mesh_over_the_world(world):
    mesh = init_device_mesh("cpu", (world.size,))
    x = torch.full((3, 2), float(world.rank + 1))
    out = overlap_gemm.gemm_all_reduce(x, torch.ones(4, 2), group=mesh)
    assert torch.equal(out, torch.full((3, 4), float(world.size * (world.size + 1))))
