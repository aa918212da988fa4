"""FMHA forward, rung ``k5``: warp specialisation. Schedules ``wgmma128`` and ``wgmma176``.

What is new against k4: one warp does nothing but load, several stages ahead, and its registers go to the warpgroups
that multiply. These never wait for each other, so that one multiplies while another exponentiates; within a warpgroup
products and softmax still take turns. O leaves in pieces of 16 bytes.

  a warp           asks for Q, then K and V of each tile as soon as a stage is empty
  each warpgroup   waits for K, S = Q · Kᵀ, leaves K; mask, softmax, O times α; waits for V, O += P · V, leaves V

At d = 128 two warpgroups of 64 rows and 240 registers; at d = 64 three of 160. Shared memory: sQ bf16 [rows, d], sK
and sV [keys, d] of each stage, mbarriers: see ``ring.smem_bytes``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_impl.fmha import ring
from cute_impl.fmha.problem import WARPGROUP, Config, Operands, Sequence
from cute_impl.fmha.ring import LOADER_REGISTERS, MULTIPLIER_REGISTERS, WARP, Buffers, Share
from cute_impl.fmha.softmax import Softmax, mask, pack, rescale
from cute_impl.fmha.store import store
from cute_impl.fmha.values import clear_values
from cute_impl.fmha.warpgroup import Products, copies, rows_of


class K5:
    def __init__(self, config: Config):
        self.config = config

    @staticmethod
    def smem_bytes(config: Config) -> int:
        return ring.smem_bytes(config)

    @staticmethod
    def configure(d: int, causal: bool, packed: bool, keys: int) -> Config:
        """Three warpgroups where a lane's S, P and O leave room in 160 registers."""
        return Config(d, causal, packed, rows=192 if d == 64 and keys == 128 else 128, keys=keys)

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
        threads = (self.config.warpgroups + 1) * WARPGROUP
        self.kernel(atoms, tensors, addresses, extents, strides, c, scale).launch(
            grid=[tiles, operands.heads_q, sequences], block=[threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, atoms: list, tensors: list, addresses: list, extents: list, strides: list, c: Float32, scale: Float32
    ):
        config = self.config
        operands = Operands(config, addresses, extents, strides)
        tile, head, batch = cute.arch.block_idx()
        sequence = Sequence(operands, batch)
        buffers = Buffers(config, SmemAllocator())
        index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        if tile * config.rows < sequence.n_q:
            buffers.initialise()
            if index == config.warpgroups:
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
                if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % WARPGROUP // WARP) == 0:
                    parts = buffers.parts(operands, tensors, sequence, atoms, head)
                    self.load(buffers, atoms, parts, sequence, tile)
            else:
                cute.arch.setmaxregister_increase(MULTIPLIER_REGISTERS[config.warpgroups])
                self.attend(buffers, operands, sequence, tile, head, index, c, scale)

    @cute.jit
    def load(self, buffers: cutlass.Constexpr, atoms: list, parts: list, sequence: cutlass.Constexpr, tile: Int32):
        """One warp: Q, then K and V from the last tile that a row of the CTA sees to the first."""
        key_tiles = Share(sequence, tile, 0).key_tiles
        buffers.q.load(atoms[0], parts[0], tile, 0)
        for i in cutlass.range(key_tiles, unroll=1):
            buffers.k.load(atoms[1], parts[1], key_tiles - 1 - i, i)
            buffers.v.load(atoms[2], parts[2], key_tiles - 1 - i, i)

    @cute.jit
    def attend(
        self,
        buffers: cutlass.Constexpr,
        operands: cutlass.Constexpr,
        sequence: cutlass.Constexpr,
        tile: Int32,
        head: Int32,
        index: Int32,
        c: Float32,
        scale: Float32,
    ):
        """One warpgroup: its 64 rows of a tile."""
        config = self.config
        share = Share(sequence, tile, index)
        products = Products(config, buffers.sQ, buffers.sK, buffers.sV, index)
        softmax = Softmax(c, scale)
        softmax.reset()
        products.rO.fill(0.0)
        rows = [tile * config.rows + row for row in rows_of(index)]
        skipped = share.key_tiles - share.own
        for i in cutlass.range(skipped, unroll=1):
            buffers.k.wait_full(i)
            buffers.k.release(i)
            buffers.v.wait_full(i)
            buffers.v.release(i)
        buffers.q.wait_full(0)
        for i in cutlass.range(skipped, share.key_tiles, unroll=1):
            key_tile = share.key_tiles - 1 - i
            buffers.k.wait_full(i)
            products.scores(buffers.k.stage(i))
            warpgroup.wait_group(0)
            buffers.k.release(i)
            if key_tile >= share.masked_from:
                mask(products.rS, sequence, rows, key_tile * config.keys)
            rescale(products.rO, softmax.step(products.rS))
            pack(products.rS, products.rP)
            buffers.v.wait_full(i)
            if cutlass.const_expr(config.packed):
                used = sequence.n_k - key_tile * config.keys
                clear_values(buffers.sV[None, None, buffers.v.stage(i)], used, index)
            products.add_values(buffers.v.stage(i))
            warpgroup.wait_group(0)
            buffers.v.release(i)
        store(operands, sequence, softmax, products.rO, tile, index, head)
