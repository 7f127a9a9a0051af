"""`python -m cute_emulator mutate`, and the trace options of the command beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cute_emulator import mutate, mutate_command, settings

SCRIPT = str(Path(__file__).with_name("mutation_script.py"))
ONE = ["--seeds", "0", "--select", "bar*"]


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    # The script alone is to notice: the emulator's checks would, too.
    monkeypatch.setattr(settings, "CHECKS", tuple(c for c in settings.CHECKS if c != "shared"))
    monkeypatch.setattr(mutate, "settings", lambda *_: [mutate.Setting("immediate"), mutate.Setting("lazy")])
    return lambda *arguments: CliRunner().invoke(mutate_command.app, [*arguments])


def test_a_script_that_notices(invoke):
    done = invoke(*ONE, SCRIPT)
    assert done.exit_code == 0, done.output
    assert "bar.sync#0: remove" in done.output and "1 detected" in done.output
    assert "ScriptFailed: exit code 3" in done.output
    assert "flood" not in done.output


def test_a_script_that_does_not(invoke, tmp_path):
    done = invoke(*ONE, SCRIPT, "--blind")
    assert done.exit_code == 1 and "1 NOT DETECTED" in done.output
    reasons = tmp_path / "reasons.json"
    reasons.write_text(json.dumps({"bar.sync*": "this script looks away"}))
    done = invoke(*ONE, "--reasons", str(reasons), SCRIPT, "--blind")
    assert done.exit_code == 0
    assert "this script looks away" in done.output and "1 explained" in done.output


def test_the_script_must_pass_unmodified(invoke, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("raise SystemExit(4)\n")
    done = invoke(*ONE, str(script))
    assert isinstance(done.exception, mutate_command.ScriptFailed)


def test_the_command_itself_and_its_trace(tmp_path):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "cute_emulator", *arguments],
            env=os.environ | {"CUTE_DSL_DUMP_DIR": str(tmp_path)}, cwd=tmp_path,
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    done = command("--trace", "trace.json", "--trace", "trace.png", SCRIPT)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"warp 0", "warp 1"} <= {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert "--reasons" in command("mutate", "--help").stdout
