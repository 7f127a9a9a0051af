"""pytest plug-in that runs tests of kernels on emulated GPUs, once per mode and schedule.

Enable it by ``pytest_plugins = ["cute_emulator.pytest_plugin"]`` in `conftest.py`, or by ``pytest -p``.
Then

    @pytest.mark.emulated(arch="sm_100a", modes=("immediate", "lazy"), schedules=("round_robin", "shuffled"))
    def test_copy(emulator):
        ...  # tensors on "cuda", cute.compile and calls as on a GPU

runs four times. A fault, a deadlock or a finding of the checks fails the test. Its name in brackets contains
the setting, and `pytest` with that name reproduces it. Arguments of the mark, all optional:

- `arch`: `sm_90a`, `sm_100a` (default), `sm_103a` or `sm_120a`;
- `ranks`: with more than one, calls inside ``with emulator.rank(r):`` are queued and run by `emulator.run()`;
- `modes`: of `immediate`, `random`, `lazy`; all three by default;
- `schedules`: names as for `--schedule`; round robin and shuffled by default;
- `seeds`: number of seeds, 1 by default; `immediate` runs with one seed unless it is shuffled, because it
  makes no random choice;
- `strict`: whether to enable checks that correct kernels may violate, too; False by default;
- other arguments are passed to `Emulator`.

A marked test that does not take `emulator` is a `pytest.UsageError`, and so is an unmarked test that takes
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cute_emulator.host.emulator import Emulator
from cute_emulator.host.script import one_device
from cute_emulator.machine.asyncq import MODES
from cute_emulator.settings import Setting

MARK = "emulated"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line(
        "markers", "emulated(arch, ranks, modes, schedules, seeds, strict): once per mode, on emulated GPUs"
    )


def settings_of(
    modes: str | tuple[str, ...] = MODES,
    schedules: str | tuple[str, ...] = ("round_robin", "shuffled"),
    seeds: int = 1,
    **_: Any,
) -> list[Setting]:
    """Returns the settings of a mark; a seed without effect is not tried twice."""
    settings = []
    for mode in (modes,) if isinstance(modes, str) else modes:
        for schedule in (schedules,) if isinstance(schedules, str) else schedules:
            random = mode != "immediate" or schedule == "shuffled"
            settings += [Setting.of(mode, seed, schedule) for seed in range(seeds if random else 1)]
    return settings


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes a test with one case per setting."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    if "emulator" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} is marked `emulated` but takes no `emulator`")
    settings = settings_of(**mark.kwargs)
    names = [f"{s.mode}-{s.seed}-{s.schedule}" for s in settings]
    metafunc.parametrize("emulator", settings, ids=names, indirect=True)


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """Provides an open emulator; with one rank, torch's "cuda" device is emulated by it."""
    mark = request.node.get_closest_marker(MARK)
    if mark is None:
        raise pytest.UsageError(f"{request.node.nodeid} takes `emulator` but is not marked `emulated`")
    setting: Setting = request.param
    others = {
        name: value
        for name, value in mark.kwargs.items()
        if name not in ("arch", "ranks", "modes", "schedules", "seeds", "strict")
    }
    options = {**setting.options(mark.kwargs.get("strict", False)), **others}
    opened = Emulator(mark.kwargs.get("arch", "sm_100a"), mark.kwargs.get("ranks", 1), **options)
    with opened:
        if opened.ranks > 1:
            yield opened
        else:
            with one_device(opened):
                yield opened
