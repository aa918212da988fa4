"""The cache insert's input recipes; ``goldens.mla_query`` shares them for its own insert."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Tensors
from reference import cache_insert as reference
from reference.numerics.formats import E4M3, to_bf16

LATENT, ROPE = reference.LATENT, reference.ROPE
EPS = float.fromhex("0x1.0c6f7ap-20")  # fp32 nearest to 1e-6


Values = Callable[[str, int], Tensors]  # label and B to kv, k_pe and w_kva, and k_scale_inv if it depends on them


@dataclass(frozen=True)
class Recipe:
    """``values`` makes the tensors; ``scale`` is k_scale_inv unless they hold it."""

    values: Values
    scale: float
    eps: float = EPS


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


def sevenths() -> Tensor:
    """fp32 [378]: seven times what lies halfway between two e4m3, and the bf16 below and above it.

    For the scale ``SEVENTH`` times a power of two: fp32(1/7) is too large by 4.5e-8 of it, so that the product is
    halfway only once it is rounded, and a quotient by the reciprocal or another number of bits goes to the other side.
    """
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(E4M3.dtype).to(torch.float32)
    times_seven = to_bf16((codes[:-1] + codes[1:]) * 3.5).view(torch.int16)
    return torch.cat([(times_seven + step).view(torch.bfloat16).to(torch.float32) for step in (-1, 0, 1)])


SEVENTH = float.fromhex("0x1.24924ap-3")  # fp32 nearest to 1/7


def _chosen(values: Tensor) -> Values:
    """Rows whose values before the scale are all of ``values``, exactly: latents of length 1 times a weight, k_pe."""

    def make(label: str, rows: int) -> Tensors:
        x = _unit(label, rows)
        x["k_pe"] = to_bf16(choice(f"{label}/k_pe", (rows, ROPE), values))
        x["w_kva"] = to_bf16(values[torch.arange(LATENT) % len(values)])
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


# bf16: ±0, the smallest, the largest subnormal and normal, the smallest normal; inf; quiet and signalling NaNs.
_SPECIAL_BITS = (0x0000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF, 0x7FBF)


def _specials(label: str, rows: int) -> Tensors:
    """k_pe of the ends of bf16 of either sign; of the latents one row has one NaN, one an infinity, in turn."""
    x = _normal(label, rows)
    x["kv"][1::3, 300] = torch.nan
    x["kv"][2::3, 511] = -torch.inf
    bits = torch.tensor([sign | code for code in _SPECIAL_BITS for sign in (0, 0x8000)])
    return x | {
        "k_pe": bits[torch.arange(rows * ROPE) % len(bits)].to(torch.int16).view(torch.bfloat16).view(rows, ROPE)
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


def edges(x: Tensor, eps: float, most: int) -> tuple[Tensor, Tensor]:
    """bf16 weights [n] in [1, 2) for x [B, n] bf16, and for each row columns [B, most] in which normed elements come
    close to the middle of two bf16, each by a product of its own.

    Only middles of 135.5 + 16 i in ULPs of bf16: with a scale of 257/256 times a power of two, the two beside them go
    to two e4m3. Near a row's closest ones some are a rounding above and some below the middle, if the row is chosen
    well."""
    wide = x.to(torch.float64)
    square = (wide * wide).unbind(1)
    mean = sum(square[1:], square[0]) / torch.tensor(float(x.shape[1]), dtype=torch.float64)
    root = torch.sqrt(mean + torch.tensor(eps, dtype=torch.float64))
    factors = torch.ones_like(root) / root
    mantissa = torch.arange(128, 256)
    products = (mantissa[:, None] * mantissa).to(torch.float64) * 2.0**-14
    own = (x.view(torch.int16).to(torch.int64) & 127).tolist()
    weights, columns, free = [1.0 + i * 37 % 128 / 128 for i in range(x.shape[1])], [], set(range(x.shape[1]))
    for row, factor in enumerate(factors):
        in_ulps = torch.frexp(products * factor).mantissa * 256.0
        middle = torch.floor(in_ulps) + 0.5
        off = ((in_ulps - middle).abs() * 2.0**40).to(torch.int64)
        off = torch.where((torch.floor(in_ulps).to(torch.int64) - 135) % 16 == 0, off, 1 << 40)
        chosen: list[int] = []
        for pair in off.flatten().argsort(stable=True).tolist():
            mine, weight = divmod(pair, 128)
            column = next((i for i in sorted(free) if own[row][i] == mine), None)
            if column is not None:
                weights[column] = 1.0 + weight / 128
                free.remove(column)
                chosen.append(column)
            if len(chosen) == most:
                break
        columns.append(chosen)
    return to_bf16(torch.tensor(weights)), torch.tensor(columns)


# Rows whose norm, an ULP up or down, moves one of their bytes, and in whose sums each order of additions tried gives
# another norm in some row: found by trying. Their squares need more bits than fp32 has, so that each addition rounds.
EDGE_ROWS = (
    *(35605, 23225, 95025, 70505, 1306, 85375, 89484, 17340),
    *(89898, 3609, 14063, 31792, 82618, 46435, 69327, 23631),
)


def edge_rows(kernel: str, rows: tuple[int, ...], width: int) -> Tensor:
    """bf16 [B, width] of these numbers."""
    return torch.stack([draw.wide_bf16(f"{kernel}/edge/{row}", (width,), -9, 2) for row in rows])


def _edge(label: str, rows: int) -> Tensors:
    kv = edge_rows("cache_insert", EDGE_ROWS[:rows], LATENT)
    again = torch.arange(rows) % len(kv)
    return _normal(label, rows) | {"kv": kv[again], "w_kva": edges(kv, EPS, 24)[0]}


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
    "ties": Recipe(_chosen(e4m3_ties() / torch.tensor(0.25)), 0.25, eps=0.0),
    "saturating": Recipe(_chosen(_SATURATING / torch.tensor(8.0)), 8.0, eps=0.0),
    "subnormal": Recipe(_scaled(), 0.006),
    "zeros": Recipe(_zeros, 7.0),
    "specials": Recipe(_specials, 2.3),
    "scale-negative": Recipe(_normal, -5.5),
    "scale-zero": Recipe(_normal, 0.0),
    "scale-tiny": Recipe(_scaled(weight=2.0**120, rope=2.0**120), 2.0**-127 * 1.5),
    "scale-huge": Recipe(_scaled(weight=2.0**-124, rope=2.0**-128), 3.0e38),
    "wide": Recipe(_wide, 0.3),
    "underflow": Recipe(_scaled(latent=2.0**-72), 40.0, eps=0.0),
    "bits": Recipe(_bits, 1.1),
    "halfway": Recipe(_halfway(), 1.0),
    "edge": Recipe(_edge, 16.0625),
    "sevenths": Recipe(_chosen(sevenths()), SEVENTH, eps=0.0),
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
    if pattern == "mixed":  # rows outside the cache between those inside; 2^32 + 1 has the low bits of a row inside
        outside = [total, (1 << 32) + 1, -2, -total, (1 << 63) - 1, -(1 << 63), total + 1, (1 << 32) + total]
        inside = [total - 1, 0, *range(2, total - 1)]
        return [(inside if row % 2 else outside)[row // 2] for row in range(rows)]
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
