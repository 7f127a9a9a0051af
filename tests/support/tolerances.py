"""The one rule of what counts as equal: at most twice as wrong as the same computation on one process.

The baseline is torch's own product in the same dtype, measured against float64 on the same operands, so that
the tolerance follows the problem instead of being guessed. A result that carries P partial sums rounded to a
half type before they are added may be wrong by P roundings of a partial; that is the one addition, stated
here.
"""

import torch
from torch import Tensor


def assert_as_good_as(
    result: Tensor, baseline: Tensor, exact: Tensor, *, what: str = "result", roundings: int = 0
) -> None:
    """Compares in the largest absolute error.

    Args:
        result: To be judged.
        baseline: The same quantity by torch on one process, in the result's dtype.
        exact: The same in float64.
        what: Named in the message.
        roundings: How many summands of the size of the result were rounded to its dtype on the way.

    Raises:
        AssertionError: The shape or dtype is not the baseline's, or the error too large.
    """
    assert result.shape == baseline.shape, f"{what}: shape {list(result.shape)}, not {list(baseline.shape)}"
    assert result.dtype == baseline.dtype, f"{what}: {result.dtype}, not {baseline.dtype}"
    if not result.numel():
        return
    error = (result.double() - exact).abs().max().item()
    allowed = tolerance(baseline, exact, roundings)
    assert error <= allowed, f"{what}: largest error {error:.3g}, allowed {allowed:.3g} ({result.dtype})"


def tolerance(baseline: Tensor, exact: Tensor, roundings: int = 0) -> float:
    """Twice the baseline's error, but at least the rounding of the largest value to its dtype."""
    epsilon = torch.finfo(baseline.dtype).eps
    unit = epsilon * exact.abs().max().item()
    return 2 * max((baseline.double() - exact).abs().max().item(), unit) + roundings * unit / 2
