"""How far KDA's outputs may be from the oracle's, for the model and for each schedule: derived, element by element."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goldens.case import Tensors
from goldens.kda.undecided import undecided
from reference import kda as reference
from reference.numerics.formats import to_bf16

D, CHUNK = reference.D, reference.CHUNK

# Errors of a state are kept twice: element by element (E [V, K]) and as the 2-norm e of each row of V over K.
# A step, or a chunk of them, takes a row s to s·M + …, M [K, K] known from the oracle; so E becomes at most E·|M|, and
# in column k at most e times the 2-norm of M's column; the smaller holds. One step's M is diag(decay)·(I − b k̂ k̂ᵀ),
# with b ≤ 1 and |k̂| ≤ 1: e grows by no more than the largest decay, d over several tokens. An output is s·w + …, w [K]
# known too: it errs by Σ E·|w|, or e times w's 2-norm. Where nothing is written M is the decay alone, and E is no more
# than the roundings of each element: that tells a state that is kept in bf16 or fp16. Where keys meet a state, E·|M|
# grows from chunk to chunk, which e does not.
# To this comes what the roundings of the step itself add, element by element from the oracle's values, each kept apart
# from its error: the schedule's own S differs from the oracle's, and Σ|S|·w over K becomes Σ|S|·w and the least of
# Σ E·w and e·|w|.
# Rounding to bf16 costs nothing where the number has eight bits anyway: initial states in bf16, unit vectors without
# decay, b = 1. (A decay makes other numbers of them in every way to cut the sequence into chunks.)
# What is taken as legal: sums in fp32 in any order; states in fp32 between chunks; states, keys, queries and what is
# made of them in bf16 as operands of a product. So the chunks' bound has Kᵉ in one part, where chunk16 has two, and in
# U the roundings of T·diag(b)·V and of T·diag(b)·K⁺ each for itself ("alone", "apart"), as flash-linear-attention makes
# them, on top of chunk16's of R. Kernels that cut after 32 or 64 tokens err by no more: tests/test_kda_bound.py holds
# some. In these a decay from far back may be below the least number, where chunk16's state had decayed by then: "lost"
# is that least number times the largest state so far. A state that is kept in less than fp32 is not legal, nor is a
# gate: neither is an operand.
# In units of U:
#   norm: half of the sum's (model: a product, 7 halvings, eps; chunk16: 2, 5 + 1, eps), its root (rsqrt.approx: 3), a
#         quotient or a product, and one with scale
#   gate: of its argument x 3 (chunk16: 2|A_log| for log2e times it, 8 more), which sigmoid passes on times
#         x(1 − sigmoid); of exp 2 (ex2.approx 4) times (1 − sigmoid); sum, quotient (rcp.approx: 2), product with the
#         bound (chunk16: log2e itself and its product too)
#   b:    of sigmoid as for the gate, of its argument 1 (chunk16: 2, log2e itself and the product)
#   mma:  one cuts 17 terms to multiples of 2^(E − 25) and the sum to fp32: 17/2 + 2 units of Σ|terms|
# With T = (I + L)⁻¹ and X = |T|·|δL|, an error of L moves T by at most (I − X)⁻¹ X |T|, whatever its size, as X is
# strictly lower triangular. Substitution itself is a relative error of 17 units in L; T's diagonal is exactly 1.

_U, _B = 2.0**-24, 2.0**-8
_LEAST, _LEAST_BF16, _SMALLEST_NORMAL = 2.0**-149, 2.0**-134, 2.0**-126
_MMA = 17 / 2 + 2
_NORM = {"model": 8, "chunk16": 10}


class _Activated(NamedTuple):
    """The oracle's values of one sequence, [T, H, …] fp64: q has scale in it, the gate is in natural log; and the
    absolute errors of gate and b."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    b: Tensor
    gate_error: Tensor
    b_error: Tensor


def _activated(x: Mapping[str, Tensor], params: Mapping[str, Any], part: slice, schedule: str) -> _Activated:
    q, k, v, g, beta = (x[n].flatten(0, 1)[part].to(torch.float64) for n in ("q", "k", "v", "g", "beta"))
    a_log, dt_bias = (x[n].to(torch.float64) for n in ("A_log", "dt_bias"))
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + reference.EPS) for y in (q, k))
    scale, lower_bound = (float(torch.tensor(params[n], dtype=torch.float32)) for n in ("scale", "lower_bound"))
    argument = torch.exp(a_log)[:, None] * (g + dt_bias)
    open_, b = torch.sigmoid(argument), torch.sigmoid(beta)
    of_beta, of_exp, rest = (1.0, 2.0, 4.0) if schedule == "model" else (2.0, 4.0, 7.0)
    of_argument = torch.full_like(a_log, 3.0) if schedule == "model" else 8.0 + 2 * a_log.abs()
    gate = lower_bound * open_
    # Beyond ±1000 the sigmoid is 0 or 1 to the last bit, and what its argument errs by is nothing.
    moved = (of_argument[:, None] * argument.abs().clamp(max=1000.0) + of_exp) * (1 - open_) + rest
    gate_error = 1.01 * _U * moved * gate.abs() + 8 * _SMALLEST_NORMAL
    b_moved = (of_beta * beta.abs().clamp(max=1000.0) + of_exp) * (1 - b) + rest
    return _Activated(q * scale, k, v, gate, b, gate_error, 1.01 * _U * b_moved * b + _SMALLEST_NORMAL)


