"""`nn.scatter_heads` and `gather_heads`: tensors with gradients, and DTensors against `redistribute`."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from overlap_gemm import DisagreementError
from overlap_gemm.nn import gather_heads, scatter_heads
from tests.support.chosen import in_turn

BATCH, SIZE = 2, 3


def even(total, size, rank):
    chunk = -(-total // size)
    return slice(min(rank * chunk, total), min((rank + 1) * chunk, total))


def heads_of_rank(rank, size, heads, kv_heads):
    """Returns the indices of this rank's heads of queries, and of keys."""
    each = heads // kv_heads
    if kv_heads < size:
        place = even(heads, size, rank)
        return [*range(heads)][place], [rank * kv_heads // size]
    place = even(kv_heads, size, rank)
    return [*range(heads)][place.start * each : place.stop * each], [*range(kv_heads)][place]


def exchanged(rank, size, heads, kv_heads, sequence, layout):
    sequence_dim, heads_dim = layout
    torch.manual_seed(0)

    def full(count):
        x = torch.randn(BATCH, sequence, count, SIZE, dtype=torch.float64)
        return x.movedim((1, 2), (sequence_dim, heads_dim)).requires_grad_()

    tensors = [full(heads), full(kv_heads), full(kv_heads)]
    numbers = [heads if kv_heads < size else kv_heads, kv_heads, kv_heads]
    rows = even(sequence, size, rank)

    def of_rows(x, rows=rows):
        return x.narrow(sequence_dim, rows.start, rows.stop - rows.start)

    local = [of_rows(one.detach()).requires_grad_() for one in tensors]
    where = {"sequence_dim": sequence_dim, "heads_dim": heads_dim}
    outs = scatter_heads(local, heads=numbers, rows=sequence, **where)
    queries, keys = heads_of_rank(rank, size, heads, kv_heads)
    for out, one, indices in zip(outs, tensors, (queries, keys, keys), strict=True):
        assert torch.equal(out, one.detach().index_select(heads_dim, torch.tensor(indices, dtype=torch.long)))

    # Gradients: every rank weighs its heads; the unsharded sum has the weights of all ranks.
    factors = [[torch.randn_like(one) for one in tensors] for _ in range(size)]
    total, mine = 0, 0
    for other in range(size):
        of_other = heads_of_rank(other, size, heads, kv_heads)
        for i, indices in enumerate((of_other[0], of_other[1], of_other[1])):
            index = torch.tensor(indices, dtype=torch.long)
            total = total + (tensors[i] * factors[other][i]).index_select(heads_dim, index).sum()
            if other == rank:
                mine = mine + (outs[i] * factors[rank][i].index_select(heads_dim, index)).sum()
    total.backward()
    mine.backward()
    for part, one in zip(local, tensors, strict=True):
        torch.testing.assert_close(part.grad, of_rows(one.grad))

    back_in = outs[0].detach().requires_grad_()
    back = gather_heads(back_in, num_heads=heads, heads=numbers[0], **where)
    assert torch.equal(back, of_rows(tensors[0].detach()))
    (back * of_rows(factors[0][0])).sum().backward()
    index = torch.tensor(queries, dtype=torch.long)
    torch.testing.assert_close(back_in.grad, factors[0][0].index_select(heads_dim, index))


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "sequence", "layout"),
    in_turn([(1, 2, 1, 3), (2, 4, 2, 8), (4, 8, 2, 11), (4, 10, 5, 5)], [(1, 2), (2, 1), (0, 2)]),
    ids=str,
)
def test_exchange_gives_each_rank_its_heads_and_undoes_itself(
    ranks, world, heads, kv_heads, sequence, layout
):
    """Heads are even; replicated; in groups of which the last rank has none, and tokens likewise."""
    ranks(world).run(exchanged, heads, kv_heads, sequence, layout)


def converted(rank, size, heads, sequence):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    full = torch.randn(BATCH, sequence, heads, SIZE, dtype=torch.float64)
    factor = torch.randn_like(full)
    x = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
    out, again = scatter_heads([x, x])
    assert isinstance(out, DTensor) and out.placements == (Shard(2),) and out.shape == full.shape
    by_torch = x.detach().redistribute(placements=[Shard(2)])
    assert torch.equal(out.to_local(), by_torch.to_local())
    assert torch.equal(again.to_local(), by_torch.to_local())
    assert torch.equal(out.full_tensor(), full)
    back = gather_heads(out)
    assert back.placements == (Shard(1),) and back.shape == full.shape
    assert torch.equal(back.to_local(), x.to_local())
    (back * distribute_tensor(factor, mesh, [Shard(1)])).sum().backward()
    assert x.grad.placements == (Shard(1),)
    torch.testing.assert_close(x.grad.full_tensor(), factor)


@pytest.mark.parametrize(("world", "heads", "sequence"), [(2, 4, 6), (4, 6, 11)])
def test_dtensors_are_converted_as_by_redistribute(ranks, world, heads, sequence):
    ranks(world).run(converted, heads, sequence)


def refused(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    x = torch.zeros(BATCH, 4, 4, SIZE)
    for placement in (Replicate(), Shard(2), Partial()):
        wrong = DTensor.from_local(x, mesh, [placement], run_check=False)
        with pytest.raises(ValueError, match=r"scatter_heads: a DTensor must have placements .*dim=1"):
            scatter_heads(wrong)
    for placement in (Replicate(), Shard(1)):
        wrong = DTensor.from_local(x, mesh, [placement], run_check=False)
        with pytest.raises(ValueError, match=r"gather_heads: a DTensor must have placements .*dim=2"):
            gather_heads(wrong)
    right = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    with pytest.raises(TypeError, match="all be DTensors of one mesh, or none"):
        scatter_heads([right, x])
    with pytest.raises(ValueError, match="heads=1 must be the number of ranks, 2, or more"):
        scatter_heads(DTensor.from_local(x[:, :, :1], mesh, [Shard(1)], run_check=False))
    with pytest.raises(ValueError, match="6 heads in 3 groups on 2 ranks are not cut as by torch.chunk"):
        scatter_heads(DTensor.from_local(x.new_zeros(1, 1, 6, 1), mesh, [Shard(1)], run_check=False), heads=3)
    both = init_device_mesh("cpu", (1, size))
    with pytest.raises(ValueError, match="the mesh of a DTensor must have one dimension"):
        scatter_heads(DTensor.from_local(x, both, [Replicate(), Shard(1)], run_check=False))
    with pytest.raises(ValueError, match="must share dtype, device and number of tokens"):
        scatter_heads([x, x.double()])
    with pytest.raises(ValueError, match="x must have this rank's heads along dimension 2, 3 of 6 in 6"):
        gather_heads(x, num_heads=6)
    with pytest.raises((ValueError, DisagreementError), match=r"the ranks hold \[4, 3\] rows"):
        scatter_heads(x[:, : 4 - rank])


def test_other_placements_and_heads_are_named(ranks):
    ranks(2).run(refused)
