"""Rules of the host side that hold between calls: each of these fails when the rule's line is broken."""

import threading
import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.api import float8
from overlap_gemm.backends import by_shards, decomposed, epilogues, peer_access
from overlap_gemm.backends.fused import compiled
from overlap_gemm.backends.fused.launch_plan import Copies, LocalShard, Plan, Product
from overlap_gemm.backends.fused.transport_hosts import STORES, requested_transport
from overlap_gemm.backends.op_call import CallOperands, OpCall
from overlap_gemm.backends.portable_arithmetic import arithmetic_of
from overlap_gemm.backends.scales.scale_layouts import MxAtoms
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import LocalShardFirst, TileGrid, WorkList
from overlap_gemm.config.scale_blocks import BLOCKS
from overlap_gemm.device.failure import RECORD_WORDS, Role
from overlap_gemm.dispatch import calls, choosing
from overlap_gemm.exchange.geometry import OWNED, ExchangeShape
from overlap_gemm.integrations import torch_symm_mem
from overlap_gemm.runtime import bootstrap, executor, messages
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.group import LOCAL, Group, resolve
from overlap_gemm.runtime.ledger import Ledger
from overlap_gemm.runtime.memory.workspace import SizeClass, Workspace
from overlap_gemm.spec import GEMM_REDUCE_SCATTER, OPS, TRANSPORTS
from overlap_gemm.spec.promises import NO_PROMISES
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.tuning import machine
from overlap_gemm.tuning.epilogue_time import EpilogueTime
from overlap_gemm.tuning.machine import load, machine_for
from overlap_gemm.tuning.time_model import Facts, fused_input_exchange, fused_time

X, WEIGHT = torch.randn(6, 4), torch.randn(8, 4)

# --- what a forward asks for holds for its gradient ---


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "dispatched"])
@pytest.mark.parametrize("op", OPS)
def test_deterministic_sums_are_those_of_the_gradient_too(op, plain, monkeypatch):
    resolve(LOCAL).calls.clear()
    seen, real = [], choosing.choose
    monkeypatch.setattr(
        choosing, "choose", lambda problem, asked: seen.append(problem) or real(problem, asked)
    )
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    with mock.patch("overlap_gemm.dispatch.bound.is_plain", lambda *_: plain):
        out = getattr(overlap_gemm, op)(x, weight, deterministic=True)
    forward = len(seen)
    out.sum().backward()
    assert all(problem.deterministic for problem in seen), seen
    assert len(seen) > forward or op == "gemm_all_reduce", "whose gradients are products"
    resolve(LOCAL).calls.clear()


# --- what every launch does, of whichever kind of plan ---


class Device:
    """An executor whose launches are noted; `captures` says of each whether a graph captures it."""

    is_open = True

    def __init__(self, *captures):
        left = iter(captures)
        self.order = SimpleNamespace(
            lock=threading.RLock(), follow=lambda stream: next(left), next_call=lambda: 1
        )

    @contextmanager
    def active(self, *used):
        yield 0

    @contextmanager
    def fork(self, stream):
        yield 1


COPIES = Copies((), 0, LocalShard(0))


class Given:
    """Stands for a kernel's arguments."""

    exchange = property(lambda self: self)
    after = None

    def of_call(self, *_):
        return self

    def _replace(self, **_):
        return self


def workspace():
    memory = SimpleNamespace(
        local=torch.zeros(64, dtype=torch.uint8), bases=torch.zeros(2, dtype=torch.int64)
    )
    record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
    return Workspace(Group("a", 0, 2), SizeClass(64, 64, 2, 2), memory, True, record)


def tiles(device, space, launched):
    shape = ExchangeShape.even(64, 64, 2)
    product = Product(GemmConfig("sm_100a"), lambda *_: launched.append(1), 1)
    plan = Plan(device, shape.pattern, (product,), space, Given())
    return lambda: plan.launch(X, (WEIGHT,), (X,), (None,))


def gathered(device, space, launched):
    product = Product(GemmConfig("sm_100a"), lambda *_: launched.append(1), 1)
    plan = Plan(device, "input_gather", (product,), space, Given(), gathering=Given(), side_work=COPIES)
    return lambda: plan.launch(X, [WEIGHT], [X], [None])


def copy_plan(device, space, launched):
    gate = lambda *_: launched.append(1)  # noqa: E731
    plan = Plan(device, "input_gather", (), space, Given(), side_work=COPIES, gate=gate)
    return by_shards.ByShards(plan, 0, 0, X, ((1, X),))


def copied(device, space, launched):
    def launch():
        with copy_plan(device, space, launched).call(X) as arrivals:
            list(arrivals)

    return launch


