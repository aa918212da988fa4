"""KDA's input recipes, states and packed lengths."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Tensors
from reference import kda as reference
from reference.numerics import portable
from reference.numerics.formats import to_bf16

D, CHUNK = reference.D, reference.CHUNK
ROWS = (3, 46, 77, 120)  # of V, in recipes whose states are 0 elsewhere

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


def _opposed(label: str, tokens: Tokens) -> Tensors:
    """``cancel`` with values far below the halves of S · k̂ (``_opposed_state``), whose sum is next to nothing."""
    return _cancel(label, tokens) | {"v": draw.normal_bf16(f"{label}/v", (*tokens, D))}


def _in_rows(x: Tensor, axis: int) -> Tensor:
    """0 but for ``ROWS`` of V: of the states, which are large, a golden's file then keeps these rows alone."""
    shape = [D if i == axis % x.dim() else 1 for i in range(x.dim())]
    chosen = (torch.arange(D)[:, None] == torch.tensor(ROWS)).any(1)
    return torch.where(chosen.view(shape), x, 0.0)


def _rows(label: str, tokens: Tokens) -> Tensors:
    """Values in few rows of V, as in the first states."""
    x = _normal(label, tokens)
    return x | {"v": _in_rows(x["v"], -1)}


def _asked(label: str, tokens: Tokens) -> Tensors:
    """``rows``, and queries at every fourth token alone: of long sequences the others' outputs are 0, as they are."""
    x = _rows(label, tokens)
    return x | {"q": torch.where((torch.arange(tokens[1]) % 4 == 0)[:, None, None], x["q"], 0.0)}


def _settled(label: str, tokens: Tokens) -> Tensors:
    """``repeated`` with one value too, in ``rows``: after a few tokens v − S · k̂ is what roundings left."""
    x = _repeated(label, tokens)
    return x | {"v": _in_rows(x["v"][:, :1].expand_as(x["v"]), -1)}


def _resting(label: str, tokens: Tokens) -> Tensors:
    """``rows`` of a state that is read, as in ``reading``, and decays by ordinary gates, but is not written to: how it
    is kept, and every gate, shows in its last bits."""
    x = _rows(label, tokens)
    return x | {"q": _reading(label, tokens)["q"], "beta": _constant(x["beta"], -200.0)}


def _balanced(label: str, tokens: Tokens) -> Tensors:
    """b 1, no decay, k̂ ±½ in four channels that are the token's own, and v what S · k̂ is in bf16: sums that are exact
    in fp32 leave of v − S · k̂ what bf16 cannot hold. One sequence of at most 32 tokens."""
    x = _reading(label, tokens)
    sign = 1.0 - 2.0 * draw.integers(f"{label}/sign", (*tokens, D), 0, 2).to(torch.float32)
    own = torch.arange(D) // 4 == torch.arange(tokens[1])[:, None, None]
    state = _balanced_state(f"{label}/initial_state", (tokens[0], tokens[2], D, D))
    quarters = torch.where(own, sign, 0.0)[..., None, :] * state[:, None]  # [B, T, H, V, K]
    read = portable.total(quarters) * 0.5
    return x | {
        "k": to_bf16(torch.where(own, sign * 1024.0, 0.0)),
        "v": to_bf16(read),
        "beta": _constant(x["beta"], 200.0),
    }


