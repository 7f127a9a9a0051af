"""From a configuration to a compiled kernel: the host-facing surface of the fused GEMM.

::

    kernel = make_kernel(config, transport=PeerBulk())     # or transport=None: a plain GEMM
    compiled = compile_kernel(kernel)                      # needs no GPU; once per configuration
    compiled(a, b, out, extras, exchange, num_clusters, stream)

Arguments of the compiled function, all run-time values. Tensors as ``cute`` tensors with dynamic layouts (or
by DLPack with ``--enable-tvm-ffi``). Integers inside ``exchange`` are ``Int32`` or ``Int64`` objects: the
DSL's own calling path packs a plain ``int`` there wrongly, without a check.

``a``
    (M, K) of ``config.in_dtype``; M is the global number of rows, K this rank's share. ``a_major="k"``: K
    contiguous; ``"m"``: M contiguous. 16-byte aligned, the other dimension's stride a multiple of 8 elements.
``b``
    (N, K), likewise; ``nn.Linear``'s weight layout when ``b_major="k"``.
``out``
    (rows, N) of ``config.out_dtype``, N contiguous, 16-byte aligned, row stride a multiple of 16 bytes.
    ``rows``: M for a plain GEMM, else the rows this rank owns; a rank that owns none passes any valid tensor
    of one row, which stays untouched.
``extras``
    A tuple: where operands have scales of blocks, these two matrices (`mainloop.blocks`, `mx`); then what the
    epilogue's visitors read and write, in the order of ``config.epilogue_operands``: vectors, contiguous,
    16-byte aligned; matrices like ``out``: their extents are `visitors.Operand.shape`, columns a multiple of
    8. None where there is nothing.
``exchange``
    An :class:`Exchange`; None for a plain GEMM. The epoch is not an argument: the kernel keeps it in the
    workspace.
``num_clusters``
    Grid in clusters: ``min(clusters that fit on the device at once, the shape's num_clusters)``. All of them
    must be co-resident, and the launch must not overlap the one before it on the same workspace.
``stream``
    ``CUstream``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from overlap_gemm.config.arch import arch_of
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import MX, NUM_MATRICES, Blocks
from overlap_gemm.device.memory import DTYPES
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.geometry import Puts
from overlap_gemm.exchange.relay import Relay
from overlap_gemm.gather.all_gather import AllGather
from overlap_gemm.gather.gate import GateKernel
from overlap_gemm.gather.gathering import Gathering, ShardScales
from overlap_gemm.kernel.fused_gemm import FusedGemm
from overlap_gemm.kernel.plain_gemm import PlainGemm
from overlap_gemm.kernel.surface import Mainloop
from overlap_gemm.mainloop import blocks, mx
from overlap_gemm.spec import ALL_GATHER_GEMM, PATTERNS, OpSpec, patterns_of
from overlap_gemm.transports.interface import Transport


def make_kernel(
    config: GemmConfig,
    transport: Transport | None = None,
    cooperative: bool = False,
    pattern: str = "reduce_scatter",
) -> FusedGemm:
    """Composes the kernel of a configuration.

    Args:
        config: compile-time choices.
        transport: how tiles reach peers, or None for a plain GEMM.
        cooperative: whether the launch is refused unless all its CTAs are resident at once.
        pattern: who sends what to whom: a name of `overlap_gemm.spec.PATTERNS` whose tiles travel.
    """
    if config.has_pairs and transport is not None:
        raise ValueError("pairs of columns are of products that are the output, not of sums over ranks")
    op = PlainGemm(config) if transport is None else _named(PATTERNS[pattern].kernel)(config, transport)
    return FusedGemm(_mainloop(config), op, cooperative)


def make_gather_kernel(
    config: GemmConfig,
    transport: Transport,
    push: bool = False,
    keep: bool = False,
    cooperative: bool = False,
    op: OpSpec = ALL_GATHER_GEMM,
) -> FusedGemm:
    """Composes the kernel of an op whose operand is sent; its ``exchange`` is a :class:`Gathering`.

    Args:
        config: compile-time choices.
        transport: raises flags at peers.
        push: whether the kernel's warps send the own shard; else copy engines do.
        keep: whether the gathered operand is copied to a tensor of the caller's.
        cooperative: as for `make_kernel`.
        op: The op.
    """
    (pattern,) = patterns_of(op.name)
    kernel = _named(PATTERNS[pattern].kernel)(config, transport, push, keep)
    return FusedGemm(_mainloop(config), kernel, cooperative)


def _mainloop(config: GemmConfig) -> Mainloop:
    mainloop: Mainloop = _named(config.on.mainloop)(config)
    return mainloop


def _named(path: str) -> Any:
    """What ``module:name`` says, imported only now."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def warp_names(config: GemmConfig) -> dict[int, str]:
    """What each warp of a CTA does, for traces: warp number -> name of its role."""
    mainloop = make_kernel(config).mainloop
    first = mainloop.first_epilogue_warp
    names = {first + i: f"epilogue {i}" for i in range(mainloop.num_epilogue_warps)}
    names |= {mainloop.load_warp: "load", mainloop.comm_warp: "comm"}
    names |= {config.first_receive_warp + i: f"receive {i}" for i in range(config.receive_warps)}
    return names | {warp: role.__name__.removesuffix("_role") for warp, role in mainloop.private_roles()}


