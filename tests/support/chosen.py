"""Which combinations of parameters the default run takes where all of them would say little more."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(cases: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """For `parametrize`: each case with every combination of the others' values, all but one of them slow.

    The default run takes the combinations in turn, so every value of each is in it. Where cases are
    themselves a product, theirs do not always meet the same one: each round begins one later.

    Args:
        cases: values, or tuples of the values of several arguments.
        others: of further arguments, which come after them.
    """
    every, found = list(product(*others)), []
    for number, case in enumerate(cases):
        taken = (number + number // len(every)) % len(every)
        for place, rest in enumerate(every):
            values = (*case, *rest) if isinstance(case, tuple) else (case, *rest)
            found.append(pytest.param(*values, marks=[] if place == taken else pytest.mark.slow))
    return found
