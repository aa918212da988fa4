"""Which tile of query rows a persistent CTA takes next.

Items are numbered in the order in which CTAs take them: by sections of heads whose keys and values fit the L2 cache
together, within a section by tiles, heavy ones first, within a tile by heads, so that those of one KV group are
neighbours. The first item of a CTA is its number, every further one the next that nobody has.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_impl import ptx
from cute_impl.fmha.problem import Fixed, Operands

L2_BYTES = 32 << 20  # of 50 MB, for the keys and values of a section


def section_heads(keys: int, d: int, group: int) -> int:
    """Query heads of a section: whole groups, at least one, each of so many keys."""
    return group * max(1, L2_BYTES // max(1, 4 * keys * d))


class Work(Fixed):
    """The items of a launch. tiles: of the longest of the ``sequences``; section: heads; counter: address, Int64."""

    def __init__(self, operands: Operands, tiles: Int32, sequences: Int32, section: Int32, counter: Int64):
        self.causal = operands.config.causal
        self.heads_q, self.tiles, self.section, self.counter = operands.heads_q, tiles, section, counter
        self.heads = operands.heads_q * sequences
        self.items = self.heads * tiles

    def place(self, item: Int32) -> tuple[Int32, Int32, Int32]:
        """Its tile, query head and sequence."""
        size = self.section * self.tiles
        first, within = item // size * self.section, item % size
        width = cutlass.min(self.section, self.heads - first)
        tile, head = within // width, first + within % width
        if self.causal:
            tile = self.tiles - 1 - tile
        return tile, head % self.heads_q, head // self.heads_q

    @cute.jit
    def ask(self) -> Int32:
        """The first lane of a warp takes the next item; ``answer`` tells the others."""
        item = Int32(0)
        if cute.arch.lane_idx() == 0:
            item = ptx.atom_add_relaxed(self.counter, Int32(1)) + cute.arch.grid_dim()[0]
        return item

    def answer(self, item: Int32) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(item, 0))
