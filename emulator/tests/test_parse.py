import pytest

from cute_emulator.ptx.ir import Imm, Mem, Pair, Reg, Sym, Vec
from cute_emulator.ptx.parse import PtxSyntaxError, entry_params, parse

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def one(body: str):
    module = parse(HEAD + ".visible .entry k(.param .u32 k_param_0)\n{\n" + body + "\n}\n")
    return module.functions["k"]


def test_operands_of_every_shape_are_read():
    f = one(
        ".reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<3>;\n"
        "@!%p1 ld.global.v2.b32 {%r1, _}, [%rd1+-8];\n"
        "elect.sync %r3|%p2, -1;\n"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%r1+16], [%rd1, {%r2, %r3}], [%r4];\n"
        "mov.f32 %r2, 0f3F800000;\n"
        "ret;"
    )
    load, elect, tma, mov, _ = f.instructions
    assert load.guard is not None and load.guard.name == "%p1" and load.guard_negated
    assert isinstance(load.operands[0], Vec) and load.operands[0].items[1] is None
    assert load.operands[1] == Mem(Reg("%rd1", load.operands[1].base.slot, "b64"), -8)
    assert isinstance(elect.operands[0], Pair)
    assert tma.opcode.endswith("mbarrier::complete_tx::bytes") and len(tma.operands[1].extra[0].items) == 2
    assert mov.operands[1] == Imm(0x3F800000, "f32")
    assert load.line == 7


def test_labels_and_registers_repeated_in_inline_assembly_scopes_are_kept_apart():
    block = "{ .reg .pred P; L: setp.eq.b32 P, %r1, 0; @P bra D; bra L; D: }\n"
    f = one(".reg .b32 %r<3>;\n" + block + block + "ret;")
    first, second = f.instructions[0].operands[0], f.instructions[3].operands[0]
    assert first.name == second.name and first.slot != second.slot
    targets = [f.labels[i.operands[0].name] for i in f.instructions if i.opcode == "bra"]
    assert targets == [3, 0, 6, 3]


def test_module_variables_and_prototypes():
    module = parse(
        HEAD + ".global .align 1 .b8 msg[3] = {104, 105, 0};\n.const .align 8 .b8 state[848];\n"
        ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n"
        ".visible .entry k() { .reg .b64 %rd<3>; mov.b64 %rd1, msg;\n"
        "{ .param .b64 p0;\n"
        "proto : .callprototype (.param .b32 _) _ (.param .b64 _);\n"
        "call (r0), %rd1, (p0), proto; } ret; }\n"
    )
    assert module.variables["msg"].init == b"hi\0" and module.variables["state"].nbytes == 848
    assert "vprintf" in module.declared
    assert module.functions["k"].instructions[0].operands[1] == Sym("msg")


def test_entry_params_gives_bytes_and_alignment():
    ptx = (
        HEAD
        + ".visible .entry k(\n.param .align 64 .b8 k_param_0[128],\n.param .u32 k_param_1\n)\n{ ret; }\n"
    )
    assert entry_params(ptx, "k") == [(128, 64), (4, 4)]
    with pytest.raises(KeyError):
        entry_params(ptx, "other")


def test_a_syntax_error_names_the_line():
    with pytest.raises(PtxSyntaxError, match="line 7"):
        one("\nmov.b32 $$, ^;")


def test_vectors_of_one_are_their_element_outside_of_matrix_instructions():
    f = one(
        ".reg .b32 %r<9>; .reg .b64 %d<2>;\n"
        "ld.global.b32 { %r1 }, [ %d1 + 0 ];\n"
        "mov.b32 {%r2}, {%r1};\n"
        "st.global.b32 [ %d1 + 0 ], {_};\n"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r1];\n"
        "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%d1, {%r3}], [%r1];"
    )
    load, move, store, matrix, copy = f.instructions
    r1 = move.operands[1]
    assert load.operands[0] == r1 and isinstance(r1, Reg) and isinstance(move.operands[0], Reg)
    assert store.operands[1] is None
    assert isinstance(matrix.operands[0], Vec) and isinstance(copy.operands[0].extra[0], Vec)
