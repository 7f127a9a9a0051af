"""Replacements of the DSL's time measurement, in `cutlass.testing` and `cutlass.cute.testing`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cute_emulator.host.replace import replaced

if TYPE_CHECKING:
    from cute_emulator.host.torch.cuda_device import CudaDevices


def changes(devices: CudaDevices) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields every replacement as a context manager; its exit restores the original."""
    import cutlass.cute.testing
    import cutlass.testing

    def benchmark(
        callable: Callable[..., Any],
        *,
        kernel_arguments: Any = None,
        workspace_generator: Callable[[], Any] | None = None,
        **_: Any,
    ) -> float:
        """Runs the kernel once.

        Returns a nanosecond per warp instruction, so that choices are reproducible.
        """
        arguments = workspace_generator() if workspace_generator is not None else kernel_arguments
        return measure(callable, *arguments.args, **arguments.kwargs)

    def measure(callable: Callable[..., Any], *args: Any, **named: Any) -> float:
        devices.synchronize()
        start = devices.instructions()
        callable(*args, **named)
        devices.synchronize()
        return max(devices.instructions() - start, 1) * 1e-3

    def for_autotune(
        callable: Callable[..., Any],
        *args: Any,
        warmup_iterations: int,
        iterations: int,
        use_cold_l2: bool,
        print_verbose: bool,
        current_stream: Any = None,
        **named: Any,
    ) -> float:
        """Returns the time that `tune` compares; a configuration that fails is skipped by `tune`."""
        return measure(callable, *args, **named)

    for module in (cutlass.testing, cutlass.cute.testing):
        for name, function in (("benchmark", benchmark), ("_benchmark_for_autotune", for_autotune)):
            if hasattr(module, name):
                yield replaced(module, name, function)
