"""Stages of shared memory between the warp that loads and the warpgroups that multiply.

Of each stage one mbarrier, "full", counts the bytes that TMA writes, another, "empty", the warps that have left it.
A CTA counts its tiles: use i takes stage i mod stages, and its phase of both barriers has the parity of i / stages.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_impl import ptx
from cute_impl.fmha.problem import WARPGROUP, WARPGROUP_ROWS, Config, Fixed, Operands, Sequence
from cute_impl.fmha.warpgroup import tile_layout, tiles_of

SMEM_BYTES = 227 * 1024  # of a CTA
WARP = 32
LOADER_REGISTERS = 24
MULTIPLIER_REGISTERS = {2: 240, 3: 160}  # a thread of so many warpgroups, beside one that loads


def stages(config: Config) -> int:
    """Of K, and as many of V: as fit, a power of 2."""
    fit = (SMEM_BYTES - config.q_bytes - 1024) // (2 * config.tile_bytes)
    return 1 << (fit.bit_length() - 1)


def smem_bytes(config: Config, q_stages: int = 1) -> int:
    """The stages of Q, K and V, and two mbarriers each."""
    return q_stages * (config.q_bytes + 16) + 2 * stages(config) * (config.tile_bytes + 16)


class Ring(Fixed):
    """Stages of one buffer, a power of 2, left by ``readers`` warps each time."""

    def __init__(self, barriers: cute.Pointer, count: int, readers: int, size: int):
        self.full, self.empty = barriers, barriers + count
        self.count, self.readers, self.size = count, readers, size

    def initialise(self):
        """By one thread, before any other touches them."""
        for i in range(self.count):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, self.readers)

    def stage(self, use: Int32) -> Int32:
        return use & (self.count - 1)

    def _parity(self, use: Int32) -> Int32:
        return use >> (self.count.bit_length() - 1) & 1

    def wait_full(self, use: Int32):
        """The tile has arrived."""
        ptx.mbarrier_wait((self.full + self.stage(use)).toint(), self._parity(use))

    def wait_empty(self, use: Int32):
        """All have left what this use replaces; at once if it is the stage's first."""
        ptx.mbarrier_wait((self.empty + self.stage(use)).toint(), self._parity(use) ^ 1)

    def release(self, use: Int32):
        """This warp has left the stage; it must have waited until it was full."""
        first_lane = cute.arch.thread_idx()[0] % WARP == 0
        ptx.mbarrier_arrive_if((self.empty + self.stage(use)).toint(), first_lane)

    def load(self, atom: cute.CopyAtom, part: tuple, tile: Int32, use: Int32):
        """One warp: ask for a tile when the stage is empty. part: (shared, global) tiles as TMA takes them."""
        shared, source = part
        full = self.full + self.stage(use)
        self.wait_empty(use)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.size)
        cute.copy(atom, source[None, tile], shared[None, self.stage(use)], tma_bar_ptr=full)


class Buffers(Fixed):
    """A CTA's shared memory: sQ (rows, d, q_stages), sK and sV (keys, d, stages), and their rings."""

    def __init__(self, config: Config, smem: SmemAllocator, q_stages: int = 1):
        count, readers = stages(config), config.warpgroups * WARPGROUP // WARP
        layouts = tile_layout(config.rows, config.d, q_stages), *[tile_layout(config.keys, config.d, count)] * 2
        self.sQ, self.sK, self.sV = [
            smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in layouts
        ]
        barriers = smem.allocate_array(Int64, 2 * (q_stages + 2 * count), byte_alignment=8)
        self.q = Ring(barriers, q_stages, readers, config.q_bytes)
        self.k = Ring(barriers + 2 * q_stages, count, readers, config.tile_bytes)
        self.v = Ring(barriers + 2 * (q_stages + count), count, readers, config.tile_bytes)

    @cute.jit
    def initialise(self):
        """By all threads of the CTA."""
        if cute.arch.thread_idx()[0] == 0:
            for ring in (self.q, self.k, self.v):
                ring.initialise()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    def parts(self, operands: Operands, tensors: list, sequence: Sequence, atoms: list, head: Int32) -> list:
        """(shared, global) tiles of q, k and v of one query head."""
        config = operands.config
        head_k = head // (operands.heads_q // operands.heads_k)
        which = (
            (self.sQ, config.rows, sequence.q_start, head),
            (self.sK, config.keys, sequence.k_start, head_k),
            (self.sV, config.keys, sequence.k_start, head_k),
        )
        return [
            tiles_of(atom, tensor, *x, batch=sequence.batch)
            for atom, tensor, x in zip(atoms, tensors, which, strict=True)
        ]


class Share(Fixed):
    """What one warpgroup does of a tile of query rows.

    key_tiles: of the CTA; own: how many of them its rows see, the first ones in memory; masked_from: the first tile of
    which some of its rows do not see every key.
    """

    def __init__(self, sequence: Sequence, tile: Int32, index: Int32):
        config = sequence.config
        first_row = tile * config.rows + index * WARPGROUP_ROWS
        self.key_tiles = sequence.key_tiles(tile * config.rows + config.rows - 1)
        self.own = sequence.key_tiles(first_row + WARPGROUP_ROWS - 1)
        self.masked_from = sequence.key_end(first_row) // config.keys
