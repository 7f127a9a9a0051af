"""Copy engines of the emulator: beside kernels, in the order of their stream, seen late without a flag."""

import pytest
import torch

from cute_emulator import Emulator, EmulatorError
from cute_emulator.host.copies import copy_launch


@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
def test_bytes_arrive_in_the_order_of_the_stream(mode):
    with Emulator("sm_90a", 2, mode) as emulator:
        block = emulator.symmetric((4096,), torch.uint8)
        first, second = (torch.randint(256, (n,), dtype=torch.uint8) for n in (4096, 1040))
        emulator.copy(0, 7, block.addresses[1], first.data_ptr(), 4096)
        emulator.copy(0, 7, block.addresses[1] + 16, second.data_ptr(), 1040)
        emulator.run()
        assert (block[1][:16] == first[:16]).all()
        assert (block[1][16:1056] == second).all()
        assert (block[1][1056:] == first[1056:]).all()


def test_a_flag_has_four_bytes():
    with Emulator("sm_90a", 2) as emulator:
        block = emulator.symmetric((64,), torch.uint8)
        word = torch.tensor([0x01020304], dtype=torch.int32)
        emulator.copy(1, 0, block.addresses[0] + 4, word.data_ptr(), 4)
        emulator.run()
        assert block[0].view(torch.int32)[1] == word[0]
        assert (block[0][:4] == 0xFF).all()
        assert (block[0][8:] == 0xFF).all()


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="4 or 8 bytes, or a multiple of 16"):
        copy_launch(0, 0, 16, 32, 20)


def test_memory_nobody_knows_is_refused():
    with Emulator("sm_90a", 1) as emulator:
        source = torch.ones(16, dtype=torch.uint8)
        emulator.copy(0, 0, 4096, source.data_ptr(), 16)
        with pytest.raises(EmulatorError, match="out of bounds: 16 bytes at 0x1000"):
            emulator.run()


def test_two_streams_that_write_one_place_are_a_race():
    with Emulator("sm_90a", 2, collect=True) as emulator:
        block = emulator.symmetric((512,), torch.uint8)
        source = torch.zeros(512, dtype=torch.uint8)
        for stream in (1, 2):
            emulator.copy(0, stream, block.addresses[1], source.data_ptr(), 512)
        report = emulator.run()
        assert {finding.kind for finding in report.findings} == {"race"}
