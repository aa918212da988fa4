"""What a call of the tensor-core rungs is: its compile-time facts, its tensors, and which keys a row sees.

All tensors are views (N, d, heads, B) of any strides but 1 along d, so [B, N, H, d], [B·H, N, d] with B = 1 here, and
packed sequences [ΣN, H, d] need no copy. Keys that row i of a sequence sees: j < ``key_end(i)``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from cute_impl import ptx

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64  # of a wgmma
TENSORS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time: width, mask, packed sequences or not, query rows of a CTA, keys of a tile."""

    d: int
    causal: bool
    packed: bool
    rows: int
    keys: int

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply, 64 rows each."""
        return self.rows // WARPGROUP_ROWS

    @property
    def tile_bytes(self) -> int:
        """Of a tile of K or V."""
        return self.keys * self.d * 2

    @property
    def q_bytes(self) -> int:
        return self.rows * self.d * 2


class Fixed:
    """An object whose attributes never change once they are set: dynamic loops and branches take it as it is."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "Fixed":
        return self


class Operands(Fixed):
    """The arguments of a launch on the device: addresses and extents as integers, strides in elements.

    addresses: q, k, v, o, lse (0: not wanted), and the offsets of packed sequences (0 otherwise), Int64. extents: N of
    q, N of k, heads of q, heads of k, B, Int32. strides: of N, heads, B for each of q, k, v, o, Int64, multiples of 8.
    """

    def __init__(self, config: Config, addresses: list, extents: list, strides: list):
        self.config = config
        self.address = dict(zip((*TENSORS, "lse", "offsets_q", "offsets_k"), addresses, strict=True))
        self.n_q, self.n_k, self.heads_q, self.heads_k, self.batch = extents
        self.strides = {name: strides[3 * i : 3 * i + 3] for i, name in enumerate(TENSORS)}

    def tensor(self, name: str) -> cute.Tensor:
        """q, k or v as (N, d, heads, B)."""
        n, heads = (self.n_q, self.heads_q) if name == "q" else (self.n_k, self.heads_k)
        row, head, batch = (cute.assume(stride, divby=8) for stride in self.strides[name])
        pointer = cute.make_ptr(BFloat16, self.address[name], cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(
            pointer, cute.make_layout((n, self.config.d, heads, self.batch), stride=(row, 1, head, batch))
        )


class Sequence(Fixed):
    """One sequence: where its rows and keys start in q and k, and how many they are."""

    def __init__(self, operands: Operands, batch: Int32):
        self.config = operands.config
        self.q_start, self.k_start = Int32(0), Int32(0)
        self.n_q, self.n_k = operands.n_q, operands.n_k
        self.batch = batch
        if operands.config.packed:
            self.batch = Int32(0)
            self.q_start, q_end = self._bounds(operands.address["offsets_q"], batch)
            self.k_start, k_end = self._bounds(operands.address["offsets_k"], batch)
            self.n_q, self.n_k = q_end - self.q_start, k_end - self.k_start

    def _bounds(self, offsets: Int64, batch: Int32) -> tuple[Int32, Int32]:
        where = offsets + Int64(batch) * 4
        return Int32(ptx.ld_b32("global", where)), Int32(ptx.ld_b32("global", where + 4))

    def key_end(self, row: Int32) -> Int32:
        """How many keys a row sees, 0 … n_k; of rows beyond the last as if they existed."""
        if not self.config.causal:
            return self.n_k
        return cutlass.max(cutlass.min(row + 1 + (self.n_k - self.n_q), self.n_k), 0)

    def key_tiles(self, last_row: Int32) -> Int32:
        """How many tiles hold a key that some row up to ``last_row`` sees."""
        return (self.key_end(last_row) + (self.config.keys - 1)) // self.config.keys
