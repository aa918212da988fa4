"""The cache insert's cases, input recipes, tolerances, and where an element is made.

``goldens.mla_query`` shares them for its own insert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Kernel, Tensors
from reference import cache_insert as reference
from reference.numerics.formats import E4M3, to_bf16

LATENT, ROPE = reference.LATENT, reference.ROPE
EPS = float.fromhex("0x1.0c6f7ap-20")  # fp32 nearest to 1e-6
UNIT = 2.0**-24  # u: half an ULP of 1 in fp32
LEAST = 2.0**-149

# Inputs.

Values = Callable[[str, int], Tensors]  # label and B to kv, k_pe and w_kva, and k_scale_inv if it depends on them


@dataclass(frozen=True)
class Recipe:
    """``values`` makes the tensors; ``scale`` is k_scale_inv unless they hold it; ``exact_only`` as in Case."""

    values: Values
    scale: float
    eps: float = EPS
    exact_only: str | None = None


def _scaled(latent: float = 1.0, weight: float = 1.0, rope: float = 1.0) -> Values:
    """Normal rows times a number each."""
    return lambda label, rows: {
        "kv": draw.normal_bf16(f"{label}/kv", (rows, LATENT), latent),
        "k_pe": draw.normal_bf16(f"{label}/k_pe", (rows, ROPE), rope),
        "w_kva": draw.normal_bf16(f"{label}/w_kva", (LATENT,), weight),
    }


_normal = _scaled()


def _padded(label: str, rows: int) -> Tensors:
    """Every second row is NaN."""
    x = _normal(label, rows)
    for name in ("kv", "k_pe"):
        x[name][1::2] = torch.nan
    return x


def signs(label: str, shape: tuple[int, ...]) -> Tensor:
    """±1 in fp32: a row of them has the mean square 1 in any order, and with eps = 0 its norm is 1 exactly."""
    return 1.0 - 2.0 * draw.integers(label, shape, 0, 2).to(torch.float32)


def _unit(label: str, rows: int) -> Tensors:
    """±1 with weight 1, the pitfalls' row: scale 2 gives 0x30 and 0xb0."""
    kv, k_pe = (to_bf16(signs(f"{label}/{n}", (rows, width))) for n, width in (("kv", LATENT), ("k_pe", ROPE)))
    return {"kv": kv, "k_pe": k_pe, "w_kva": torch.ones(LATENT, dtype=torch.bfloat16)}


def e4m3_ties() -> Tensor:
    """fp32 [630]: for each two neighbours from 0 to 480 the value halfway, the bf16 below and above it, and their ends.

    480 would follow 448; what rounds there saturates.
    """
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(E4M3.dtype).to(torch.float32)
    ends = torch.cat([codes, torch.tensor([480.0])])
    halfway = (ends[:-1] + ends[1:]) * 0.5
    around = [to_bf16(halfway).view(torch.int16) + step for step in (-1, 0, 1)]
    return torch.cat([*(x.view(torch.bfloat16).to(torch.float32) for x in around), ends[:-1], ends[1:]])[: 5 * 126]


def choice(label: str, shape: tuple[int, ...], values: Tensor) -> Tensor:
    """Elements of ``values`` [n], each with a random sign."""
    return values[draw.integers(f"{label}/choice", shape, 0, len(values))] * signs(f"{label}/sign", shape)


def _chosen(values: Tensor, scale: float) -> Values:
    """Rows whose scaled values are all of ``values``, exactly: latents of length 1 times a weight, and k_pe."""

    def make(label: str, rows: int) -> Tensors:
        x = _unit(label, rows)
        w = values / torch.tensor(scale)
        x["k_pe"] = to_bf16(choice(f"{label}/k_pe", (rows, ROPE), w))
        x["w_kva"] = to_bf16(w[torch.arange(LATENT) % len(values)])
        return x

    return make


_SATURATING = torch.tensor([416, 440, 447, 448, 449, 456, 463, 464, 465, 480, 512, 1000, 2.0**100, torch.inf])


def _zeros(label: str, rows: int) -> Tensors:
    """A row of zeros of both signs, then normal rows with a quarter of such zeros; zeros among the weights too."""
    x = _normal(label, rows)
    for name in x:
        zero = draw.integers(f"{label}/zero/{name}", tuple(x[name].shape), 0, 4) == 0
        if x[name].dim() == 2:
            zero[0] = True
        x[name] = torch.where(zero, to_bf16(signs(f"{label}/sign/{name}", tuple(zero.shape)) * 0.0), x[name])
    return x


