"""Shared object without code: every symbol is the absolute address of a function of this process.

The DSL's JIT looks up runtime functions by name in shared libraries. The dynamic linker interprets a symbol
of section ``SHN_ABS`` as an address, not as an offset into the file (glibc >= 2.28). So a library that
exports the emulator's callbacks needs no machine code, and no compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

_ELF_HEADER = 64
_PROGRAM_HEADER = 56
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, ...
_SHT_SYMTAB = 2
_SHN_ABS = 0xFFF1
_GLOBAL_FUNCTION = (1 << 4) | 2
_ET_DYN = 3
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 4, 5, 6, 10, 11, 14
_READ_WRITE = 6


def absolute_symbols(symbols: Mapping[str, int], soname: str) -> bytes:
    """Returns an ELF64 little-endian shared object that defines ``symbols`` at absolute addresses.

    Args:
        symbols: Address in this process by symbol name.
        soname: Name of the library.

    Raises:
        OSError: The running interpreter is not a 64-bit little-endian ELF program.
    """
    names = b"\0"
    entries = [bytes(_SYMBOL.size)]  # symbol 0 is the undefined symbol
    for name, address in symbols.items():
        entries.append(_SYMBOL.pack(len(names), _GLOBAL_FUNCTION, 0, _SHN_ABS, address, 0))
        names += name.encode() + b"\0"
    soname_offset = len(names)
    names += soname.encode() + b"\0"

    count = len(entries)
    chain = [0, *range(2, count), 0]  # one bucket: 1 -> 2 -> ... -> end
    hash_table = struct.pack(f"<III{count}I", 1, count, 1, *chain)

    headers = 3
    symbol_offset = _ELF_HEADER + headers * _PROGRAM_HEADER
    hash_offset = symbol_offset + count * _SYMBOL.size
    name_offset = hash_offset + len(hash_table)
    dynamic_offset = -(-(name_offset + len(names)) // 8) * 8
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (_DT_HASH, hash_offset),
            (_DT_STRTAB, name_offset),
            (_DT_SYMTAB, symbol_offset),
            (_DT_STRSZ, len(names)),
            (_DT_SYMENT, _SYMBOL.size),
            (_DT_SONAME, soname_offset),
            (0, 0),
        )
    )
    size = dynamic_offset + len(dynamic)

    def program_header(kind: int, offset: int, length: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, _READ_WRITE, offset, offset, offset, length, length, align)

    image = _elf_header(headers)
    image += program_header(_PT_LOAD, 0, size, 0x1000)
    image += program_header(_PT_DYNAMIC, dynamic_offset, len(dynamic), 8)
    image += program_header(_PT_GNU_STACK, 0, 0, 16)  # without it the loader requests an executable stack
    image += b"".join(entries) + hash_table + names
    return image.ljust(dynamic_offset, b"\0") + dynamic


def _elf_header(program_headers: int) -> bytes:
    with Path("/proc/self/exe").open("rb") as executable:
        header = executable.read(20)
    if header[:6] != b"\x7fELF\x02\x01":
        raise OSError("the emulator needs a 64-bit little-endian Linux Python")
    machine = struct.unpack_from("<H", header, 18)[0]
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    return identity + struct.pack(
        "<HHIQQQIHHHHHH",
        _ET_DYN, machine, 1, 0, _ELF_HEADER, 0, 0, _ELF_HEADER, _PROGRAM_HEADER, program_headers, 64, 0, 0,
    )  # fmt: skip


def rename_undefined(image: bytes, names: Mapping[str, str]) -> bytes:
    """Returns an ELF64 object file with renamed undefined symbols.

    Args:
        image: Relocatable object; other bytes are returned unchanged.
        names: New name by old name of undefined symbols, of the same length.
    """
    if not image.startswith(b"\x7fELF"):
        return image
    changed = bytearray(image)
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [_SECTION.unpack_from(image, table + i * size) for i in range(count)]
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind != _SHT_SYMTAB:
            continue
        strings = sections[link][4]
        for entry in range(start, start + length, _SYMBOL.size):
            name_offset, _, _, section, _, _ = _SYMBOL.unpack_from(image, entry)
            begin = strings + name_offset
            name = image[begin : image.index(b"\0", begin)].decode()
            if section == 0 and name in names:
                assert len(names[name]) == len(name), f"{name} cannot become {names[name]} in place"
                changed[begin : begin + len(name)] = names[name].encode()
    return bytes(changed)