def copied_beside(device, space, launched):
    def launch():
        with copy_plan(device, space, launched).alongside(X[:0], lambda: None):
            pass

    return launch


KINDS = [tiles, gathered, copied, copied_beside]


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_that_a_graph_uses_stays_captured(kind):
    """Freed after a later eager call, the graph would store into its peers' freed memory."""
    space, launched = workspace(), []
    launch = kind(Device(*[True] * 2, *[False] * 6), space, launched)
    launch()
    assert space.captured and launched
    launch()
    launch()
    assert space.captured


@pytest.mark.parametrize("kind", KINDS)
def test_an_eager_call_captures_nothing(kind):
    space = workspace()
    kind(Device(*[False] * 4), space, [])()
    assert not space.captured


@pytest.mark.parametrize("kind", KINDS)
def test_the_call_after_a_failed_one_raises_and_launches_nothing(kind):
    space, launched = workspace(), []
    record = [1, 1, GEMM_REDUCE_SCATTER.code, Role.RECEIVE_PARTIAL, 3, 2, 4, 7, 0, 5, 0]
    assert len(record) == RECORD_WORDS
    space.record[:] = torch.tensor(record, dtype=torch.int32)
    with pytest.raises(CommTimeoutError, match="rank 1 .* gave up on rank 2"):
        kind(Device(False, False), space, launched)()
    assert not launched


# --- keys ---


def test_a_call_depends_on_capture_and_on_the_emulator(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True)
    states = set()
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        states.add(calls.state(on_gpu))
    for emulation in (None, object(), object()):
        monkeypatch.setattr(executor, "emulation", emulation)
        states.add(calls.state(X))
    with overlap_gemm.configured(reserve_sms=8):
        states.add(calls.state(X))
    assert len(states) == 6


def test_what_a_group_reaches_is_not_another_groups_of_its_name(monkeypatch):
    """torch numbers groups from 0 again when it is initialised again."""
    monkeypatch.setattr(peer_access, "_known", {})
    monkeypatch.setattr(
        peer_access, "_probe", lambda group, device: peer_access.PeerAccess(f"of {id(group)}", 0, None)
    )
    first, second = Group("0", 0, 2), Group("0", 0, 2)
    for group in (first, second, first):
        assert peer_access.peer_access_of(group, torch.device("cuda", 0)).arch == f"of {id(group)}"


@pytest.fixture
def gpus(monkeypatch):
    """Three of 132 SMs, of which the last is beyond the others' reach."""

    def properties(index):
        return SimpleNamespace(
            major=9, minor=0, name="NVIDIA H200", multi_processor_count=132, uuid=f"gpu {index}"
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: peer != 2)
    monkeypatch.setattr(peer_access, "why_no_cuda", lambda index: None)
    return [peer_access.this_device(torch.device("cuda", index)) for index in range(3)]


@pytest.mark.parametrize(("reserve", "left"), [(0, 132), (131, 1), (132, None)])
def test_a_gpu_of_which_one_sm_is_left_will_do(gpus, monkeypatch, reserve, left):
    monkeypatch.setenv("OVERLAP_GEMM_RESERVE_SMS", str(reserve))
    own = peer_access.this_device(torch.device("cuda", 0))
    assert own.num_sms == (left or 0)
    assert (own.why_not is None) == (left is not None), own.why_not
    found = peer_access.compare(Group("a", 0, 2), [own, gpus[1]])
    assert left is not None or found == peer_access.PeerAccess("", 0, f"rank 0: {own.why_not}")


def test_only_gpus_of_peers_that_are_seen_here_are_asked_for(gpus):
    elsewhere = replace(gpus[0], uuid="gpu 7")
    own = torch.device("cuda", 0)
    assert peer_access._why_no_access(own, [*gpus[:2], elsewhere]) is None
    assert peer_access._why_no_access(own, [*gpus, elsewhere]) == "device 0 cannot access device 2"
    assert peer_access._why_no_access(own, gpus[:1]) is None


# --- constants ---


def test_a_named_machine_of_another_architecture_is_refused_where_the_device_needs_one(monkeypatch):
    monkeypatch.setenv(machine.MACHINE_VARIABLE, "b200")
    machine_for.cache_clear()
    try:
        assert machine_for("sm_100a").name == "NVIDIA B200"
        assert machine_for("sm_90a").name == "NVIDIA H200"
        monkeypatch.setattr(machine, "device_name", lambda arch: "NVIDIA H100" if arch == "sm_90a" else "")
        machine_for.cache_clear()
        assert machine_for("sm_100a").name == "NVIDIA B200"
        with pytest.raises(ValueError, match="MACHINE=b200 has constants for sm_100a.*NVIDIA H100 is sm_90a"):
            machine_for("sm_90a")
    finally:
        machine_for.cache_clear()


