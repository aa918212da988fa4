"""Which of FMHA's outputs the oracle does not decide: those that legal schedules give differently, or not at all."""

from typing import NamedTuple

import torch
from torch import Tensor

_LARGE = 2.0**127  # half of fp32's range: what stays below overflows in no order
_STEEP = 2.0**23  # see below
_LOG2_E = 1.4426950408889634
_FIRST_TILE = 64  # keys of k2, which alone does not guard against a tile of nothing but −inf
_CERTAIN = 120 / _LOG2_E  # a weight above 2^-120 is flushed nowhere


class Undecided(NamedTuple):
    """Bool: elements of o, [heads, rows, d], and rows, [heads, rows, 1], which lse shares."""

    o: Tensor
    rows: Tensor


# Whether a score overflows depends on the order of its sum, unless the sum of its terms' magnitudes stays below 2^127:
# the products, also times scale and log2 e, which may come before the maximum is subtracted. A row that sees such a
# score is undecided. One that sees NaN is NaN in any order. One that sees +inf is NaN in our schedules (inf − inf) and
# a limit elsewhere (torch's log-sum-exp is +inf): undecided. So is one whose first tile has no score but −inf: NaN
# where −inf − −inf is not guarded against (k2), else as if those keys were not there.
# Where the maximum is scaled and rounded before it is subtracted, the largest weight is 2 to the power of that
# rounding, at most 2^-24 of the scaled score: below 2^23 a factor of √2, for which 2^127 leaves room; from 2^31 on it
# overflows or vanishes. A row that sees a score whose terms reach 2^23 is undecided.
#
# A tile's masked keys have weight 0, and 0 · NaN and 0 · inf are NaN: who visits the key gives NaN, who does not gives
# what the oracle gives. So a row's channel is undecided where a masked value is no number. A visible NaN makes NaN
# everywhere; a visible infinity stays one if its weight is certainly not flushed to 0: less than 120 ln 2 below the
# maximum, scores erring by less than 2^-16 of the largest sum of magnitudes (at d = 128 by 84 + 5 roundings of 2^-24).
# Values are summed before they are divided by the sum of weights, each at most 1: if their magnitudes reach 2^127,
# that may overflow where the mean does not.


def undecided(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Undecided:
    """Of fp64 q [heads, rows, d], k and v [heads, keys, d]; keep [rows, keys] says which keys a row sees."""
    heads, rows = q.shape[:2]
    if not k.shape[1]:
        return Undecided(*(torch.zeros(heads, rows, n, dtype=torch.bool, device=q.device) for n in (q.shape[2], 1)))
    numbers_q, numbers_k, numbers_v = (torch.where(x.isfinite(), x.abs(), 0.0) for x in (q, k, v))
    sums = torch.where(keep, numbers_q @ numbers_k.transpose(1, 2), 0.0)
    overflows = sums * max(1.0, scale * _LOG2_E) >= _LARGE
    overflows = overflows | (sums * (scale * _LOG2_E) >= _STEEP)
    s = torch.where(keep, q @ k.transpose(1, 2) * scale, -torch.inf)
    nothing = keep.any(-1)[:, None] & (s[..., :_FIRST_TILE] == -torch.inf).all(-1, keepdim=True)
    of_rows = (overflows | (s == torch.inf)).any(-1, keepdim=True) & ~s.isnan().any(-1, keepdim=True) | nothing

    distance = torch.where(keep, s.amax(-1, keepdim=True) - s, 0.0)
    faint = keep & (distance + 2.0**-15 * scale * sums.amax(-1, keepdim=True) >= _CERTAIN)
    seen, hidden, lost = (x.expand(s.shape).to(torch.float64) for x in (keep, ~keep, faint))
    no_number, infinite = (x.to(torch.float64) for x in (~v.isfinite(), v.isinf()))
    of_values = (hidden @ no_number > 0) | (lost @ infinite > 0) | (seen @ numbers_v >= _LARGE)
    return Undecided(of_rows | of_values, of_rows)