def _strange(label: str, tokens: Tokens) -> Tensors:
    """``rows`` of which one has a NaN in its values and one an infinity, amid sound keys."""
    x = _rows(label, tokens)
    x["v"][:, tokens[1] // 2, :, ROWS[1]], x["v"][:, tokens[1] // 2, :, ROWS[2]] = torch.nan, torch.inf
    return x


def _fading(label: str, tokens: Tokens) -> Tensors:
    """Rows of very different size (``_fading_state``) under gates of ``bound-beside-none``; b is 0, so nothing is
    written of values as large as 2^100."""
    x = _bound_beside_none(label, tokens)
    v = _by_size(x["v"].to(torch.float32), -1, (0.0, 2.0**-125, 1.0, 2.0**100))
    return x | {"v": to_bf16(v), "beta": _constant(x["beta"], -200.0)}


def _by_size(x: Tensor, axis: int, sizes: tuple[float, ...]) -> Tensor:
    """``x`` in rows of V, times so much."""
    size = torch.ones(D)
    size[list(ROWS)] = torch.tensor(sizes)
    return _in_rows(x * size.view([D if i == axis % x.dim() else 1 for i in range(x.dim())]), axis)


def _probing(label: str, tokens: Tokens) -> Tensors:
    """No decay, b ½ or 1, and queries and every other key are unit vectors: what they read has 16 bits at most, so a
    good part of T, P, R, U and out are ties."""
    x = _still(label, tokens)
    unit = torch.zeros(*tokens, D)
    channel = draw.integers(f"{label}/channel", tokens, 0, D)
    unit.scatter_(-1, channel[..., None], 1024.0)
    odd = (torch.arange(tokens[1]) % 2 == 1)[:, None, None]
    beta = 200.0 * draw.integers(f"{label}/whole", tokens, 0, 2).to(torch.float32)
    return x | {"q": to_bf16(unit), "k": torch.where(odd, to_bf16(unit), x["k"]), "beta": to_bf16(beta)}


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


def _state_in_rows(label: str, shape: tuple[int, ...]) -> Tensor:
    return _in_rows(_plain_state(label, shape), -2)


def _balanced_state(label: str, shape: tuple[int, ...]) -> Tensor:
    return to_bf16(_state_in_rows(label, shape)).to(torch.float32)


def _strange_state(label: str, shape: tuple[int, ...]) -> Tensor:
    """``rows`` of any exponent, with zeros of both signs."""
    x = draw.wide_bf16(label, shape, -127, 40).to(torch.float32)
    x[..., ::3] *= 0.0
    return _in_rows(x, -2)


def _fading_state(label: str, shape: tuple[int, ...]) -> Tensor:
    return _by_size(draw.normal(label, shape), -2, (2.0**100, 2.0**-125, 1.0, 0.0))


def _opposed_state(label: str, shape: tuple[int, ...]) -> Tensor:
    return _paired_state(label, shape) * 2.0**18


def _inf_state(label: str, shape: tuple[int, ...]) -> Tensor:
    state = _plain_state(label, shape)
    state[..., 3, 5], state[..., 40, 7], state[..., 77, 9] = torch.inf, -torch.inf, torch.nan
    return state


def _subnormal_state(label: str, shape: tuple[int, ...]) -> Tensor:
    return draw.wide_bf16(label, shape, -127, -122).to(torch.float32)


class Recipe(NamedTuple):
    """``values`` makes the tokens, ``state`` the first state, if the case has one."""

    values: Values
    state: Callable[[str, tuple[int, ...]], Tensor] = _plain_state


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
    "settled": Recipe(_settled, _state_in_rows),
    "opposed": Recipe(_opposed, _opposed_state),
    "rows": Recipe(_rows, _state_in_rows),
    "asked": Recipe(_asked, _state_in_rows),
    "resting": Recipe(_resting, _state_in_rows),
    "balanced": Recipe(_balanced, _balanced_state),
    "fading": Recipe(_fading, _fading_state),
    "probing": Recipe(_probing),
    "strange": Recipe(_strange, _strange_state),
    "nan": Recipe(_nan),
    "inf-state": Recipe(_normal, _inf_state),
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
    "cycle": (0, 20, 25, 60),
    "around-chunks": (0, 17, 146, 147, 147, 210, 226, 291, 355, 370),  # 17, 129, 1, 0, 63, 16, 65, 64, 15
    "ones": (0, 3, 4, 20, 21),
    "one-behind": (0, 70, 71),
    "around-64": (0, 64, 130, 130, 195),
    "beyond-416": (0, 3, 420),
    "beyond-512": (0, 513, 514),
    "scan-i32": (0, 129, 129, 130, 322),
    "scan416-i32": (0, 416, 833, 833, 834, 1667, 1682),
    "six": (0, 1300, 1847, 3895, 4858, 5129, 8192),
}


def split(recipe: str) -> tuple[str, str, str]:
    """Values, offsets and the first state's type of a case's recipe "VALUES@OFFSETS@STATE"; "-" where there is none."""
    values, pattern, state = recipe.split("@")
    return values, pattern, state


def inputs(case: Case) -> Tensors:
    """All inputs of a case."""
    values, pattern, state = split(case.recipe)
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
