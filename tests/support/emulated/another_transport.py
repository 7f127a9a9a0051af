"""A transport from outside, by public names alone: one thread stores a stage chunk by chunk."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from overlap_gemm import TransportSpec
from overlap_gemm.transports import PeerBulk

CHUNK_BYTES = 16
traced: list[str] = []
"""Types of the stages that kernels traced by this process store."""


@dataclass(frozen=True)
class ChunkStores(PeerBulk):
    """Stores by ordinary stores of 16 bytes, each followed by nothing; the flag comes after all of them."""

    @cute.jit
    def put(self, target, stage, num_bytes):
        """Stores the stage's first bytes in the tile's slot; one thread."""
        traced.append(str(stage.element_type))
        chunks = cute.zipped_divide(stage, (CHUNK_BYTES * 8 // stage.element_type.width,))
        for i in cutlass.range(num_bytes // CHUNK_BYTES, unroll=1):
            values = cute.make_rmem_tensor(chunks.shape[0], stage.element_type)
            cute.autovec_copy(chunks[(None, i)], values)
            self.store(target.at[i * CHUNK_BYTES], values)


SPEC = TransportSpec("chunk_stores", shards=False, tiles=True, device=f"{__name__}:ChunkStores")