class _Apart(NamedTuple):
    """How far a state may be from the oracle's: each element [H, V, K], and each row's 2-norm [H, V]."""

    each: Tensor
    row: Tensor

    def read(self, w: Tensor) -> Tensor:
        """Its share in state · wᵀ [H, V, N], w [H, N, K]."""
        return torch.minimum(self.each @ w.abs().mT, self.row[..., None] * torch.linalg.vector_norm(w, dim=-1)[:, None])

    def moved(self, each: Tensor, columns: Tensor, decay: Tensor, own: Tensor) -> "_Apart":
        """After state · M + what has the error ``own``: ``each`` is E·|M|, ``columns`` [H, K] has the norms of M's
        columns, and no row gets longer than ``decay`` [H] times what it was."""
        each = torch.minimum(each, self.row[..., None] * columns[:, None]) + own
        row = decay[:, None] * self.row + torch.linalg.vector_norm(own, dim=-1)
        return _Apart(each, torch.minimum(row, torch.linalg.vector_norm(each, dim=-1)))


def _exactly(state: Tensor) -> _Apart:
    """No error yet."""
    return _Apart(torch.zeros_like(state), torch.zeros_like(state[..., 0]))


def _model_bound(x: _Activated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on out [T, H, V] and on the last state, from the first state [H, V, K]."""
    norm = _NORM["model"]
    apart = _exactly(state)
    out = torch.empty(x.v.shape, dtype=torch.float64)
    for t, decay in enumerate(x.gate.exp()):
        k, q, b = (y[t][:, None] for y in (x.k, x.q, x.b))
        state, each = state * decay[:, None], apart.each * decay[:, None]
        bar = state.abs() + each
        own = bar * (x.gate_error[t] + 3 * _U)[:, None]
        seen_error = (bar * k.abs()).sum(-1) * (norm + 8) * _U + (own * k.abs()).sum(-1)
        rest, far = x.v[t] - (state * k).sum(-1), apart.read(decay[:, None] * k)[..., 0]
        u, bar_u = b * rest, b * (rest.abs() + far)
        u_error = b * seen_error + bar_u * 3 * _U + x.b_error[t][:, None] * (rest.abs() + far + seen_error)
        state = state + u[..., None] * k
        each = each + b[..., None] * (each * k.abs()).sum(-1, keepdim=True) * k.abs()  # E·|M|, and a little more
        square = x.k[t] ** 2
        columns = decay * (1 + square * (b * b * square.sum(-1, keepdim=True) - 2 * b)).clamp(min=0).sqrt()
        own = own + (u_error[..., None] + bar_u[..., None] * (norm + 1) * _U) * k.abs() + 4 * _LEAST
        own = own + (state.abs() + each) * _U
        apart = apart.moved(each, columns, decay.amax(-1), own)
        own = ((state.abs() + apart.each) * q.abs()).sum(-1) * (norm + 10) * _U + D * _LEAST
        out[t] = apart.read(q)[..., 0] + own
    return 1.01 * out, 1.01 * apart.each


def _product(a: Tensor, a_error: Tensor, b: Tensor, b_error: Tensor, instructions: int) -> Tensor:
    """|error| of a · bᵀ by a chain of mma: |a| […, M, K] and |b| […, N, K] with their errors."""
    a_all, b_all = a + a_error, (b + b_error).transpose(-1, -2)
    moved = a_error @ b_all + a @ b_error.transpose(-1, -2)
    return moved + 1.01 * _U * _MMA * instructions * (a_all @ b_all) + a.shape[-1] * _LEAST


def _state_product(state: Tensor, apart: _Apart, b: Tensor, b_error: Tensor, instructions: int) -> Tensor:
    """|error| of bf16(S) · bᵀ but for what S itself is off by: S [H, V, K] of the oracle, and |b| [H, N, K]."""
    w = b_error + 1.01 * _U * _MMA * instructions * (b + b_error)
    exact = _has_eight_bits(state, torch.zeros_like(state)) & (apart.each == 0)
    rounded = torch.where(exact, 0.0, _B * state.abs() + _LEAST_BF16) @ (b + b_error).mT
    return rounded + state.abs() @ (w * (1 + _B)).mT + apart.read(_B * b + (1 + _B) * w) + D * _LEAST


def _has_eight_bits(x: Tensor, error: Tensor) -> Tensor:
    """Where x is a bf16, but for ``error``."""
    return (to_bf16(x.to(torch.float32)).to(torch.float64) - x).abs() <= error


def _to_bf16(x: Tensor, error: Tensor) -> Tensor:
    """|error| after rounding to bf16 of |x| that has ``error``."""
    return error + _B * (x + error) + _LEAST_BF16


def _operand(x: Tensor, error: Tensor, total: Tensor) -> Tensor:
    """The same of a key or query: without decay, one of eight bits is rounded to these."""
    return torch.where((total == 0) & _has_eight_bits(x, error), 2 * error, _to_bf16(x.abs(), error))


def _to_two_parts(x: Tensor, error: Tensor) -> Tensor:
    """|error| of a sum of two bf16 parts: what is left over is exact in fp32."""
    return error + _to_bf16(_B * (x + error) + _LEAST_BF16, torch.zeros_like(x))


def _chunked(x: Tensor) -> Tensor:
    """[T, H, …] to [chunks, H, 16, …], zeros at the end."""
    padding = x.new_zeros(-len(x) % CHUNK, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _chunk16_bound(sequence: _Activated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on out [T, H, V] and on the last state, from the first state [H, V, K]."""
    out, apart, _ = _chunks_bound(sequence, state, _exactly(state))
    return 1.01 * out, 1.01 * apart.each


def _chunks_bound(sequence: _Activated, state: Tensor, apart: _Apart) -> tuple[Tensor, _Apart, Tensor]:
    """The same, not enlarged, from a first state that is ``apart``; and the oracle's last state."""
    norm = _NORM["chunk16"] * _U
    x = _Activated(*(_chunked(y) for y in sequence))
    total = x.gate.cumsum(2)
    off = x.gate_error.cumsum(2) + 17 * _U * x.gate.abs().cumsum(2) + 5 * _U  # relative errors of E⁺ and E⁻
    end, end_off = total[:, :, -1:], off[:, :, -1:]
    k_up, q_up, k_down, k_end = x.k * total.exp(), x.q * total.exp(), x.k * (-total).exp(), x.k * (end - total).exp()
    bars = [y.abs() for y in (k_up, q_up, k_down, k_end)]
    errors = [_operand(y, y.abs() * (norm + off) + _LEAST, total) for y in (k_up, q_up)]
    errors.append(_to_two_parts(bars[2], bars[2] * (norm + off) + _LEAST))
    errors.append(_operand(k_end, bars[3] * (norm + off + end_off) + _LEAST * end.exp(), end))

    lower = (x.b[..., None] * (k_up @ k_down.mT)).tril(-1)
    bar = (k_up @ k_down.mT).abs()
    bar_error = _product(bars[0], errors[0], bars[2], errors[2], 16)
    lower_error = (x.b + x.b_error)[..., None] * bar_error + x.b_error[..., None] * bar + _LEAST
    lower_error = (lower_error + 18 * _U * (lower.abs() + lower_error)).tril(-1)
    identity = torch.eye(CHUNK, dtype=torch.float64)
    t = torch.linalg.solve_triangular(identity + lower, identity.expand_as(lower), upper=False)
    moved = t.abs() @ lower_error  # X
    t_error = torch.linalg.solve_triangular(identity - moved, moved @ t.abs(), upper=False)
    t_error = _to_bf16(t.abs(), t_error).tril(-1)
    p = (q_up @ k_down.mT).tril()
    p_error = _to_bf16(p.abs(), _product(bars[1], errors[1], bars[2], errors[2], 16)).tril()

    decay = x.gate.amax(-1).sum(2).exp()  # [chunks, H]
    u_up = t @ (x.b[..., None] * k_up)  # U is T · R less S · this, out less S · w, the next state S · m and more
    w = q_up - p @ u_up
    m = torch.diag_embed(end[:, :, 0].exp()) - u_up.mT @ k_end
    columns = torch.linalg.vector_norm(m, dim=-2)
    apart_error = _operand(u_up, 2.0**-16 * u_up.abs(), total) - 2.0**-16 * u_up.abs()
    out, most = [], state.abs()
    for c in range(len(total)):
        most = torch.maximum(most, state.abs())
        lost = _LEAST_BF16 * most.sum(-1, keepdim=True)
        rest = x.v[c].mT - state @ k_up[c].mT  # [H, V, 16]
        b, b_error = x.b[c][:, None], x.b_error[c][:, None]
        r = b * rest
        u = r @ t[c].mT
        bar_rest, bar_u = rest.abs() + apart.read(k_up[c]), u.abs() + apart.read(u_up[c])
        rest_error = _state_product(state, apart, bars[0][c], errors[0][c], 9) + 2 * _U * bar_rest + lost
        bar_r = b * bar_rest
        r_error = (b + b_error) * rest_error + b_error * bar_rest
        r_error = _to_bf16(bar_r, r_error + 2 * _U * (bar_r + r_error) + _LEAST)
        u_error = _product(bar_r, r_error, t[c].abs(), t_error[c], 1)
        alone = (b * x.v[c].mT) @ t[c].mT
        alone_error = torch.where(_has_eight_bits(alone, 2.0**-16 * alone.abs()), 0.0, _B * alone.abs())
        u_error = u_error + alone_error + state.abs() @ apart_error[c].mT + apart.read(apart_error[c])
        u_error = _to_bf16(bar_u, u_error)
        o_error = _state_product(state, apart, bars[1][c], errors[1][c], 9) + lost
        o_error = o_error + _product(bar_u, u_error, p[c].abs(), p_error[c], 1)
        out.append((o_error + apart.read(w[c])).permute(2, 0, 1))
        end_bars, end_errors = (y[3][c].mT for y in (bars, errors))
        own = _product(bar_u, u_error, end_bars, end_errors, 2) + _LEAST * (1 + most)
        own = own + (state.abs() + apart.each) * (end[c].exp() * (end_off[c] + (2 * _MMA + 1) * _U))
        state = state * end[c].exp() + u @ k_end[c]
        apart = apart.moved(apart.each @ m[c].abs(), columns[c], decay[c], own)
    errors_out = torch.cat(out)[: len(sequence.v)] if out else sequence.v
    return errors_out, apart, state


def _scan_bound(sequence: _Activated, state: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """As ``_chunk16_bound``, for a scan over segments.

    With errors E of S, E_C and E_M, S · M + C errs by what E becomes, by (|S| + E) · E_M, by E_C, and by what 128
    roundings of Σ|S||M| + |C| add. S, M and C themselves are the oracle's.
    """
    first = _exactly(state)
    outs = []
    for begin in range(0, max(len(sequence.v), 1), segment):
        part = _Activated(*(x[begin : begin + segment] for x in sequence))
        out, apart, last = _chunks_bound(part, state, first)
        outs.append(out)
        if begin + segment < len(sequence.v):
            first = _carried(part, state, first)
            state = last
    return 1.01 * torch.cat(outs), 1.01 * apart.each


def _carried(part: _Activated, state: Tensor, apart: _Apart) -> _Apart:
    """How far S · M + C is apart, from the oracle's S and how far that is."""
    nothing, unit = torch.zeros_like(state), torch.eye(D).to(state).expand_as(state)
    _, c_apart, c = _chunks_bound(part, nothing, _exactly(state))
    _, m_apart, m = _chunks_bound(part._replace(v=torch.zeros_like(part.v)), unit, _exactly(state))
    bar = state.abs() + apart.each
    m_all = m.abs() + 1.01 * m_apart.each
    own = 1.01 * (bar @ m_apart.each + c_apart.each)
    own = own + D * _U * (bar @ m_all + c.abs() + 1.01 * c_apart.each) + D * _LEAST
    columns, decay = torch.linalg.vector_norm(m, dim=-2), part.gate.amax(-1).sum(0).exp()
    return apart.moved(apart.each @ m.abs(), columns, decay, 1.01 * own)


_BOUNDS: dict[str, Callable[[_Activated, Tensor], tuple[Tensor, Tensor]]] = {
    "model": _model_bound,
    "chunk16": _chunk16_bound,
    **{f"chunk16_scan{segment}": partial(_scan_bound, segment=segment) for segment in reference.SEGMENTS},
}


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |out − oracle| and |final_state − oracle| before they are rounded to their formats; infinite where
    the oracle does not decide (``goldens.kda.undecided``)."""
    if schedule not in _BOUNDS:
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {', '.join(_BOUNDS)}")
    starts, heads = reference.offsets(tensors), tensors["q"].shape[2]
    states = tensors.get("initial_state", torch.zeros(len(starts) - 1, heads, D, D)).to(torch.float64)
    out, last = [], []
    for start, end, state in zip(starts, starts[1:], states, strict=False):
        made = _BOUNDS[schedule](_activated(tensors, params, slice(start, end), schedule), state)
        out.append(made[0])
        last.append(made[1])
    result = {"out": torch.cat(out).view(tensors["v"].shape)}
    if params["final_state"] is not None:
        result["final_state"] = torch.stack(last)
    left_out = undecided(tensors)
    return {name: torch.where(left_out[name], torch.inf, x) for name, x in result.items()}
