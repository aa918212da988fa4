"""FMHA forward, schedule ``k2``: FlashAttention-2's tiles on scalar FP32, one CTA per 64 query rows.

o = softmax(q kᵀ · scale) v with the online softmax (Dao, arXiv 2307.08691). 256 threads: thread t
serves query row t // 4 with column group g = t mod 4, that is score columns g, g + 4, … and output
columns g·d/4 … (g + 1)·d/4 − 1. The four threads of a row sit in one warp, meet in shuffles, and
each holds the row's maximum m and sum l.

Shared memory: sQ and sKV (K, then V) bf16 [64, d], sS fp32 [64, 64]; 48 KB at d = 128, 32 KB at 64.
Every rounding is spelled; ``reference.fmha`` states the same schedule as mathematics.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.memory import SmemAllocator

from cute_impl import runtime
from cute_impl.ptx import add_rn, ex2_approx_ftz, fma_rn, max_f32, mul_rn, rcp_approx_ftz, sub_rn

TILE = 64  # query rows a CTA, keys a step
GROUP = 4  # threads a query row
THREADS = TILE * GROUP
ORDER = (2, 0, 1)  # (N, d, B) on [B, N, d] memory, slowest mode first
LOG2_E = math.log2(math.e)


@cute.jit
def exp(x: Float32) -> Float32:
    return ex2_approx_ftz(mul_rn(x, Float32(LOG2_E)))


@cute.jit
def row_group(op: cutlass.Constexpr, x: Float32) -> Float32:
    """Combine one value of each of the four threads of a row."""
    for offset in (1, 2):
        x = op(x, cute.arch.shuffle_sync_bfly(x, offset))
    return x


class K2:
    def __init__(self, d: int, causal: bool):
        self.d = d
        self.causal = causal

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, stream):
        n, _, batch = mQ.shape  # (N, d, B)
        self.kernel(mQ, mK, mV, mO, scale).launch(grid=[n // TILE, batch, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.jit
    def copy_tile(self, gX: cute.Tensor, sX: cute.Tensor):
        """One [64, d] tile from global to shared memory, 16 bytes a thread and step."""
        thread, _, _ = cute.arch.thread_idx()
        chunks = self.d // 8
        for i in cutlass.range_constexpr(TILE * chunks // THREADS):
            chunk = i * THREADS + thread
            where = (chunk // chunks, chunk % chunks)
            cute.autovec_copy(cute.local_tile(gX, (1, 8), where), cute.local_tile(sX, (1, 8), where))

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        q_tile, batch, _ = cute.arch.block_idx()
        row, g = thread // GROUP, thread % GROUP
        columns = self.d // GROUP

        smem = SmemAllocator()
        tile_layout = cute.make_ordered_layout((TILE, self.d), order=(1, 0))
        sQ = smem.allocate_tensor(BFloat16, tile_layout, byte_alignment=1024)
        sKV = smem.allocate_tensor(BFloat16, tile_layout, byte_alignment=1024)
        sS = smem.allocate_tensor(Float32, cute.make_ordered_layout((TILE, TILE), order=(1, 0)), byte_alignment=1024)

        gQ, gK, gV, gO = [cute.local_tile(x[None, None, batch], (TILE, self.d), (None, 0)) for x in (mQ, mK, mV, mO)]
        self.copy_tile(gQ[None, None, q_tile], sQ)

        rS = cute.make_rmem_tensor(TILE // GROUP, Float32)  # scores, then weights, of columns g, g + 4, …
        rO = cute.make_rmem_tensor(columns, Float32)  # the output so far
        rPV = cute.make_rmem_tensor(columns, Float32)  # what this tile adds
        rO.fill(0.0)
        m, l = -Float32.inf, Float32(0.0)

        for k_tile in cutlass.range(cute.size(gK, mode=[2])):
            self.copy_tile(gK[None, None, k_tile], sKV)
            cute.arch.sync_threads()

            rS.fill(0.0)
            for k in cutlass.range(self.d, unroll=8):
                q = sQ[row, k].to(Float32)
                for i in cutlass.range_constexpr(TILE // GROUP):
                    rS[i] = fma_rn(q, sKV[i * GROUP + g, k].to(Float32), rS[i])

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

            cute.arch.sync_threads()
            self.copy_tile(gV[None, None, k_tile], sKV)
            cute.arch.sync_threads()

            rPV.fill(0.0)
            for key in cutlass.range(TILE, unroll=8):
                p = sS[row, key]
                for c in cutlass.range_constexpr(columns):
                    rPV[c] = fma_rn(p, sKV[key, g * columns + c].to(Float32), rPV[c])
            for c in cutlass.range_constexpr(columns):
                rO[c] = fma_rn(rO[c], alpha, rPV[c])
            cute.arch.sync_threads()

        inv = rcp_approx_ftz(l) if l != 0.0 and l == l else Float32(1.0)
        for c in cutlass.range_constexpr(columns):
            gO[row, g * columns + c, q_tile] = mul_rn(rO[c], inv).to(BFloat16)


def compile_variant(d: int, causal: bool, options: str = ""):
    """The kernel for one d and mask, any N and batch; needs no GPU."""
    n, batch = cute.sym_int(divisibility=TILE), cute.sym_int()
    tensors = [runtime.fake(BFloat16, (n, d, batch), order=ORDER) for _ in range(4)]
    key = ("fmha", "k2", d, causal, options)
    return runtime.compile_kernel(key, lambda: K2(d, causal), *tensors, Float32(1.0), options=options)


class Handle(NamedTuple):
    compiled: Any
    scale: float


def compile_kernel(
    B: int, N: int, d: int, causal: bool, tensors: Mapping[str, Any], scale: float | None = None
) -> Handle:
    """Compile for the CuTe views q_cute, k_cute, v_cute, o_cute of shape (N, d, B) on [B, N, d] memory."""
    shapes = {tuple(tensors[name].shape) for name in ("q_cute", "k_cute", "v_cute", "o_cute")}
    if shapes != {(N, d, B)} or d not in (64, 128) or N % TILE or N == 0:
        raise ValueError(
            f"tensors: got shapes {shapes} for (N, d, B) = {(N, d, B)}; N is a multiple of 64, d 64 or 128"
        )
    views = [tensors[name] for name in ("q_cute", "k_cute", "v_cute", "o_cute")]
    compiled = runtime.compile_now(K2(d, bool(causal)), *views, Float32(1.0))
    return Handle(compiled, 1.0 / math.sqrt(d) if scale is None else scale)


def run_kernel(handle: Handle, tensors: Mapping[str, Any]) -> None:
    """Launch on PyTorch's current stream; o_cute is written."""
    views = [tensors[name] for name in ("q_cute", "k_cute", "v_cute", "o_cute")]
    handle.compiled(*views, Float32(handle.scale), runtime.stream())
