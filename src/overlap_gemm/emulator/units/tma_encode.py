"""`cuTensorMapEncodeTiled`: the driver's conditions for a tensor map, and the map it makes."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_gemm.emulator.units.tma import CODES, FLOAT_NAN, PADDED, SWIZZLES, TYPES, TensorMap

# CUtensorMapDataType of the driver API, in its order; tf32 is f32 with bit 16.
API_TYPES = (
    "u8",
    "u16",
    "u32",
    "s32",
    "u64",
    "s64",
    "f16",
    "f32",
    "f64",
    "bf16",
    "f32.ftz",
    "tf32",
    "tf32.ftz",
    "b4x16",
    "b4x16_p64",
    "b6x16_p32",
)


def encode_tiled(
    data_type: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    interleave: int = 0,
    swizzle_mode: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> TensorMap:
    """`cuTensorMapEncodeTiled`: checks the driver's conditions and builds the map.

    Args:
        data_type: `CUtensorMapDataType` (its bf16 is 9, the hardware's 10).
        address: global address, 16-byte aligned.
        dims: extents, 1 to 2**32 each.
        strides: byte strides of dimensions 1.., multiples of 16 below 2**40.
        box: box extents, 1 to 256 each; the inner one a multiple of 16 bytes.
        element_strides: traversal strides, 1 to 8.
        interleave: `CUtensorMapInterleave`; only none (0) is modelled.
        swizzle_mode: `CUtensorMapSwizzle`, 0 to 4.
        l2_promotion: `CUtensorMapL2promotion`.
        oob_fill: `CUtensorMapFloatOOBfill`: 0 zero, 1 NaN (float types only).

    Raises:
        ValueError: where the driver returns `CUDA_ERROR_INVALID_VALUE`, with the rule.
    """
    if not 0 <= data_type < len(API_TYPES):
        raise ValueError(
            f"{data_type=} is no CUtensorMapDataType this emulator knows (0..{len(API_TYPES) - 1})"
        )
    api = API_TYPES[data_type]
    name = {"tf32": "f32", "tf32.ftz": "f32.ftz"}.get(api, api)
    bits = TYPES[CODES[name]][1]
    rank = len(dims)
    if not 1 <= rank <= 5 or (len(strides), len(box), len(element_strides)) != (rank - 1, rank, rank):
        raise ValueError(
            f"rank {rank} (1..5) needs {rank - 1} strides, {rank} box extents, {rank} element strides, got "
            f"{len(strides)}, {len(box)} and {len(element_strides)}"
        )
    if address % 16:
        raise ValueError(f"{address=:#x} must be a multiple of 16")
    for what, values, low, high in (("dims", dims, 1, 1 << 32), ("box", box, 1, 256)):
        if any(not low <= v <= high for v in values):
            raise ValueError(f"{what}={tuple(values)}: each must be in {low}..{high}")
    if any(not 1 <= v <= 8 for v in element_strides):
        raise ValueError(f"element_strides={tuple(element_strides)}: each must be in 1..8")
    if any(s % 16 or not 0 <= s < 1 << 40 for s in strides):
        raise ValueError(f"strides={tuple(strides)}: each must be a multiple of 16 below 2**40")
    if interleave:
        raise ValueError(f"{interleave=}: only CU_TENSOR_MAP_INTERLEAVE_NONE (0) is modelled")
    if not 0 <= swizzle_mode < len(SWIZZLES):
        raise ValueError(
            f"{swizzle_mode=}: none, 32B, 64B, 128B and 128B in 32-byte units (0..4) are modelled"
        )
    width = box[0] * (8 if name in PADDED else bits) // 8
    if width % 16:
        raise ValueError(f"inner box of {width} bytes must be a multiple of 16 bytes")
    if name in PADDED and (box[0] != 128 or dims[0] % 128 or any(s % 32 for s in (address, *strides))):
        raise ValueError(
            f"{name} needs an inner box of 128 elements, an inner extent of a multiple of them, and address "
            f"and strides of multiples of 32 bytes; got {box[0]}, {dims[0]}, {address:#x}, {tuple(strides)}"
        )
    mode = SWIZZLES[swizzle_mode]
    if mode.bits and width > mode.row_bytes:
        raise ValueError(f"inner box of {width} bytes exceeds the {mode.row_bytes} of swizzle {mode.name}")
    if oob_fill and name not in FLOAT_NAN:
        raise ValueError(f"oob_fill NaN needs a float type, not {api}")
    return TensorMap(
        address=address,
        type=name,
        dims=tuple(dims),
        strides=tuple(strides),
        box=tuple(box),
        element_strides=tuple(element_strides),
        swizzle=mode,
        tf32=api.startswith("tf32"),
        fill_nan=bool(oob_fill),
        l2_promotion=l2_promotion,
    )
