"""`auto` by measurement: what is measured, what all ranks come to, and what a file may do to them."""

import json
import os
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends import autotuning, group_measurements
from overlap_gemm.backends.decomposed import Decomposed
from overlap_gemm.backends.sequential import Sequential
from overlap_gemm.backends.torch_backend import Torch
from overlap_gemm.dispatch import choosing
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from tests.support.autotuned import begun_anew
from tests.support.ops import SHARDED

M, N, K = 24, 16, 12
OP = "gemm_reduce_scatter"
BACKENDS = {"torch": Torch, "sequential": Sequential, "decomposed": Decomposed}


@contextmanager
def slowed(*names, op=OP, seconds=0.03):
    """Backends that sleep in every call of an op."""
    with ExitStack() as stack:
        for name in names:
            method = getattr(BACKENDS[name], op)

            def slow(*given, _method=method, **named):
                time.sleep(seconds)
                return _method(*given, **named)

            stack.enter_context(mock.patch.object(BACKENDS[name], op, slow))
        yield


def operands(rank, size, op=OP):
    own = Shards.owned_by(size, rank)
    x, weight = OPS[op].shapes(M, N, K, own)
    return torch.ones(x), torch.ones(weight)


def call(rank, size, op=OP, **how):
    x, weight = operands(rank, size, op)
    return getattr(overlap_gemm, op)(x, weight, **OPS[op].arguments(M, N, K), **how)


def explained(rank, size, op=OP, **how):
    x, weight = operands(rank, size, op)
    return overlap_gemm.explain(op, x, weight, **OPS[op].arguments(M, N, K), **how)


never = mock.Mock(side_effect=AssertionError("measured"))


def in_the_form_of_a_call(rank, size, folder, op):
    """Checks that ops with lists of weights get lists, also without biases, and that nothing is excluded."""
    passed, bind, lists = [], autotuning.bind_as, OPS[op].takes_lists

    def recorded(*arguments):
        run = bind(*arguments)
        return lambda operands: passed.append((operands.weight, operands.bias)) or run(operands)

    for number, (columns, bias) in enumerate([(N, False), (N, True), ([N, N], False)][: 2 + lists]):
        passed.clear()
        with (
            begun_anew(Path(folder) / f"{number}.json"),
            mock.patch.object(autotuning, "bind_as", recorded),
            mock.patch.object(autotuning.logger, "warning") as warned,
        ):
            overlap_gemm.warmup(op, (M, columns, K), bias=bias, dtype=torch.float32, autotune="measure")
        without = list if lists else type(None)
        expected = (list if lists else torch.Tensor), (type(passed[0][0]) if bias else without)
        assert {(type(weight), type(of_bias)) for weight, of_bias in passed} == {expected}
        warned.assert_not_called()


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[] if op in ("all_gather_gemm", "gemm_reduce_scatter") else pytest.mark.slow)
        for op in OPS
    ],
)
def test_candidates_are_called_as_the_op_calls_them(ranks, tmp_path, op):
    ranks(2).run(in_the_form_of_a_call, str(tmp_path), op)


def takes_the_fastest(rank, size, folder, op):
    for i, fast in enumerate(BACKENDS):
        with begun_anew(Path(folder) / f"{i}.json"):
            slow = [name for name in BACKENDS if name != fast]
            with slowed(
                *(slow if rank == 1 else []), op=op, seconds=0.05
            ):  # the op is done when its last rank is
                overlap_gemm.warmup(op, (M, N, K), dtype=torch.float32, autotune="measure")
            choice = explained(rank, size, op)
            assert choice.backend.name == fast
            assert choice.problem.measured.candidates < 4  # those that are far behind may be left out
            assert f"{fast}: chosen [" in str(choice)
            assert "us measured]" in str(choice)
            for expected in (operands(rank, size, op), None):  # those who say less of the extents, too
                x, weight = expected or operands(rank, size, op)
                said = OPS[op].arguments(M, N, K, least=expected is None)
                assert overlap_gemm.explain(op, x, weight, **said).backend.name == fast


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[] if op == "gemm_all_reduce" else pytest.mark.slow) for op in SHARDED]
)
def test_what_is_fastest_on_the_slowest_rank_is_taken(ranks, tmp_path, op):
    ranks(2).run(takes_the_fastest, str(tmp_path), op)


