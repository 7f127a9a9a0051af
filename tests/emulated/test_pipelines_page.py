"""The snippets of docs/pipelines.md, put together to two kernels: right as they stand, and needed."""

import importlib.util
import re
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int64, cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, EmulatorError, FindingsError, Schedule
from overlap_gemm.pipelines import RECORD_WORDS, LaggedPublication, WaitBound
from tests.support.chosen import in_turn

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
BLOCKS = [dedent(text) for text in re.findall(r"^ *```python\n(.*?)^ *```$", PAGE, re.M | re.S)]
BLANK = re.compile(r"^\.\.\..*\n", re.M)
SUBTILES, VALUES, LANES = 2, 32, 32
SHAPE = (SUBTILES * LANES, VALUES)  # a tile: subtiles of 4 KiB


def snippet(words: str) -> str:
    """The one snippet that has these words."""
    (text,) = (text for text in BLOCKS if words in text)
    return text


def filled(words: str, *blanks: str) -> str:
    """The snippet with its ``...`` lines replaced."""
    parts = BLANK.split(snippet(words))
    return "".join(part + blank for part, blank in zip(parts, (*blanks, ""), strict=True))


def at(column: int, text: str) -> str:
    return indent(text, " " * column)


AWAIT_READ = snippet('fence_proxy("async.global")')
ANSWERED = """
if tile >= self.places:
    wait_flag(self.acks + 8 * Int64(tile - self.places), self.epoch, self.bound, FailureSite(tile=tile))
"""


def sender() -> str:
    """The page's sender, with what the page says about memory that is written again."""
    fields = "\n    acks: Int64\n    bound: Any\n    places: Int32\n"
    head, locate = snippet("class Push").split("    def locate", 1)
    first, rest = locate.split("\n", 1)
    locate = "    @cute.jit\n    def locate" + first + "\n" + at(8, AWAIT_READ + ANSWERED.strip("\n")) + "\n"
    return head.rstrip() + fields + "\n" + locate + rest


SHARED = f"""
from dataclasses import dataclass
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute, memory, pipeline
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.pipelines import *

SUBTILES, VALUES = {SUBTILES}, {VALUES}
SUBTILE_BYTES = 32 * VALUES * 4
TILE_BYTES = SUBTILES * SUBTILE_BYTES


{sender()}

@cute.jit
def receive(got: cute.Tensor, out: cute.Tensor, own_flags: Int64, peer_acks: Int64, num_tiles: Int32,
            epoch: Uint64, bound: WaitBound):
    lane = cute.arch.lane_idx()
    for tile in cutlass.range(num_tiles, unroll=1):
{
    at(
        8,
        filled(
            "wait_flag(own_flags",
            '''for row in cutlass.range(SUBTILES * 32, unroll=1):
    out[tile * SUBTILES * 32 + row, lane] = got[tile * SUBTILES * 32 + row, lane] + 1.0
''',
        ),
    )
}
{at(8, snippet("all lanes have read"))}
"""

ARGUMENTS = """x: cute.Tensor, y: cute.Tensor, got: cute.Tensor, out: cute.Tensor, inbox: Int64, flags: Int64,
    acks: Int64, own_flags: Int64, peer_acks: Int64, num_tiles: Int32, num_received: Int32, epoch: Uint64,
    bound: WaitBound, places: Int32"""
NAMES = ", ".join(re.findall(r"(\w+):", ARGUMENTS))

