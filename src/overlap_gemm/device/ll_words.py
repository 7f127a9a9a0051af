"""LL packets: data that is its own flag, awaited by the reader at its destination.

Protocol of a 32-bit word of a slot:

- Empty: the word is `EMPTY`.
- Writer: stores data that is never `EMPTY` (``st.relaxed.sys``). No fence and no flag follow.
- Reader: loads until the word is not `EMPTY` (``ld.relaxed.sys``), takes it, stores `EMPTY` again.

So data takes one trip; with a flag, the flag's store must wait for the data's. (It is a queue of one
producer and one consumer without a lock: Lamport, "Proving the Correctness of Multiprocess Programs", IEEE
Transactions on Software Engineering, 1977.)

Memory order: each access is relaxed at system scope. Each 32-bit element of a vector access is indivisible
(PTX ISA, memory consistency model). A word that is not `EMPTY` is the value stored there. Words need no order
among each other: each is awaited. Reuse needs order: the caller ensures that the next store to a word
comes after the reader's `EMPTY` (:mod:`overlap_gemm.exchange.call`), and that nothing else is stored there.

`EMPTY` has all 32 bits set: two 16-bit NaNs, or one fp32 NaN. Arithmetic does not return this NaN, but a
copied operand may contain it. `store_words` stores `OTHER_NANS` in place of such a word: other NaNs.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from overlap_gemm.device.failure import NOTHING, FailureSite
from overlap_gemm.device.flags import WaitBound, fail
from overlap_gemm.device.memory import CHUNK_WORDS, load_chunk, store_chunk
from overlap_gemm.device.traced import Address, Scalar
from overlap_gemm.spec import EMPTY_BYTE

EMPTY = EMPTY_BYTE * 0x01010101

OTHER_NANS = 0x7FFF7FFF


@cute.jit
def store_words(address: Int64, words: cute.Tensor) -> None:
    """Stores the four words of a 16-byte chunk by one ``st.relaxed.sys``; replaces words that are `EMPTY`.

    Args:
        address: Destination in the reader's memory, a multiple of 16.
        words: Four 32-bit registers.
    """
    _store(address, [_filled(words[i]) for i in range(CHUNK_WORDS)])


@cute.jit
def load_words(address: Int64, words: cute.Tensor) -> None:
    """Loads the four words of a chunk by one ``ld.relaxed.sys``, whether or not they have arrived."""
    load_chunk("ld.relaxed.sys.global.v4.b32", address, words)


@cute.jit
def take_words(
    addresses: tuple[Int64, ...],
    words: cute.Tensor,
    sources: tuple[Int32, ...],
    epoch: Uint64,
    bound: WaitBound,
    site: FailureSite,
) -> None:
    """Waits until all words of some chunks have arrived, then stores `EMPTY` in their places.

    Each lane that calls it takes its chunks, which no other lane takes. The lane has loaded them once
    (`load_words`). They are loaded again until no word is `EMPTY`. If the limit expires, writes a failure
    record that names the first missing chunk's source, and traps.

    Args:
        addresses: Addresses of the chunks in this rank's memory; an address may be repeated.
        words: Loaded words, ``(4, chunks)``; complete on return.
        sources: Source rank of each chunk.
        epoch: Epoch for the failure record.
        bound: Limit and place of the record.
        site: Place of the wait. Its ``index`` is that of rank 0's flag; the record of a missing chunk has
            ``index + source``.
    """
    if _missing(words) < len(addresses):
        start = cute.arch.globaltimer()
        missing = _missing(words)
        while missing < len(addresses):
            for i in cutlass.range_constexpr(len(addresses)):
                load_words(addresses[i], words[(None, i)])
            missing = _missing(words)
            if bound.timeout_ns > 0 and cute.arch.globaltimer() - start > bound.timeout_ns:
                source = sources[0]
                for i in cutlass.range_constexpr(1, len(sources)):
                    source = cutlass.select_(missing == i, sources[i], source)
                late = site._replace(source=source, index=site.index + source)
                fail(bound, late, epoch, Uint64(NOTHING))
                start = cute.arch.globaltimer()
    for i in cutlass.range_constexpr(len(addresses)):
        _clear(addresses[i])


def _missing(words: cute.Tensor) -> Any:
    """Returns the number of the first chunk that has an `EMPTY` word, or the number of chunks if none has."""
    first = Int32(cute.size(words, mode=[1]))
    for i in reversed(range(cute.size(words, mode=[1]))):
        empty = [words[j, i] == EMPTY for j in range(CHUNK_WORDS)]
        first = cutlass.select_((empty[0] | empty[1]) | (empty[2] | empty[3]), Int32(i), first)
    return first


def _filled(word: Scalar) -> Any:
    return cutlass.select_(word == EMPTY, Uint32(OTHER_NANS), word)


def _clear(address: Address) -> None:
    _store(address, [Uint32(EMPTY)] * CHUNK_WORDS)


def _store(address: Address, words: list[Any]) -> None:
    store_chunk("st.relaxed.sys.global.v4.b32", Int64(address), words)