def fake_arguments(kernel: FusedGemm) -> tuple[Any, ...]:
    """Arguments to compile with: every extent, stride and scalar dynamic."""
    cfg = kernel.config

    def matrix(dtype: str, row_major: bool) -> Any:
        pitch = cute.sym_int64(divisibility=128 // DTYPES[dtype].width)
        stride = (pitch, 1) if row_major else (1, pitch)
        return make_fake_tensor(
            DTYPES[dtype], (cute.sym_int32(), cute.sym_int32()), stride=stride, assumed_align=16
        )

    scales: tuple[Any, ...] = ()
    if cfg.blocks is not None:
        scales = tuple(scales_of(cfg.blocks).fake_scales() for _ in range(NUM_MATRICES))
    operands = tuple(
        matrix(operand.dtype, True)
        if operand.is_matrix
        else make_fake_compact_tensor(
            Int32 if operand.dtype == "i32" else DTYPES[operand.dtype], (cute.sym_int32(),), assumed_align=16
        )
        for operand in cfg.epilogue_operands
    )
    extras = scales + operands or None
    exchange: Any = None if isinstance(kernel.op, PlainGemm) else _fake_exchange()
    if isinstance(kernel.op, AllGather):
        exchange = _fake_gathering(cfg, kernel.op.keep)
        if kernel.op.has_chunks:
            exchange = exchange._replace(chunk_rows=Int32(1))
    b = matrix(cfg.in_dtypes[1], cfg.b_major == "k")
    if cfg.has_two_weights:
        b = b, matrix(cfg.in_dtypes[1], True)
    return (
        matrix(cfg.in_dtype, cfg.a_major == "k"),
        b,
        matrix(cfg.out_dtype, True),
        extras,
        exchange,
        Int32(1),
        make_fake_stream(),
    )


def compile_relay(arch: str, transport: Any, options: str = "") -> Any:
    """Compiles the relay kernel that puts what a GEMM with transport ``staged`` leaves to it.

    Its arguments: the op (`OpSpec.code`), two lists of puts (`geometry.Puts`, of ``Int64``), the GEMM's
    ``exchange``, a stream other than the GEMM's.
    """
    relay, none = Relay(transport), Puts(*map(Int64, Puts()))
    fakes = (Int32(1), (none, none), _fake_exchange(), make_fake_stream())
    return cute.compile(relay, *fakes, options=f"--gpu-arch {arch_of(arch).target} {options}".strip())


def compile_gate(arch: str, transport: Any, options: str = "") -> Any:
    """Compiles the gate kernel; its arguments: those of `GateKernel`, the stream last."""
    fakes = (Int32(0), Int32(0), _fake_exchange(), make_fake_stream())
    return cute.compile(
        GateKernel(transport), *fakes, options=f"--gpu-arch {arch_of(arch).target} {options}".strip()
    )


def compile_kernel(kernel: FusedGemm, options: str = "") -> Any:
    """Compiles for ``kernel.config.arch``, on any machine.

    Args:
        kernel: what :func:`make_kernel` returned.
        options: further options of ``cute.compile``, for example ``"--enable-tvm-ffi"``.

    Returns:
        The DSL's compiled function.
    """
    # What a profile shows. "cutlass" stays in it: ptxas makes other code of an entry without that word, and
    # the plain GEMM of 128x128 is 1 to 2 % slower then (docs/design/facts.md).
    FusedGemm.kernel.set_name_prefix(kernel.name, keep_mangled_name=False)
    return cute.compile(
        kernel, *fake_arguments(kernel), options=f"--gpu-arch {kernel.config.on.target} {options}".strip()
    )


class DirectCall:
    """A compiled function called the DSL's own way, with the arguments that a TVM-FFI function takes.

    A TVM-FFI function keeps the library that its kernel is loaded from to itself; this one can be asked for
    it, and NVSHMEM has to initialise it. A call costs the host about 250 us more.

    Args:
        compiled: what the functions here return, compiled without ``--enable-tvm-ffi``.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    @property
    def library(self) -> Any:
        """The loaded ``cudaLibrary_t``."""
        return self._compiled.library

    def __call__(self, *arguments: Any) -> None:
        """Starts the kernel; tensors by DLPack, the stream last, as an integer."""
        *values, stream = arguments
        self._compiled(*map(_converted, values), CUstream(stream))


def _converted(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Puts):
        return Puts(*map(Int64, value))
    if type(value) is tuple:
        return tuple(map(_converted, value))
    if isinstance(value, Exchange):
        peers, rank, world, shard, *addresses, call, signature = value
        table = from_dlpack(peers, assumed_align=8).mark_layout_dynamic()
        words = (*map(Int64, addresses), Int32(call), Int32(signature))
        return Exchange(table, Int32(rank), Int32(world), Int32(shard), *words)
    if value.ndim == 1:
        return from_dlpack(value, assumed_align=16).mark_layout_dynamic()
    return from_dlpack(value, assumed_align=16).mark_layout_dynamic(1 if value.stride(1) == 1 else 0)


def scales_of(kind: Blocks) -> Any:
    """The module of kernels with scales of such blocks."""
    return mx if kind == MX else blocks


def _fake_exchange() -> Exchange:
    peers = make_fake_compact_tensor(cutlass.Int64, (cute.sym_int32(),), assumed_align=8)
    return Exchange(peers, Int32(0), Int32(1), Int32(1), *(Int64(0),) * 5, Int32(1), Int32(0))


def _fake_gathering(config: GemmConfig, keep: bool) -> Gathering:
    dtype, kept = DTYPES[config.in_dtype], None
    whole = 128 // dtype.width
    if keep:
        kept = make_fake_compact_tensor(dtype, (cute.sym_int64(divisibility=whole),), assumed_align=16)
    extents = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    pitch, shard = cute.sym_int64(divisibility=whole), cute.sym_int64(divisibility=whole)
    gathered = make_fake_tensor(dtype, extents, stride=(pitch, 1, shard), assumed_align=16)
    scales = None if config.blocks is None else scales_of(config.blocks).fake_gathered()
    after = ShardScales(*(Int64(0),) * 3) if config.blocks is not None or config.visits_rows else None
    words = Int32(1), Int64(0), Int64(0), kept, gathered, Int32(1), Int32(1)
    return Gathering(_fake_exchange(), *words, scales, after)
