"""Trial of launches that are cooperative and programmatic dependents at once.

    python benchmarks/cooperative_dependent.py

The DSL sets both attributes on any launch (`kernel.launch(cooperative=, use_pdl=)`). Prints, for each of the
four combinations, the answer of the driver, and how long 200 launches in a CUDA graph took, each.
"""

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def _add_one(values: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    values[block * 128 + thread] += 1


@cute.jit
def add_one(
    values: cute.Tensor, cooperative: cutlass.Constexpr, dependent: cutlass.Constexpr, stream: CUstream
) -> None:
    """Launches it with these attributes."""
    _add_one(values).launch(
        grid=(132, 1, 1),
        block=(128, 1, 1),
        stream=stream,
        cooperative=cooperative,
        use_pdl=dependent,
    )


def microseconds(cooperative: bool, dependent: bool) -> float:
    """Returns the time of one of 200 launches in a graph; raises the driver's error."""
    values = torch.zeros(132 * 128, dtype=torch.int32, device="cuda")
    view, stream = from_dlpack(values), torch.cuda.Stream()
    launch = cute.compile(add_one, view, cooperative, dependent, CUstream(stream.cuda_stream))
    launch(view, CUstream(stream.cuda_stream))
    launch(view, CUstream(stream.cuda_stream))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(200):
            launch(view, CUstream(torch.cuda.current_stream().cuda_stream))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    assert (values == 402).all(), values.unique()
    return begin.elapsed_time(end) * 1e3 / 200


if __name__ == "__main__":
    for cooperative in (False, True):
        for dependent in (False, True):
            try:
                outcome = f"{microseconds(cooperative, dependent):.2f} us a launch"
            except Exception as error:  # noqa: BLE001 - the error is the result
                outcome = f"refused: {type(error).__name__}: {error}"
            print(f"cooperative={cooperative} dependent={dependent}: {outcome}", flush=True)
