"""O and lse from the accumulators to global memory, 16 bytes a lane."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import select_

from cute_impl import ptx
from cute_impl.fmha.softmax import LANES
from cute_impl.fmha.warpgroup import rows_of
from cute_impl.ptx import cvt_bf16x2, mul_rn


def transpose(words: list) -> list:
    """Word i of lane j becomes word j of lane i, of each four lanes; by two exchanges of two words."""
    lane = cute.arch.thread_idx()[0] % LANES
    words = list(words)
    for offset in (1, 2):
        upper = lane & offset != 0
        for i in (i for i in range(LANES) if not i & offset):
            low, high = words[i], words[i + offset]
            sent = select_(upper, low, high)
            got = cute.arch.shuffle_sync_bfly(sent, offset)
            words[i], words[i + offset] = select_(upper, got, low), select_(upper, high, got)
    return words


@cute.jit
def store(
    operands: cutlass.Constexpr,
    sequence: cutlass.Constexpr,
    softmax: cutlass.Constexpr,
    rO: cute.Tensor,
    tile: Int32,
    index: Int32,
    head: Int32,
):
    """O and lse of a lane's two rows, as far as they exist.

    A lane holds two columns of each eight; four lanes exchange theirs of four times eight, so that each has eight.
    """
    inverses, lses = softmax.finish()
    lane = cute.arch.thread_idx()[0] % LANES
    row_stride, head_stride, batch_stride = operands.strides["o"]
    rows = [tile * operands.config.rows + row for row in rows_of(index)]
    lse_head = Int64(sequence.batch) * operands.heads_q + head
    for r in cutlass.range_constexpr(2):
        columns = range(2 * r, cute.size(rO), 4)  # registers of a row, two in turn
        words = [cvt_bf16x2(*[mul_rn(rO[i + k], inverses[r]) for k in range(2)]) for i in columns]
        pieces = [transpose(words[i : i + LANES]) for i in range(0, len(words), LANES)]
        if rows[r] < sequence.n_q:
            row = Int64(sequence.q_start + rows[r])
            out = row * row_stride + head * head_stride + sequence.batch * batch_stride + 8 * lane
            base = operands.address["o"] + out * 2
            for i in cutlass.range_constexpr(len(pieces)):
                ptx.st_v4("global", base + i * 8 * LANES * 2, pieces[i])
            if lane == 0 and operands.address["lse"] != 0:
                ptx.st_b32("global", operands.address["lse"] + (lse_head * operands.n_q + row) * 4, lses[r])
