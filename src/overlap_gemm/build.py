"""Compilation of kernels for a `GemmConfig`, for hosts that launch the fused GEMM themselves.

::

    kernel = make_kernel(config, transport=PeerBulk())     # or transport=None: a plain GEMM
    compiled = compile_kernel(kernel)                      # needs no GPU; once per configuration
    compiled(a, b, out, extras, exchange, num_clusters, stream)

All arguments of the compiled function are run-time values. Tensors are ``cute`` tensors with dynamic layouts;
after a compilation with ``--enable-tvm-ffi``, any DLPack tensors. Without TVM-FFI, integers in ``exchange``
must be ``Int32`` or ``Int64`` objects: the DSL packs a plain ``int`` there wrongly, without an error.

``a``
    (M, K) of ``config.in_dtype``. M is the number of rows over all ranks, K this rank's share. With
    ``a_major="k"`` K is contiguous, with ``"m"`` M is. The address is 16-byte aligned; the stride of the
    other dimension is a multiple of 16 bytes.
``b``
    (N, K), with the rules of ``a`` and ``b_major``. ``b_major="k"`` is the layout of ``nn.Linear``'s weight.
``out``
    (rows, N) of ``config.out_dtype``, N contiguous, 16-byte aligned, row stride a multiple of 16 bytes.
    ``rows`` is M for a plain GEMM, else the number of rows that this rank owns. A rank without rows passes
    any valid tensor of one row; the kernel does not write to it.
    With ``config.weights`` above 1, ``a`` and ``b`` are tuples of that many, whose products are added; for an
    all-to-all of tiles and an all-gather ``b`` and ``out``.
``extras``
    Tuple of tensors, or None if there are none. First the two matrices of scales, if operands have scales of
    blocks (`mainloop.blocks`, `mx`). Then the operands of the epilogue's visitors, in the order of
    ``config.epilogue_operands``. A vector is contiguous and 16-byte aligned. A matrix has the layout of
    ``out``, the extents of `visitors.Operand.shape`, and a multiple of 8 columns.
``exchange``
    An :class:`Exchange`; None for a plain GEMM. The epoch is not an argument: the workspace stores it in
    device memory.
``num_clusters``
    Grid size in clusters: the smaller of the clusters that the device holds at once and the shape's
    ``num_clusters``. All clusters must be co-resident. The launch must not overlap the previous launch on the
    same workspace.
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
from overlap_gemm.exchange.all_to_all import AllToAll
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.geometry import Puts
from overlap_gemm.exchange.relay import Relay
from overlap_gemm.gather.all_gather import AllGather
from overlap_gemm.gather.gate import GateKernel
from overlap_gemm.gather.gathering import Gathering, PartOfK, ShardScales
from overlap_gemm.kernel.fused_gemm import FusedGemm
from overlap_gemm.kernel.plain_gemm import PlainGemm
from overlap_gemm.kernel.protocols import Mainloop
from overlap_gemm.mainloop import blocks, mx
from overlap_gemm.spec import ALL_GATHER_GEMM, PATTERNS, OpSpec, patterns_of
from overlap_gemm.transports.interface import Transport


def make_kernel(
    config: GemmConfig,
    transport: Transport | None = None,
    cooperative: bool = False,
    pattern: str = "reduce_scatter",
) -> FusedGemm:
    """Returns the kernel of a plain GEMM, or of an op that sends result tiles; not compiled.

    Args:
        config: Compile-time choices.
        transport: Transport that sends tiles to peers; None: a plain GEMM.
        cooperative: Whether to launch cooperatively: CUDA then refuses a grid that is not co-resident.
        pattern: Communication pattern, a name of `overlap_gemm.spec.PATTERNS`; not read for a plain GEMM.

    Raises:
        ValueError: `config` has pairs of columns, and there is a transport.
    """
    if config.has_pairs and transport is not None:
        raise ValueError(
            "a configuration with pairs of columns (config.has_pairs) is for a plain GEMM or "
            f"all_gather_gemm, not for pattern {pattern!r}, which sends result tiles; pass transport=None"
        )
    op = PlainGemm(config) if transport is None else _named(PATTERNS[pattern].kernel)(config, transport)
    return FusedGemm(_mainloop(config), op, cooperative)


def make_gather_kernel(
    config: GemmConfig,
    transport: Transport,
    push: bool = False,
    keep: bool = False,
    cooperative: bool = False,
    op: OpSpec = ALL_GATHER_GEMM,
    joins: bool = False,
) -> FusedGemm:
    """Returns the kernel of an op that gathers x; not compiled. Its ``exchange`` is a :class:`Gathering`.

    Args:
        config: Compile-time choices.
        transport: Transport by which the kernel signals peers.
        push: Whether warps of the kernel send the local shard; False: copy engines send it.
        keep: Whether the kernel also copies the gathered x to a tensor of the caller.
        cooperative: Whether to launch cooperatively: CUDA then refuses a grid that is not co-resident.
        op: Definition of the op.
        joins: Whether tiles have rows of several shards (`gather.few_rows`); needs ``push``.
    """
    (pattern,) = patterns_of(op.name)
    name = "overlap_gemm.gather.few_rows:AllGatherFewRows" if joins else PATTERNS[pattern].kernel
    kernel = _named(name)(config, transport, push, keep)
    return FusedGemm(_mainloop(config), kernel, cooperative)


def _mainloop(config: GemmConfig) -> Mainloop:
    """Returns the mainloop of a configuration's architecture."""
    mainloop: Mainloop = _named(config.on.mainloop)(config)
    return mainloop


