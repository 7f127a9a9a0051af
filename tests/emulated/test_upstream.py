"""examples/upstream in the emulator: right as it stands, and each wait, fence and address is needed."""

import contextlib
import importlib.util
import re
import sys
from pathlib import Path

import cutlass
import pytest

from cute_emulator import Emulator, Schedule
from cute_emulator.host.script import one_device
from cute_emulator.testing import emulator_command

FOLDER = Path(__file__).parents[2] / "examples" / "upstream"
PAGE = Path(__file__).parents[2] / "docs" / "example-kernel.md"
NAME = "distributed_gemm_reduce_scatter_hopper"
SCRIPT = FOLDER / f"{NAME}.py"
READ_WAIT = FOLDER / "read_wait_race.py"


def load(name, monkeypatch, folder=FOLDER):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", [SCRIPT, READ_WAIT], ids=lambda file: file.stem)
def test_a_file_stands_by_itself(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 900
    imported = re.findall(r"^ *(?:import|from) (\w+)", text, re.M)
    assert set(imported) <= {"argparse", "cuda", "cutlass", "itertools", "os", "torch"}
    assert text.startswith("# Copyright") and "SPDX-License-Identifier: BSD-3-Clause" in text


QUICK = "1rank-tile64x64", "2ranks-cluster1x2-fp16-bf16", "2ranks-ragged", "4ranks-ragged-cluster2x1"


def cases():
    """The cases of the example's own tests; asynchronous modes take turns."""
    with pytest.MonkeyPatch.context() as patch:
        small = load(f"test_{NAME}", patch).SMALL
    modes = ("immediate", "random", "lazy")
    return [
        pytest.param(*p.values, modes[i % 3], id=p.id, marks=[] if p.id in QUICK else pytest.mark.slow)
        for i, p in enumerate(small)
    ]


@pytest.mark.parametrize(("ranks", "mnkl", "tile", "cluster", "ab_dtype", "c_dtype", "mode"), cases())
def test_virtual_ranks(ranks, mnkl, tile, cluster, ab_dtype, c_dtype, mode, monkeypatch):
    example = load(NAME, monkeypatch)
    schedule = Schedule(order="random", lanes=True) if mode == "random" else None
    with (
        Emulator("sm_90a", mode=mode, seed=1, num_sms=8, schedule=schedule) as emulator,
        one_device(emulator),
    ):
        example.run(mnkl, ab_dtype, c_dtype, tile, cluster, ranks, iterations=0)


SHAPE = ["--mnkl", "512,128,264,1", "--tile_shape_mn", "64,128", "--cluster_shape_mn", "1,1"]
"""On 3 SMs each CTA computes two tiles or more, in which it uses its stages more than once."""


def run(*words, script=SCRIPT, ranks=2, mode="immediate", schedule="round_robin"):
    """The example as torchrun starts it."""
    options = ("--arch", "sm_90a", "--ranks", ranks, "--num-sms", 3, "--mode", mode, "--schedule", schedule)
    return emulator_command(*options, script, *(words or (*SHAPE, "--iterations", 0)))


@pytest.mark.parametrize(
    ("ranks", "mode", "schedule"),
    [
        pytest.param(1, "lazy", "round_robin", marks=pytest.mark.slow),
        pytest.param(2, "lazy", "starve:1", marks=pytest.mark.slow),
        pytest.param(4, "random", "shuffled", marks=pytest.mark.slow),
    ],
)
def test_torchrun(ranks, mode, schedule):
    done = run(ranks=ranks, mode=mode, schedule=schedule)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == ranks


def test_times_are_printed():
    shape = ("--mnkl", "128,64,64,1", "--tile_shape_mn", "64,64", "--cluster_shape_mn", "1,1")
    done = run(*shape, "--warmup_iterations", 1, "--iterations", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "TFLOP/s" in line]
    names = ("product alone", "reduce-scatter alone", "one after the other", "fused")
    assert [line.startswith(name) for line, name in zip(lines, names, strict=True)] == [True] * 4


NOTHING = "fence_acq_rel_gpu()"  # in the place of a statement
RACE, LANE_RACE = r"\[race\]", r"\[(lane-)?race\]"
BROKEN = {
    "no proxy fence": ('fence_proxy("async.shared", space="cta")', NOTHING, r"\[proxy-fence\]"),
    "a flag at .gpu scope": ('sem="release", scope="sys"', 'sem="release", scope="gpu"', RACE),
}
BROKEN_TOO = {
    "no wait before the flag": ("cp_async_bulk_wait_group(0, read=False)", NOTHING, RACE),
    "a flag to the wrong rank": ("flag = flags[owner]", "flag = flags[rank]", "deadlock"),
    "one buffer for all launches": ("((epoch % 2) * world + source)", "source", RACE),
    "a read wait before the flag": ("(0, read=False)", "(0, read=True)", rf"{RACE} no full wait_group"),
    "a tile to the wrong rank": ("slot = slots[owner]", "slot = slots[rank]", RACE),
    "a tile to the wrong slot": ("_slot_offset(epoch, rank,", "_slot_offset(epoch, owner,", RACE),
    "a flag without a release": ('sem="release", scope="sys"', 'sem="relaxed", scope="sys"', RACE),
    "no wait for flags": ("while seen < epoch", "while seen < 0", RACE),
    "no wait before a release": ("cp_async_bulk_wait_group(1, read=True)", NOTHING, r"\[shared-race\]"),
    "no warp barrier before the commit": ("sync_warp()\n    ", f"{NOTHING}\n    ", LANE_RACE),
    "no warp barrier after the flags": ("sync_warp()\n\n", f"{NOTHING}\n\n", LANE_RACE),
}


@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(change, id=name) for name, change in BROKEN.items()),
        *(pytest.param(change, id=name, marks=pytest.mark.slow) for name, change in BROKEN_TOO.items()),
    ],
)
def test_what_is_broken_is_noticed(change, tmp_path):
    before, after, message = change
    text = SCRIPT.read_text()
    assert text.count(before) == 1
    script = tmp_path / "broken.py"
    script.write_text(text.replace(before, after))
    done = run(script=script, mode="lazy")
    assert done.returncode == 1
    assert re.search(message, done.stdout + done.stderr), done.stdout + done.stderr


