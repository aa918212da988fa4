"""KDA's cases, input recipes, tolerances, and where in a schedule an element is made."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Kernel, Tensors
from reference import kda as reference
from reference.numerics.formats import to_bf16

D, CHUNK = reference.D, reference.CHUNK
SCALE = D**-0.5

# Inputs.

Tokens = tuple[int, int, int]  # B, T, H
Values = Callable[[str, Tokens], Tensors]  # label and tokens to everything but the state and the offsets


def _normal(label: str, tokens: Tokens) -> Tensors:
    heads = tokens[2]
    return {
        **{name: draw.normal_bf16(f"{label}/{name}", (*tokens, D)) for name in ("q", "k", "v", "g")},
        "beta": draw.normal_bf16(f"{label}/beta", tokens),
        "A_log": draw.normal(f"{label}/A_log", (heads,)),
        "dt_bias": draw.normal(f"{label}/dt_bias", (heads, D)),
    }


def _times(x: Tensor, factor: Tensor | float, plus: float = 0.0) -> Tensor:
    return to_bf16(x.to(torch.float32) * factor + plus)


def _constant(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x, value)


def _repeated(label: str, tokens: Tokens) -> Tensors:
    """One key for all tokens, next to no decay, b nearly 1: I + L is as far from I as it gets."""
    x = _normal(label, tokens)
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x |= {"A_log": torch.zeros_like(x["A_log"]), "dt_bias": torch.zeros_like(x["dt_bias"])}
    return x | {"g": _constant(x["g"], -12.0), "beta": _constant(x["beta"], 8.0)}


def _collinear(label: str, tokens: Tokens) -> Tensors:
    """Keys that are one key but for a 64th, of both signs; little decay."""
    x = _normal(label, tokens)
    sign = 1.0 - 2.0 * draw.integers(f"{label}/sign", (*tokens, 1), 0, 2).to(torch.float32)
    x["k"] = to_bf16(sign * (x["k"][:, :1].to(torch.float32) + x["k"].to(torch.float32) * 2.0**-6))
    return x | {"g": _times(x["g"], 0.5, -5.0), "beta": _times(x["beta"], 0.5, 4.0)}


def _bound_beside_none(label: str, tokens: Tokens) -> Tensors:
    """Channels that decay by the bound at every token, beside channels that do not decay at all."""
    x = _normal(label, tokens)
    return x | {"g": to_bf16(torch.where(torch.arange(D) % 2 == 0, 100.0, -100.0).expand_as(x["g"]).contiguous())}


def _saturated(label: str, tokens: Tokens) -> Tensors:
    """Gates far out on both sides, beta ±200 and 0."""
    x = _normal(label, tokens)
    beta = torch.tensor([-200.0, 200.0, 0.0])[draw.integers(f"{label}/which", tokens, 0, 3)]
    return x | {"g": _times(x["g"], 30.0), "A_log": x["A_log"] + 2.0, "beta": to_bf16(beta)}


def _inf_gates(label: str, tokens: Tokens) -> Tensors:
    """Infinite gates and betas of both signs among normal ones."""
    x = _normal(label, tokens)
    for name in ("g", "beta"):
        which = draw.integers(f"{label}/{name}/which", tuple(x[name].shape), 0, 8)
        x[name][which == 0], x[name][which == 1] = torch.inf, -torch.inf
    return x


def _faint(label: str, tokens: Tokens) -> Tensors:
    """Keys and queries whose squares add up to about the 1e-6 of the norm."""
    x = _normal(label, tokens)
    return x | {name: _times(x[name], 2.0**-13) for name in ("q", "k")}


def _zeros(label: str, tokens: Tokens) -> Tensors:
    """Zeros of both signs: all of q, k, v and g at every third token, k alone at the next."""
    x = _normal(label, tokens)
    for name in ("q", "k", "v", "g"):
        sign = draw.integers(f"{label}/{name}/sign", (*tokens, D), 0, 2)
        zero = to_bf16(torch.where(sign == 1, -0.0, 0.0))
        x[name][:, ::3] = zero[:, ::3]
        if name == "k":
            x[name][:, 1::3] = zero[:, 1::3]
    return x


def _sizes(label: str, tokens: Tokens) -> Tensors:
    """Values of about 2^100 and of about 2^-100 in turn."""
    x = _normal(label, tokens)
    return x | {"v": _times(x["v"], torch.where(torch.arange(D) % 2 == 0, 2.0**100, 2.0**-100))}


def _subnormal(label: str, tokens: Tokens) -> Tensors:
    """Values in the subnormal range and just above."""
    return _normal(label, tokens) | {"v": draw.wide_bf16(f"{label}/v", (*tokens, D), -127, -122)}


def _wide(label: str, tokens: Tokens) -> Tensors:
    x = _normal(label, tokens)
    span = {"q": (-12, 3), "k": (-12, 3), "v": (-40, 40)}
    return x | {n: draw.wide_bf16(f"{label}/{n}", (*tokens, D), *span[n]) for n in span}


def _nan(label: str, tokens: Tokens) -> Tensors:
    """NaN of several payloads at tokens of the second third: in a packed batch, in its second sequence alone."""
    x = _normal(label, tokens)
    third = tokens[1] // 3
    for i, (name, code) in enumerate((("k", 0x7FC0), ("v", 0x7F81), ("q", -1), ("g", 0x7FFF))):
        at = min(third + 1 + i, tokens[1] - 1)
        x[name].view(torch.int16)[:, at : at + 1, :, 5] = code
    return x


def _reading(label: str, tokens: Tokens) -> Tensors:
    """Neither decay nor update, and query t is the unit vector t: out is scale times column t of the first state."""
    x = _normal(label, tokens)
    q = torch.zeros(*tokens, D)
    q[:, torch.arange(tokens[1]), :, torch.arange(tokens[1]) % D] = 1024.0
    return x | {"q": to_bf16(q), "g": _constant(x["g"], -torch.inf), "beta": _constant(x["beta"], -200.0)}


def _whispering(label: str, tokens: Tokens) -> Tensors:
    """``reading``, and updates of about an ULP of what is read: with scale 1.5 half of out are ties but for these."""
    x = _reading(label, tokens)
    return x | {"beta": _constant(x["beta"], -16.5)}


def _cancel(label: str, tokens: Tokens) -> Tensors:
    """Keys and queries whose channels come in pairs of opposite sign, where gates and (``_paired_state``) states are
    alike; v is 0. So out is what the roundings of S · k̂ and S · q̂ leave."""
    x = _normal(label, tokens)
    first, second = _pairs()
    for name in ("q", "k", "g", "dt_bias"):
        x[name][..., second] = x[name][..., first] if name in ("g", "dt_bias") else -x[name][..., first]
    return x | {"v": torch.zeros_like(x["v"])}


def _still(label: str, tokens: Tokens) -> Tensors:
    """No decay: keys and queries are rounded as they come out of their norm. Seeds make one a tie but for an ULP."""
    x = _normal(label, tokens)
    return x | {"g": _constant(x["g"], -torch.inf)}


def _pairs() -> tuple[Tensor, Tensor]:
    """The channels in random pairs."""
    order = draw.words("kda/pairs", D).argsort()
    return order[0::2], order[1::2]


def _paired_state(label: str, shape: tuple[int, ...]) -> Tensor:
    state = draw.normal(label, shape)
    first, second = _pairs()
    state[..., second] = state[..., first]
    return state


def _plain_state(label: str, shape: tuple[int, ...]) -> Tensor:
    """fp32, and larger from row to row: nothing about it is symmetric in V and K."""
    return draw.normal(label, shape) * (1.0 + torch.arange(D)[:, None] * 2.0**-5)


def _inf_state(label: str, shape: tuple[int, ...]) -> Tensor:
    state = _plain_state(label, shape)
    state[..., 3, 5], state[..., 40, 7], state[..., 77, 9] = torch.inf, -torch.inf, torch.nan
    return state


def _subnormal_state(label: str, shape: tuple[int, ...]) -> Tensor:
    return draw.wide_bf16(label, shape, -127, -122).to(torch.float32)


class Recipe(NamedTuple):
    """``values`` makes the tokens, ``state`` the first state, if the case has one. ``exact_only`` as in Case."""

    values: Values
    state: Callable[[str, tuple[int, ...]], Tensor] = _plain_state
    exact_only: str | None = None


RECIPES: dict[str, Recipe] = {
    "normal": Recipe(_normal),
    "repeated": Recipe(_repeated),
    "collinear": Recipe(_collinear),
    "bound-beside-none": Recipe(_bound_beside_none),
    "saturated": Recipe(_saturated),
    "inf-gates": Recipe(_inf_gates),
    "faint": Recipe(_faint),
    "zeros": Recipe(_zeros),
    "sizes": Recipe(_sizes),
    "subnormal": Recipe(_subnormal, _subnormal_state),
    "wide": Recipe(_wide),
    "reading": Recipe(_reading),
    "whispering": Recipe(_whispering),
    "cancel": Recipe(_cancel, _paired_state),
    "still": Recipe(_still),
    "nan": Recipe(_nan, exact_only="a chunk's tokens share its NaN, those before it too"),
    "inf-state": Recipe(_normal, _inf_state, exact_only="whether inf meets −inf depends on the order of a sum"),
}

# name → offsets; int32 where the name says so.
OFFSETS: dict[str, tuple[int, ...]] = {
    "tails": tuple(n * (n + 1) // 2 for n in range(CHUNK + 1)),  # lengths 1 … 16
    "lengths": (0, 65, 131, 202, 281),
    "thirds": (0, 7, 14, 21),
    "first-empty": (0, 0, 5),
    "empty-i32": (0, 0, 64, 64),
    "nothing": (0, 0, 0),
    "mixed-i32": (0, 300, 300, 341, 853, 854, 1024),
    "scan": (0, 2, 2, 131),
    "two-of-70": (0, 70, 140),
    "scan-i32": (0, 129, 129, 130, 322),
    "six": (0, 1300, 1847, 3895, 4858, 5129, 8192),
}


def _split(recipe: str) -> tuple[str, str, str]:
    """Values, offsets and the first state's type of a case's recipe "VALUES@OFFSETS@STATE"; "-" where there is none."""
    values, pattern, state = recipe.split("@")
    return values, pattern, state


def inputs(case: Case) -> Tensors:
    """All inputs of a case."""
    values, pattern, state = _split(case.recipe)
    tokens = (case.dims["batch"], case.dims["tokens"], case.dims["heads"])
    x = RECIPES[values].values(case.id, tokens)
    if pattern != "-":
        dtype = torch.int32 if pattern.endswith("i32") else torch.int64
        x["cu_seqlens"] = torch.tensor(OFFSETS[pattern], dtype=dtype)
    if state != "-":
        shape = (len(reference.offsets(x)) - 1, tokens[2], D, D)
        first = RECIPES[values].state(f"{case.id}/initial_state", shape)
        x["initial_state"] = to_bf16(first) if state == "bf16" else first
    return x


# Cases.


def make_case(
    tokens: int,
    heads: int = 1,
    values: str = "normal",
    offsets: str = "-",
    *,
    batch: int = 1,
    state: str = "-",
    final: str | None = None,
    lower_bound: float = -5.0,
    scale: float = SCALE,
    regenerated: tuple[str, ...] = (),
    committed: bool = True,
    seed: int = 0,
    schedules: tuple[str, ...] = ("chunk16",),
) -> Case:
    """A case by its sizes, the recipe of its values, its offsets, and the types of its first and last state."""
    parts = [f"t{tokens}", f"h{heads}" if heads != 1 else "", f"b{batch}" if batch != 1 else ""]
    parts += [
        offsets if offsets != "-" else "",
        f"from-{state}" if state != "-" else "",
        f"to-{final}" if final else "",
    ]
    parts += [f"lb{lower_bound:g}" if lower_bound != -5 else "", f"scale{scale:g}" if scale != SCALE else "", values]
    parts += [f"s{seed}" if seed else ""]
    return Case(
        kernel="kda",
        name="-".join(part for part in parts if part),
        dims={"batch": batch, "tokens": tokens, "heads": heads},
        params={"scale": scale, "lower_bound": lower_bound, "final_state": final},
        recipe=f"{values}@{offsets}@{state}",
        seed=seed,
        schedules=schedules,
        committed=committed,
        exact_only=_exact_only(values, tokens, lower_bound),
        regenerated=regenerated,
    )


_STATE = ("initial_state",)
_ROWS = ("q", "k", "v", "g")
_BOTH = (*_ROWS, *_STATE)


_SCAN64, _SCAN512 = ("chunk16_scan64",), ("chunk16_scan512",)
_ACCUMULATES = "what does not decay keeps every chunk's error: in the worst case more than there is to output"


def _exact_only(values: str, tokens: int, lower_bound: float) -> str | None:
    """Why the model is no judge: the recipe says so, or the derived bound is beyond the outputs."""
    lasting = abs(lower_bound) < 0.1 or values in ("repeated", "collinear", "bound-beside-none", "still")
    return RECIPES[values].exact_only or (_ACCUMULATES if lasting and tokens > 2 * CHUNK else None)


def _large(tokens: int, heads: int = 1, values: str = "normal", offsets: str = "-", **more: Any) -> Case:
    return make_case(tokens, heads, values, offsets, committed=False, **more)


_CASES = (
    # Two chunks, whole; then every way to begin and to end a state, every tail, sequences side by side. Other files
    # leave out what their recipe makes again, where that is much.
    make_case(20, 1, "normal"),
    make_case(17, 1, "normal", state="fp32", final="fp32", regenerated=_BOTH),
    make_case(2, 2, "normal", state="bf16", regenerated=_STATE),
    make_case(1, 1, "normal", final="bf16"),
    make_case(18, 1, "bound-beside-none", final="fp32", regenerated=_ROWS),
    make_case(136, 1, "normal", "tails", regenerated=_ROWS),
    make_case(281, 1, "normal", "lengths", regenerated=_ROWS),
    make_case(5, 1, "normal", "first-empty", state="bf16", final="bf16", regenerated=_BOTH),
    make_case(3, 2, "normal", batch=2, lower_bound=0.1, regenerated=_ROWS),
    make_case(18, 1, "normal", lower_bound=0.0, scale=1.0, regenerated=_ROWS),
    make_case(7, 1, "reading", state="fp32", lower_bound=-1.0, regenerated=_BOTH),
    # Hostile values.
    make_case(18, 1, "cancel", state="fp32", regenerated=_BOTH),
    # Seeds of which one notices the order of the norm's sum and its root, the other the root again.
    make_case(4, 1, "still", seed=464, regenerated=_ROWS),
    make_case(4, 1, "still", seed=8, regenerated=_ROWS),
    make_case(19, 1, "repeated", regenerated=_ROWS),
    make_case(18, 1, "collinear", regenerated=_ROWS),
    make_case(18, 1, "saturated", regenerated=_ROWS),
    make_case(9, 1, "inf-gates", regenerated=_ROWS),
    make_case(6, 1, "faint", regenerated=_ROWS),
    # Seeds that tell eps from the fp32 number above it; scale times the root of the norm from scale times the normed;
    # substitution in fp32 from one in fp64.
    *(make_case(4, 1, "faint", seed=seed, regenerated=_ROWS) for seed in (1771, 1664)),
    make_case(12, 1, "collinear", seed=2219, regenerated=_ROWS),
    make_case(1, 1, "whispering", state="bf16", scale=1.5, regenerated=_BOTH),
    make_case(1, 1, "subnormal", scale=2.0**-20, regenerated=_ROWS),  # sums below the least fp32
    make_case(7, 1, "zeros", regenerated=_ROWS),
    make_case(9, 1, "sizes", regenerated=_ROWS),
    make_case(5, 1, "subnormal", state="fp32", regenerated=_BOTH),
    make_case(9, 1, "wide", regenerated=_ROWS),
    make_case(21, 1, "nan", "thirds", regenerated=_ROWS),
    make_case(3, 1, "inf-state", state="fp32", regenerated=_STATE),
    # Three segments of 64 tokens, the last of one, behind a short sequence and an empty one; a decay that leaves much.
    make_case(131, 1, "normal", "scan", state="bf16", lower_bound=-0.0625, regenerated=_BOTH, schedules=_SCAN64),
    # On demand: every recipe over several chunks with states of either type.
    *(_large(100, 2, values, state="fp32", final="fp32", schedules=("chunk16", *_SCAN64)) for values in RECIPES),
    *(_large(77, 2, values, state="bf16", final="bf16", batch=2, lower_bound=-1.0) for values in RECIPES),
    _large(64, 2, "normal", "empty-i32", state="fp32", final="fp32"),
    _large(0, 2, "normal", "nothing", state="fp32", final="fp32"),
    _large(0, 2, "normal", "nothing", final="bf16"),
    _large(136, 3, "normal", "tails", state="bf16", final="bf16"),
    _large(281, 4, "normal", "lengths", state="fp32", final="fp32"),
    _large(1024, 2, "normal", "mixed-i32", state="fp32", final="fp32"),
    _large(64, 40, "normal", final="fp32"),
    _large(33, 2, "normal", batch=9, state="bf16", final="bf16"),
    _large(1024, 4, "normal", lower_bound=0.0, final="fp32"),
    _large(1024, 4, "bound-beside-none", final="fp32"),
    _large(8192, 1, "normal", "six", state="bf16", final="bf16"),
    _large(4096, 1, "repeated", final="fp32"),
    _large(16384, 1, "repeated", final="fp32"),
    # Segments: NaN in the second of two sequences; every kind of state; lengths about whole segments.
    _large(140, 1, "nan", "two-of-70", state="bf16", final="bf16", lower_bound=-0.0625, schedules=_SCAN64),
    _large(322, 2, "normal", "scan-i32", state="bf16", final="bf16", lower_bound=-0.0625, schedules=_SCAN64),
    _large(193, 1, "normal", batch=2, final="fp32", lower_bound=-0.0625, schedules=_SCAN64),
    _large(512, 1, "normal", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    _large(513, 2, "normal", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    _large(1024, 1, "normal", lower_bound=-0.0078125, final="bf16", schedules=_SCAN512),
    _large(1300, 1, "bound-beside-none", state="bf16", final="bf16", schedules=_SCAN512),
    _large(2048, 1, "repeated", state="fp32", final="fp32", schedules=_SCAN512),
)


# Tolerances.

# One step maps a row s of S to s·diag(decay)·(I − b k̂ k̂ᵀ) + …, and b ≤ 1, |k̂| ≤ 1: in the 2-norm over K no error of a
# row grows by more than the largest decay. So a row's error e (2-norm) becomes at most d·e + |what the step adds|, d
# being the product of the tokens' largest decays; an output errs by what its own sums add, and by |scale q̂|·d·e.
# What a step adds is bounded element by element from the oracle's values, each kept apart from its error. The
# schedule's own S differs from the oracle's by up to e: Σ|S|·w over K becomes Σ|S|·w + e·|w|, w's 2-norm.
# Roundings are U = 2^-24 (fp32) and B = 2^-8 (bf16), half an ULP of 1, plus 2^-149 or 2^-134 below the normal ranges.
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


def _model_bound(x: _Activated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on out [T, H, V] and on the rows of the last state [H, V], from the first state [H, V, K]."""
    norm = _NORM["model"]
    error = torch.zeros(state.shape[:2], dtype=torch.float64)
    out = torch.empty(x.v.shape, dtype=torch.float64)
    for t, decay in enumerate(x.gate.exp()):
        k, q = x.k[t][:, None], x.q[t][:, None]
        state = state * decay[:, None]
        bar = state.abs() + error[..., None]
        own = bar * (x.gate_error[t] + 3 * _U)[:, None]
        seen_error = (bar * k.abs()).sum(-1) * (norm + 8) * _U + (own * k.abs()).sum(-1)
        rest, b = x.v[t] - (state * k).sum(-1), x.b[t][:, None]
        u, bar_u = b * rest, b * (rest.abs() + error)
        u_error = b * seen_error + bar_u * 3 * _U + x.b_error[t][:, None] * (rest.abs() + error + seen_error)
        state = state + u[..., None] * k
        own = (
            own
            + (u_error[..., None] + bar_u[..., None] * (norm + 1) * _U) * k.abs()
            + (state.abs() + error[..., None]) * _U
        )
        error = decay.amax(-1, keepdim=True) * error + torch.linalg.vector_norm(own + 4 * _LEAST, dim=-1)
        length = torch.linalg.vector_norm(x.q[t], dim=-1, keepdim=True)
        out[t] = length * error + ((state.abs() + error[..., None]) * q.abs()).sum(-1) * (norm + 10) * _U + D * _LEAST
    return 1.01 * out, 1.01 * error


