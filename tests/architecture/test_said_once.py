"""An op, or a transport, is what its object says: who else names one, or asks which it is, is counted."""

import ast
import re
from pathlib import Path

from overlap_gemm.spec import OPS, PATTERNS
from overlap_gemm.spec.transport import TRANSPORTS

SOURCE = Path(__file__).parents[2] / "src" / "overlap_gemm"
ROOM = "spec"
DEVICE_CODE = ("exchange/", "gather/", "kernel/", "mainloop/")

OP_NAMES = 17
"""Names of ops outside their room: what the package and its modules export, and the demo's model."""

PATTERN_NAMES = 9
"""The same of patterns, two of which are registered, and of collectives that are called so."""

TRANSPORT_NAMES = 1
"""Names of transports that decide something: `OVERLAP_GEMM_SYMMETRIC=nvshmem`, which is no transport."""


def trees():
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] != ROOM:
            yield file.relative_to(SOURCE).as_posix(), ast.parse(file.read_text())


def names_in(tree, names):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in names]


def identities(tree):
    """Names of ops and patterns that decide something."""
    return compared(tree, {*OPS, *PATTERNS})


def compared(tree, names):
    """Names that are compared with, looked for, or keys."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from names_in(node, names)
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if isinstance(key, ast.Constant) and key.value in names)


def counted(find):
    return {name: len(found) for name, tree in trees() if (found := list(find(tree)))}


def test_ops_are_named_in_their_room_alone():
    found = counted(lambda tree: names_in(tree, set(OPS)))
    assert sum(found.values()) <= OP_NAMES, found
    found = counted(lambda tree: names_in(tree, set(PATTERNS)))
    assert sum(found.values()) <= PATTERN_NAMES, found


def test_nobody_else_tells_one_op_from_another_by_its_name():
    collectives = {"cli/tune.py": 1}  # torch.distributed's reduce-scatter, by the name of its curve
    assert counted(identities) == collectives


def asked_of_transports(tree):
    """Attributes of a transport that are no method which is called: what it is, not what it does."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called:
            owner = node.value
            name = getattr(owner, "id", getattr(owner, "attr", None))
            if name == "transport":
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            yield from (arg.id for arg in node.args if getattr(arg, "id", None) == "transport")


def test_roles_ask_transports_to_do_things():
    assert {
        name: asked for name, asked in counted(asked_of_transports).items() if name.startswith(DEVICE_CODE)
    } == {}


def test_transports_are_told_apart_in_few_places():
    found = counted(lambda tree: compared(tree, set(TRANSPORTS)))
    assert (
        sum(count for name, count in found.items() if not name.startswith("transports/")) <= TRANSPORT_NAMES
    ), found


def test_frames_of_threads_are_read_in_one_place():
    """The interpreter may hang in it (`current_frames` says when)."""
    root = SOURCE.parents[1]
    files = [file for folder in ("src", "emulator/src") for file in (root / folder).rglob("*.py")]
    pattern = re.compile(r"\b_current_(frames|exceptions)\(")
    found = {file.name: len(calls) for file in files if (calls := pattern.findall(file.read_text()))}
    assert found == {"turns.py": 1}


def test_the_counters_see_what_they_count():
    seen = ast.parse(
        "transport.puts or not self.transport.words or transport.put(1) or isinstance(transport, LL)"
    )
    assert len(list(asked_of_transports(seen))) == 3
    tree = ast.parse('op == "gemm_all_reduce" or op in ("one_shot",)\ntable = {"gemm_all_gather": 1}')
    assert len(list(identities(tree))) == 3
    assert len(names_in(tree, set(OPS))) == 2


def test_inputs_are_copied_only_while_autograd_records():
    users = [file for file, tree in trees() if "copy_to_ranks" in ast.unparse(tree)]
    assert users == ["dispatch/shard_ops.py"], "for_each_rank decides whether to copy"
