"""Producers use no register that they gave away: in the machine code of kernels, and of a few lines."""

import dataclasses

import pytest

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.mainloop.sm90 import PRODUCER_REGISTERS
from overlap_gemm_tools import sass
from overlap_gemm_tools.sass import disassemble, instructions, reached, sass_findings

CONFIG = GemmConfig(arch="sm_90a", mma="pingpong", tile=(128, 128), cluster=(2, 1))


def moved(code):
    """Where registers are given away, and taken."""
    places = {one.opcode.split(".")[1]: i for i, one in enumerate(code) if one.root == "USETMAXREG"}
    return places["DEALLOC"], places["TRY_ALLOC"]


@pytest.mark.parametrize("pattern", ["reduce_scatter", "two_shot"])
def test_what_both_kinds_of_warps_run_uses_the_fewer_registers(pattern, compiled):
    """The receive role is one copy: both reach it, and it is most of what either reaches."""
    code = disassemble(compiled(CONFIG, pattern).cubin)
    given, taken = moved(code)
    assert int(code[given].operands, 16) == PRODUCER_REGISTERS
    producers, consumers = (set(reached(code, index)) for index in (given, taken))
    assert len(producers & consumers) > 0.6 * len(consumers)
    assert not any(one.root == "HGMMA" for one in (code[i] for i in producers))
    assert any(one.root == "HGMMA" for one in (code[i] for i in consumers))
    assert max(max(code[i].registers, default=0) for i in consumers) >= PRODUCER_REGISTERS
    assert sass_findings(code) == []


@pytest.mark.parametrize("fewer", [64, 88])
def test_a_count_below_what_producers_use_is_found(fewer, compiled):
    """As ptxas left the code, but with fewer registers kept: it may use none of the others."""
    code = disassemble(compiled(CONFIG, "two_shot").cubin)
    given, _ = moved(code)
    code[given] = dataclasses.replace(code[given], operands=hex(fewer))
    (finding,) = sass_findings(code)
    assert finding.startswith(f"producers keep {fewer} registers; what they run uses R")


def program(*lines):
    """A text as nvdisasm writes it: ``L0``, ``L1`` are its lines."""
    text = ["        /*0000*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;"]
    for number, line in enumerate(lines):
        text += [f"L{number}:", f"        /*{16 * (number + 1):04x}*/    {line} ;"]
    return instructions("\n".join(text))


OVER = "IADD3 R24,R2,R3,RZ"


@pytest.mark.parametrize(
    "lines",
    [
        [OVER, "EXIT"],
        ["@P0 EXIT", OVER, "EXIT"],
        ["BRA `(L2)", "EXIT", OVER, "EXIT"],
        ["@P0 BRA `(L2)", "EXIT", OVER, "EXIT"],
        ["BRA UP0,`(L2)", OVER, "EXIT"],
        ["BSSY B0,`(L3)", "EXIT", "EXIT", OVER, "EXIT"],
        ["BRA.DIV UR4,`(L2)", "EXIT", "WARPSYNC.COLLECTIVE R2,`(L4)", "EXIT", OVER, "EXIT"],
        ["CALL.REL.NOINC `(L3)", OVER, "EXIT", "RET.REL.NODEC R2 `(L0)"],
        ["CALL.REL.NOINC `(L2)", "EXIT", OVER, "RET.REL.NODEC R2 `(L0)"],
        ["LDG.E.128 R4,desc[UR32][R24.64+0x10]", "EXIT"],
        ["HGMMA.64x128x16.F32.BF16 R8,gdesc[UR4],R8", "EXIT"],
    ],
)
def test_every_way_to_a_register_is_followed(lines):
    assert len(sass_findings(program(*lines))) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ["IADD3 R23,R2,UR40,-R0", "EXIT", OVER],
        ["BRA `(L2)", OVER, "EXIT"],
        ["BPT.TRAP 0x1", OVER],
        ["BRA `(L3)", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0,0xc8", OVER, "EXIT"],
        ["@P0 BRA `(L2)", "EXIT", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0,0xc8", OVER, "EXIT"],
    ],
)
def test_what_producers_do_not_run_may_use_all(lines):
    assert sass_findings(program(*lines)) == []


@pytest.mark.parametrize("line", ["BRX R4 -0x10", "CALL.ABS.NOINC R4", "JMX R4"])
def test_a_way_that_is_not_known_is_an_error(line):
    with pytest.raises(ValueError, match="an operand must name it"):
        sass_findings(program(line, "EXIT"))


def test_a_text_that_is_not_understood_is_an_error():
    lost = "  /*0000*/  { NOP ;\n  /*0010*/  EXIT ;"
    with pytest.raises(RuntimeError, match="0 instructions are read before"):
        instructions(lost)
    assert sass_findings(instructions("  /*0000*/  EXIT ;")) == ["no registers are released"]


def test_without_a_disassembler_nothing_is_said_to_be_clean(compiled, monkeypatch):
    monkeypatch.setattr(sass, "find_nvidia_binary_utility", lambda name: None)
    with pytest.raises(RuntimeError, match="nvidia-cuda-nvdisasm"):
        compiled(CONFIG, "two_shot").findings(exchanges=True)
    with pytest.raises(RuntimeError, match="nvdisasm failed"):
        monkeypatch.undo()
        disassemble(b"no module")