def _product(a: Tensor, a_error: Tensor, b: Tensor, b_error: Tensor, instructions: int) -> Tensor:
    """|error| of a · bᵀ by a chain of mma: |a| […, M, K] and |b| […, N, K] with their errors."""
    a_all, b_all = a + a_error, (b + b_error).transpose(-1, -2)
    moved = a_error @ b_all + a @ b_error.transpose(-1, -2)
    return moved + 1.01 * _U * _MMA * instructions * (a_all @ b_all) + a.shape[-1] * _LEAST


def _state_product(state: Tensor, far: Tensor, b: Tensor, b_error: Tensor, instructions: int) -> Tensor:
    """|error| of bf16(S) · bᵀ: |S| [H, V, K] of the oracle, ``far`` [H, V, 1] from it, and |b| [H, N, K]."""
    w = _B * b + (1.0 + _B) * (b_error + 1.01 * _U * _MMA * instructions * (b + b_error))
    all_b = (b + b_error).sum(-1)[:, None] * _LEAST_BF16
    return state @ w.transpose(-1, -2) + far * torch.linalg.vector_norm(w, dim=-1)[:, None] + all_b + D * _LEAST


def _to_bf16(x: Tensor, error: Tensor) -> Tensor:
    """|error| after rounding to bf16 of |x| that has ``error``."""
    return error + _B * (x + error) + _LEAST_BF16


