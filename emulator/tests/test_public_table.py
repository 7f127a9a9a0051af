"""The commands that run public kernels; the counts that they write into docs/public.md."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from cute_emulator.testing import emulator_command

FOLDER = Path(__file__).parents[1] / "public"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public = load("run")
cutlass_examples = load("cutlass_examples")  # which imports the other
wheels = load("wheels")  # so does this

KERNEL = """
import sys
import cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(x: cute.Tensor):
    cta, _, _ = cute.arch.block_idx()
    x[cta // STEP] = cta

@cute.jit
def go(x: cute.Tensor):
    kernel(x).launch(grid=(2, 1, 1), block=(32, 1, 1))

x = torch.zeros(2, dtype=torch.int32, device="cuda")
go(from_dlpack(x))
assert sys.argv[1] == "right", x.tolist()
"""


def test_verdicts(tmp_path):
    script = tmp_path / "kernel.py"
    found = {}
    for name, step, argument in (("pass", 1, "right"), ("reported", 2, "right"), ("stops", 1, "wrong")):
        script.write_text(KERNEL.replace("STEP", str(step)))
        done = emulator_command("--collect", script, argument)
        found[name] = public.classify(done.returncode, done.stderr)
    assert found == {
        "pass": ("pass", ""),
        "reported": ("reported", "race at kernel.py:9"),
        "stops": ("stops", "AssertionError: [0, 1]"),
    }
    script.write_text(KERNEL.replace("STEP", "2"))  # found, and wrong
    assert public.verdict(script, "wrong", arch="sm_90a", mode="immediate") == (
        "stops", "race at kernel.py:9"
    )  # fmt: skip
    slow = public.verdict(script, "right", arch="sm_90a", mode="immediate", seconds=0.01)
    assert slow == ("stops", "after 0.01 s")


def test_the_page_shows_what_was_kept():
    rows = json.loads(public.RESULTS.read_text())
    assert rows and {(r["package"], r["case"]) for r in rows} <= {(c[0], c[3]) for c in public.CASES}
    assert {r["verdict"] for r in rows} <= {"pass", "reported", "stops"}
    assert public.counts(rows) in public.PAGE.read_text()
    lines = public.table(rows).splitlines()[2:]
    assert len(lines) == len(rows)
    assert all(f"| {row['verdict']}" in line for row, line in zip(rows, lines, strict=True))


def test_kernels_of_other_compilers_ran():
    rows = json.loads(public.RESULTS.read_text())
    numbers = {}
    for row in rows:
        if row["verdict"] != "stops":
            name = row["compiler"].rpartition(" ")[0]
            numbers.setdefault(name, set()).add((row["package"], row["case"]))
    assert len(numbers["Triton"]) >= 20 and len(numbers["nvcc"]) >= 10 and numbers["TileLang"]
    sources = {row["package"] for row in rows if row["compiler"].startswith("Triton ")}
    assert sources == {"triton", "liger-kernel", "fla-core", "vllm"}


def test_every_file_of_the_wheels_is_in_one_group():
    kept = json.loads(wheels.RESULTS.read_text())
    for package in kept["packages"].values():
        rows = package["files"]
        assert len({row["file"] for row in rows}) == len(rows) > 0
        assert {row["group"] for row in rows} <= {*wheels.GROUPS}
        for row in rows:
            assert bool(row["why"]) == (row["group"] in ("runs", "not imported")), row
            assert row["group"] != "runs" or row["why"] == kept["ran"][row["file"]], row
    cases = {case[3] for case in public.CASES}
    assert {case.split(" ")[0] for case in kept["ran"].values()} <= cases
    assert wheels.counts(kept) in public.PAGE.read_text()


def test_files_are_grouped_by_their_kernels_and_imports(tmp_path, monkeypatch):
    texts = {
        "ran": "@cute.kernel\ndef k(): ...",
        "complete": "class cute:\n    kernel = staticmethod(lambda f: f)\n@cute.kernel\ndef k(): ...",
        "names": "# cute.kernel",
        "lacks": "import nothing_of_this_name\n@cute.kernel\ndef k(): ...",
        "ends": "import os\nos._exit(1)\n@cute.kernel\ndef k(): ...",
        "after": "from .complete import k, cute\n@cute.kernel\ndef other(): ...",
    }
    (tmp_path / "some_wheel" / "inner").mkdir(parents=True)
    (tmp_path / "some_wheel" / "__init__.py").write_text("raise OSError('no driver')")
    for name, text in texts.items():
        (tmp_path / "some_wheel" / "inner" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    files = {f"some_wheel/inner/{name}.py": tmp_path / f"some_wheel/inner/{name}.py" for name in texts}
    rows = wheels.grouped(files, {"some_wheel/inner/ran.py": "case sm_90a: pass"})
    assert [(row["group"], row["why"]) for row in rows] == [
        ("runs", "case sm_90a: pass"),
        ("no case", ""),
        ("no kernel", ""),
        ("not imported", "needs nothing_of_this_name"),
        ("not imported", "crash, or too slow"),
        ("no case", ""),
    ]


def test_the_page_counts_the_tests_of_quack_that_were_kept():
    kept = json.loads((FOLDER / "quack-tests.json").read_text())
    ran = [r["verdict"] for r in kept["outcomes"] if r["verdict"] != "skip"]
    assert len({r["test"].partition("[")[0] for r in kept["outcomes"]}) == len(kept["outcomes"])
    text = f"of {len(ran)} that were not skipped {ran.count('pass')} pass, none with a finding"
    assert "reported" not in ran and text in public.PAGE.read_text()


def test_every_script_of_cutlass_that_did_not_pass_was_judged_and_is_printed():
    kept = json.loads(cutlass_examples.RESULTS.read_text())
    assert len({row["script"] for row in kept["scripts"]}) == len(kept["scripts"]) == 188
    for row in kept["scripts"]:
        assert (row["verdict"] == "pass") != ("judged" in row), row
        assert row["verdict"] != "reported" or row["judged"].startswith("right: "), row
    assert cutlass_examples.counts(kept) in public.PAGE.read_text()
    printed = cutlass_examples.table(kept).splitlines()[2:]
    left = [row for row in kept["scripts"] if row["verdict"] != "pass"]
    assert len(printed) == len(left)
    for row, line in zip(left, printed, strict=True):
        assert row["script"] in line and row["judged"] in line


@pytest.mark.parametrize(
    ("argument", "shows", "verdict"),
    [("right", None, "pass"), ("wrong", None, "stops"), ("wrong", "AssertionError: [0, 1]", "pass")],
)
def test_a_script_runs_in_a_forked_process(argument, shows, verdict, tmp_path):
    """With the arguments of its row; one that shows an error passes with that error."""
    (tmp_path / "kernel.py").write_text(KERNEL.replace("STEP", "1"))
    row = {"script": "kernel.py", "arguments": argument, "arch": "sm_90a", "ranks": 1}
    row |= {"shows": shows} if shows else {}
    assert cutlass_examples.run(row, tmp_path, "immediate", 60)["verdict"] == verdict