def all_measured(rank, size, folder):
    with begun_anew(Path(folder) / "file.json"), mock.patch.object(autotuning, "FARTHEST", 1e9):
        with slowed("torch", "sequential"):
            overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        choice = explained(rank, size)
        assert choice.backend.name == "decomposed"
        assert "measured, 3 candidates" in str(choice)
        assert "torch: no, decomposed is faster [" in str(choice)
    with begun_anew(Path(folder) / "far.json"), slowed("torch", "sequential", seconds=0.3):
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        assert explained(rank, size).problem.measured.candidates == 1


def test_candidates_that_are_near_each_other_are_timed_and_others_left_out(ranks, tmp_path):
    ranks(2).run(all_measured, str(tmp_path))


def kept_in_a_file(rank, size, folder):
    file = Path(folder) / "of-rank-0.json"
    own = file if rank == 0 else Path(folder) / f"of-rank-{rank}.json"
    with begun_anew(own), slowed("torch", "sequential"):
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        assert explained(rank, size).backend.name == "decomposed"
    torch.distributed.barrier()
    assert not (Path(folder) / "of-rank-1.json").exists()  # rank 0's counts
    entries = json.loads(file.read_text())["entries"]
    assert [entry["kind"].split(",")[0] for entry in entries] == [f"{OP} 24x16x12", f"{OP} 24x16x?"]
    with begun_anew(own), mock.patch.object(autotuning, "_measured", never):  # nothing is measured again
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        assert explained(rank, size).backend.name == "decomposed"
        call(rank, size)
        assert explained(rank, size, deterministic=True).backend.name == "sequential"  # another kind of call
    for change in ({"torch": "1.0"}, {"kernels": "others"}, {"ranks": 3}):  # other conditions
        torch.distributed.barrier()
        if rank == 0:
            for entry in entries:
                entry["conditions"] |= change
            file.write_text(json.dumps({"entries": entries}))
        torch.distributed.barrier()
        with begun_anew(own):
            assert explained(rank, size).backend.name == "torch"


def test_a_later_process_takes_what_was_measured(ranks, tmp_path):
    ranks(2).run(kept_in_a_file, str(tmp_path))