def _to_two_parts(x: Tensor, error: Tensor) -> Tensor:
    """|error| of a sum of two bf16 parts: what is left over is exact in fp32."""
    return error + _to_bf16(_B * (x + error) + _LEAST_BF16, torch.zeros_like(x))


def _chunked(x: Tensor) -> Tensor:
    """[T, H, …] to [chunks, H, 16, …], zeros at the end."""
    padding = x.new_zeros(-len(x) % CHUNK, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _chunk16_bound(sequence: _Activated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on out [T, H, V] and on the rows of the last state [H, V], from the first state [H, V, K]."""
    out, error, _ = _chunks_bound(sequence, state, torch.zeros(state.shape[:2], dtype=torch.float64))
    return 1.01 * out, 1.01 * error


def _chunks_bound(sequence: _Activated, state: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, not enlarged, from a first state whose rows have an error [H, V]; and the oracle's last state."""
    norm = _NORM["chunk16"] * _U
    x = _Activated(*(_chunked(y) for y in sequence))
    total = x.gate.cumsum(2)
    off = x.gate_error.cumsum(2) + 17 * _U * x.gate.abs().cumsum(2) + 5 * _U  # relative errors of E⁺ and E⁻
    end, end_off = total[:, :, -1:], off[:, :, -1:]
    k_up, q_up, k_down, k_end = x.k * total.exp(), x.q * total.exp(), x.k * (-total).exp(), x.k * (end - total).exp()
    bars = [y.abs() for y in (k_up, q_up, k_down, k_end)]
    errors = [_to_bf16(bar, bar * (norm + off) + _LEAST) for bar in bars[:2]]
    errors.append(_to_two_parts(bars[2], bars[2] * (norm + off) + _LEAST))
    errors.append(_to_two_parts(bars[3], bars[3] * (norm + off + end_off) + _LEAST * end.exp()))

    lower = (x.b[..., None] * (k_up @ k_down.transpose(-1, -2))).tril(-1)
    bar = (k_up @ k_down.transpose(-1, -2)).abs()
    bar_error = _product(bars[0], errors[0], bars[2], errors[2], 16)
    lower_error = (x.b + x.b_error)[..., None] * bar_error + x.b_error[..., None] * bar + _LEAST
    lower_error = (lower_error + 18 * _U * (lower.abs() + lower_error)).tril(-1)
    identity = torch.eye(CHUNK, dtype=torch.float64)
    t = torch.linalg.solve_triangular(identity + lower, identity.expand_as(lower), upper=False)
    moved = t.abs() @ lower_error  # X
    t_error = torch.linalg.solve_triangular(identity - moved, moved @ t.abs(), upper=False)
    t_error = _to_bf16(t.abs(), t_error).tril(-1)
    p = (q_up @ k_down.transpose(-1, -2)).tril()
    p_error = _to_bf16(p.abs(), _product(bars[1], errors[1], bars[2], errors[2], 16)).tril()

    largest = x.gate.amax(-1).cumsum(2).exp()  # [chunks, H, 16]
    b_k_up = x.b[..., None] * k_up
    k_length, u_length, q_length = (torch.linalg.vector_norm(y, dim=-1) for y in (k_up, t @ b_k_up, x.q))
    out = []
    for c in range(len(total)):
        far = error[..., None]
        bar_s = state.abs()
        rest = x.v[c].transpose(-1, -2) - state @ k_up[c].transpose(-1, -2)  # [H, V, 16]
        b, b_error = x.b[c][:, None], x.b_error[c][:, None]
        r = b * rest
        u = r @ t[c].transpose(-1, -2)
        bar_rest, bar_u = rest.abs() + far * k_length[c][:, None], u.abs() + far * u_length[c][:, None]
        rest_error = _state_product(bar_s, far, bars[0][c], errors[0][c], 9) + 2 * _U * bar_rest
        bar_r = b * bar_rest
        r_error = (b + b_error) * rest_error + b_error * bar_rest
        r_error = _to_bf16(bar_r, r_error + 2 * _U * (bar_r + r_error) + _LEAST)
        u_error = _to_bf16(bar_u, _product(bar_r, r_error, t[c].abs(), t_error[c], 1))
        o_error = _state_product(bar_s, far, bars[1][c], errors[1][c], 9)
        o_error = o_error + _product(bar_u, u_error, p[c].abs(), p_error[c], 1)
        out.append((o_error + far * (largest[c] * q_length[c])[:, None]).permute(2, 0, 1))
        end_bars, end_errors = (y[3][c].transpose(-1, -2) for y in (bars, errors))
        own = _product(bar_u, u_error, end_bars, end_errors, 2)
        own = own + (bar_s + far) * (end[c].exp() * (end_off[c] + (2 * _MMA + 1) * _U)) + _LEAST
        state = state * end[c].exp() + u @ k_end[c]
        error = largest[c][:, -1:] * error + torch.linalg.vector_norm(own, dim=-1)
    errors_out = torch.cat(out)[: len(sequence.v)] if out else sequence.v
    return errors_out, error, state


def _scan_bound(sequence: _Activated, state: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """As ``_chunk16_bound``, for a scan over segments.

    With errors (2-norms of rows over K) e of S, c of C and m of M, S · M + C errs by d · e, d being the segment's
    product of largest decays, by Σ_k |S_k| m_k + e · |m|, by c, and by what 128 roundings of Σ|S_k||M_k| + |C| add.
    S, M and C themselves are the oracle's.
    """
    first = torch.zeros(state.shape[:2], dtype=torch.float64)
    outs = []
    for begin in range(0, max(len(sequence.v), 1), segment):
        part = _Activated(*(x[begin : begin + segment] for x in sequence))
        out, error, last = _chunks_bound(part, state, first)
        outs.append(out)
        if begin + segment < len(sequence.v):
            first = _carried_error(part, state, first)
            state = last
    return 1.01 * torch.cat(outs), 1.01 * error


def _carried_error(part: _Activated, state: Tensor, error: Tensor) -> Tensor:
    """Of the rows of S · M + C [H, V], from the oracle's S and its error."""
    none = torch.zeros_like(error)
    _, c_error, c = _chunks_bound(part, torch.zeros_like(state), none)
    _, m_error, m = _chunks_bound(
        part._replace(v=torch.zeros_like(part.v)), torch.eye(D).to(state).expand_as(state), none
    )
    c_error, m_error = 1.01 * c_error, 1.01 * m_error
    decay = part.gate.amax(-1).sum(0).exp()[:, None]
    m_all = torch.linalg.vector_norm(m, dim=-1) + m_error
    products = (state.abs() @ m_all[..., None])[..., 0] + error * torch.linalg.vector_norm(m_all, dim=-1, keepdim=True)
    rounded = D * _U * (products + torch.linalg.vector_norm(c, dim=-1) + c_error) + D * D * _LEAST
    moved = (state.abs() @ m_error[..., None])[..., 0] + error * torch.linalg.vector_norm(m_error, dim=-1, keepdim=True)
    return 1.01 * (decay * error + moved + c_error + rounded)


_BOUNDS: dict[str, Callable[[_Activated, Tensor], tuple[Tensor, Tensor]]] = {
    "model": _model_bound,
    "chunk16": _chunk16_bound,
    **{f"chunk16_scan{segment}": partial(_scan_bound, segment=segment) for segment in reference.SEGMENTS},
}


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |out − oracle| and |final_state − oracle| before they are rounded to their formats."""
    if schedule not in _BOUNDS:
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {', '.join(_BOUNDS)}")
    starts, heads = reference.offsets(tensors), tensors["q"].shape[2]
    states = tensors.get("initial_state", torch.zeros(len(starts) - 1, heads, D, D)).to(torch.float64)
    out, rows = [], []
    for start, end, state in zip(starts, starts[1:], states, strict=False):
        made = _BOUNDS[schedule](_activated(tensors, params, slice(start, end), schedule), state)
        out.append(made[0])
        rows.append(made[1])
    result = {"out": torch.cat(out).view(tensors["v"].shape)}
    if params["final_state"] is not None:
        result["final_state"] = torch.stack(rows)[..., None].expand(states.shape).contiguous()
    return result


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """Sequence, head, chunk, slab of 16 rows of V (a consumer warp has one or two), lane, register of an element.

    Lane and register are those of the accumulator of mma.m16n8k16, [V, tokens] for out and [V, K] for the state. All
    are the same whatever the cluster.
    """
    if output == "out":
        batch, token, head, row = index
        pattern = _split(case.recipe)[1]
        starts = OFFSETS[pattern] if pattern != "-" else (0,)
        sequence = bisect_right(starts, token) - 1
        token -= starts[sequence]
        place = {"sequence": batch + sequence, "head": head, "chunk": token // CHUNK}
        column = token % CHUNK
    else:
        sequence, head, row, column = index
        place = {"sequence": sequence, "head": head}
    register = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return place | {"slab": row // 16, "lane": row % 8 * 4 + column % 8 // 2, "register": register}


KERNEL = Kernel("kda", reference, _CASES, inputs, bound, locate)
