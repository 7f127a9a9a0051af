"""Choice between our op and a serving stack's own, for the plug-ins of vLLM and SGLang."""

from functools import cache

from ..backends.base import Problem
from ..backends.select import choose


@cache
def overlaps(problem: Problem) -> bool:
    """Returns whether our op overlaps the communication, and so is faster than product and collective."""
    return choose(problem).backend.name in ("fused", "decomposed")