TMA_STORE = f"""
@cute.kernel
def kernel(tma_atom: cute.CopyAtom, y_tma: cute.Tensor, {ARGUMENTS}):
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    smem = memory.SmemAllocator()
    layout = cute.make_layout((32, VALUES, 3), stride=(VALUES, 1, 32 * VALUES))
    buffers = smem.allocate_tensor(Float32, layout, byte_alignment=128)
{at(4, snippet("PipelineTmaStoreAsync.create("))}
    if warp == 0:
        tiles = cute.zipped_divide(y_tma, (32, VALUES))
        source, target = cpasync.tma_partition(
            tma_atom, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), tiles
        )
        for i in cutlass.range(num_tiles * SUBTILES, unroll=1):
            for v in cutlass.range(VALUES, unroll=1):
                buffers[lane, v, i % 3] = 2 * x[i * 32 + lane, v]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            smem_subtile, global_subtile = source[(None, i % 3)], target[(None, (i, 0))]
            if lane == 0:
{at(16, BLANK.split(snippet("store.commit()"))[0])}
            cute.arch.sync_warp()
        if lane == 0:
{at(12, BLANK.split(snippet("store.commit()"))[1])}
    elif warp == 1:
        for tile in cutlass.range(num_tiles, unroll=1):
            if lane == 0:
{at(16, AWAIT_READ.replace("self.", ""))}
            cute.arch.sync_warp()
            there = cute.make_tensor(
                global_pointer(Float32, inbox + Int64(tile) * TILE_BYTES, 16),
                cute.make_layout((SUBTILES * 32, VALUES), stride=(VALUES, 1)),
            )
            for subtile in cutlass.range(SUBTILES, unroll=1):
{
    at(
        16,
        filled(
            "written.release()",
            '''for row in cutlass.range(32, unroll=1):
    there[subtile * 32 + row, lane] = y[(tile * SUBTILES + subtile) * 32 + row, lane]
''',
        ),
    )
}
            if lane == 0:
                release_flag(flags + 8 * Int64(tile), epoch)
    elif warp == 2:
        receive(got, out, own_flags, peer_acks, num_received, epoch, bound)


@cute.jit
def launch({ARGUMENTS}, stream: CUstream):
    box = cute.make_layout((32, VALUES), stride=(VALUES, 1))
    atom, y_tma = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, box, (32, VALUES))
    kernel(atom, y_tma, {NAMES}).launch(grid=(1, 1, 1), block=(96, 1, 1), stream=stream)
"""

