"""FMHA's cases, input recipes, tolerances, and where in a schedule an output element is made."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Kernel, Tensors
from reference import fmha as reference
from reference.numerics.formats import to_bf16

_UNIT = 2.0**-24  # u: half an ULP of 1 in fp32
_TINY = 2.0**-126
_FUSED_SUM = 10.5  # see the tolerances below
_BF16_OVER_FP32 = 2.0**16

# Inputs.


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
    "dominant": _dominant,
    "constant": _constant,
    "halfway": _halfway,
    "nan": _nan,
    "inf": _inf,
    "bits": _bits,
}
_EXACT_ONLY = {
    "overflow": "whether a score overflows depends on the order of its sum",
    "nan": "k2 visits masked keys, and 0 · NaN is NaN",
    "inf": "k2 visits masked keys, and 0 · inf is NaN",
    "bits": "k2 visits masked keys, and 0 · inf is NaN",
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


# Cases.


def make_case(
    d: int,
    causal: bool,
    n: int | tuple[int, int],
    recipe: str,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (1, 1),
    scale: float | None = None,
    seed: int = 0,
    committed: bool = True,
    schedules: tuple[str, ...] | None = None,
    packed: tuple[tuple[int, int], ...] = (),
) -> Case:
    """A case by its dimensions; n is N, or (Nq, Nk); heads is (Hq, Hkv) of one batch.

    schedules: whose exact outputs the golden holds, by default ``k2`` where it supports the shapes. packed: the
    (Nq, Nk) of each of several sequences, whose sums are n.
    """
    n_q, n_k = (n, n) if isinstance(n, int) else n
    if packed and (sum(q for q, _ in packed), sum(k for _, k in packed)) != (n_q, n_k):
        raise ValueError(f"packed: got {packed}, whose sums are not n = {(n_q, n_k)}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, allowed are {', '.join(RECIPES)}")
    if min(n_q, n_k, batch, *heads) < 1 or heads[0] % heads[1]:
        raise ValueError(f"n, batch, heads: got {n}, {batch}, {heads}; all are at least 1, Hq a multiple of Hkv")
    length = f"n{n_q}" if n_q == n_k else f"q{n_q}-k{n_k}"
    parts = [f"d{d}", "causal" if causal else "", length, f"b{batch}" if batch > 1 else ""]
    parts += [f"h{heads[0]}-{heads[1]}" if heads != (1, 1) else "", "" if scale is None else f"scale{scale:g}", recipe]
    parts += ["packed" + ".".join(f"{q}x{k}" for q, k in packed) if packed else "", f"s{seed}" if seed else ""]
    dims = {"batch": batch, "heads_q": heads[0], "heads_kv": heads[1], "n_q": n_q, "n_k": n_k, "d": d}
    dims |= {f"n_q{i}": q for i, (q, _) in enumerate(packed)} | {f"n_k{i}": k for i, (_, k) in enumerate(packed)}
    q, k = (batch * heads[0], n_q, d), (batch * heads[1], n_k, d)
    if schedules is None:
        schedules = () if packed or reference.k2_refusal(q, k) else ("k2",)
    return Case(
        kernel="fmha",
        name="-".join(part for part in parts if part),
        dims=dims,
        params={"causal": causal, "scale": scale},
        recipe=recipe,
        seed=seed,
        schedules=schedules,
        committed=committed,
        exact_only=_EXACT_ONLY.get(recipe),
        regenerated=("q", "k", "v") if committed and min(n_q, n_k) >= 128 else (),
    )


WGMMA = ("wgmma128", "wgmma176")
_HOSTILE = ("wide", "cancel", "ties", "subnormal", "zeros", "overflow", "constant", "halfway", "inf", "bits")
_PACKED = ((5, 9), (1, 1), (0, 4), (7, 0), (13, 46))
_PACKED_LONG = ((180, 180), (1, 300), (0, 1), (64, 64), (5, 0), (150, 255), (100, 100))

_CASES = (
    # Every recipe, each with and without a mask where the mask changes what is computed.
    *(make_case(64, causal, 64, "normal") for causal in (False, True)),
    *(make_case(64, True, 128, recipe) for recipe in ("nan", "dominant", "inf", "bits")),
    *(make_case(64, False, 64, recipe) for recipe in ("ties", "subnormal", "zeros", "overflow", "constant", "wide")),
    *(make_case(64, True, 64, recipe) for recipe in ("negative", "cancel")),
    # Both widths, several tiles, batches, a scale of the caller's.
    make_case(128, False, 64, "normal"),
    make_case(128, True, 128, "normal"),
    make_case(128, True, 64, "wide"),
    make_case(64, False, 128, "halfway"),
    make_case(64, True, 64, "normal", batch=2),
    make_case(64, False, 64, "normal", scale=0.5),
    make_case(64, True, 512, "normal"),
    # Beyond k2: other lengths, ragged ends, rows without keys, grouped heads.
    make_case(64, True, (65, 64), "normal"),
    make_case(64, True, (17, 80), "normal"),
    make_case(64, False, (1, 65), "normal"),
    make_case(64, True, 33, "normal", heads=(4, 2)),
    # Tensor cores. Diagonal, full and ragged tiles; rows without keys; a group of rows that skips a tile; other tiles.
    make_case(64, True, (70, 134), "normal", schedules=WGMMA),
    make_case(64, True, (20, 9), "normal", schedules=WGMMA[:1]),
    make_case(128, True, (16, 132), "normal", schedules=WGMMA),
    make_case(64, False, (3, 129), "negative", schedules=WGMMA[:1]),
    make_case(64, False, (4, 144), "dominant", schedules=WGMMA[:1]),
    make_case(64, True, (6, 33), "normal", heads=(4, 2), scale=0.3, schedules=WGMMA[:1]),
    make_case(64, False, (33, 40), "nan", schedules=WGMMA[:1]),
    # Weights' sums near 1 and lse below it, where lg2 is cut; a scale that times fp32(log2 e) is not c.
    make_case(64, False, (2, 3), "normal", scale=0.9, seed=7, schedules=WGMMA[:1]),
    # A neighbour full of NaN, a sequence without keys, one without queries, one of a single row.
    make_case(64, True, (26, 60), "normal", heads=(2, 1), packed=_PACKED, schedules=WGMMA[:1]),
    # On demand.
    make_case(64, False, (300, 500), "normal", heads=(2, 1), schedules=WGMMA, committed=False),
    make_case(128, True, (200, 300), "normal", heads=(2, 1), schedules=WGMMA, committed=False),
    *(make_case(64, True, (200, 336), recipe, schedules=WGMMA, committed=False) for recipe in _HOSTILE),
    make_case(128, True, 1024, "normal", seed=1, schedules=WGMMA, committed=False),
    make_case(128, True, (500, 900), "normal", heads=(2, 2), packed=_PACKED_LONG, schedules=WGMMA, committed=False),
    make_case(128, True, 256, "normal", committed=False),
    make_case(128, False, 512, "normal", committed=False),
    make_case(64, True, 1024, "dominant", committed=False),
    make_case(128, False, 1024, "normal", committed=False),
    make_case(64, False, 2048, "wide", committed=False),
    make_case(128, True, 4096, "normal", committed=False),
)


# Tolerances.

# Roundings, in units u = 2^-24 of fp32, by where they enter. With M the row's maximum, R = M − s the distance of a
# score below it, A = scale · Σ|q·k|, T the number of key tiles, and weights w that sum to 1:
#   score     (score · A): d products and sums and the scale, d + 1 roundings
#   shift     (shift · A of the row's largest): m · c is rounded before it is subtracted (wgmma alone)
#   weight    (range · R + weight): x · log2e is rounded, and log2e itself; each ex2 errs by at most 2^-22 = 4u. In k2
#             the weight is exp(s − m) times a factor α for each later tile; their exponents add up to R.
#   numerator (value): a chain over the keys of a tile and one rounding a tile
#   sum       (total): 16 adds, 2 shuffles, one rounding a tile
#   quotient  (last): reciprocal (1 ULP = 2u) and product, or one division
# so, with E = score·A + range·R + weight,
#   |error of o| ≤ u · [Σ w|v|(E + value) + |o| Σ w(E + total) + last·|o|],
# In wgmma a fused sum cuts its 17 terms at 2^-25 of the largest one's power of two, and their sum at 2^-23: at most
# 17/2 + 2 = 10.5 u of Σ|terms|. The weights that multiply V, not those that are summed, are rounded to bf16: by half an
# ULP of its 8 bits, 2^-8 = 2^16 u. Its range R counts c, the FMA, and in α a difference and a product; in lse, lg2 errs
# by 2^-22 of the larger of 1 and itself.
# All this plus what underflow may drop: 2^-126 for each exponential, times the largest |v|, and 2^-150 for each
# operation on subnormals, at most 2 a key and 4 a row. A factor 1.01 pays for products of errors.


def _roundings(d: int, n: int, schedule: str) -> dict[str, float]:
    if schedule == "k2":
        tiles = -(-n // 64)
        return {
            "score": d + 1,
            "shift": 0,
            "range": 3,
            "weight": 4.0 * tiles,
            "value": 64 + tiles,
            "total": 18 + tiles,
            "last": 3,
        }
    if schedule == "model":
        total = 1.0 * n.bit_length()
        return {
            "score": d + 2,
            "shift": 0,
            "range": 1,
            "weight": 2,
            "value": n + 1,
            "total": total,
            "last": 1,
            "log": 0,
        }
    if schedule.startswith("wgmma"):
        bc = int(schedule.removeprefix("wgmma"))
        tiles = -(-n // bc)
        return {
            "score": _FUSED_SUM * d / 16,
            "shift": 1,
            "range": 4,
            "weight": 4.0 * tiles,
            "value": _BF16_OVER_FP32 + _FUSED_SUM * tiles * bc / 16 + tiles,
            "total": bc / 4 + tiles + 2,
            "last": 3,
            "log": 4,
        }
    raise ValueError(f"schedule: got {schedule!r}, a bound is derived for k2, wgmma and model")


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |o − oracle| before o is rounded to its format, and on |lse − oracle| if the schedule has it."""
    return reference.by_sequence(lambda own: _bound(own, params, schedule), tensors)


