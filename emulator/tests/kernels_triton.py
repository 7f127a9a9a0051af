"""Small kernels in Triton, each with a launch and what comes out. Recorded as PTX by `record_ptx.py`."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, powers / tl.sum(powers, 0), mask=inside)


@triton.jit
def matmul(a, b, out, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, k, DEPTH):
        left = tl.load(a + rows[:, None] * k + (at + depth)[None, :])
        right = tl.load(b + (at + depth)[:, None] * n + columns[None, :])
        sums = tl.dot(left, right, sums)
    tl.store(out + rows[:, None] * n + columns[None, :], sums.to(tl.float16))


@triton.jit
def matmul_tma(a, b, out, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [ROWS, DEPTH])
    right = tl.make_tensor_descriptor(b, [k, n], [n, 1], [DEPTH, COLUMNS])
    result = tl.make_tensor_descriptor(out, [m, n], [n, 1], [ROWS, COLUMNS])
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, k, DEPTH):
        sums = tl.dot(left.load([row, at]), right.load([at, column]), sums)
    result.store([row, column], sums.to(tl.float16))


@triton.jit
def numbers(out, pair, small, large, real, truth):
    tl.store(out, pair[0])
    tl.store(out + 1, pair[1])
    tl.store(out + 2, small)
    tl.store(out + 3, large)
    tl.store(out + 4, real)
    tl.store(out + 5, truth)


def run_add(device="cpu", n=1000):
    """Returns what came out, and what should."""
    x, y = torch.randn(n, device=device), torch.randn(n, device=device)
    out = torch.empty_like(x)
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=256)
    return out, x + y


def run_softmax(device="cpu", rows=4, columns=200):
    """Returns what came out, and what should."""
    x = torch.randn(rows, columns, device=device)
    out = torch.empty_like(x)
    softmax[(rows,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
    return out, torch.softmax(x, 1)


def run_matmul(device="cpu", m=128, n=64, k=96):
    """Returns what came out, and what should."""
    a, b, out = _matrices(device, m, n, k)
    matmul[m // 64, n // 64](a, b, out, n, k, ROWS=64, COLUMNS=64, DEPTH=32, num_stages=2)
    return out, a.float() @ b.float()


def run_matmul_tma(device="cpu", m=128, n=64, k=192):
    """Returns what came out, and what should."""
    a, b, out = _matrices(device, m, n, k)
    triton.set_allocator(lambda nbytes, *_: torch.empty(nbytes, dtype=torch.int8, device=device))
    matmul_tma[m // 64, n // 64](a, b, out, m, n, k, ROWS=64, COLUMNS=64, DEPTH=64, num_stages=2)
    return out, a.float() @ b.float()


def _matrices(device, m, n, k):
    shapes = (m, k), (k, n), (m, n)
    return [torch.randn(shape, device=device).half() for shape in shapes]


RUNS = {"add": run_add, "softmax": run_softmax, "matmul": run_matmul, "matmul_tma": run_matmul_tma}
