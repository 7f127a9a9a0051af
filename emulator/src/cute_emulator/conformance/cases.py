"""All pairs."""

from __future__ import annotations

from cute_emulator.conformance import flags, lanes, launches, proxies, tensor_cores
from cute_emulator.conformance.kernel import Case

CASES: tuple[Case, ...] = (*flags.CASES, *proxies.CASES, *lanes.CASES, *tensor_cores.CASES, *launches.CASES)
