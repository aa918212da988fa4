"""One step of the online softmax in registers, masks, and what is written at the end.

Schedules ``wgmma``: every rounding is spelled, ``reference.fmha`` states the same as mathematics. A lane holds two rows
(``warpgroup.row_of``); the four lanes of a row share its maximum m after each tile, and their sums l at the end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cute_impl import ptx
from cute_impl.fmha.k2 import row_group
from cute_impl.fmha.problem import Fixed, Sequence
from cute_impl.fmha.warpgroup import column_of, row_of, rows_of
from cute_impl.ptx import (
    add_rn,
    cvt_bf16x2,
    ex2_approx_ftz,
    fma_rn,
    lg2_approx_ftz,
    max_f32,
    mul_rn,
    rcp_approx_ftz,
    sub_rn,
)

LN_2 = 0.6931471805599453
LANES = 4  # of a row


class Softmax(Fixed):
    """The state of a lane's two rows: maximum m of what was seen, and the lane's part l of the sum."""

    def __init__(self, c: Float32, scale: Float32):
        self.c, self.scale = c, scale  # c = scale · log2 e
        self.m, self.l = (cute.make_rmem_tensor(2, Float32) for _ in range(2))

    def reset(self):
        """No key seen yet."""
        self.m.fill(-Float32.inf)
        self.l.fill(0.0)

    def step(self, rS: cute.Tensor) -> list[Float32]:
        """Scores of a tile become weights in place; returns α, by which O of each row is to be multiplied."""
        count = cute.size(rS)
        alphas, shifts = [], []
        for row in range(2):
            own = [i for i in range(count) if row_of(i) == row]
            # Two chains: the order of a maximum does not matter.
            halves = [self._maximum([rS[i] for i in own[part::2]]) for part in range(2)]
            m = max_f32(self.m[row], row_group(max_f32, max_f32(halves[0], halves[1])))
            shift = select_(m == -Float32.inf, Float32(0.0), m)
            alphas.append(ex2_approx_ftz(mul_rn(sub_rn(self.m[row], shift), self.c)))
            shifts.append(mul_rn(shift, -self.c))
            self.m[row] = m
        sums = [Float32(0.0), Float32(0.0)]
        for i in range(count):
            row = row_of(i)
            rS[i] = ex2_approx_ftz(fma_rn(rS[i], self.c, shifts[row]))
            sums[row] = add_rn(sums[row], rS[i])
        for row in range(2):
            self.l[row] = fma_rn(self.l[row], alphas[row], sums[row])
        return alphas

    def _maximum(self, values: list) -> Float32:
        result = values[0]
        for x in values[1:]:
            result = max_f32(result, x)
        return result

    def finish(self) -> tuple[list[Float32], list[Float32]]:
        """1 / Σ and the natural log-sum-exp of each row."""
        inverses, lses = [], []
        for row in range(2):
            total = row_group(add_rn, self.l[row])
            usable = cutlass.and_(total != 0.0, total == total)
            inverses.append(select_(usable, rcp_approx_ftz(total), Float32(1.0)))
            lse = fma_rn(lg2_approx_ftz(total), Float32(LN_2), mul_rn(self.m[row], self.scale))
            lses.append(select_(total == 0.0, -Float32.inf, lse))
        return inverses, lses


def rescale(rO: cute.Tensor, factors: list):
    """O of each row times its factor."""
    for i in range(cute.size(rO)):
        rO[i] = mul_rn(rO[i], factors[row_of(i)])


def some_grown(factors: list) -> Boolean:
    """Whether some row of the warp has a greater maximum than before; if not, O · α is O, bit for bit."""
    return cute.arch.vote_any_sync(cutlass.or_(factors[0] != 1.0, factors[1] != 1.0))


@cute.jit
def rescale_if(condition: Boolean, rO: cute.Tensor, factors: list):
    if condition:
        rescale(rO, factors)


def pack(rS: cute.Tensor, rP: cute.Tensor):
    """Weights to bf16, as operand A of P · V."""
    for i in range(cute.size(rP)):
        rP[i] = cvt_bf16x2(rS[2 * i], rS[2 * i + 1])


def mask(rS: cute.Tensor, sequence: Sequence, rows: list, first_key: Int32):
    """−inf for the keys of a tile that a row does not see; ``rows`` count within the sequence."""
    first = first_key + cute.arch.thread_idx()[0] % LANES * 2
    visible = [sequence.key_end(row) - first for row in rows]
    for i in range(cute.size(rS)):
        rS[i] = select_(column_of(i) < visible[row_of(i)], rS[i], -Float32.inf)


@cute.jit
def write(
    operands: cutlass.Constexpr,
    sequence: cutlass.Constexpr,
    softmax: cutlass.Constexpr,
    rO: cute.Tensor,
    tile: Int32,
    index: Int32,
    head: Int32,
):
    """O and lse of a lane's two rows, as far as they exist, from the registers."""
    inverses, lses = softmax.finish()
    lane = cute.arch.thread_idx()[0] % LANES
    row_stride, head_stride, batch_stride = operands.strides["o"]
    rows = [tile * operands.config.rows + row for row in rows_of(index)]
    lse_head = Int64(sequence.batch) * operands.heads_q + head
    for r in cutlass.range_constexpr(2):
        if rows[r] < sequence.n_q:
            row = Int64(sequence.q_start + rows[r])
            out = row * row_stride + head * head_stride + sequence.batch * batch_stride + 2 * lane
            base = operands.address["o"] + out * 2
            for i in cutlass.range_constexpr(2 * r, cute.size(rO), 4):
                pair = [mul_rn(rO[i + k], inverses[r]) for k in range(2)]
                ptx.st_b32("global", base + column_of(i) * 2, cvt_bf16x2(pair[0], pair[1]))
            if lane == 0 and operands.address["lse"] != 0:
                ptx.st_b32("global", operands.address["lse"] + (lse_head * operands.n_q + row) * 4, lses[r])
