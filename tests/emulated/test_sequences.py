"""Sequences of calls of any ops and shapes, on any streams, with a rank that lags: judged by values.

The rule they try: nobody writes a buffer of call e + 2 before every rank has finished reading call e. A rank
that owns no row of a call has nobody to wait for in it, so a sequence in which one does lets it run ahead.
"""

import random
from functools import partial

import pytest

from cute_emulator import EmulatorError
from overlap_gemm.backends.fused import transport_hosts
from overlap_gemm.exchange import send
from overlap_gemm.tuning.space import every_config
from tests.support.chosen import in_turn
from tests.support.emulated.sequences import ARCHS, Call, run_sequence

both = pytest.mark.parametrize("arch", ARCHS)

WAYS = [
    ("gemm_reduce_scatter", None),
    ("gemm_reduce_scatter", None),
    ("gemm_all_reduce", "one_shot"),
    ("gemm_all_reduce", "two_shot"),
    ("gemm_all_gather", None),
]
"""Ops and algorithms that share workspaces. In a reduce-scatter alone a rank may have nobody to wait for."""


def random_sequence(seed):
    """(ranks, shapes, starved rank, mode): every kind of share, each likely to follow each other."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 3, 4])
    few, many = [1, 1, 2, ranks - 1, ranks], [64, 130, 256 * ranks, 256 * ranks]
    shapes = [(draw.choice(draw.choice([few, many])), draw.choice([8, 64, 64, 136])) for _ in range(6)]
    return ranks, shapes, draw.randrange(ranks), draw.choice(["immediate", "random", "lazy"])


def random_calls(seed):
    """The same with every op: (ranks, calls, starved rank, mode)."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 3, 4])
    few, many, calls = [1, 1, 2, ranks - 1, ranks], [64, 130, 256 * ranks], []
    for _ in range(6):
        op, algorithm = draw.choice(WAYS)
        n = draw.choice([8, 64, 64, 136])
        rows = draw.choice(draw.choice([few, many]))
        calls.append(Call(rows, ranks * n if op == "gemm_all_gather" else n, op, algorithm))
    return ranks, calls, draw.randrange(ranks), draw.choice(["immediate", "random", "lazy"])


PUTS = (("transport", "nvshmem"),)


def random_puts(seed):
    """The same, with all-gather GEMMs, which have workspaces of their own; two calls of three by puts."""
    ranks, calls, starved, mode = random_calls(seed)
    draw = random.Random(seed)
    for number, call in enumerate(calls):
        if draw.random() < 0.3:
            calls[number] = call._replace(op="all_gather_gemm", algorithm=None, n=64 * ranks)
    return ranks, [c._replace(kernel=PUTS if n % 3 else ()) for n, c in enumerate(calls)], starved, mode


ROOM = 4
"""SMs for kernels in clusters of two."""


def random_kernels(arch, seed):
    """The same, each call by a kernel and a transport of its own: slots that others have filled otherwise."""
    ranks, calls, starved, mode = random_calls(seed)
    draw = random.Random(seed)
    every = [config for config in every_config(arch) if 2 * config.cluster_ctas <= ROOM]
    for number, call in enumerate(calls):
        config, transport = draw.choice(every), draw.choice([None, None, "peer_bulk", "ll"])
        if draw.random() < 0.2:
            call = call._replace(op="all_gather_gemm", algorithm=None, n=64 * ranks)
            transport = draw.choice(["copy_engine", "peer_bulk"])
        names = ("mma", "tile", "cluster", "k_split")
        kernel = {**{name: getattr(config, name) for name in names}, "transport": transport}
        calls[number] = call._replace(kernel=(*kernel.items(), ("raster_group", draw.choice([1, 8]))))
    return ranks, calls, starved, mode


def run_random_sequence(arch, seed, drawn=random_sequence, **options):
    ranks, shapes, starved, mode = drawn(seed)
    how = {"mode": mode, "seed": seed, "num_sms": 1 + seed % 3, "streams": 1 + seed % 2, **options}
    run_sequence(arch, ranks, shapes, starved=starved, **how)


# --- sequences with a name ---


@pytest.mark.parametrize(("starved", "arch"), in_turn([2], ARCHS))
def test_decode_between_prefill_chunks(arch, starved):
    """In the call of one row ranks 1 and 2 own nothing."""
    run_sequence(arch, 3, [(768, 64), (1, 64), (768, 64)], starved=starved)