def _bound(tensors: Tensors, params: Mapping[str, Any], schedule: str) -> Tensors:
    """``bound`` of one sequence length."""
    q, k, v = (tensors[name].to(torch.float64) for name in ("q", "k", "v"))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scale = reference.scale_of(q.shape[2], params)
    c = _roundings(q.shape[2], k.shape[1], schedule)
    keep = reference.visible(q.shape[1], k.shape[1], params.get("causal", False), q.device)
    s = torch.where(keep, q @ k.transpose(1, 2) * scale, -torch.inf)
    a = torch.where(keep, q.abs() @ k.abs().transpose(1, 2) * scale, 0.0)
    largest = s.amax(-1, keepdim=True) if k.shape[1] else torch.full_like(q[..., :1], -torch.inf)
    empty = largest == -torch.inf
    distance = torch.where(keep, largest - s, 0.0)
    w = torch.where(keep & ~empty, torch.exp(-distance), 0.0)
    total = w.sum(-1, keepdim=True)
    w = w / torch.where(empty, 1.0, total)
    largest_a = a.amax(-1, keepdim=True) if k.shape[1] else torch.zeros_like(largest)
    relative = c["score"] * a + c["shift"] * largest_a + c["range"] * distance + c["weight"]
    o = w @ torch.where(v.isfinite(), v, 0.0)
    sums = (w * (relative + c["total"])).sum(-1, keepdim=True)
    errors = (w * (relative + c["value"])) @ v.abs() + o.abs() * sums + c["last"] * o.abs()
    dropped = _TINY * 2 * k.shape[1] * v.abs().amax((1, 2), keepdim=True) if k.shape[1] else 0.0
    dropped = dropped + (2 * k.shape[1] + 4) * 2.0**-150
    result = {"o": 1.01 * _UNIT * errors + dropped}
    if schedule != "k2":
        lse = torch.where(empty, 0.0, largest + torch.log(torch.where(empty, 1.0, total)))
        score = (c["score"] * w * a).sum(-1, keepdim=True) + c["score"] * largest_a
        logarithm = c["log"] * (1 + lse.abs() + largest.abs())
        parts = sums + score + logarithm + 3 * lse.abs() + 2 * largest.abs()
        result["lse"] = (1.01 * _UNIT * parts.nan_to_num(0.0))[..., 0]
    return result


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """Which tile of 64 rows, warp, lane and register of a schedule made an element of o."""
    if output != "o":
        return {}
    batch, row, column = index
    place = {"tile": row // 64, "batch": batch}
    if schedule == "k2":
        per_thread = case.dims["d"] // 4
        thread = row % 64 * 4 + column // per_thread
        return place | {"warp": thread // 32, "lane": thread % 32, "register": column % per_thread}
    if "n_q0" in case.dims:
        return {}
    # The accumulator fragment of wgmma: 16 rows a warp, two of them and two columns of every eight a lane.
    lane, register = row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return place | {"warp": row % 64 // 16, "lane": lane, "register": register}


KERNEL = Kernel("fmha", reference, _CASES, inputs, bound, locate)