def fixed_at_first_use(rank, size, folder):
    with begun_anew(Path(folder) / "file.json"):
        call(rank, size)
        with slowed("torch"):
            overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        assert explained(rank, size).backend.name == "torch"
        assert "measured" not in str(explained(rank, size))
        with slowed("torch"):  # another kind is
            overlap_gemm.warmup(OP, (M + 2, N, K), dtype=torch.float32, autotune="measure")
        x = torch.ones(M + 2, K // size)
        assert overlap_gemm.explain(OP, x, torch.ones(N, K // size), k=K).backend.name != "torch"


def test_a_choice_that_calls_were_made_by_does_not_change(ranks, tmp_path):
    ranks(2).run(fixed_at_first_use, str(tmp_path))


def by_policy(rank, size, folder):
    with begun_anew(Path(folder) / "1.json", "measure"), slowed("torch"):
        result = call(rank, size)  # the first call measures, and is right
        assert torch.equal(result, torch.full((M // size, N), float(K)))
        assert explained(rank, size).backend.name != "torch"
        with mock.patch.object(autotuning, "_measured", never):
            call(rank, size)
            call(rank, size, backend="decomposed")
            with overlap_gemm.configured(tile=(128, 128)):  # a caller who names kernels has chosen
                call(rank, size)
            call(rank, size, partials="float32")  # what was measured may have no such kernel, or other bits
            call(rank, size, invariant="batch")
        assert explained(rank, size, partials="float32").backend.name == "torch"
    with begun_anew(Path(folder) / "2.json", "model"), mock.patch.object(autotuning, "_measured", never):
        call(rank, size)
        overlap_gemm.warmup(OP, (M + 4, N, K), dtype=torch.float32)
    with begun_anew(Path(folder) / "3.json"), mock.patch.object(autotuning, "_measured", never):
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32)  # on CPUs only where it is asked for
    with pytest.raises(ValueError, match="autotune must be one of model, measure, or None, got 'always'"):
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="always")


def test_the_policy_says_when_to_measure(ranks, tmp_path):
    ranks(2).run(by_policy, str(tmp_path))


def other_strides(rank, size, folder):
    """Checks calls that one rank prepares again, by its strides, after the ranks have measured."""

    def strided(tensor):
        return tensor.repeat_interleave(2, 1)[:, ::2] if rank == 1 else tensor

    with begun_anew(Path(folder) / "file.json", "measure"):
        x, weight = operands(rank, size)
        for passed in (x, strided(x)):
            result = overlap_gemm.gemm_reduce_scatter(passed, weight, k=K)
            assert torch.equal(result, torch.full((M // size, N), float(K)))
        # x's gradient of a list is one exchange. Between two of them is a call with its extents.
        x, weights = torch.ones(M, K, requires_grad=True), [torch.ones(N, K)] * 2
        for change in (torch.clone, strided):
            results = overlap_gemm.gemm_all_to_all(x, weights)
            torch.autograd.backward(results, [change(torch.ones_like(result)) for result in results])
            overlap_gemm.all_to_all_gemm(torch.ones(size * M, N), torch.ones(K, 2 * N))
        assert torch.equal(x.grad, torch.full(x.shape, 4.0 * N))


def test_ranks_with_other_strides_later_take_the_same_choice(ranks, tmp_path):
    ranks(2).run(other_strides, str(tmp_path))


def other_algorithms(rank, size, folder):
    algorithm = "one_shot" if rank == 1 else None
    with begun_anew(Path(folder) / "file.json", "measure"), overlap_gemm.configured(algorithm=algorithm):
        result = call(rank, size, "all_gather_gemm")
        assert explained(rank, size, "all_gather_gemm").problem.measured is not None
    assert torch.equal(result, torch.full(result.shape, float(K)))


def test_settings_of_other_ops_do_not_prevent_a_measurement(ranks, tmp_path):
    ranks(2).run(other_algorithms, str(tmp_path))


def gradients_too(rank, size, folder):
    with begun_anew(Path(folder) / "file.json"), slowed("torch", "sequential", op="all_gather_gemm"):
        how = {"dtype": torch.float32, "autotune": "measure", "backward": True}
        overlap_gemm.warmup(OP, (M, N, K), **how)
        assert explained(rank, size).backward.backend.name == "decomposed"
        with mock.patch.object(autotuning, "_measured", never):
            x, weight = (given.requires_grad_() for given in operands(rank, size))
            overlap_gemm.gemm_reduce_scatter(x, weight, k=K).sum().backward()
        assert torch.equal(x.grad, torch.full(x.shape, float(N)))


def test_gradients_are_measured_in_a_warm_up_with_them(ranks, tmp_path):
    ranks(2).run(gradients_too, str(tmp_path))


def left_out(rank, size, folder):
    file, other = Path(folder) / "file.json", Path(folder) / "other.json"
    failing = mock.patch.object(Sequential, OP, side_effect=MemoryError("no room"))
    with begun_anew(file), failing, slowed("torch"):
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        choice = explained(rank, size)
        assert choice.backend.name == "decomposed"
        assert "sequential: no, it was not measured" in str(choice)
        assert torch.equal(call(rank, size), torch.full((M // size, N), float(K)))
    # One whose first call ended the process is not tried again.
    torch.distributed.barrier()
    if rank == 0:
        entry = json.loads(file.read_text())["entries"][0]
        note = {"kind": entry["kind"], "conditions": entry["conditions"], "refused": "decomposed"}
        ended = 2**22 + 1  # no process has such a number
        host = overlap_gemm.tuning.measured._host()
        for more, text in enumerate((json.dumps(note), '{"kind', "[1]")):  # two of them damaged
            other.with_name(f"{other.name}.{host}.{ended + more}.trying").write_text(text)
    torch.distributed.barrier()
    for _ in range(2):  # from the mark, then from the file
        with begun_anew(other), slowed("torch", "sequential"):
            overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
            assert "decomposed: no, it was not measured" in str(explained(rank, size))
        torch.distributed.barrier()
        if rank == 0:
            assert not list(Path(folder).glob("*.trying"))
            entries = json.loads(other.read_text())["entries"]
            refused = [entry for entry in entries if "refused" in entry]
            assert [entry["refused"] for entry in refused] == ["decomposed"]
            other.write_text(json.dumps({"entries": refused}))
        torch.distributed.barrier()


def test_a_candidate_that_fails_is_left_out_on_all_ranks(ranks, tmp_path):
    ranks(2).run(left_out, str(tmp_path))


def not_copied(rank, size, folder):
    """Checks that every rank takes, and keeps, the choice of the time model."""
    copies = mock.Mock(side_effect=MemoryError("planted")) if rank == 1 else autotuning._operands
    file = Path(folder) / "file.json"
    with begun_anew(file, "measure"), mock.patch.object(autotuning, "_operands", copies):
        for _ in range(2):
            assert torch.equal(call(rank, size), torch.full((M // size, N), float(K)))
        assert explained(rank, size).problem.measured is None
    assert not file.exists()


def test_operands_that_one_rank_cannot_copy_are_not_measured(ranks, tmp_path):
    ranks(2).run(not_copied, str(tmp_path))


def fails_on_one_rank(rank, size, folder):
    with begun_anew(Path(folder) / "1.json", "measure"):
        no_memory = mock.patch.object(Sequential, OP, side_effect=MemoryError("planted"))
        with no_memory if rank == 1 else nullcontext():
            assert torch.equal(call(rank, size), torch.full((M // size, N), float(K)))
        assert "sequential: no, it was not measured" in str(explained(rank, size))


def test_a_candidate_that_fails_on_one_rank_is_left_out_on_all(ranks, tmp_path):
    ranks(2).run(fails_on_one_rank, str(tmp_path))


def retried(rank, size, folder, fails_at):
    """Checks a retry on one rank, which fails before, in or after the call for captured graphs."""
    timed, ranged = autotuning._timed, choosing._ranged

    def with_graphs(*arguments):
        measured = timed(*arguments)
        return replace(measured, eager=(("torch", 1.0),), captured=(("sequential", 1.0),))

    def fail(*_):
        raise MemoryError("planted")

    def fail_after(*passed):
        run = ranged(*passed)
        return lambda *tensors: fail(run(*tensors))

    effects = {"before": [fail], "in": [fail_after], "after": [ranged, fail]}[fails_at]
    with (
        begun_anew(Path(folder) / "file.json", "measure"),
        mock.patch.object(autotuning, "_timed", with_graphs),
    ):
        if rank == 1:
            planted = mock.patch.object(choosing, "_ranged", lambda *passed: effects.pop(0)(*passed))
            with planted, pytest.raises(MemoryError) as caught:
                call(rank, size)
        with overlap_gemm.retry(caught.value) if rank == 1 else nullcontext():
            result = call(rank, size)
        assert torch.equal(result, torch.full((M // size, N), float(K)))


@pytest.mark.parametrize("fails_at", ["before", "in", "after"])
def test_a_call_that_fails_after_its_measurement_can_be_retried(ranks, tmp_path, fails_at):
    ranks(2).run(retried, str(tmp_path), fails_at)


def marked_while_tried(rank, size, folder):
    file, seen = Path(folder) / "file.json", []
    method = Decomposed.gemm_reduce_scatter

    def looks(*given, **named):
        if rank == 0:  # for another rank the mark may come or go while it looks
            seen.append([json.loads(mark.read_text())["refused"] for mark in Path(folder).glob("*.trying")])
        return method(*given, **named)

    with begun_anew(file), mock.patch.object(Decomposed, OP, looks):
        overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
    if rank == 0:
        assert seen[0] == ["decomposed"]  # at the first call
        assert all(not marks for marks in seen[1:])


def test_what_is_tried_is_noted_in_front_of_it(ranks, tmp_path):
    ranks(2).run(marked_while_tried, str(tmp_path))


def damaged(rank, size, folder):
    good = {"kind": "k", "conditions": {}, "eager": [["torch", 1.0]]}
    for i, text in enumerate((b"{", b"[]", b'{"entries": [{}]}', b'{"entries": 3}', b"\xff\xfe{")):
        file = Path(folder) / f"{i}.json"
        if rank == 0:
            file.write_bytes(text)
        torch.distributed.barrier()
        with begun_anew(file), pytest.raises(DisagreementError, match=rf"rank 0: .*{file.name} is damaged"):
            call(rank, size)
    file = Path(folder) / "fields.json"
    with begun_anew(file):
        under = group_measurements.measurements_of(
            overlap_gemm.runtime.group.find(None), torch.device("cpu")
        ).under
    every = {"captured": [], "kernel": [[], None], "candidates": 1, "date": ""}
    nan = every | {"eager": [["torch", 1.0], ["sequential", float("nan")]]}
    for fields in ({}, nan, every | {"eager": [["torch", -1.0]]}):
        if rank == 0:
            file.write_text(json.dumps({"entries": [{**good, **fields, "conditions": dict(under)}]}))
        torch.distributed.barrier()
        with begun_anew(file), pytest.raises(DisagreementError, match="fields.json is damaged"):
            call(rank, size)
        torch.distributed.barrier()
    for off in ("off", "OFF"):
        with begun_anew(off, "measure"):
            call(rank, size)
        assert not Path(off).exists()
    with begun_anew("/dev/null/no-folder.json"), mock.patch.object(group_measurements, "read") as read:
        read.return_value = overlap_gemm.tuning.measured.Entries({}, frozenset())
        with slowed("torch"):  # it cannot be written, so it holds in this process alone
            overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        assert explained(rank, size).backend.name != "torch"


def test_a_damaged_file_is_an_error_that_names_it_on_every_rank(ranks, tmp_path):
    ranks(2).run(damaged, str(tmp_path))


def different_environments(rank, size, folder):
    with (
        begun_anew(Path(folder) / "file.json", "measure" if rank else "model"),
        pytest.raises(DisagreementError, match="OVERLAP_GEMM_AUTOTUNE must be the same .*rank 0 has model"),
    ):
        call(rank, size)
    with (
        begun_anew(Path(folder) / "file.json", "always"),
        pytest.raises(ValueError, match="OVERLAP_GEMM_AUTOTUNE must be model or measure; got 'always'"),
    ):
        call(rank, size)


def test_ranks_whose_environments_differ_hear_of_it(ranks, tmp_path):
    ranks(2).run(different_environments, str(tmp_path))


def out_of_time(rank, size, folder):
    with begun_anew(Path(folder) / "file.json"), slowed(*BACKENDS, seconds=0.1):
        with mock.patch.dict(os.environ, {group_measurements.SECONDS_VARIABLE: "0.05"}):
            overlap_gemm.warmup(OP, (M, N, K), dtype=torch.float32, autotune="measure")
        assert "measured, 1 candidates" in str(explained(rank, size))


def test_the_time_for_candidates_is_bounded(ranks, tmp_path):
    ranks(2).run(out_of_time, str(tmp_path))