# --- shards and orders ---


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [8, 64, 136, 1000, 4096, 8200])
def test_a_two_shots_owners_have_whole_tiles_and_as_few_as_cover_the_columns(columns, world):
    shape = ExchangeShape.even(512, columns, world, "two_shot")
    assert shape.is_by_columns and shape.shard % OWNED == 0
    assert shape.shard * world >= columns > (shape.shard - OWNED) * world
    assert ExchangeShape.even(512, columns, world, "reduce_scatter").shard == -(-512 // world)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_a_two_shots_owners_begin_with_a_block_of_scales(blocks):
    for columns, world in ((264, 2), (384, 2), (400, 3), (4096 + 8, 8)):
        shape = ExchangeShape.even(512, columns, world, "two_shot", blocks[1])
        unit = max(OWNED, blocks[1])
        assert shape.shard % OWNED == shape.shard % blocks[1] == 0
        assert shape.shard * world >= columns > (shape.shard - unit) * world


@pytest.mark.parametrize("owners", [1, 2, 4])
@pytest.mark.parametrize("rank", range(4))
def test_a_gather_begins_with_the_own_shard_and_goes_on_as_they_arrive(rank, owners):
    work, grid = WorkList(TileGrid(2, 3), rank, owners), 6
    shards = [LocalShardFirst().place(t, work).shard for t in range(LocalShardFirst().num_tiles(work))]
    wanted = [(rank + step) % owners for step in range(owners)]
    assert shards == [shard for shard in wanted for _ in range(grid)]


# --- integrations and launchers ---


@pytest.mark.parametrize(("rows", "divides"), [(6, True), (5, False), (7, False)])
def test_torchs_reduce_scatter_keeps_rows_that_do_not_divide(rows, divides, monkeypatch):
    """Torch refuses them; ours would cut them as `torch.chunk` does, and return another shape."""
    said = []
    monkeypatch.setattr(torch_symm_mem, "group_size", lambda group: 2)
    monkeypatch.setattr(
        torch_symm_mem, "_torch_op", lambda op, A, why: said.append(why) or (lambda *_: "torch's")
    )
    monkeypatch.setattr(torch_symm_mem, "gemm_reduce_scatter", lambda A, B, **_: A)
    out = torch_symm_mem._matmul_reduce_scatter("auto", torch.randn(rows, 4), WEIGHT.t(), "sum", 0, "g")
    assert isinstance(out, torch.Tensor) == divides
    assert said == ([] if divides else [f"{rows} rows are not divisible by P=2"])


def test_what_ranks_say_in_front_is_not_taken_for_a_shard():
    """Both are messages between the same ranks; gloo tells them apart by their tags."""
    assert messages.TAG < decomposed._TAG_BASE


def test_slurms_steps_and_jobs_do_not_meet(monkeypatch):
    ports = []
    monkeypatch.setattr(
        bootstrap.dist, "TCPStore", lambda address, port, *_, **__: ports.append((address, port)) or "store"
    )
    steps = [(job, step) for job in (100, 101, 4711) for step in (0, 1, 2)]
    for job, step in steps:
        env = {
            "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[3-4]",
            "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_LOCALID": "0",
        }  # fmt: skip
        assert bootstrap._find_placement(env).launcher == "slurm"
        bootstrap._find_placement({**env, "SLURM_PROCID": "0"})
    assert ports[::2] == ports[1::2], "the ranks of a step meet"
    assert len(set(ports)) == len(steps)
    assert all(address == "node3" and 20000 <= port < 60000 for address, port in ports)
    bootstrap._find_placement({**env, "MASTER_ADDR": "here", "MASTER_PORT": "7"})
    assert ports[-1] == ("here", 7)


# --- what drawn mutants showed ---


def test_an_option_that_is_off_is_left_out_of_messages():
    assert str(OpCall(deterministic=True, keep=True)) == "keep=True, deterministic=True"
    assert str(OpCall(deterministic=False)) == ""


def test_a_ledgers_later_calls_differ_if_an_earlier_one_did():
    # A rank publishes its last calls only, so these must show all calls before.
    chains = []
    for words in ((1, 2, 3, 4), (2, 1, 3, 4)):
        ledger = Ledger.__new__(Ledger)
        ledger._calls, ledger._number, ledger._chain = deque(), 0, 0
        for word in words:
            ledger.note(word, "call")
        chains.append(ledger._calls[-1][1])
    assert chains[0] != chains[1]


@pytest.mark.parametrize("op", OPS)
def test_an_invariance_that_a_call_names_is_checked(op):
    with pytest.raises(ValueError, match="invariant='batch'"):
        getattr(overlap_gemm, op)(X, WEIGHT, backend="torch", invariant="batch")


def test_each_time_of_a_partial_epilogue_is_its_own():
    seconds = {"fused": 10.0, "torch": 20.0}
    for kernel, operations in ((1.0, 2.0), (4.0, 5.0)):
        added = EpilogueTime(kernel, operations, 0.0, is_partial=True).added(seconds, ["fused"])
        assert added == {"fused": 10.0 + kernel, "torch": 20.0 + operations}


def test_sums_that_return_are_read_and_written_once_more():
    config, h200 = GemmConfig("sm_90a", (128, 128), mma="cooperative"), load("h200")
    times = [
        fused_time(config, Facts(op, 512, 1024, 2048, "bf16", 2), h200, 132, pattern)
        for op, pattern in (("gemm_all_reduce", "two_shot"), ("gemm_reduce_scatter", "reduce_scatter"))
    ]
    more = (times[0].memory - times[1].memory) * h200.memory_rate
    assert more == pytest.approx(2 * 512 * 1024 * 2)


def test_an_exchange_of_clusters_of_two_takes_the_waves_of_half_the_sms():
    config, facts = (
        GemmConfig("sm_90a", (128, 128), mma="cooperative", cluster=(2, 1)),
        Facts("all_to_all_gemm", 2048, 128, 2048, "bf16", 2),
    )
    four, one = (fused_input_exchange(config, facts, load("h200"), sms).waves for sms in (2, 8))
    assert four > 2 * one, "four clusters, one at a time or all at once"


def test_blocks_that_are_sent_have_the_columns_of_their_rank(monkeypatch):
    exchange, spec = mock.Mock(), OPS["gemm_all_to_all"]
    monkeypatch.setattr(decomposed, "_Exchange", lambda *_: exchange)
    rest = Shards.even(len(X), 2), Group("pair", 0, 2), arithmetic_of(NO_PROMISES, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch resizes a block that does not fit
        decomposed.Decomposed().by_collective(spec, CallOperands(X[:3], [WEIGHT[:5]]), *rest)
    assert torch.equal(exchange.post.call_args.args[0], X[:3] @ WEIGHT[3:5].t())


def test_a_kernel_without_epilogues_is_named_by_its_own_op(monkeypatch):
    monkeypatch.setattr(epilogues, "patterns_of", lambda _: ["bare"])
    monkeypatch.setattr(epilogues, "PATTERNS", {"bare": SimpleNamespace(has_epilogue=False)})
    for op in ("gemm_all_to_all", "all_to_all_gemm"):
        applying = SimpleNamespace(epilogue=SimpleNamespace(pairs=False))
        problem = SimpleNamespace(applying=applying, spec=OPS[op], num_weights=1)
        assert f"the kernel of {op} is registered" in epilogues.why_after(problem, 64)


def test_weights_that_were_made_for_a_call_are_not_read_early():
    with mock.patch.object(float8, "call_op", return_value=[None, X]) as called:
        float8.COPIES.all_gather_gemm(X, [WEIGHT], bias=None, group=None)
    assert called.call_args.args[-1].copied_weight


@pytest.mark.parametrize("puts", [False, True])
def test_kernels_of_a_gather_are_kept_on_disk(monkeypatch, puts):
    cache = mock.Mock()  # they call NVSHMEM with no transport; the relay kernel does
    monkeypatch.setattr(compiled, "_from_cache", cache)
    compiled.compiled_gather(
        SimpleNamespace(is_full_device=True),
        GemmConfig("sm_90a", (128, 128), mma="cooperative"),
        True,
        False,
        puts,
    )
    assert cache.call_args.kwargs == {"puts": False}


def test_packets_are_sent_by_no_transport_that_has_flags():
    assert requested_transport(TRANSPORTS["peer_bulk"]) is STORES


def test_fewer_scales_of_atoms_fill_the_first_bytes_of_a_matrix():
    scale, matrix = torch.arange(6, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int16)
    MxAtoms().put(scale.view(2, 3), matrix)
    assert matrix.view(torch.uint8).flatten().tolist() == [0, 1, 2, 3, 4, 5, *[0] * 10]


def test_kernels_read_an_epilogues_matrix_where_tma_can():
    memory = torch.zeros(8 * 24 + 8, dtype=torch.bfloat16)
    first = -memory.data_ptr() // 2 % 8
    for start, strides, readable in (
        (0, (24, 1), True), (0, (8, 2), False), (0, (20, 1), False), (1, (24, 1), False),
    ):  # fmt: skip
        matrix = memory[first:].as_strided((4, 4), strides, first + start)
        assert epilogues._is_aligned(matrix) == readable
