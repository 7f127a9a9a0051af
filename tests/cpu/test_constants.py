"""Every constant of a machine's file counts, and says where it is from."""

from dataclasses import fields, replace
from itertools import product

import pytest

from overlap_gemm.config.scale_blocks import PROMOTED
from overlap_gemm.epilogues import add_residual_squared, swiglu, to_e4m3_blocks
from overlap_gemm.spec import OPS
from overlap_gemm.spec.promises import Promises
from overlap_gemm.tuning.epilogue_time import epilogue_time
from overlap_gemm.tuning.machine import SHIPPED, Machine, load
from overlap_gemm.tuning.prediction import predict_on
from overlap_gemm.tuning.time_model import Facts

TUNED = {
    "mma_rate", "memory_rate", "link_rate", "bulk_rate", "copy_rate", "launch", "epilogue", "arrival", "step",
}  # fmt: skip
"""What `tune` measures; the others are told by their provenance."""

LIMITS = {
    "small_tile": 0,
    "copy_bytes": 0,
    "copies_world": 8,
    "few_rows": 0,
    "ar_rows": 0,
    "ar_gain": 0.0,
}
"""Where a choice changes, and what takes the choice away."""

NUMBERS = [field.name for field in fields(Machine) if field.type == "float" and field.name not in LIMITS]

CALLS = [
    Facts(op, m, n, k, dtype, world)
    for op, dtype, world, (m, n, k) in product(
        OPS,
        ("bf16", "e4m3"),
        (2, 4),
        [(1, 4096, 4096), (16, 8192, 28672), (512, 4096, 1024), (2048, 4096, 2048), (8192, 8192, 8192)],
    )
] + [Facts(op, 8192, 8192, 8192, "e4m3", 2, blocks=PROMOTED[0]) for op in OPS]


PROMISED = [
    call for call in CALLS if call.dtype == "bf16" and call.op in ("gemm_reduce_scatter", "gemm_all_reduce")
]


def predictions(machine: Machine) -> list[tuple[str, float]]:
    calls = [(call, Promises()) for call in CALLS] + [
        (call, Promises(invariant="ranks")) for call in PROMISED
    ]
    added = [
        (one.name, epilogue_time(one, [2] * len(one.inputs), call, machine, "sm_90a", machine.sms).kernel)
        for one in (add_residual_squared, swiglu, to_e4m3_blocks)
        for call in CALLS
    ]
    return added + [
        way
        for call, promises in calls
        for captured in (False, True)
        for way in sorted(
            predict_on(call, machine, machine.archs[0], machine.sms, captured, promises).seconds.items()
        )
    ]


@pytest.fixture(scope="module")
def expected():
    return predictions(load("h200"))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_constant_that_is_neutralised_changes_what_is_predicted(name, expected):
    """Seconds to none, rates and shares to what does not slow down: some call takes another time."""
    machine = load("h200")
    neutral = 1.0 if name in ("stream", "swap_ab_stream", "small_tile_rate") else 0.0
    if name.endswith("_rate") and name != "small_tile_rate":
        neutral = 2 * getattr(machine, name)
    assert getattr(machine, name) != neutral
    found = predictions(replace(machine, **{name: neutral}))
    less = [(was, now) for was, now in zip(expected, found, strict=True) if was != now]
    assert less, f"{name} = {getattr(machine, name)} might as well be {neutral}"
    assert any(now[1] < was[1] for was, now in less)


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_that_is_taken_away_changes_what_is_predicted(name, expected):
    assert predictions(replace(load("h200"), **{name: LIMITS[name]})) != expected


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_a_file_says_where_what_is_not_tuned_is_from(file):
    machine = load(file.stem)
    assert set(machine.provenance) == {*NUMBERS, *LIMITS} - TUNED
    assert all(machine.provenance.values())
    assert Machine.from_json(machine.to_json()).provenance == machine.provenance


def test_a_file_without_a_constant_is_refused_by_its_name(tmp_path):
    text = (SHIPPED / "h200.json").read_text().replace('"flag_step": 5.5e-6,', "", 1)
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ValueError, match="not a machine's constants.*flag_step"):
        load(str(tmp_path / "mine.json"))