@pytest.mark.parametrize("starved", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_decode_between_prefill_chunks_beyond_reach(starved):
    """The same through the relay kernel."""
    run_sequence("sm_90a", 3, [(768, 64), (1, 64), (768, 64)], starved=starved, network=True)


def test_every_op_in_turn_by_puts_and_by_stores():
    """Each on workspaces of its kind, that of puts beside the other."""
    ways = [*WAYS[1:], ("all_gather_gemm", None)]
    calls = [Call(40, 64, op, how, PUTS) for op, how in ways]
    run_sequence("sm_90a", 2, [*calls, Call(40, 64), Call(1, 64, kernel=PUTS), *calls[::2]], starved=1)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_many_calls_of_which_one_rank_owns_everything(arch):
    run_sequence(arch, 4, [(512, 64), (1, 64), (1, 8), (1, 64), (512, 64)], starved=3)


@pytest.mark.parametrize(("starved", "arch"), in_turn([1], ARCHS))
def test_classes_take_turns(arch, starved, monkeypatch):
    """The calls of each class must reuse its buffers safely, with calls of others in between."""
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    run_sequence(arch, 2, [(64, 64), (300, 64), (1, 8), (300, 136), (1, 64), (300, 64)], starved=starved)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["immediate", "lazy"])
@pytest.mark.parametrize("starved", [1, 2])
def test_kernels_for_few_rows_between_others(starved, mode):
    """Tiles of other sizes, of which only the rows that exist are sent, in the same buffers."""
    narrow = (("mma", "swap_ab"), ("tile", (16, 64)))
    parts = (*narrow, ("k_split", 4))
    calls = [
        Call(300, 64, "gemm_all_reduce", "two_shot"),
        Call(1, 136, "gemm_all_reduce", "one_shot", parts),
        Call(17, 192, "gemm_all_gather", None, narrow),
        Call(2, 64, "gemm_reduce_scatter", None, narrow),
        Call(300, 64, "gemm_all_reduce", "one_shot"),
    ]
    run_sequence("sm_90a", 3, calls, starved=starved, mode=mode, num_sms=4)


FIRST, LAST = (Call(256, 192, "gemm_all_reduce", how) for how in ("two_shot", "one_shot"))
MIXED = [FIRST, Call(1, 64), LAST]
"""As decode between prefill chunks; what rank 1 sends in the last call lies where the first has results."""


@pytest.mark.parametrize(("starved", "arch"), in_turn([2], ARCHS))
def test_all_reduces_around_a_reduce_scatter_of_one_row(arch, starved):
    run_sequence(arch, 3, MIXED, starved=starved)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_every_op_in_turn(arch):
    calls = [Call(256, 192 if op == "gemm_all_gather" else 64, op, how) for op, how in WAYS[1:]]
    run_sequence(arch, 3, [*calls, Call(1, 64), *reversed(calls)], starved=1, num_sms=1)


@pytest.fixture
def owners_alone(monkeypatch, changed_kernels):
    """The mend taken out: nobody waits for the peers' entries, so a rank without rows waits for nobody."""
    monkeypatch.setattr(send, "await_peers", lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("owners_alone")
def test_without_the_rule_these_sequences_are_wrong():
    for sequence in (
        lambda: test_decode_between_prefill_chunks("sm_100a", 1),
        lambda: run_sequence("sm_100a", 3, MIXED, starved=2),
        lambda: run_random_sequence("sm_100a", 4, random_calls),
        *map(random_on_sm_100, (5, 23)),
    ):
        with pytest.raises((EmulatorError, AssertionError)):
            sequence()


def random_on_sm_100(seed):
    return lambda: run_random_sequence("sm_100a", seed)


# --- any sequence ---


@pytest.mark.parametrize(
    ("seed", "arch"),
    [
        *in_turn([5], ARCHS),
        *(pytest.param(seed, arch, marks=pytest.mark.slow) for seed in (21, 23, 25) for arch in ARCHS),
    ],
)
def test_random_sequences(arch, seed):
    """Each of these finds that a rank without rows waits for the owners alone."""
    run_random_sequence(arch, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "arch"), in_turn([21], ARCHS))
def test_random_sequences_of_many_classes(arch, seed, monkeypatch):
    monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    run_random_sequence(arch, seed)


@pytest.mark.slow
@both
@pytest.mark.parametrize("classes", ["one", "many"])
@pytest.mark.parametrize("seed", range(200, 260))
def test_more_random_sequences(arch, seed, classes, monkeypatch):
    if classes == "many":
        monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    run_random_sequence(arch, seed)


@pytest.mark.parametrize(("seed", "arch"), in_turn([4], ARCHS))
def test_random_sequences_of_all_ops(arch, seed):
    run_random_sequence(arch, seed, random_calls)


@pytest.mark.slow
@both
@pytest.mark.parametrize("classes", ["one", "many"])
@pytest.mark.parametrize("seed", range(300, 340))
def test_more_random_sequences_of_all_ops(arch, seed, classes, monkeypatch):
    if classes == "many":
        monkeypatch.setattr(transport_hosts, "SMALLEST_BUFFER", 1 << 10)
    run_random_sequence(arch, seed, random_calls)


def test_a_random_sequence_of_kernels():
    run_random_sequence("sm_90a", 2, partial(random_kernels, "sm_90a"), num_sms=ROOM)


@pytest.mark.slow
@both
@pytest.mark.parametrize("seed", range(500, 520))
def test_more_random_sequences_of_kernels(arch, seed):
    run_random_sequence(arch, seed, partial(random_kernels, arch), num_sms=ROOM)


@pytest.mark.slow
@both
@pytest.mark.parametrize("network", [False, True], ids=["within-reach", "network"])
@pytest.mark.parametrize("seed", range(400, 412))
def test_random_sequences_of_all_ops_by_puts(arch, seed, network):
    """Over a network all calls are by puts; within reach those of peer memory are among them."""
    run_random_sequence(arch, seed, random_puts, network=network, num_sms=2 + seed % 2)
