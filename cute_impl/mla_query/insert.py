"""The FP8 cache insert, one warp a row: device code shared by ``cache_insert`` and by both schedules of ``mla_query``.

Lane j owns columns 8 j … 8 j + 7 and 256 + 8 j … of the latent, that is threads j and 32 + j of the schedule, whose
two warps' sums meet in a shuffle; and columns 2 j, 2 j + 1 of k_pe. A row lies at slot · 576 bytes, since the cache is
contiguous: page · page_size + offset counts rows. A slot that is negative or not below the capacity is skipped: the
store is the only access that depends on it.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_impl import ptx
from cute_impl.attn_res.cluster7 import dot8, fold, pack, widen
from cute_impl.ptx import add_rn, fma_rn, mul_rn, rsqrt_approx_ftz

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE  # bytes of a row
HALF_BYTES = LATENT  # 256 bf16: what a warp of the schedule owns


def e4m3x4(values: list) -> Int32:
    """Four fp32 to e4m3, saturating, the first in the lowest byte."""
    lo, hi = (ptx.cvt_e4m3x2(*values[i : i + 2]) for i in (0, 2))
    return lo | (hi << 16)


def load_weights(w_kva: Int64, lane: Int32) -> list:
    """The lane's words of w_kva, which depends on no predecessor."""
    return [ptx.ld_v4("global", w_kva + half * HALF_BYTES + lane * 16) for half in (0, 1)]


@cute.jit
def insert_row(
    kv: Int64, k_pe: Int64, weights: list, cache: Int64, slot_at: Int64, scale_at: Int64, slots: Int64, eps: Float32
):
    """Write one row. All 32 lanes of a warp call it; ``slots`` is the number of rows that the cache holds."""
    lane = cute.arch.lane_idx()
    words = [ptx.ld_v4("global", kv + half * HALF_BYTES + lane * 16) for half in (0, 1)]
    rope = ptx.ld_b32("global", k_pe + lane * 4)
    slot = ptx.ld_b64("global", slot_at)
    scale = ptx.ld_b32("global", scale_at, Float32)

    half = fold(
        [dot8(x, x) for x in map(widen, words)], lane
    )  # lanes 0 … 15 the first warp's sum, 16 … 31 the second's
    total = add_rn(half, cute.arch.shuffle_sync_bfly(half, 16))
    rr = rsqrt_approx_ftz(fma_rn(total, Float32(1 / LATENT), eps))
    rows = []
    for x_words, w_words in zip(words, weights, strict=True):
        normed = [mul_rn(mul_rn(x, rr), w) for x, w in zip(widen(x_words), widen(w_words), strict=True)]
        scaled = [mul_rn(x, scale) for x in widen(pack(normed))]
        rows.append([e4m3x4(scaled[:4]), e4m3x4(scaled[4:])])
    tail = ptx.cvt_e4m3x2(mul_rn(ptx.bf16_lo(rope), scale), mul_rn(ptx.bf16_hi(rope), scale))
    # Two lanes make a word.
    tail |= cute.arch.shuffle_sync_bfly(tail, 1) << 16

    if slot >= 0 and slot < slots:
        row = cache + slot * WIDTH
        ptx.st_v2("global", row + lane * 8, rows[0])
        ptx.st_v2("global", row + LATENT // 2 + lane * 8, rows[1])
        if lane % 2 == 0:
            ptx.st_b32("global", row + LATENT + lane * 2, tail)
