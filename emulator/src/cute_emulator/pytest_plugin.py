"""pytest: tests of kernels on emulated GPUs, once per mode and schedule.

In `conftest.py`, ``pytest_plugins = ["cute_emulator.pytest_plugin"]``, or ``pytest -p`` the same.
Then

    @pytest.mark.emulated(arch="sm_100a", modes=("immediate", "lazy"), schedules=("round_robin", "shuffled"))
    def test_copy(emulator):
        ...  # tensors on "cuda", cute.compile and calls as on a GPU

runs four times. A fault, a deadlock or a finding of the checks fails the test; its name in brackets says how
it was run, and `pytest` with that name repeats it. Arguments of the mark, all optional:

- `arch`: `sm_90a`, `sm_100a`, `sm_103a` or `sm_120a`;
- `ranks`: with more than one, calls inside ``with emulator.rank(r):`` are queued and run by `emulator.run()`;
- `modes`: of `immediate`, `random`, `lazy`; all three by default;
- `schedules`: names as `--schedule` takes them; round robin and shuffled by default;
- `seeds`: how many, for what has random choices;
- `strict`: also the checks that kernels may break on purpose;
- further ones are `Emulator`'s.
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
    """Makes the mark known."""
    config.addinivalue_line(
        "markers", "emulated(arch, ranks, modes, schedules, seeds, strict): once per mode, on emulated GPUs"
    )


def settings_of(
    modes: str | tuple[str, ...] = MODES,
    schedules: str | tuple[str, ...] = ("round_robin", "shuffled"),
    seeds: int = 1,
    **_: Any,
) -> list[Setting]:
    """What a mark asks for; a seed that changes nothing is not tried twice."""
    found = []
    for mode in (modes,) if isinstance(modes, str) else modes:
        for schedule in (schedules,) if isinstance(schedules, str) else schedules:
            random = mode != "immediate" or schedule == "shuffled"
            found += [Setting.of(mode, seed, schedule) for seed in range(seeds if random else 1)]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per setting."""
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
    """An open emulator; with one rank, torch's "cuda" device is its."""
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
