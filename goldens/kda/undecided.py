"""Which of KDA's outputs the oracle does not decide: where NaN and infinities are spread by how tokens are grouped."""

from collections.abc import Mapping

import torch
from torch import Tensor

from goldens.case import Tensors
from reference import kda as reference

_CHUNK = 64  # tokens that schedules in use compute together, at most; others divide it


# k, the gate and beta meet all of a head's state, a value one row of it: from a NaN there (k, q: infinities too, over
# an infinite norm) everything is NaN in any order, and out alone where q is none. But a chunk's tokens are multiplied
# as matrices whose upper triangle is 0, and 0 · NaN is NaN: those before it in its chunk may share it. An infinity
# among values or states is NaN as soon as it meets a 0 or its opposite, which depends on the order: its row is
# undecided from its chunk on. A sequence without tokens returns its state, whatever that is.


def undecided(tensors: Mapping[str, Tensor]) -> Tensors:
    """bool, out [B, T, H, V] and final_state [N, H, V, 1]."""
    k, v, g, beta = (tensors[name].flatten(0, 1) for name in ("k", "v", "g", "beta"))
    nan = (~k.isfinite().all(-1) | g.isnan().any(-1) | beta.isnan())[..., None] | v.isnan()  # [B · T, H, V]
    starts = reference.offsets(tensors)
    out = torch.zeros_like(nan)
    rows = torch.zeros(len(starts) - 1, *v.shape[1:], dtype=torch.bool, device=v.device)
    for n in range(len(starts) - 1):
        tokens = slice(starts[n], starts[n + 1])
        if tokens.start == tokens.stop:
            continue
        infinite = v[tokens].isinf()
        if "initial_state" in tensors:
            infinite[0] |= tensors["initial_state"][n].isinf().any(-1)
        for first in range(0, len(infinite), _CHUNK):
            chunk = slice(tokens.start + first, min(tokens.start + first + _CHUNK, tokens.stop))
            rows[n] |= infinite[first : first + _CHUNK].any(0)
            behind = nan[chunk].flip(0).to(torch.int64).cumsum(0).flip(0) - nan[chunk].to(torch.int64)
            out[chunk] = (behind > 0) | rows[n]
    return {"out": out.view(tensors["v"].shape), "final_state": rows[..., None]}
