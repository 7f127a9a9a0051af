"""LL packets: words that are their own flag, which a reader awaits at their destination.

A word of memory in which nothing has arrived is `EMPTY`. A writer stores words that are never `EMPTY`. A
reader loads until no word is, takes them, and makes them `EMPTY` again. So data needs no flag after it, and
no fence between the two. It takes one trip; a flag's store must follow the data's arrival. (A queue of
one producer and one consumer without a lock: Lamport, "Proving the Correctness of Multiprocess Programs",
IEEE Transactions on Software Engineering, 1977.)

Why it is sound: every access is a relaxed one at system scope, of 32 bits, each of which is indivisible (PTX
ISA, memory consistency model: a vector access is one access per element, in no order). A word that is not
`EMPTY` is the value that was stored there. Nothing has to be ordered between two words, since each is awaited
separately. Reuse must be ordered: the caller proves that the writer's next store comes after the reader's
`EMPTY` (:mod:`overlap_gemm.exchange.call`), and that nothing else is ever written there. A word has no epoch,
so none that could become too old.

`EMPTY` is two 16-bit NaNs whose bits are all set. Arithmetic makes no such NaN, but a copied operand may be
one: `store_words` turns a word of two of them into two other NaNs.
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
    """Stores a chunk's four words, none of which stays `EMPTY`: ``st.relaxed.sys``.

    Args:
        address: Destination, a multiple of 16.
        words: Registers of 32 bits.
    """
    _store(address, [_filled(words[i]) for i in range(CHUNK_WORDS)])


@cute.jit
def load_words(address: Int64, words: cute.Tensor) -> None:
    """Loads a chunk's four words, whether or not they have arrived: ``ld.relaxed.sys``."""
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
    """Waits until chunks that `load_words` has loaded have arrived, and resets their places to `EMPTY`.

    Args:
        addresses: Address of each chunk, in this rank's own memory; one may be listed twice.
        words: Result of `load_words`, ``(4, chunks)``; complete after this.
        sources: Source rank of each chunk.
        epoch: Epoch for the failure record.
        bound: Time limit and failure record.
        site: Place of the wait for rank 0, for the record; the flags of other ranks are the next ones.
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
    """Returns the number of the first chunk with an `EMPTY` word; the number of chunks if there is none."""
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
