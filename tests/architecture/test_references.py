"""Kernels form addresses of other ranks' memory in one module, from the layout that the host uses, too."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "overlap_gemm"
KERNELS = ("device", "exchange", "gather", "kernel", "mainloop", "pipelines", "transports")
REFERENCES, LAYOUT = "device/remote.py", "exchange/geometry.py"
TABLES = {"peers", "peer_table"}
LOCAL = {"self", "lane", "scales"}
"""Records with an address of this rank's memory: the output, a lane's partial sums, scales of the operand."""


def named(node):
    """Returns the name of a variable or attribute, or None."""
    return getattr(node, "id", getattr(node, "attr", None))


def addresses_formed(tree):
    """Subscripts of the table of ranks, and arithmetic on what a reference returns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and named(node.value) in TABLES:
            yield node
        elif isinstance(node, ast.BinOp):
            for operand in (node.left, node.right):
                if isinstance(operand, ast.Attribute) and (
                    operand.attr in ("base", "symmetric_address", "staging_address")
                    or (operand.attr == "address" and named(operand.value) not in LOCAL)
                ):
                    yield node


def places_of_flags(tree):
    """Products with the bytes of a flag: its place, which `Region` computes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield from (node for side in (node.left, node.right) if named(side) == "FLAG_BYTES")


def files(*folders):
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not folders or name.startswith(folders):
            yield name, ast.parse(file.read_text())


def lines_with(find, pairs, home):
    lines = {name: [node.lineno for node in find(tree)] for name, tree in pairs}
    assert lines.pop(home), "the module that does it alone"
    return {name: numbers for name, numbers in lines.items() if numbers}


def test_addresses_of_other_ranks_are_formed_by_references_alone():
    assert lines_with(addresses_formed, files(*KERNELS), REFERENCES) == {}


def test_places_of_flags_are_computed_by_the_layout_alone():
    assert lines_with(places_of_flags, files(), LAYOUT) == {}


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (addresses_formed, "exchange.peers[peer]"),
        (addresses_formed, "call.base + 8"),
        (addresses_formed, "call.memory.remote(peer).at[slot].address + offset"),
        (addresses_formed, "offset + target.address"),
        (addresses_formed, "slot.staging_address - 16"),
        (places_of_flags, "flags + FLAG_BYTES * tile"),
    ],
)
def test_a_sum_of_integers_is_noticed(find, text):
    assert list(find(ast.parse(text)))
