"""FMHA forward, rung ``k6``: products beside softmax. Schedules ``wgmma128`` and ``wgmma176``.

What is new against k5: a warpgroup begins Q · Kᵀ of the next tile and P · V of this one, and exponentiates the next
while P · V still runs; warpgroups take turns in beginning products, so that one's softmax falls into the other's
products. Tiles with a mask come first, the rest never looks at one. As many CTAs as multiprocessors take one tile of
query rows after another, heavy ones first (``work``); loads of the next run beside the end of this.

  a warp           takes an item; writes where it lies beside Q; asks for K 0, then K i and V i − 1, at last for the
                   last V, each as soon as its stage is empty
  each warpgroup   S 0 = Q · Kᵀ 0, softmax, P 0. Then for each tile i: when it is its turn, begins S i = Q · Kᵀ i and
                   O += P i − 1 · V i − 1; waits for S i, leaves K i; mask, softmax; waits for O, leaves V i − 1;
                   O times α, P i. At last O += P · V of the last tile

Threads, registers and shared memory are k5's, a second stage of Q where it fits, so that the next item's is there in
time, and 16 bytes beside each that say where its item lies.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_impl import ptx
from cute_impl.fmha import ring
from cute_impl.fmha.k5 import K5
from cute_impl.fmha.problem import WARPGROUP, Config, Fixed, Operands, Sequence
from cute_impl.fmha.ring import LOADER_REGISTERS, MULTIPLIER_REGISTERS, WARP, Buffers, Share
from cute_impl.fmha.softmax import Softmax, mask, pack, rescale_if, some_grown
from cute_impl.fmha.store import store
from cute_impl.fmha.values import clear_values
from cute_impl.fmha.warpgroup import Products, copies, rows_of
from cute_impl.fmha.work import Work

SLOT_BYTES = 16  # tile, head and sequence of an item; tile −1: there is none left
TURNS = 4  # the first named barrier of turns; 0 is the CTA's, 1 to 3 those of ``clear_values``


class Turns(Fixed):
    """Warpgroups begin products in turns, as often each; a warpgroup's barrier opens when the one before has begun."""

    def __init__(self, index: Int32, count: int):
        self.index, self.count = index, count
        self.own, self.next = TURNS + index, TURNS + (index + 1) % count

    def wait(self):
        cute.arch.barrier(barrier_id=self.own, number_of_threads=2 * WARPGROUP)

    def give(self):
        cute.arch.barrier_arrive(barrier_id=self.next, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def begin(self):
        """The last gives the first its first turn."""
        if self.index == self.count - 1:
            self.give()

    @cute.jit
    def end(self):
        """The first takes the turn that is left."""
        if self.index == 0:
            self.wait()


class K6:
    configure = staticmethod(K5.configure)

    def __init__(self, config: Config):
        self.config = config

    @staticmethod
    def q_stages(config: Config) -> int:
        """Two where they fit."""
        return 2 if ring.smem_bytes(config, 2) + 2 * SLOT_BYTES <= ring.SMEM_BYTES else 1

    @staticmethod
    def smem_bytes(config: Config) -> int:
        return ring.smem_bytes(config, K6.q_stages(config)) + K6.q_stages(config) * SLOT_BYTES

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
        counter: Int64,
        section: Int32,
        ctas: Int32,
        stream,
    ):
        """addresses, extents, strides: see ``Operands``; tiles, sequences, section, counter: see ``Work``."""
        operands = Operands(self.config, addresses, extents, strides)
        loads = copies(operands)
        atoms, tensors = [load.atom for load in loads], [load.tma_tensor for load in loads]
        threads = (self.config.warpgroups + 1) * WARPGROUP
        work = [tiles, sequences, section, counter]
        self.kernel(atoms, tensors, addresses, extents, strides, work, c, scale).launch(
            grid=[ctas, 1, 1], block=[threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        atoms: list,
        tensors: list,
        addresses: list,
        extents: list,
        strides: list,
        work: list,
        c: Float32,
        scale: Float32,
    ):
        config = self.config
        operands = Operands(config, addresses, extents, strides)
        smem = SmemAllocator()
        q_stages = self.q_stages(config)
        buffers = Buffers(config, smem, q_stages)
        slot = smem.allocate(q_stages * SLOT_BYTES, byte_alignment=16).toint()
        index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        buffers.initialise()
        if index == config.warpgroups:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % WARPGROUP // WARP) == 0:
                self.load(buffers, slot, atoms, tensors, operands, Work(operands, *work))
        else:
            cute.arch.setmaxregister_increase(MULTIPLIER_REGISTERS[config.warpgroups])
            self.multiply(buffers, slot, operands, index, c, scale)

    @cute.jit
    def load(
        self,
        buffers: cutlass.Constexpr,
        slot: Int32,
        atoms: list,
        tensors: list,
        operands: cutlass.Constexpr,
        work: cutlass.Constexpr,
    ):
        """One warp: everything the CTA reads, item by item."""
        item = cute.arch.block_idx()[0]
        q_use, kv_use = Int32(0), Int32(0)  # items and tiles of keys so far
        while item < work.items:
            following = work.ask()
            tile, head, batch = work.place(item)
            sequence = Sequence(operands, batch)
            if tile * self.config.rows < sequence.n_q:
                parts = buffers.parts(operands, tensors, sequence, atoms, head)
                key_tiles = Share(sequence, tile, 0).key_tiles
                self.announce(buffers, slot, q_use, tile, head, batch)
                buffers.q.load(atoms[0], parts[0], tile, q_use)
                for i in cutlass.range(key_tiles, unroll=1):
                    buffers.k.load(atoms[1], parts[1], key_tiles - 1 - i, kv_use + i)
                    if i > 0:
                        buffers.v.load(atoms[2], parts[2], key_tiles - i, kv_use + i - 1)
                if key_tiles > 0:
                    buffers.v.load(atoms[2], parts[2], 0, kv_use + key_tiles - 1)
                q_use += 1
                kv_use += key_tiles
            item = work.answer(following)
        self.announce(buffers, slot, q_use, Int32(-1), Int32(0), Int32(0))
        with cute.arch.elect_one():
            ptx.mbarrier_arrive((buffers.q.full + buffers.q.stage(q_use)).toint())

    def announce(self, buffers: Buffers, slot: Int32, use: Int32, tile: Int32, head: Int32, batch: Int32):
        """Write where an item lies, to be read when its Q has arrived."""
        buffers.q.wait_empty(use)
        with cute.arch.elect_one():
            ptx.st_v4("shared", slot + buffers.q.stage(use) * SLOT_BYTES, [tile, head, batch, Int32(0)])

    def announced(self, buffers: Buffers, slot: Int32, use: Int32) -> list[Int32]:
        """Tile, head and sequence of the item, once its Q has arrived."""
        buffers.q.wait_full(use)
        words = ptx.ld_v4("shared", slot + buffers.q.stage(use) * SLOT_BYTES)
        cute.arch.sync_warp()  # all lanes have read before one of them leaves Q
        return [cute.arch.make_warp_uniform(word) for word in words[:3]]

    @cute.jit
    def multiply(
        self,
        buffers: cutlass.Constexpr,
        slot: Int32,
        operands: cutlass.Constexpr,
        index: Int32,
        c: Float32,
        scale: Float32,
    ):
        """One warpgroup: its rows of every item."""
        turns = Turns(index, self.config.warpgroups)
        products = Products(self.config, buffers.sQ, buffers.sK, buffers.sV, index)
        softmax = Softmax(c, scale)
        turns.begin()
        q_use, kv_use = Int32(0), Int32(0)
        tile, head, batch = self.announced(buffers, slot, q_use)
        while tile >= 0:
            sequence = Sequence(operands, batch)
            share = Share(sequence, tile, index)
            self.attend(buffers, turns, products, softmax, sequence, share, tile, index, q_use, kv_use)
            buffers.q.release(q_use)
            if share.own > 0:
                last = kv_use + share.key_tiles - 1
                buffers.v.wait_full(last)
                products.add_values(buffers.v.stage(last))
                warpgroup.wait_group(0)
                buffers.v.release(last)
            store(operands, sequence, softmax, products.rO, tile, index, head)
            q_use += 1
            kv_use += share.key_tiles
            tile, head, batch = self.announced(buffers, slot, q_use)
        turns.end()

    @cute.jit
    def attend(
        self,
        buffers: cutlass.Constexpr,
        turns: cutlass.Constexpr,
        products: cutlass.Constexpr,
        softmax: cutlass.Constexpr,
        sequence: cutlass.Constexpr,
        share: cutlass.Constexpr,
        tile: Int32,
        index: Int32,
        q_use: Int32,
        kv_use: Int32,
    ):
        """An item up to the last tile's weights. kv_use: the use of K and V with which it begins."""
        config = self.config
        q_stage = buffers.q.stage(q_use)
        softmax.reset()
        products.rO.fill(0.0)
        rows = [tile * config.rows + row for row in rows_of(index)]
        start = kv_use + share.key_tiles - share.own
        for use in cutlass.range(kv_use, start, unroll=1):
            turns.wait()
            turns.give()
            buffers.k.wait_full(use)
            buffers.k.release(use)
            buffers.v.wait_full(use)
            buffers.v.release(use)
        if share.own > 0:
            key_tile = share.own - 1
            buffers.k.wait_full(start)
            turns.wait()
            products.scores(buffers.k.stage(start), q_stage)
            turns.give()
            warpgroup.wait_group(0)
            buffers.k.release(start)
            if key_tile >= share.masked_from:
                mask(products.rS, sequence, rows, key_tile * config.keys)
            softmax.step(products.rS)  # O is 0 whatever α
            pack(products.rS, products.rP)
            if cutlass.const_expr(config.packed):
                buffers.v.wait_full(start)
                used = sequence.n_k - key_tile * config.keys
                clear_values(buffers.sV[None, None, buffers.v.stage(start)], used, index)
            masked = Int32(0)
            if cutlass.const_expr(config.causal):
                masked = cutlass.max(key_tile - share.masked_from, 0)
                for i in cutlass.range(masked, unroll=1):
                    self.overlap(buffers, turns, products, q_stage, start + 1 + i)
                    first_key = (key_tile - 1 - i) * config.keys
                    self.finish(buffers, products, softmax, start + 1 + i, (sequence, rows, first_key))
            for i in cutlass.range(masked, key_tile, unroll=1):
                self.overlap(buffers, turns, products, q_stage, start + 1 + i)
                self.finish(buffers, products, softmax, start + 1 + i, None)

    def overlap(self, buffers: Buffers, turns: Turns, products: Products, q_stage: Int32, use: Int32):
        """Begin S of a tile and O of the one before; S is there."""
        buffers.k.wait_full(use)
        turns.wait()
        products.scores(buffers.k.stage(use), q_stage)
        buffers.v.wait_full(use - 1)
        products.add_values(buffers.v.stage(use - 1))
        turns.give()
        warpgroup.wait_group(1)
        buffers.k.release(use)

    def finish(self, buffers: Buffers, products: Products, softmax: Softmax, use: Int32, masked: tuple | None):
        """Softmax of a tile beside P · V of the one before. masked: what ``mask`` takes, if any key is hidden."""
        if masked:
            mask(products.rS, *masked)
        alphas = softmax.step(products.rS)
        grown = some_grown(alphas)
        # Passed before, and passed at once: ptxas moves the softmax behind the next line, but not across a branch.
        buffers.v.wait_full(use - 1)
        warpgroup.wait_group(0)
        buffers.v.release(use - 1)
        rescale_if(grown, products.rO, alphas)
        pack(products.rS, products.rP)
