"""A process that is forked from one that has joined its peers is told so, where it would wait for ever."""

import os
import re
import signal
import traceback
from unittest import mock

import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.runtime import bootstrap

X, WEIGHT = torch.ones(4, 3), torch.ones(5, 3)
REFUSED = (
    "RuntimeError: process [0-9]+ was forked from one that had joined its peers.*'spawn' or 'forkserver'"
)


def in_a_child(body):
    """What `body` returns in a forked process, or the error it raised; a hang is one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            said = str(body())
        except RuntimeError as error:
            said = f"RuntimeError: {error}"
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or f"ended with {status}"


def known():
    return overlap_gemm.gemm_all_reduce(X, WEIGHT)


def of_another_kind():
    return overlap_gemm.all_gather_gemm(X, WEIGHT, backend="decomposed")


def by_name():
    return overlap_gemm.gemm_all_reduce(X, WEIGHT, group=dist.group.WORLD.group_name)


def finalizing():
    """As where `init` made the process group, which the parent goes on to use."""
    with mock.patch.object(bootstrap, "_owns_process_group", True):
        overlap_gemm.finalize()
        overlap_gemm.finalize()
    return dist.is_initialized()


def joining_again():
    return overlap_gemm.init(device="cpu").size


def alone():
    """The child's own world."""
    dist.distributed_c10d._world.pg_map.clear()
    dist.distributed_c10d._update_default_pg(None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return overlap_gemm.gemm_all_reduce(X, WEIGHT).sum().item()


def forked(rank, size):
    known()  # kept with its group
    answers = [in_a_child(body) for body in (known, of_another_kind, by_name, joining_again)]
    assert torch.equal(known(), torch.full((4, 5), 3.0 * size)), "the parent goes on"
    answers_of_own = in_a_child(finalizing), in_a_child(alone)
    assert torch.equal(known(), torch.full((4, 5), 3.0 * size)), "and goes on"
    return answers, answers_of_own


def test_a_forked_child_is_refused_by_name(ranks):
    for answers, own in ranks(2).run(forked):
        for answer in answers:
            assert re.match(REFUSED, answer), answer
        assert own == ("True", "60.0"), own
