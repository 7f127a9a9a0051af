"""Any program of calls: whatever one rank does otherwise, results are right or an error says what differs.

Drawn are the calls, ranks, groups that share them, streams, when asynchronous operations complete, which
calls are replays of graphs, on which ranks, how old the workspaces are and which flags have been left alone
for how long, and what one rank does otherwise (`FAULTS`). Counted are wrong results, errors without a name,
false alarms, and faults that nobody noticed.
"""

import random
from collections import Counter

import pytest
import torch

from cute_emulator import Schedule
from cute_emulator.host.replace import environment
from overlap_gemm.backends.fused import launch_plan as plan
from overlap_gemm.testing.cases import Case
from tests.support.emulated.programs import FAILS, NAMED, Call, Programs, Step
from tests.support.emulated.sequences import ARCHS

WITHIN = {
    "scatter": ("gemm_reduce_scatter", ()),
    "one-shot": ("gemm_all_reduce", (("algorithm", "one_shot"),)),
    "two-shot": ("gemm_all_reduce", (("algorithm", "two_shot"),)),
    "output gather": ("gemm_all_gather", ()),
    "gather by copies": ("all_gather_gemm", (("shard_transport", "copy_engine"),)),
    "gather by kernel": ("all_gather_gemm", (("shard_transport", "peer_bulk"),)),
}
WORDS = {
    "one-shot LL": ("gemm_all_reduce", (("algorithm", "one_shot"), ("tile_transport", "ll"))),
    "two-shot LL": ("gemm_all_reduce", (("algorithm", "two_shot"), ("tile_transport", "ll"))),
}
"""Waits for these take the emulator long, so they are in fewer programs."""
PUT = {
    "put scatter": ("gemm_reduce_scatter", (("tile_transport", "nvshmem"),)),
    "put two-shot": ("gemm_all_reduce", (("algorithm", "two_shot"), ("tile_transport", "nvshmem"))),
    "put output gather": ("gemm_all_gather", (("tile_transport", "nvshmem"),)),
    "put gather": ("all_gather_gemm", (("shard_transport", "nvshmem"),)),
}
"""Also where no rank reaches another by stores."""

FAULTS = (
    "none", "order", "skip", "none", "settings", "never", "memory", "none", "compile", "unordered", "dead",
    "workspace", "all skip",
)  # fmt: skip
AGES = (2**31 + 5, 2**31 - 4, 2**32 - 3, 2**33 + 2, 2**46)
OTHER_SETTINGS = (
    ("algorithm", "one_shot"), ("algorithm", "two_shot"), ("tile_transport", "ll"),
    ("tile_transport", "peer_bulk"), ("tile_transport", "nvshmem"), ("slot_dtype", "f32"),
    ("tile", (128, 128)), ("raster_group", 1), ("ring_stages", 3), ("mma", "swap_ab"),
    ("reserve_sms", 3), ("reserve_sms", 2),
)  # fmt: skip
"""What one rank alone is told; of the last, grids need not agree, but 3 leave none of 3 SMs."""

STEPS = 6
SEEDS = range(100, 152)
AT_ONCE = 4