def _wide(label: str, rows: int) -> Tensors:
    return {
        "kv": draw.wide_bf16(f"{label}/kv", (rows, LATENT), -20, 20),
        "k_pe": draw.wide_bf16(f"{label}/k_pe", (rows, ROPE), -12, 10),
        "w_kva": draw.wide_bf16(f"{label}/w_kva", (LATENT,), -8, 8),
    }


def _bits(label: str, rows: int) -> Tensors:
    """Row 0 is any bits; the others have an infinity, or squares that overflow, in turn; k_pe is any bits."""
    x = _normal(label, rows)
    x["kv"][1::2, 5] = -torch.inf
    x["kv"][2::2] = to_bf16(x["kv"][2::2].to(torch.float32) * 2.0**64)
    return x | {
        "kv": torch.cat([draw.bits_bf16(f"{label}/bits", (1, LATENT)), x["kv"][1:]]),
        "k_pe": draw.bits_bf16(f"{label}/k_pe", (rows, ROPE)),
    }


def halfway(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 weights [n] in [1, 2) for x [B, n] bf16, with which normed elements come close to the middle of two bf16.

    Column k is made for row k mod B. Also returns, for these elements, how far from the middle they are in 2^-40 ULP of
    bf16, int64, and |the middle|, fp64. An ULP of the norm is some 2^-16 ULP of bf16, and decides the closest.
    """
    wide = x.to(torch.float64)
    square = (wide * wide).unbind(1)
    mean = sum(square[1:], square[0]) / torch.tensor(float(x.shape[1]), dtype=torch.float64)
    normed = wide / torch.sqrt(mean + torch.tensor(eps, dtype=torch.float64))[:, None]
    column = torch.arange(x.shape[1])
    normed = normed[column % x.shape[0], column].abs()
    mantissa = torch.arange(128, 256)[:, None]
    value, exponent = torch.frexp(normed * mantissa.to(torch.float64) * 2.0**-7)  # value · 256 is in ULPs of bf16
    middle = torch.floor(value * 256.0) + 0.5
    off = ((value * 256.0 - middle).abs() * 2.0**40).to(torch.int64)
    best = (off * 128 + mantissa - 128).amin(0)  # the first of the closest
    chosen = best % 128
    power = ((exponent[chosen, column].to(torch.int64) - 8 + 1023) << 52).view(torch.float64)
    return to_bf16((chosen + 128).to(torch.float32) * 2.0**-7), best >> 7, middle[chosen, column] * power


def _halfway(latent: float = 1.0) -> Values:
    """The closest element's middle, scaled, is 17, the middle of two e4m3: an ULP of its row's norm decides a byte."""

    def make(label: str, rows: int) -> Tensors:
        x = _scaled(latent)(label, rows)
        w, off, middle = halfway(x["kv"], EPS)
        closest = (off * LATENT + torch.arange(LATENT)).amin() % LATENT
        scale = (torch.full_like(middle, 17.0) / middle)[closest].to(torch.float32).view(1)
        return x | {"w_kva": w, "k_scale_inv": scale}

    return make


RECIPES: dict[str, Recipe] = {
    "normal": Recipe(_normal, 20.0),
    "padded": Recipe(_padded, 3.0),
    "unit": Recipe(_unit, 0.5, eps=0.0),
    "ties": Recipe(_chosen(e4m3_ties(), 0.25), 0.25, eps=0.0),
    "saturating": Recipe(_chosen(_SATURATING, 8.0), 8.0, eps=0.0),
    "subnormal": Recipe(_scaled(), 0.006),
    "zeros": Recipe(_zeros, 7.0),
    "scale-zero": Recipe(_normal, 0.0),
    "scale-tiny": Recipe(_scaled(weight=2.0**120, rope=2.0**120), 2.0**-127 * 1.5),
    "scale-huge": Recipe(_scaled(weight=2.0**-124, rope=2.0**-128), 3.0e38),
    "wide": Recipe(_wide, 0.3),
    "underflow": Recipe(
        _scaled(latent=2.0**-72), 40.0, eps=0.0, exact_only="squares below the normal range lose their bits"
    ),
    "bits": Recipe(_bits, 1.1, exact_only="squares overflow in fp32"),
    "halfway": Recipe(_halfway(), 1.0),
    "faint-halfway": Recipe(_halfway(2.0**-10), 1.0),  # mean squares of about eps
}


def _slots(pattern: str, label: str, rows: int, pages: int, page_size: int) -> list[int]:
    total = pages * page_size
    if pattern == "spread":  # anywhere
        places = draw.words(f"{label}/slots", max(total, rows)).argsort().tolist()
        return [slot if slot < total else -1 for slot in places[:rows]]
    if pattern == "alternate":  # the last and the first, then others, between rows of none
        return [-1 if row % 2 else (total - 1, 0, *range(1, total - 1))[row // 2] for row in range(rows)]
    if pattern == "none":
        return [-1] * rows
    if pattern == "page":  # several rows into the last page, backwards
        return [total - 1 - row if row < page_size else -1 for row in range(rows)]
    if pattern == "crossing":  # over the boundary of the first two pages
        return [page_size - 1 + row if page_size - 1 + row < total else -1 for row in range(rows)]
    if pattern == "beyond":  # none of them in the cache
        far = [total, -(1 << 63), (1 << 63) - 1, -2, 1 << 32, -total, (1 << 31) - 1, total + 1]
        return (far + [-1] * rows)[:rows]
    raise ValueError(f"pattern: got {pattern!r}, there is no such pattern of slots")


def make_inputs(recipe: Recipe, pattern: str, label: str, rows: int, pages: int, page_size: int) -> Tensors:
    """All inputs of the insert. The cache is full of 0xa5 where the slots are ``alternate``, else of any bytes."""
    shape = (pages, page_size, reference.WIDTH)
    fill = draw.integers(f"{label}/cache", shape, 0, 256).to(torch.uint8)
    return {
        "k_scale_inv": torch.tensor([recipe.scale], dtype=torch.float32),
        **recipe.values(label, rows),
        "cache": torch.full_like(fill, 0xA5) if pattern == "alternate" else fill,
        "slots": torch.tensor(_slots(pattern, label, rows, pages, page_size), dtype=torch.int64),
    }


def inputs(case: Case) -> Tensors:
    """kv, k_pe, w_kva, cache, slots and k_scale_inv of a case, whose recipe is "VALUES@SLOTS"."""
    values, pattern = case.recipe.split("@")
    return make_inputs(RECIPES[values], pattern, case.id, *(case.dims[name] for name in ("rows", "pages", "page_size")))


# Cases.


def make_case(
    rows: int,
    values: str,
    slots: str = "spread",
    *,
    pages: int = 2,
    page_size: int = 2,
    committed: bool = True,
    seed: int = 0,
) -> Case:
    """A case by B, the recipe of its values and the pattern of its slots."""
    size = f"p{pages}x{page_size}" if (pages, page_size) != (2, 2) else ""
    parts = [f"b{rows}", size, slots if slots != "spread" else "", values, f"s{seed}" if seed else ""]
    return Case(
        kernel="cache_insert",
        name="-".join(part for part in parts if part),
        dims={"rows": rows, "pages": pages, "page_size": page_size},
        params={"eps": RECIPES[values].eps},
        recipe=f"{values}@{slots}",
        seed=seed,
        schedules=("insert",),
        committed=committed,
        exact_only=RECIPES[values].exact_only,
    )


_CASES = (
    # The pitfalls' two, by hand in tests/test_cache_insert.py.
    make_case(1, "unit", pages=1, page_size=1),
    make_case(4, "padded", "alternate", pages=2, page_size=3),
    # What the numbers may be.
    make_case(2, "normal", "crossing"),
    make_case(1, "ties", pages=1, page_size=1),
    make_case(1, "saturating", pages=1, page_size=1),
    make_case(1, "subnormal", pages=1, page_size=1),
    make_case(2, "zeros", "page", pages=1, page_size=2),
    make_case(1, "scale-zero", pages=1, page_size=1),
    make_case(1, "scale-tiny", pages=1, page_size=1),
    make_case(1, "scale-huge", pages=1, page_size=1),
    make_case(1, "underflow", pages=1, page_size=1),
    make_case(3, "bits", pages=1, page_size=3),
    # Two seeds that between them notice each wrong order, rounding or root of the norm that is tried.
    *(make_case(1, "halfway", pages=1, page_size=1, seed=seed) for seed in (60, 447)),
    make_case(1, "faint-halfway", pages=1, page_size=1, seed=109),  # tells eps from the fp32 number above it
    # What the slots may be.
    make_case(3, "normal", "page", pages=2, page_size=3),
    make_case(8, "normal", "beyond", pages=1, page_size=2),
    make_case(2, "normal", "none", pages=1, page_size=1),
    # On demand: every recipe and pattern in a larger cache.
    *(make_case(16, values, pages=5, page_size=16, committed=False) for values in RECIPES),
    *(
        make_case(64, "normal", slots, pages=3, page_size=64, committed=False)
        for slots in ("spread", "alternate", "none", "page", "crossing", "beyond")
    ),
    make_case(64, "wide", "spread", pages=1, page_size=64, committed=False),
)


# Tolerances.

# Roundings, in units u = 2^-24 of fp32, from kv to the value that is rounded to bf16. The mean square has those of a
# sum of positive terms (sum) and two more, eps added and the division (the insert's product with 1/512 is exact, its
# fma one rounding); a root halves them. Then 1/√ itself, two products:
#   insert:  sum 14 = 8 FMAs, 5 butterfly stages, 1 of the warps;  root 5 = 2.5 ULP of rsqrt.approx (measured: 2 from
#            the correctly rounded)
#   model:   sum 1 + ⌈log2 n⌉, a product and halving;  root 2 = √ and the division
# so e = u · ((sum + 2) / 2 + root + 2) · |value|, and 2^-149 where a product is subnormal. Rounding to bf16 is
# monotone: what enters within e of the oracle's value v leaves within [bf16(v − e), bf16(v + e)], a single number
# unless a tie lies between. The product with the scale rounds once more. k_pe has only that product.


def norm_error(value: Tensor, sum_roundings: float, root: float) -> Tensor:
    """fp64 bound on the error of x · rsqrt(mean(x²) + eps) · w before its rounding to bf16."""
    return 1.01 * UNIT * ((sum_roundings + 2) / 2 + root + 2) * _finite(value).abs() + 2 * LEAST


def _finite(value: Tensor) -> Tensor:
    """0 in place of infinities: those of the inputs have no error."""
    return torch.where(value.isinf(), 0.0, value)


def spread(value: Tensor, error: Tensor) -> Tensor:
    """The largest distance between roundings to bf16 of what lies within ``error`` of fp64 ``value``."""
    low, high = (reference.round_bf16(x) for x in (value - error, value + error))
    return torch.where(low == high, 0.0, high - low)


def scaled_error(value: Tensor, error: Tensor, scale: Tensor) -> Tensor:
    """The error after a product with ``scale``, from that of ``value``."""
    return (scale * error).abs() + 1.01 * UNIT * _finite(scale * value).abs() + LEAST


def rows_bound(tensors: Mapping[str, Tensor], eps: float, schedule: str) -> Tensor:
    """fp64 bounds [B, 576] on the rows before their conversion."""
    kv, k_pe, w, scale = (tensors[name].to(torch.float64) for name in ("kv", "k_pe", "w_kva", "k_scale_inv"))
    value = kv / torch.sqrt((kv * kv).mean(1, keepdim=True) + eps) * w
    error = norm_error(value, 1 + LATENT.bit_length() - 1, 2) if schedule == "model" else norm_error(value, 14, 5)
    latent = scaled_error(reference.round_bf16(value), spread(value, error), scale)
    return torch.cat([latent, scaled_error(k_pe, torch.zeros_like(k_pe), scale)], dim=1)


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |cache − oracle| before conversion; 0 where no row is written."""
    if schedule not in ("model", *reference.SCHEDULES):
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for insert and model")
    untouched = torch.zeros(tensors["cache"].shape, dtype=torch.float64, device=tensors["cache"].device)
    return {"cache": reference.write(untouched, tensors["slots"], rows_bound(tensors, params["eps"], schedule))}


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """The slot, and the thread of 64 that made an element of its latent; k_pe follows as threads 64 … 71."""
    page, offset, column = index
    return {"slot": page * case.dims["page_size"] + offset, "thread": column // reference.COLUMNS}


FORMATS = {"cache": E4M3.dtype}
KERNEL = Kernel("cache_insert", reference, _CASES, inputs, bound, locate, FORMATS)