RING = f"""
@cute.kernel
def kernel({ARGUMENTS}):
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    smem = memory.SmemAllocator()
    stages = smem.allocate_tensor(Float32, cute.make_layout((32 * VALUES, 4)), byte_alignment=128)
{at(4, snippet("EpilogueRing.create("))}
    if warp < 4:
        i = Int32(0)
{at(8, BLANK.split(snippet("ring.acquire"))[0])}
        for i in cutlass.range(num_tiles * SUBTILES, unroll=1):
{at(12, BLANK.split(snippet("ring.acquire"))[1])}
            for v in cutlass.range(8, unroll=1):
                stages[(8 * warp + v) * 32 + lane, state.index] = 2 * x[i * 32 + 8 * warp + v, lane]
{at(12, BLANK.split(snippet("ring.acquire"))[2])}
    elif warp == 4:
{at(8, snippet("ring.drain(").replace("num_tiles))", "num_tiles, acks, bound, places))"))}
    else:
        receive(got, out, own_flags, peer_acks, num_received, epoch, bound)


@cute.jit
def launch({ARGUMENTS}, stream: CUstream):
    kernel({NAMES}).launch(grid=(1, 1, 1), block=(192, 1, 1), stream=stream)
"""
KERNELS = {"tma_store": TMA_STORE, "ring": RING}
MOST = 5  # tiles


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes the launch of a kernel, perhaps without some of its text."""

    def make(name: str, without: str = "", instead: str = "pass"):
        text = SHARED + KERNELS[name]
        assert without in text
        file = tmp_path / f"page_{name}.py"
        file.write_text(text.replace(without, instead) if without else text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module.launch

    return make


def run(launch, tiles, launches=2, begin=0, places=MOST, **options) -> None:
    """Rank 0 sends so many tiles to rank 1, rank 1 so many to rank 0, in each launch; compares."""
    with Emulator("sm_90a", 2, **options) as emulator:
        shape = (MOST * SHAPE[0], VALUES)
        inbox = emulator.symmetric(shape, torch.float32)
        flags, acks = (emulator.symmetric((MOST,), torch.int64, name) for name in ("flags", "acks"))
        for tensor in (*flags.tensors, *acks.tensors):
            tensor.fill_(begin)
        words = [emulator.empty((1 + RECORD_WORDS,), torch.int32, r).zero_() for r in range(2)]
        bounds = [WaitBound(Int64(0), Int64(w[1:].data_ptr()), Int64(w.data_ptr())) for w in words]
        xs = torch.randn(launches, 2, *shape, generator=torch.Generator().manual_seed(1))
        ys = [[emulator.empty(shape, torch.float32, r) for r in range(2)] for _ in range(launches)]
        outs = [[emulator.empty(shape, torch.float32, r) for r in range(2)] for _ in range(launches)]
        compiled = None
        for e in range(launches):
            for r in range(2):
                tensors = (xs[e, r], ys[e][r], inbox[r], outs[e][r])
                reached = (inbox[1 - r], flags[1 - r], acks[r], flags[r], acks[1 - r])
                counts = (tiles[r], tiles[1 - r], begin + e + 1)
                arguments = [from_dlpack(t, assumed_align=16) for t in tensors]
                arguments += [*(t.data_ptr() for t in reached), *counts, bounds[r], places, CUstream(0)]
                compiled = compiled or cute.compile(launch, *arguments)
                with emulator.rank(r):
                    compiled(*arguments)
        emulator.run()
        for e in range(launches):
            for r in range(2):
                rows = tiles[1 - r] * SHAPE[0]
                torch.testing.assert_close(outs[e][r][:rows], 2 * xs[e, 1 - r, :rows] + 1, rtol=0, atol=0)
                assert outs[e][r][rows:].isnan().all()


LAGGING = Schedule(starved=lambda rank, cta, warp: rank == 1)


RUNS = {
    "random": ((3, 5), {"mode": "random", "seed": 1}),
    "a rank lags": ((1, 0), {"mode": "lazy", "schedule": LAGGING, "launches": 4}),
    "lanes in turn": ((2, 1), {"mode": "lazy", "schedule": Schedule(order="random", lanes=True), "seed": 2}),
    "epochs of 48 bits go through 0": ((2, 3), {"mode": "lazy", "begin": 2**48 - 2, "launches": 3}),
}


@pytest.mark.parametrize(("how", "name"), in_turn(RUNS, KERNELS))
def test_the_page_is_right(kernel, name, how):
    tiles, options = RUNS[how]
    run(kernel(name), tiles, **options)


WAITS = {
    "the flag": "wait_flag(own_flags + 8 * Int64(tile), epoch, bound, FailureSite(tile=tile, index=tile))",
    "that it was read": AWAIT_READ.split("\n")[0],
}


@pytest.mark.parametrize(("wait", "name"), in_turn(WAITS, KERNELS))
def test_each_wait_is_needed(kernel, name, wait):
    text = WAITS[wait].replace("self.", "") if name == "tma_store" else WAITS[wait]
    with pytest.raises(FindingsError, match="race"):
        run(kernel(name, without=text), (3, 2), mode="lazy")


@pytest.mark.parametrize(
    "mode", ["lazy", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("immediate", "random"))]
)
def test_a_warp_that_does_not_meet_is_noticed(kernel, mode):
    sync = f"{at(16, 'cute.arch.sync_warp()')}\n{at(16, 'if lane == 0:')}\n{at(20, 'written.release()')}"
    launch = kernel("tma_store", without=sync, instead="\n".join(sync.split("\n")[1:]))
    with pytest.raises(FindingsError, match="race"):
        run(launch, (3, 2), mode=mode, seed=1)


@pytest.mark.parametrize(("name", "text"), [("tma_store", "producer.tail()"), ("ring", "ring.commit(state)")])
def test_who_hands_nothing_over_is_waited_for(kernel, name, text):
    with pytest.raises(EmulatorError, match="deadlock"):
        run(kernel(name, without=text), (1, 1))


@pytest.mark.parametrize(("places", "ends"), [(LaggedPublication(SUBTILES, 2).lag + 1, True), (1, False)])
def test_a_sender_may_not_wait_for_the_answer_to_a_tile_that_it_has_not_published(kernel, places, ends):
    assert places == 1 + ends
    if ends:
        run(kernel("ring"), (5, 4), places=places)
    else:
        with pytest.raises(EmulatorError, match="deadlock(.|\n)* of acks of rank 0 .*read 0x0"):
            run(kernel("ring"), (5, 4), places=places)


@cute.kernel
def add_one_kernel(x: cute.Tensor):
    x[0] = x[0] + 1


@cute.jit
def add_one(x: cute.Tensor):
    add_one_kernel(x).launch(grid=(1, 1, 1), block=(1, 1, 1))


def test_the_page_says_how_to_check():
    """Here a kernel with nothing to remove."""
    given, compiled = set(), []

    def main(**options):
        given.add((options["mode"], options["schedule"].lanes))
        with Emulator("sm_90a", 2, **options) as emulator:
            x = emulator.empty((1,), torch.float32).fill_(3)
            compiled[:] = compiled or [cute.compile(add_one, from_dlpack(x))]
            with emulator.rank(0):
                compiled[0](from_dlpack(x))
            emulator.run()
        assert x == 4

    names = {"main": main}
    exec(snippet("mutate"), names)
    assert given == {(mode, lanes) for mode in ("immediate", "random", "lazy") for lanes in (False, True)}
    assert names["outcomes"] == []


def test_every_other_snippet_is_in_the_kernels():
    text = SHARED + TMA_STORE + RING
    for line in "".join(block for block in BLOCKS if "mutate" not in block).splitlines():
        assert line.strip().rstrip(")") in text or line.strip().startswith("..."), line