def _named(path: str) -> Any:
    """Returns the object at ``module:name``; imports the module at the call, not with this one."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def warp_names(config: GemmConfig) -> dict[int, str]:
    """Returns the role's name of each warp of a CTA, by warp number; for traces."""
    mainloop = make_kernel(config).mainloop
    first = mainloop.first_epilogue_warp
    names = {first + i: f"epilogue {i}" for i in range(mainloop.num_epilogue_warps)}
    names |= {mainloop.load_warp: "load", mainloop.comm_warp: "comm"}
    names |= {config.first_receive_warp + i: f"receive {i}" for i in range(config.receive_warps)}
    return names | {warp: role.__name__.removesuffix("_role") for warp, role in mainloop.private_roles()}


def fake_arguments(kernel: FusedGemm) -> tuple[Any, ...]:
    """Returns the arguments with which a kernel is compiled; extents, strides and scalars are dynamic."""
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
            Int64 if operand.dtype == "i64" else DTYPES[operand.dtype], (cute.sym_int32(),), assumed_align=16
        )
        for operand in cfg.epilogue_operands
    )
    extras = scales + operands or None
    exchange: Any = None if isinstance(kernel.op, PlainGemm) else _fake_exchange()
    if isinstance(kernel.op, AllGather):
        exchange = _fake_gathering(cfg, kernel.op.keep)
        if kernel.op.has_chunks:
            exchange = exchange._replace(chunk_rows=Int32(1))
    a, b = matrix(cfg.in_dtype, cfg.a_major == "k"), matrix(cfg.in_dtypes[1], cfg.b_major == "k")
    if cfg.has_two_weights:
        b = b, matrix(cfg.in_dtypes[1], True)
    out = matrix(cfg.out_dtype, True)
    if cfg.weights > 1:
        b = tuple(matrix(cfg.in_dtypes[1], cfg.b_major == "k") for _ in range(cfg.weights))
        if not is_along_k(kernel.op):
            out = tuple(matrix(cfg.out_dtype, True) for _ in range(cfg.weights))
        else:
            a = tuple(matrix(cfg.in_dtype, cfg.a_major == "k") for _ in range(cfg.weights))
        if is_along_k(kernel.op) and isinstance(kernel.op, AllGather):
            later = [_fake_part_of_k(cfg, kernel.op.keep) for _ in range(1, cfg.weights)]
            exchange = exchange._replace(later=tuple(later))
    return a, b, out, extras, exchange, Int32(1), make_fake_stream()


def is_along_k(op: Any) -> bool:
    """Returns whether several matrices B of a kernel are along K, so that their products are added."""
    return not isinstance(op, AllToAll) and (not isinstance(op, AllGather) or op.has_chunks)


def compile_relay(arch: str, transport: Any, options: str = "") -> Any:
    """Compiles the relay kernel, which sends the tiles that a GEMM with transport ``staged`` stages locally.

    Arguments of the compiled function: the op (`OpSpec.code`), two lists of puts (`geometry.Puts`, of
    ``Int64``), the GEMM's ``exchange``, and a stream other than the GEMM's.

    Args:
        arch: Architecture, for example "sm_90a".
        transport: Transport that executes the puts.
        options: Further options of ``cute.compile``.
    """
    relay, none = Relay(transport), Puts(*map(Int64, Puts()))
    fakes = (Int32(1), (none, none), _fake_exchange(), make_fake_stream())
    return cute.compile(relay, *fakes, options=f"--gpu-arch {arch_of(arch).target} {options}".strip())


