"""Encoding of tensor maps: `cuTensorMapEncodeTiled` with the driver's conditions, and `tensormap.replace`."""

from __future__ import annotations

from collections.abc import Sequence

from cute_emulator.units.tma import CODES, FLOAT_NAN, PADDED, SWIZZLES, TYPES, TensorMap

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
_HARDWARE = {"tf32": "f32", "tf32.ftz": "f32.ftz"}


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
    """Checks the driver's conditions and builds a tensor map (`cuTensorMapEncodeTiled`).

    Args:
        data_type: `CUtensorMapDataType` (its bf16 is 9, the hardware's 10).
        address: Global address, 16-byte aligned.
        dims: Extents, 1 to 2**32 each.
        strides: Byte strides of dimensions 1.., multiples of 16 below 2**40.
        box: Box extents, 1 to 256 each; the inner one a multiple of 16 bytes.
        element_strides: Traversal strides, 1 to 8.
        interleave: `CUtensorMapInterleave`; only none (0) is modelled.
        swizzle_mode: `CUtensorMapSwizzle`, 0 to 4.
        l2_promotion: `CUtensorMapL2promotion`.
        oob_fill: `CUtensorMapFloatOOBfill`: 0 zero, 1 NaN (float types only).

    Raises:
        ValueError: The driver would return `CUDA_ERROR_INVALID_VALUE`; the message contains the rule.
    """
    name, tf32 = _element(data_type)
    if address % 16:
        raise ValueError(f"{address=:#x} must be a multiple of 16")
    _check_extents(dims, strides, box, element_strides)
    if interleave:
        raise ValueError(f"{interleave=}: only CU_TENSOR_MAP_INTERLEAVE_NONE (0) is modelled")
    if not 0 <= swizzle_mode < len(SWIZZLES):
        raise ValueError(
            f"{swizzle_mode=}: none, 32B, 64B, 128B and 128B in 32-byte units (0..4) are modelled"
        )
    if oob_fill and name not in FLOAT_NAN:
        raise ValueError(f"oob_fill NaN needs a float type, not {name}")
    tmap = TensorMap(
        address=address,
        type=name,
        dims=tuple(dims),
        strides=tuple(strides),
        box=tuple(box),
        element_strides=tuple(element_strides),
        swizzle=SWIZZLES[swizzle_mode],
        tf32=tf32,
        fill_nan=bool(oob_fill),
        l2_promotion=l2_promotion,
    )
    _check_rows(tmap)
    return tmap


def _element(number: int) -> tuple[str, bool]:
    """Returns the hardware's name of a `CUtensorMapDataType`, and whether it is tf32."""
    if not 0 <= number < len(API_TYPES):
        known = f"0..{len(API_TYPES) - 1}"
        raise ValueError(f"CUtensorMapDataType {number} is not modelled; valid values are {known}")
    api = API_TYPES[number]
    return _HARDWARE.get(api, api), api.startswith("tf32")


def _check_extents(
    dims: Sequence[int], strides: Sequence[int], box: Sequence[int], element_strides: Sequence[int]
) -> None:
    """Checks the conditions on extents and strides that do not depend on the type."""
    rank = len(dims)
    if not 1 <= rank <= 5 or (len(strides), len(box), len(element_strides)) != (rank - 1, rank, rank):
        raise ValueError(
            f"rank {rank} (1..5) needs {rank - 1} strides, {rank} box extents, {rank} element strides, got "
            f"{len(strides)}, {len(box)} and {len(element_strides)}"
        )
    for what, values, high in (
        ("dims", dims, 1 << 32),
        ("box", box, 256),
        ("element_strides", element_strides, 8),
    ):
        if any(not 1 <= v <= high for v in values):
            raise ValueError(f"{what}={tuple(values)}: each must be in 1..{high}")
    if any(s % 16 or not 0 <= s < 1 << 40 for s in strides):
        raise ValueError(f"strides={tuple(strides)}: each must be a multiple of 16 below 2**40")


def _check_rows(tmap: TensorMap) -> None:
    """Checks the conditions on a row of the box, by type and swizzle."""
    name, row, padded = tmap.type, tmap.box[0], tmap.type in PADDED
    width = row * (8 if padded else TYPES[CODES[name]][1]) // 8
    if width % 16:
        raise ValueError(f"inner box of {width} bytes must be a multiple of 16 bytes")
    places = (tmap.address, *tmap.strides)
    if padded and (row != 128 or tmap.dims[0] % 128 or any(place % 32 for place in places)):
        raise ValueError(
            f"{name} needs an inner box of 128 elements, an inner extent of a multiple of them, address and "
            f"strides of multiples of 32 bytes; got {row}, {tmap.dims[0]}, {tmap.address:#x}, {tmap.strides}"
        )
    swizzle = tmap.swizzle
    if swizzle.bits and width > swizzle.row_bytes:
        raise ValueError(
            f"inner box of {width} bytes exceeds the {swizzle.row_bytes} of swizzle {swizzle.name}"
        )


# Fields of tensormap.replace at a fixed position for each ordinal: 32-bit word and shift of ordinal 0, bits,
# increments of word and shift for each further ordinal, and the number subtracted from the value.
FIELDS: dict[str, tuple[int, int, int, int, int, int]] = {
    "global_address": (0, 0, 64, 0, 0, 0),
    "rank": (2, 4, 3, 0, 0, 0),  # the instruction's operand is rank - 1
    "elemtype": (2, 7, 4, 0, 0, 0),
    "interleave_layout": (2, 11, 2, 0, 0, 0),
    "swizzle_mode": (2, 13, 2, 0, 0, 0),
    "fill_mode": (2, 15, 1, 0, 0, 0),
    "swizzle_atomicity": (2, 19, 2, 0, 0, 0),
    "global_stride": (3, 0, 32, 1, 0, 0),
    "global_dim": (8, 0, 32, 1, 0, 1),
    "element_stride": (13, 0, 3, 0, 3, 1),
    "box_dim": (14, -8, 8, 0, 8, 1),
}


def field_bits(name: str, ordinal: int, value: int) -> list[tuple[int, int, int, int]]:
    """Returns the bits that `tensormap.replace` writes: 32-bit word, shift, number of bits, their value.

    Args:
        name: A key of `FIELDS`.
        ordinal: Dimension, from 0; of a stride the dimension minus one.
        value: Operand of the instruction; strides in bytes.

    Raises:
        ValueError: The field cannot hold the value.
    """
    word, shift, bits, word_step, shift_step, less = FIELDS[name]
    word, shift, field = word + ordinal * word_step, shift + ordinal * shift_step, value - less
    if name == "box_dim" and ordinal == 0:
        word, shift = 13, 24
    if name == "global_stride":
        if value % 16 or not 0 <= value < 1 << 40 or ordinal > 3:
            rule = "a multiple of 16 bytes below 2**40, ordinals 0 to 3"
            raise ValueError(f"stride {value} of ordinal {ordinal}: {rule}")
        field = value >> 4
        return [(word, 0, 32, field & 0xFFFFFFFF), (7, 4 * ordinal, 4, field >> 32)]
    if name == "global_address":
        return [(0, 0, 32, value & 0xFFFFFFFF), (1, 0, 32, value >> 32)]
    if name == "elemtype":
        element, tf32 = _element(value)
        return [(word, shift, bits, CODES[element]), (2, 16, 1, int(tf32))]
    field &= 0xFFFFFFFF if name == "global_dim" else -1  # 0 means 2**32
    if not 0 <= field < 1 << bits:
        raise ValueError(f"{name} of {value} does not fit its {bits} bits")
    return [(word, shift, bits, field)]
