"""FMHA forward, rung ``k3``: schedule ``k2``'s arithmetic, tiles by TMA into two buffers.

What is new against k2: one thread asks the tensor memory accelerator for whole tiles, an mbarrier counts their bytes,
and the threads wait for data, not for their own loads. K has one buffer and V the other: V j arrives during the scores
of tile j, K j + 1 while V j is multiplied. Threads, registers, every rounding and their order are k2's.

  thread 0    asks for Q, K 0, V 0; for K j + 1 when all have left K j, for V j + 1 when all have left V j
  all         wait for K j, scores, softmax, S to shared memory; wait for V j, multiply

Shared memory: sQ, sK and sV bf16 [64, d], sS fp32 [64, 64], three mbarriers: 64 KB and 24 bytes at d = 128, 40 KB
and 24 bytes at 64.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_impl import runtime
from cute_impl.fmha.k2 import GROUP, ORDER, THREADS, TILE, exp, row_group
from cute_impl.ptx import add_rn, fma_rn, max_f32, mul_rn, rcp_approx_ftz, sub_rn

BARRIERS = Q, K, V = 0, 1, 2


class K3:
    def __init__(self, d: int, causal: bool):
        self.d = d
        self.causal = causal

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream):
        n, _, batch = mQ.shape  # (N, d, B)
        tile = cute.make_ordered_layout((TILE, self.d), order=(1, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        copies = [cpasync.make_tiled_tma_atom(load, x, tile, (TILE, self.d)) for x in (mQ, mK, mV)]
        self.kernel([copy.atom for copy in copies], [copy.tma_tensor for copy in copies], mO, scale).launch(
            grid=[n // TILE, batch, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, atoms: list, mQKV: list, mO: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        q_tile, batch, _ = cute.arch.block_idx()
        row, g = thread // GROUP, thread % GROUP
        columns = self.d // GROUP

        smem = SmemAllocator()
        tile_layout = cute.make_ordered_layout((TILE, self.d), order=(1, 0))
        tiles = [smem.allocate_tensor(BFloat16, tile_layout, byte_alignment=1024) for _ in BARRIERS]
        sQ, sK, sV = tiles
        sS = smem.allocate_tensor(Float32, cute.make_ordered_layout((TILE, TILE), order=(1, 0)), byte_alignment=1024)
        barriers = smem.allocate_array(Int64, len(BARRIERS), byte_alignment=8)

        whole = cute.make_layout(1)
        parts = []  # shared and global tiles of Q, K and V as TMA takes them
        for i in cutlass.range_constexpr(3):
            gX = cute.local_tile(mQKV[i][None, None, batch], (TILE, self.d), (None, 0))
            parts.append(
                cpasync.tma_partition(atoms[i], 0, whole, cute.group_modes(tiles[i], 0, 2), cute.group_modes(gX, 0, 2))
            )

        if thread == 0:
            for i in cutlass.range_constexpr(3):
                cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.load(Q, q_tile, atoms, parts, barriers)
        self.load(K, 0, atoms, parts, barriers)
        self.load(V, 0, atoms, parts, barriers)

        gO = cute.local_tile(mO[None, None, batch], (TILE, self.d), (q_tile, 0))
        rS = cute.make_rmem_tensor(TILE // GROUP, Float32)  # scores, then weights, of columns g, g + 4, …
        rO = cute.make_rmem_tensor(columns, Float32)  # the output so far
        rO.fill(0.0)
        m, l = -Float32.inf, Float32(0.0)

        cute.arch.mbarrier_wait(barriers + Q, 0)
        parity = Int32(0)
        k_tiles = cute.ceil_div(mO.shape[0], TILE)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(barriers + K, parity)
            self.scores(sQ, sK, rS, row, g)
            m_tile = -Float32.inf
            for i in cutlass.range_constexpr(TILE // GROUP):
                rS[i] = mul_rn(rS[i], scale)
                if cutlass.const_expr(self.causal):
                    if k_tile * TILE + i * GROUP + g > q_tile * TILE + row:
                        rS[i] = -Float32.inf
                m_tile = max_f32(m_tile, rS[i])
            m_new = max_f32(m, row_group(max_f32, m_tile))
            alpha = exp(sub_rn(m, m_new))
            m = m_new

            l_tile = Float32(0.0)
            for i in cutlass.range_constexpr(TILE // GROUP):
                p = exp(sub_rn(rS[i], m))
                sS[row, i * GROUP + g] = p
                l_tile = add_rn(l_tile, p)
            l = fma_rn(alpha, l, row_group(add_rn, l_tile))
            cute.arch.sync_threads()  # S is there, and all have left K
            if k_tile + 1 < k_tiles:
                self.load(K, k_tile + 1, atoms, parts, barriers)

            cute.arch.mbarrier_wait(barriers + V, parity)
            self.add_values(sS, sV, rO, alpha, row, g)
            cute.arch.sync_threads()  # all have left S and V
            parity ^= 1
            if k_tile + 1 < k_tiles:
                self.load(V, k_tile + 1, atoms, parts, barriers)

        inv = rcp_approx_ftz(l) if l != 0.0 and l == l else Float32(1.0)
        for c in cutlass.range_constexpr(columns):
            gO[row, g * columns + c] = mul_rn(rO[c], inv).to(BFloat16)

    @cute.jit
    def load(self, which: cutlass.Constexpr, tile: Int32, atoms: list, parts: list, barriers: cute.Pointer):
        """Thread 0: arm the barrier of Q, K or V and ask for a tile."""
        if cute.arch.thread_idx()[0] < 32:
            shared, source = parts[which]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + which, TILE * self.d * 2)
            cute.copy(atoms[which], source[None, tile], shared, tma_bar_ptr=barriers + which)

    @cute.jit
    def scores(self, sQ: cute.Tensor, sK: cute.Tensor, rS: cute.Tensor, row: Int32, g: Int32):
        """rS ← q · k of the thread's row and columns, chains of FMAs from 0."""
        rS.fill(0.0)
        for k in cutlass.range(self.d, unroll=8):
            q = sQ[row, k].to(Float32)
            for i in cutlass.range_constexpr(TILE // GROUP):
                rS[i] = fma_rn(q, sK[i * GROUP + g, k].to(Float32), rS[i])

    @cute.jit
    def add_values(self, sS: cute.Tensor, sV: cute.Tensor, rO: cute.Tensor, alpha: Float32, row: Int32, g: Int32):
        """rO ← fma(rO, α, the tile's chain of p · v)."""
        columns = self.d // GROUP
        rPV = cute.make_rmem_tensor(columns, Float32)
        rPV.fill(0.0)
        for key in cutlass.range(TILE, unroll=8):
            p = sS[row, key]
            for c in cutlass.range_constexpr(columns):
                rPV[c] = fma_rn(p, sV[key, g * columns + c].to(Float32), rPV[c])
        for c in cutlass.range_constexpr(columns):
            rO[c] = fma_rn(rO[c], alpha, rPV[c])


def compile_variant(d: int, causal: bool, options: str = ""):
    """The kernel for one d and mask, any N and batch; needs no GPU."""
    n, batch = cute.sym_int(divisibility=TILE), cute.sym_int()
    tensors = [runtime.fake(BFloat16, (n, d, batch), order=ORDER) for _ in range(4)]
    key = ("fmha", "k3", d, causal, options)
    return runtime.compile_kernel(key, lambda: K3(d, causal), *tensors, Float32(1.0), options=options)
