"""The examples run as they stand, in every mode; and they fail when their synchronisation is broken."""

from pathlib import Path

import pytest

from cute_emulator import Schedule, mutate
from tests.support.chosen import in_turn
from tests.support.scripts import load

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = ["epilogue_ring", "tma_store_pipeline"]

HARMLESS = {
    "fence.mbarrier_init*": "the CTA barrier after it orders the initialisation for one CTA's threads",
    "*.sys.global.b64#*: .*": "ordering and scope of flags: tests/compiled checks them in the text",
}
RING = HARMLESS | {
    "st.release.sys.global.b64#0: *": "writes the failure record, and no wait expires",
    "mbarrier.arrive.shared.b64#[23]: remove": "frees stages after the flush; nothing is produced after it",
}
TMA_STORE = HARMLESS | {"bar.warp.sync#0: *": "the peer reads the copied rows only after the launch"}


@pytest.mark.parametrize(
    ("mode", "seed", "name"),
    in_turn([("immediate", 0), ("random", 1), ("lazy", 0), ("random", 2)], EXAMPLES),
)
def test_example_runs(name, mode, seed):
    load(FOLDER / f"{name}.py").main(mode=mode, seed=seed)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_on_other_worlds_and_schedules(name):
    example = load(FOLDER / f"{name}.py")
    example.main(ranks=1, tiles=1, num_ctas=1)
    example.main(ranks=3, tiles=4, num_ctas=3, mode="lazy", schedule=Schedule(order="random", lanes=True))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "reasons"), [("epilogue_ring", RING), ("tma_store_pipeline", TMA_STORE)])
def test_every_broken_synchronisation_shows(name, reasons):
    example = load(FOLDER / f"{name}.py")
    outcomes = mutate.run(
        lambda options: example.main(**options), mutate.settings(seeds=1, ranks=2, warps=5), reasons=reasons
    )
    assert len(outcomes) > 10
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
