"""FMHA's input recipes."""

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Tensors
from reference import fmha as reference
from reference.numerics.formats import to_bf16


def _normal(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    return {name: draw.normal_bf16(f"{label}/{name}", q if name == "q" else kv) for name in ("q", "k", "v")}


def _wide(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    spread = {"q": (-12, 3), "k": (-12, 3), "v": (-40, 40)}
    return {n: draw.wide_bf16(f"{label}/{n}", q if n == "q" else kv, *spread[n]) for n in ("q", "k", "v")}


def _cancel(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """The second half of each score's products undoes the first, values alternate in sign."""
    x = _normal(label, q, kv)
    half = q[2] // 2
    x["q"][..., half:] = x["q"][..., :half]
    x["k"][..., half:] = -x["k"][..., :half]
    x["k"][..., -1] = draw.normal_bf16(f"{label}/rest", kv[:2])
    x["v"][:, 1::2] = -x["v"][:, 0::2]
    return x


def _ties(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Equal weights and small integers whose mean over all keys is an odd multiple of ½: without a mask, all ties."""
    values = draw.integers(f"{label}/v", kv, 128, 192)
    values[:, -1] += (kv[1] // 2 - values.sum(1)) % kv[1]
    return {
        "q": torch.zeros(q, dtype=torch.bfloat16),
        "k": draw.normal_bf16(f"{label}/k", kv),
        "v": to_bf16(values.to(torch.float32)),
    }


def _subnormal(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    return _normal(label, q, kv) | {"v": draw.wide_bf16(f"{label}/v", kv, -127, -124)}


def _zeros(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Zeros of both signs in q, k and v."""
    sign = {n: draw.integers(f"{label}/{n}", q if n == "q" else kv, 0, 2) for n in ("q", "k", "v")}
    return {n: to_bf16(torch.where(s == 1, -0.0, 0.0)) for n, s in sign.items()}


def _overflow(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Every 16th key has scores around the largest fp32: some of their chains overflow, to either side."""
    x = _normal(label, q, kv)
    exponent = torch.where(torch.arange(kv[1]) % 16 == 0, 2.0**62, 2.0**-60)[:, None]
    return x | {
        "q": to_bf16(x["q"].to(torch.float32) * 2.0**62),
        "k": to_bf16(x["k"].to(torch.float32) * exponent),
    }


def _negative(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """All scores far below zero, where only differences to the maximum matter."""
    x = _normal(label, q, kv)
    near = {n: to_bf16(x[n].to(torch.float32) * 0.125 + (8.0 if n == "q" else -8.0)) for n in ("q", "k")}
    return near | {"v": x["v"]}


def _far(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """All scores below -10^5 at the default scale: whatever finite number stands for a mask's -inf outweighs them."""
    x = _normal(label, q, kv)
    far = {n: to_bf16(x[n].to(torch.float32) * 0.5 + (128.0 if n == "q" else -160.0)) for n in ("q", "k")}
    return far | {"v": x["v"]}


def _dominant(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """One key in the second half of each sequence outweighs the others by about e^80."""
    x = _normal(label, q, kv)
    direction = draw.normal_bf16(f"{label}/direction", (1, 1, q[2]))
    x["q"] = to_bf16(x["q"].to(torch.float32) * 0.125 + direction.to(torch.float32))
    x["k"][:, kv[1] * 3 // 4] = to_bf16(direction[:, 0].to(torch.float32) * (80.0 / q[2] ** 0.5))
    return x


def _constant(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """All keys of a sequence equal: every visible weight is the same."""
    x = _normal(label, q, kv)
    x["k"] = x["k"][:, :1].expand(kv).contiguous()
    return x


def _halfway(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Keys in equal pairs, four apart, with neighbouring values: whatever the weights, every mean is a tie in bf16.

    One rounding more or less anywhere in a row's sums then decides which way an output goes.
    """
    x = _normal(label, q, kv)
    second = torch.arange(kv[1]) % 8 >= 4
    x["k"][:, second] = x["k"][:, ~second]
    x["v"] = (x["v"][:, :1].view(torch.int16) + second[:, None].to(torch.int16)).view(torch.bfloat16)
    return x


def _nan(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """NaN of several payloads in one query row, one key of the second half, and one value in the last row."""
    x = _normal(label, q, kv)
    for where, code in (("q", 0x7FC0), ("k", 0x7F81), ("v", -1)):
        row = {"q": q[1] // 3, "k": kv[1] * 2 // 3, "v": kv[1] - 1}[where]
        x[where].view(torch.int16)[:, row, 5] = code
    return x


def _inf(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Infinities of both signs in single elements of q, k and v."""
    x = _normal(label, q, kv)
    x["q"][:, q[1] // 3, 5] = torch.inf
    x["k"][:, kv[1] * 2 // 3, 7] = -torch.inf
    x["v"][:, kv[1] // 2, 9] = torch.inf
    x["v"][:, -1, 11] = -torch.inf
    return x


def _bits(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Any bit patterns; q and k keep to 2^±20 so that not every row is NaN, one sequence of v is all bits."""
    x = {n: draw.wide_bf16(f"{label}/{n}", q if n == "q" else kv, -20, 2) for n in ("q", "k")}
    return x | {"v": draw.bits_bf16(f"{label}/v", kv)}


def _near_one(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Log-sum-exp is near 1, so that one rounding of a row's sum shows in it.

    Of 90 keys one is close to the maximum, the others are 4 to 14 below; each 90 are half of one below those before.
    """
    x = {name: draw.times(t, 0.5) for name, t in _normal(label, q, kv).items()}
    below = draw.integers(f"{label}/below", kv[:2], 64, 224).to(torch.float32) * 2.0**-4
    below[:, 45::90] = 0.0
    below += (torch.arange(kv[1]) // 90).to(torch.float32) * 0.5
    x["q"][..., 0], x["k"][..., 0] = q[2] ** 0.5, to_bf16(-below)
    return x | {"v": draw.times(x["v"], 2.0)}


def _far_below(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Scores below any finite "−inf": of every five rows one near −6 · 10^4, one of −2^104, one of −inf alone, one of
    −inf in the second half of the keys, one in the first."""
    x = _normal(label, q, kv)
    x["q"][..., :4], x["k"][..., :4] = 0.0, 0.0
    for row, (channel, height) in enumerate(((0, 2.0**-1), (1, 2.0**84), (1, 2.0**108), (2, 2.0**108), (3, 2.0**108))):
        x["q"][:, row::5, channel] = height
    x["q"][:, 1::5, 4:], x["q"][:, 2::5, 4:] = 0.0, 0.0
    far = -(2.0**20)
    x["k"][..., 0], x["k"][..., 1] = far, to_bf16((far * draw.power_of_two(torch.arange(kv[1]) % 3)).to(torch.float32))
    x["k"][:, kv[1] // 2 :, 2], x["k"][:, : kv[1] // 2, 3] = far, far
    return x


def _faint(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """The middle key has all weight and the value 0; the others' weights, 2^-88 to 2^-136, times huge values are o."""
    x = {name: draw.times(t, 0.25) for name, t in _normal(label, q, kv).items()}
    octaves = torch.arange(kv[1]) * 29 % 48 + 88
    x["q"][..., 0] = q[2] ** 0.5
    x["k"][..., 0] = to_bf16(octaves * -0.6931471805599453)
    rest = draw.wide_bf16(f"{label}/v", kv, -2, 1).to(torch.float32)
    # What is flushed weighs a sixteenth: dropped, it changes bits and no mean.
    x["v"] = to_bf16((rest * draw.power_of_two(octaves - 20 - 4 * (octaves > 124))[:, None]).to(torch.float32))
    x["k"][:, kv[1] // 2, 0], x["v"][:, kv[1] // 2] = 0.0, 0.0
    return x


def _vanishing(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Values of a few times 2^-133, mostly 0: outputs are subnormals and zeros of both signs.

    In the second half of the channels the other keys alone have values, whose weights are 2^-16: sums of 2^-149.
    """
    x = {name: draw.times(t, 0.5) for name, t in _normal(label, q, kv).items()}
    other = torch.arange(kv[1])[:, None] % 2
    x["q"][..., 0], x["k"][..., 0] = q[2] ** 0.5, to_bf16(other[:, 0].to(torch.float32) * -11.0)
    steps = draw.integers(f"{label}/v", kv, -3, 4) * draw.integers(f"{label}/some", kv, 0, 2)
    channel = torch.arange(kv[2])
    steps = torch.where(channel < kv[2] // 2, steps, steps * other)
    return x | {"v": to_bf16((steps * draw.power_of_two(channel % 8 - 133)).to(torch.float32))}


def _own(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """The key at the query's own place has all weight: each output row is a row of v."""
    signs = {n: draw.integers(f"{label}/{n}", s, 0, 2) * 2.0 - 1 for n, s in (("q", q), ("k", kv))}
    both = min(q[1], kv[1])
    signs["q"][:, q[1] - both :] = signs["k"][:, kv[1] - both :].repeat_interleave(q[0] // kv[0], 0)
    high = 2048.0**0.5 / q[2] ** 0.25
    return {n: to_bf16(x * high) for n, x in signs.items()} | {"v": draw.normal_bf16(f"{label}/v", kv)}


def _marks(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Each even channel has two values that are no numbers, half of the keys apart.

    A channel is NaN in the rows that visit the mark's key, masked or not: it says which tiles a row visits.
    """
    x = _normal(label, q, kv)
    marks = torch.arange(kv[2])
    keys, channels = (marks * kv[1] + kv[1] - 1) // kv[2], marks * 2 % kv[2]
    codes = torch.tensor([0x7FC0, 0x7F80, -0x80, -1], dtype=torch.int16)
    x["v"].view(torch.int16)[:, keys, channels] = codes[marks % 4]
    return x


def _hidden(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Keys beyond the first query's diagonal are NaN or infinite: rows that do not see them have numbers."""
    x = _normal(label, q, kv)
    first = max(1, kv[1] - q[1] + 1)
    x["k"][:, first + (kv[1] - first) // 2 :, ::7] = torch.nan
    x["k"][:, first + (kv[1] - first) // 4 : first + (kv[1] - first) // 2, ::5] = torch.inf
    return x


def _means(label: str, q: tuple[int, ...], kv: tuple[int, ...]) -> Tensors:
    """Equal weights: the mean of every even number of keys is a tie in bf16, which the number's reciprocal decides."""
    values = 128 + (torch.arange(kv[2]) % 64 + torch.arange(kv[1])[:, None] % 2)
    x = {"q": torch.zeros(q, dtype=torch.bfloat16), "k": draw.normal_bf16(f"{label}/k", kv)}
    return x | {"v": to_bf16(values.to(torch.float32)).expand(kv).contiguous()}


Recipe = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensors]
RECIPES: dict[str, Recipe] = {
    "normal": _normal,
    "wide": _wide,
    "cancel": _cancel,
    "ties": _ties,
    "subnormal": _subnormal,
    "zeros": _zeros,
    "overflow": _overflow,
    "negative": _negative,
    "far": _far,
    "dominant": _dominant,
    "constant": _constant,
    "halfway": _halfway,
    "nan": _nan,
    "inf": _inf,
    "bits": _bits,
    "means": _means,
    "near-one": _near_one,
    "far-below": _far_below,
    "faint": _faint,
    "vanishing": _vanishing,
    "own": _own,
    "marks": _marks,
    "hidden": _hidden,
}


def inputs(case: Case) -> Tensors:
    """q [B·Hq, Nq, d], k and v [B·Hkv, Nk, d], bf16, of a case.

    Packed sequences also have their offsets, int32; keys and values of a sequence without queries are NaN.
    """
    dims = case.dims
    q = (dims["batch"] * dims["heads_q"], dims["n_q"], dims["d"])
    kv = (dims["batch"] * dims["heads_kv"], dims["n_k"], dims["d"])
    x = RECIPES[case.recipe](case.id, q, kv)
    if "n_q0" in dims:
        x |= {name: _offsets(dims, prefix) for name, prefix in zip(reference.OFFSETS, ("n_q", "n_k"), strict=True)}
        for _, own in reference.sequences(x):
            if own["q"].shape[1] == 0:
                own["k"].fill_(torch.nan)
                own["v"].fill_(torch.nan)
    return x


def _offsets(dims: Mapping[str, int], prefix: str) -> Tensor:
    """Where packed sequences start, int32 [B + 1], from the lengths ``prefix``0, ``prefix``1, …"""
    count = sum(name.removeprefix(prefix).isdigit() for name in dims)
    return torch.tensor([0, *itertools.accumulate(dims[f"{prefix}{i}"] for i in range(count))], dtype=torch.int32)
