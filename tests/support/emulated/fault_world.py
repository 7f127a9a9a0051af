"""A world of emulated ranks in which a flag is raised wrongly, or not at all."""

import pytest
import torch

from cute_emulator import Emulator
from cute_emulator.machine.inject import StoreFault
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured

CASE = Case("gemm_reduce_scatter", 768, 64, 64, torch.bfloat16)


ARCHS = {
    "sm_100a": {"mma": "1cta", "tile": (128, 64)},
    "sm_90a": {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)},
}


class World:
    """Three virtual ranks whose faults are set by `harm` after their launches are queued, before they run."""

    def __init__(self, arch, harm, launches=1, case=CASE, **fields):
        self.arch, self.harm, self.launches, self.case = arch, harm, launches, case
        self.fields = {**ARCHS[arch], **fields}

    def run(self):
        """The judgements of all launches."""
        with (
            configured(**self.fields),
            Emulator(self.arch, 3, "immediate") as emulator,
            VirtualWorld(3, emulator=emulator) as world,
            pytest.MonkeyPatch.context() as patch,
        ):
            submit, run, self.flag_lines = emulator.machine.submit, emulator.run, set()

            def note_flags(launch):
                lines = launch.ptx.splitlines()
                raises = ("st.release.sys", "st.relaxed.sys")  # the latter after a fence
                self.flag_lines |= {n for n, line in enumerate(lines, 1) if any(r in line for r in raises)}
                submit(launch)

            def harm_and_run():
                self.harm(self, emulator.faults)
                return run()

            patch.setattr(emulator.machine, "submit", note_flags)
            patch.setattr(emulator, "run", harm_and_run)
            launched = run_launches(self.case, world, self.launches)
            return [judge(self.case, given, outs, torch.bfloat16) for given, outs in launched]


def flag_fault(action, source, target, **options):
    def harm(world, faults):
        assert world.flag_lines
        for line in world.flag_lines:
            faults.add(StoreFault(action, source, target, line, **options))

    return harm