@pytest.mark.parametrize("order", ["source", pytest.param("world - 1 - source", marks=pytest.mark.slow)])
def test_sums_are_in_rank_order(order, monkeypatch, tmp_path):
    """Partial sums p, -p, q, r, where p absorbs q and r: (p - p) + q + r is not r + q + (-p) + p."""
    text = SCRIPT.read_text()
    assert text.count("_slot_offset(epoch, source,") == 1
    (tmp_path / SCRIPT.name).write_text(
        text.replace("_slot_offset(epoch, source,", f"_slot_offset(epoch, {order},")
    )
    example = load(NAME, monkeypatch, tmp_path)
    operands = example.operands

    def opposite(mnk, dtype, rank, launch):
        a, b = operands(mnk, dtype, max(rank, 1), launch)
        return (a * 2**30 * (-1) ** rank, b) if rank < 2 else (a, b)

    monkeypatch.setattr(example, "operands", opposite)
    noticed = pytest.raises(AssertionError, match="not equal")
    expected = contextlib.nullcontext() if order == "source" else noticed
    with Emulator("sm_90a", num_sms=4) as emulator, one_device(emulator), expected:
        bf16 = cutlass.BFloat16
        example.run((256, 64, 64, 1), bf16, bf16, (64, 64), (1, 1), 4, iterations=0)


@pytest.mark.parametrize("mode", [pytest.param("immediate", marks=pytest.mark.slow), "lazy"])
def test_read_wait_is_a_race(mode):
    assert emulator_command("--arch", "sm_90a", "--mode", mode, READ_WAIT, "--wait", "full").returncode == 0
    done = emulator_command("--arch", "sm_90a", "--mode", mode, READ_WAIT, "--wait", "read")
    assert done.returncode == 1
    assert "[race] no full wait_group for the bulk store" in done.stderr
    assert "read_wait_race.py" in done.stderr and "cute.copy(store, stage, mailbox)" in done.stderr


BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_the_page_quotes_the_script():
    text = SCRIPT.read_text()
    quoted = [block for block in BLOCKS if re.match(r"cute|ring", block)]
    assert len(quoted) == 5
    for line in "".join(quoted).splitlines():
        assert line.strip() in text, line
    for role in re.findall(r"^\| [\w, ]+ \| `(\w+)`", PAGE.read_text(), re.M):
        assert f"    def {role}(" in text, role


def test_the_pages_commands_run():
    (block,) = (block for block in BLOCKS if "small=" in block)
    small = re.search('small="(.*)"', block)[1].split()
    commands = re.findall(r"^python -m cute_emulator (.*)$", block, re.M)
    assert len(commands) == 2
    for command in commands:
        words = [w for word in command.split() for w in (small if word == "$small" else [word])]
        done = emulator_command(*(SCRIPT if word == SCRIPT.name else word for word in words))
        assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr
