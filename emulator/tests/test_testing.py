"""Commands of tests, each in a process forked from one that has done the imports."""

import os
import signal
import threading

import pytest

from cute_emulator.testing import emulator_command


class Interruption(BaseException):
    """As a test's time limit is."""


def interrupt(*_):
    raise Interruption


def test_the_answer_of_a_command_that_was_given_up_is_not_the_next_ones(tmp_path):
    scripts = {"waits": "import time; time.sleep(20)", "ends": "print('here')"}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    emulator_command(tmp_path / "ends.py")  # the imports are done
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        with pytest.raises(Interruption):
            emulator_command(tmp_path / "waits.py")
    finally:
        signal.signal(signal.SIGUSR2, before)
    done = emulator_command(tmp_path / "ends.py")
    assert (done.returncode, done.stdout) == (0, "here\n")