def compile_gate(arch: str, transport: Any, options: str = "") -> Any:
    """Compiles the gate kernel. The compiled function takes the arguments of `GateKernel`, then the stream.

    Args:
        arch: Architecture, for example "sm_90a".
        transport: Transport by which the kernel signals peers.
        options: Further options of ``cute.compile``.
    """
    fakes = (Int32(0), Int32(0), _fake_exchange(), make_fake_stream())
    return cute.compile(
        GateKernel(transport), *fakes, options=f"--gpu-arch {arch_of(arch).target} {options}".strip()
    )


def compile_kernel(kernel: FusedGemm, options: str = "") -> Any:
    """Compiles a kernel for ``kernel.config.arch``; needs no GPU.

    Args:
        kernel: Kernel from :func:`make_kernel` or :func:`make_gather_kernel`.
        options: Further options of ``cute.compile``, for example ``"--enable-tvm-ffi"``.

    Returns:
        The DSL's compiled function, with the arguments that the module's docstring lists.
    """
    # The name that a profiler shows. It must contain "cutlass": ptxas generates other code for an entry
    # without that word, and the plain GEMM of 128x128 is then 1 to 2 % slower (docs/design/facts.md).
    FusedGemm.kernel.set_name_prefix(kernel.name, keep_mangled_name=False)
    return cute.compile(
        kernel, *fake_arguments(kernel), options=f"--gpu-arch {kernel.config.on.target} {options}".strip()
    )


class DirectCall:
    """A compiled function called through the DSL, with the arguments that a TVM-FFI function takes.

    It exposes the loaded CUDA library, which NVSHMEM must initialise; a TVM-FFI function does not. A call
    takes about 250 us more host time than one by TVM-FFI.

    Args:
        compiled: Result of a compile function of this module, without ``--enable-tvm-ffi``.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    @property
    def library(self) -> Any:
        """Returns the loaded ``cudaLibrary_t``."""
        return self._compiled.library

    def __call__(self, *arguments: Any) -> None:
        """Launches the kernel.

        Args:
            *arguments: Arguments of the compiled function: tensors as DLPack objects, integers as ``int``,
                and last the stream as an integer handle.
        """
        *values, stream = arguments
        self._compiled(*map(_converted, values), CUstream(stream))


def _converted(value: Any) -> Any:
    """Returns an argument of a call as the type that a kernel without TVM FFI expects."""
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
    """Returns the module of the mainloop for scales of these blocks: `mainloop.mx` or `mainloop.blocks`."""
    return mx if kind == MX else blocks


def _fake_exchange() -> Exchange:
    """Returns placeholders of the exchange arguments, for compilation."""
    peers = make_fake_compact_tensor(cutlass.Int64, (cute.sym_int32(),), assumed_align=8)
    return Exchange(peers, Int32(0), Int32(1), Int32(1), *(Int64(0),) * 5, Int32(1), Int32(0))


def _fake_part_of_k(config: GemmConfig, keep: bool) -> PartOfK:
    """Returns placeholders of a further matrix along K, for compilation."""
    kept, gathered = _fake_gathering(config, keep)[4:6]
    return PartOfK(Int64(0), Int64(0), kept, gathered, Int64(0))


def _fake_gathering(config: GemmConfig, keep: bool) -> Gathering:
    """Returns placeholders of the gathering arguments, for compilation."""
    dtype, kept = DTYPES[config.in_dtype], None
    alignment = 128 // dtype.width
    if keep:
        kept = make_fake_compact_tensor(dtype, (cute.sym_int64(divisibility=alignment),), assumed_align=16)
    extents = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    pitch, shard = cute.sym_int64(divisibility=alignment), cute.sym_int64(divisibility=alignment)
    gathered = make_fake_tensor(dtype, extents, stride=(pitch, 1, shard), assumed_align=16)
    scales = None if config.blocks is None else scales_of(config.blocks).fake_gathered()
    after = ShardScales(*(Int64(0),) * 5) if config.blocks is not None or config.visits_rows else None
    words = Int32(1), Int64(0), Int64(0), kept, gathered, Int32(1), Int32(1)
    return Gathering(_fake_exchange(), *words, scales, after)
