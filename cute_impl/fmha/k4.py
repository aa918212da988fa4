"""FMHA forward, rung ``k4``: tensor cores. Schedules ``wgmma128`` and ``wgmma176``.

What is new against k3: the products run as ``wgmma`` from tiles that TMA swizzles, S and P never leave the registers,
and scores are exponentiated as powers of two. Two warpgroups of 64 query rows share each tile of keys; tiles are
visited from the last that a row of the CTA sees to the first. K has one buffer and V the other, as in k3, so loads run
beside arithmetic, but products and softmax take turns.

  thread 0    asks for Q, K, V of the last tile; for the K before when all have left K, for the V before likewise
  all         wait for K, S = Q · Kᵀ; mask, softmax, O times α; wait for V, O += P · V

Shared memory: sQ bf16 [128, d], sK and sV [keys, d], three mbarriers: with 128 keys 96 KB and 24 bytes at d = 128,
48 KB and 24 bytes at 64.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_impl.fmha.problem import WARPGROUP, WARPGROUP_ROWS, Config, Operands, Sequence
from cute_impl.fmha.softmax import Softmax, mask, pack, rescale, write
from cute_impl.fmha.values import clear_values
from cute_impl.fmha.warpgroup import Products, copies, rows_of, tile_layout, tiles_of

BARRIERS = Q, K, V = 0, 1, 2
ROWS = 128


class K4:
    def __init__(self, config: Config):
        self.config = config

    @staticmethod
    def smem_bytes(config: Config) -> int:
        return config.q_bytes + 2 * config.tile_bytes + 8 * len(BARRIERS)

    @staticmethod
    def configure(d: int, causal: bool, packed: bool, keys: int) -> Config:
        return Config(d, causal, packed, ROWS, keys)

    @cute.jit
    def __call__(
        self,
        addresses: list,
        extents: list,
        strides: list,
        tiles: Int32,
        sequences: Int32,
        c: Float32,
        scale: Float32,
        stream,
    ):
        """addresses, extents, strides: see ``Operands``. tiles: of query rows of the longest of the ``sequences``."""
        operands = Operands(self.config, addresses, extents, strides)
        loads = copies(operands)
        atoms, tensors = [load.atom for load in loads], [load.tma_tensor for load in loads]
        self.kernel(atoms, tensors, addresses, extents, strides, c, scale).launch(
            grid=[tiles, operands.heads_q, sequences], block=[self.config.warpgroups * WARPGROUP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, atoms: list, tensors: list, addresses: list, extents: list, strides: list, c: Float32, scale: Float32
    ):
        config = self.config
        operands = Operands(config, addresses, extents, strides)
        tile, head, batch = cute.arch.block_idx()
        sequence = Sequence(operands, batch)

        smem = SmemAllocator()
        sQ, sK, sV = [
            smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (tile_layout(rows, config.d, 1) for rows in (config.rows, config.keys, config.keys))
        ]
        barriers = smem.allocate_array(Int64, len(BARRIERS), byte_alignment=8)
        if tile * config.rows < sequence.n_q:
            self.attend(atoms, tensors, operands, sequence, sQ, sK, sV, barriers, tile, head, c, scale)

    @cute.jit
    def attend(
        self,
        atoms: list,
        tensors: list,
        operands: cutlass.Constexpr,
        sequence: cutlass.Constexpr,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        barriers: cute.Pointer,
        tile: Int32,
        head: Int32,
        c: Float32,
        scale: Float32,
    ):
        """The rows of one tile."""
        config = self.config
        index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        first_row = tile * config.rows + index * WARPGROUP_ROWS
        head_k = head // (operands.heads_q // operands.heads_k)
        starts = (sequence.q_start, sequence.k_start, sequence.k_start)
        parts = [
            tiles_of(*x, start, own, sequence.batch)
            for x, start, own in zip(
                zip(atoms, tensors, (sQ, sK, sV), (config.rows, config.keys, config.keys), strict=True),
                starts,
                (head, head_k, head_k),
                strict=True,
            )
        ]
        key_tiles = sequence.key_tiles(tile * config.rows + config.rows - 1)
        own_tiles = sequence.key_tiles(first_row + WARPGROUP_ROWS - 1)
        unmasked_keys = sequence.key_end(first_row)

        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(len(BARRIERS)):
                cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.load(Q, tile, atoms, parts, barriers)
        if key_tiles > 0:
            self.load(K, key_tiles - 1, atoms, parts, barriers)
            self.load(V, key_tiles - 1, atoms, parts, barriers)

        products = Products(config, sQ, sK, sV, index)
        softmax = Softmax(c, scale)
        softmax.reset()
        products.rO.fill(0.0)
        rows = [tile * config.rows + row for row in rows_of(index)]
        cute.arch.mbarrier_wait(barriers + Q, 0)
        for i in cutlass.range(key_tiles, unroll=1):
            key_tile = key_tiles - 1 - i
            cute.arch.mbarrier_wait(barriers + K, i % 2)
            if key_tile < own_tiles:
                products.scores(0)
                warpgroup.wait_group(0)
            cute.arch.sync_threads()  # all have left K
            if key_tile > 0:
                self.load(K, key_tile - 1, atoms, parts, barriers)
            if key_tile < own_tiles:
                if (key_tile + 1) * config.keys > unmasked_keys:
                    mask(products.rS, sequence, rows, key_tile * config.keys)
                rescale(products.rO, softmax.step(products.rS))
                pack(products.rS, products.rP)
            cute.arch.mbarrier_wait(barriers + V, i % 2)
            if key_tile < own_tiles:
                if cutlass.const_expr(config.packed):
                    clear_values(sV[None, None, 0], sequence.n_k - key_tile * config.keys, index)
                products.add_values(0)
                warpgroup.wait_group(0)
            cute.arch.sync_threads()  # all have left V
            if key_tile > 0:
                self.load(V, key_tile - 1, atoms, parts, barriers)
        write(operands, sequence, softmax, products.rO, tile, index, head)

    @cute.jit
    def load(self, which: cutlass.Constexpr, tile: Int32, atoms: list, parts: list, barriers: cute.Pointer):
        """Warp 0: arm the barrier of Q, K or V and ask for a tile."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            shared, source = parts[which]
            size = cutlass.const_expr(self.config.q_bytes if which == Q else self.config.tile_bytes)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + which, size)
            cute.copy(atoms[which], source[None, tile], shared[None, 0], tma_bar_ptr=barriers + which)
