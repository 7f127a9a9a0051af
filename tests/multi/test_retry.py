"""What a rank does after an error of its own: retries, skips, frees memory; and calls of several threads."""

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import find
from tests.support.chosen import in_turn

BACKENDS = ("auto", "torch", "sequential", "decomposed")
LAYERS, WIDTH = 32, 8


def layer(x, group, backend):
    """One of many that are alike."""
    weight = torch.eye(WIDTH).roll(1, 0)[: WIDTH // 2]
    return overlap_gemm.gemm_all_gather(x, weight, group=group, backend=backend)


def no_memory(*_, **__):
    raise MemoryError("planted")


def failing(x, group, backend):
    """A layer for which there is no memory; returns the error."""
    with (
        mock.patch.object(torch.Tensor, "new_empty", no_memory),
        mock.patch.object(torch, "mm", no_memory),
        pytest.raises(MemoryError) as caught,
    ):
        layer(x, group, backend)
    return caught.value


def retried(rank, size, backend):
    group = dist.new_group()
    x = expected = torch.arange(4.0 * WIDTH).view(4, WIDTH)
    for number in range(LAYERS):
        expected = torch.cat([expected @ torch.eye(WIDTH).roll(1, 0)[: WIDTH // 2].t()] * 2, 1)
        if rank == 1 and number == 17:
            error = failing(x, group, backend)
            with overlap_gemm.retry(error):
                x = layer(x, group, backend)
            with pytest.raises(ValueError, match="was not retried yet"), overlap_gemm.retry(error):
                pass
        else:
            x = layer(x, group, backend)
    assert torch.equal(x, expected)
    assert find(group).progress.skipped == 0


def skipped(rank, size, backend):
    group = dist.new_group()
    x = torch.ones(4, WIDTH)
    for number in range(LAYERS + (rank == 1)):  # a call that is refused meets none
        if number < 17:
            x = layer(x, group, backend)
        elif rank == 1 and number == 17:
            failing(x, group, backend)
        else:
            with pytest.raises(DisagreementError, match="rank 1 has .*gemm_all_gather: MemoryError"):
                layer(x, group, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_like_layers_one_is_retried(ranks, backend):
    ranks(2).run(retried, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_like_layers_one_that_is_skipped_is_named_on_every_rank(ranks, backend):
    ranks(2).run(skipped, backend)


def after_it_is_named(rank, size):
    """The rank that refused makes the call again, while its peers make theirs again."""
    group = dist.new_group()
    x = torch.ones(4, WIDTH)
    layer(x, group, "torch")
    error = failing(x, group, "torch") if rank == 1 else None
    with pytest.raises(DisagreementError):
        layer(x, group, "torch")
    if rank == 1:
        with overlap_gemm.retry(error):
            layer(x, group, "torch")
    else:
        layer(x, group, "torch")
    layer(x, group, "torch")


def test_a_retry_brings_ranks_in_step_that_have_been_told(ranks):
    ranks(3).run(after_it_is_named)


def other_calls(rank, size):
    group = dist.new_group()
    x = torch.ones(4, WIDTH)
    error = failing(x, group, "torch")  # on all ranks
    with (
        pytest.raises(ValueError, match=r"that raised, gemm_all_gather of x \[4, 8\].* got "),
        overlap_gemm.retry(error),
    ):
        layer(torch.ones(6, WIDTH), group, "torch")
    for foreign in (KeyError("of the caller's"), error.__class__()):
        with pytest.raises(ValueError, match="no call of a group raised it"), overlap_gemm.retry(foreign):
            pass
    layer(x, group, "torch")


def test_a_retry_is_of_the_same_call(ranks):
    ranks(2).run(other_calls)


def out_of_memory(rank, size, backend, times):
    """Rank 1 has no memory, and has some once torch's cache is freed."""
    group = dist.new_group()
    x = torch.ones(4, WIDTH)
    layer(x, group, backend)
    # Decomposed writes products into memory that is there before its first transfer.
    owner, name = (torch.Tensor, "new_empty") if backend == "decomposed" else (torch, "mm")
    left, real = [times], getattr(owner, name)

    def scarce(*operands, **options):
        if rank == 1 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("planted")
        return real(*operands, **options)

    with mock.patch.object(owner, name, scarce), mock.patch.object(torch.cuda, "empty_cache") as freed:
        if rank == 1 and times > 1:
            with pytest.raises(torch.OutOfMemoryError) as caught:
                layer(x, group, backend)
            with overlap_gemm.retry(caught.value):
                result = layer(x, group, backend)
        else:
            result = layer(x, group, backend)
    assert freed.call_count == (rank == 1)
    assert torch.equal(result, torch.ones(4, WIDTH))


@pytest.mark.parametrize(("backend", "times"), in_turn(BACKENDS, [1, 2]))
def test_torchs_cache_is_freed_before_memory_is_said_to_be_out(ranks, backend, times):
    ranks(2).run(out_of_memory, backend, times)


def two_threads(rank, size, backend):
    """The second thread's calls are refused, which peers are told; a thread that has ended hands over."""
    group = dist.new_group()
    x, errors = torch.ones(4, WIDTH), []
    layer(x, group, backend)

    def other():
        try:
            layer(x, group, backend)
        except BaseException as error:
            errors.append(error)

    def run():
        thread = threading.Thread(target=other, name="the other")
        thread.start()
        thread.join()

    if rank == 1:
        run()
        (error,) = errors
        assert isinstance(error, overlap_gemm.GroupThreadError)
        assert "called in thread 'the other', but the group belongs to thread 'MainThread'" in str(error)
    with pytest.raises(DisagreementError, match="rank 1 has 1 .*GroupThreadError"):
        layer(x, group, backend)
    fresh = dist.new_group()
    group, errors[:] = fresh, []
    run()
    run()
    assert not errors
    layer(x, fresh, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_is_one_threads(ranks, backend):
    ranks(2).run(two_threads, backend)


def backward_in_autograds_thread(rank, size):
    """What autograd calls in its own thread, while the group's waits, is the group's thread's."""
    group, seen = dist.new_group(), []

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            real = threading.get_ident
            with mock.patch("overlap_gemm.dispatch.calls.get_ident", lambda: real() + 1):
                out = torch.ops.overlap_gemm.sum_over_ranks(grad, find(group).name)
            seen.append(out)
            return out

    layer(torch.ones(4, WIDTH), group, "torch")
    Elsewhere.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert torch.equal(seen[0], torch.full((2,), 1.0 * size))


def test_autograds_threads_are_the_callers(ranks):
    ranks(2).run(backward_in_autograds_thread)