class Drawn:
    """A program, drawn by a seed.

    Attributes:
        calls, programs, options: of `Programs`.
        fault: what one rank does otherwise.
        ends: how it may end: "clean", "named", or either.
        facts: what is among what was drawn.
    """

    def __init__(self, seed):
        self.seed, draw = seed, random.Random(seed)
        self.fault = FAULTS[seed % len(FAULTS)]
        self.ranks = ranks = draw.choice([2, 2, 3])
        self.network = self.fault != "settings" and draw.random() < 0.15
        ages = draw.random() < 0.4 and self.fault != "workspace"
        replays = self.fault == "unordered" or draw.random() < 0.4
        several = not self.network and draw.random() < 0.35
        groups = [(0, 1), (1, 0)] if ranks == 2 else [(0, 1), (2, 1), (2, 0), (1, 2, 0)]
        ways = PUT if self.network else WITHIN | (WORDS if draw.random() < 0.25 else {})
        if not (self.network or several) and draw.random() < 0.25:
            ways = ways | PUT
        self.calls = []
        for number in range(STEPS):
            some = draw.choice([(), *groups]) if several else ()
            self.calls.append(self._call(draw, ways, some, replays, 100 * seed + number))
        if replays and self.fault in ("none", "dead", "unordered"):  # the same graphs again and again
            for number in range(STEPS // 2, STEPS):
                again = self.calls[number - STEPS // 2]
                self.calls[number] = again._replace(case=again.case.with_seed(100 * seed + number))
        streams = draw.choice([1, 2]) + (self.fault == "unordered")
        kinds = list(dict.fromkeys(call.kind for call in self.calls))
        self.programs = []
        for rank in range(ranks):
            program = []
            for number, call in enumerate(self.calls):
                if rank in (call.ranks or range(ranks)):
                    how = "replay" if replays and draw.random() < 0.6 else "call"
                    stream = draw.randrange(streams)
                    if self.fault == "unordered":  # each graph's x is one, so its replays have one order
                        stream = 1 + kinds.index(call.kind) % 2 if how == "replay" else 0
                    program.append(Step(number, how, self._own(draw, call), stream))
            self.programs.append(program)
        self._harm(draw)
        self.facts = {
            self.fault, "network" * self.network, "ages" * ages, "replays" * replays, "groups" * several,
            f"{ranks} ranks", *(step.how for program in self.programs for step in program),
        } - {""}  # fmt: skip
        lagging = draw.randrange(ranks)
        left = draw.choice([lambda flag: False, lambda flag: flag % 2 == 1, lambda flag: flag >= ranks])
        self.options = {
            "mode": draw.choice(["immediate", "random", "lazy"]),
            "seed": seed,
            "schedule": Schedule(starved=lambda rank, cta, warp: rank == lagging, grids="random"),
            "num_sms": 3,
            "network": self.network,
            "age": (draw.choice(AGES), left) if ages else None,
            "ordered": self.fault != "unordered",
            "dead": self.odd if self.fault == "dead" else None,
        }

    @staticmethod
    def _call(draw, ways, some, replays, seed):
        op, settings = ways[draw.choice(list(ways))]
        ranks = len(some) or 3  # a multiple of every group's size, where x must not be padded
        m = draw.choice([1, 2, 17, 64, 130, 200])
        n = draw.choice([8, 64, 136]) * (
            6 if op in ("gemm_all_gather", "all_gather_gemm") and not some else ranks
        )
        if op in ("gemm_reduce_scatter", "gemm_all_reduce"):
            n = draw.choice([8, 64, 136])
        return Call(Case(op, m, n, 96 if replays else 64, torch.bfloat16, seed=seed), settings, some)

    @staticmethod
    def _own(draw, call):
        """What may differ between ranks: SMs left to others, and how shards travel."""
        own = (("reserve_sms", draw.choice([0, 1])),)
        if ("shard_transport", "copy_engine") in call.settings and draw.random() < 0.3:
            own += (("shard_transport", "peer_bulk"),)
        return own

    def _harm(self, draw):
        """Lets one rank do otherwise, and says how that may end."""
        self.odd, self.ends = draw.randrange(self.ranks), ("clean",)
        program = self.programs[self.odd]
        if self.fault in ("none", "dead", "unordered"):
            self.ends = {"dead": ("named",), "unordered": ("clean", "named")}.get(self.fault, self.ends)
            if self.fault == "dead" and not program:
                self.fault, self.ends = "none", ("clean",)
            return
        at = draw.randrange(max(len(program) - 1, 1))
        if not program or (self.fault == "order" and len(program) < 2):
            self.fault = "none"
            return
        call = self.calls[program[at].call]
        if self.fault == "order":
            other = self.calls[program[at + 1].call]
            program[at], program[at + 1] = program[at + 1], program[at]
            self.ends = ("named",) if call.ranks == other.ranks else ("clean", "named")
            self._unless_alike([call, other])
        elif self.fault == "never":
            self.ends = ("named",)
            program[at] = program[at]._replace(how="never")
            self._unless_alike(self.calls)
        elif self.fault == "settings":
            self.ends = ("clean", "named")
            own = dict(program[at].settings) | dict([draw.choice(OTHER_SETTINGS)])
            program[at] = Step(program[at].call, "odd", tuple(own.items()), program[at].stream)
        elif self.fault == "all skip":
            number = program[at].call
            for each in self.programs:
                for place, step in enumerate(each):
                    if step.call == number:
                        each[place] = step._replace(how="skip")
            self._no_replays_from(number)
        else:
            program[at] = program[at]._replace(how=self.fault)
            self._no_replays_from(program[at].call)
            self.ends = ("named",)

    def _unless_alike(self, calls):
        """Of calls that differ in their data alone nobody could tell."""
        if len({call.kind for call in calls}) < len(calls):
            self.ends = ()

    def _no_replays_from(self, number):
        """A graph carries how many calls had raised when it was captured, here none."""
        for program in self.programs:
            for place, step in enumerate(program):
                if step.call > number and step.how == "replay":
                    program[place] = step._replace(how="call")

    def run(self, arch):
        """Counts what came of it."""
        if not self.ends:
            return Counter()
        with environment("OVERLAP_GEMM_TIMEOUT", "0.02"):  # of the emulator's seconds, an instruction a ns
            found = Programs(arch, self.calls, self.programs, fields=ARCHS[arch], **self.options).run()
        ends, error = self.ends, found.error
        if self.fault in (*FAILS, "settings") and not found.raised and self.fault != "settings":
            ends = ("clean",)  # there was nothing to allocate
        told = Counter(calls=STEPS, finished=found.finished, wrong=len(found.wrong))
        told["nameless"] = error is not None and not isinstance(error, NAMED)
        told["false alarms"] = error is not None and "named" not in ends
        told["unnoticed"] = error is None and "clean" not in ends
        to_come = sum(step.how != "never" for program in self.programs for step in program)
        told["missing"] = error is None and found.finished != to_come - len(found.raised)
        told[type(error).__name__] = 1
        if any(told[what] for what in BAD):
            print(
                self.seed, self.fault, self.ends, self.facts, found, *self.calls, *self.programs, sep="\n  "
            )
        return told


BAD = ("wrong", "nameless", "false alarms", "unnoticed", "missing")


def sweep(arch, seeds):
    told = sum((Drawn(seed).run(arch) for seed in seeds), Counter())
    print(arch, dict(told))
    assert [told[what] for what in BAD] == [0] * len(BAD), dict(told)
    return told


def test_all_is_among_what_is_drawn():
    """By a program that is run: of 300 calls."""
    run = [drawn for drawn in map(Drawn, SEEDS) if drawn.ends]
    facts = Counter(fact for drawn in run for fact in drawn.facts)
    for fact in {*FAULTS, *FAILS, "network", "ages", "replays", "groups", "2 ranks", "3 ranks", "replay"}:
        assert facts[fact] >= 2, fact
    assert STEPS * len(run) >= 300
    ways = {(call.case.op, call.settings) for drawn in run for call in drawn.calls}
    assert ways == {*WITHIN.values(), *WORDS.values(), *PUT.values()}
    ages = {drawn.options["age"][0] for drawn in run if drawn.options["age"]}
    assert ages == {*AGES}
    few = [call for drawn in run for call in drawn.calls if "gather" in call.case.op and call.case.m == 1]
    assert few, "gathers to which some ranks have nothing to give"


@pytest.mark.parametrize(
    ("arch", "seeds"), [("sm_90a", (104, 112)), pytest.param("sm_100a", (110,), marks=pytest.mark.slow)]
)
def test_some_programs(arch, seeds):
    sweep(arch, seeds)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", SEEDS[::AT_ONCE])
@pytest.mark.parametrize("arch", ARCHS)
def test_300_calls(arch, first):
    assert sweep(arch, range(first, first + AT_ONCE))["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [110, 112])
def test_without_the_count_of_calls_that_raised_wrong_results_are_counted(seed, monkeypatch):
    """The control."""
    monkeypatch.setattr(plan, "after_skipped", lambda signature, skipped: 0)
    assert Drawn(seed).run("sm_90a")["wrong"]
