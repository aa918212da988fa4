"""KDA's cases, input recipes, and where in a schedule an element is made; tolerances: ``kda_bound``."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Kernel, Tensors
from goldens.kda_bound import bound
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
    "scan416-i32": (0, 416, 833, 833, 834, 1667, 1682),
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


_SCAN64, _SCAN416, _SCAN512 = ((f"chunk16_scan{segment}",) for segment in reference.SEGMENTS)
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
    _large(1682, 1, "normal", "scan416-i32", state="bf16", final="bf16", lower_bound=-0.0078125, schedules=_SCAN416),
    _large(2048, 1, "repeated", final="fp32", schedules=_SCAN416),
    _large(512, 1, "normal", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    _large(513, 2, "normal", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    _large(1024, 1, "normal", lower_bound=-0.0078125, final="bf16", schedules=_SCAN512),
    _large(1300, 1, "bound-beside-none", state="bf16", final="bf16", schedules=_SCAN512),
    _large(2048, 1, "repeated", state="fp32", final="fp32", schedules=_SCAN512),
)


# Where.


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
