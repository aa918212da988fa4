"""The MLA query's cases, input recipes, tolerances, and where in a schedule an element is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from goldens import cache_insert as insert
from goldens import inputs as draw
from goldens.cache_insert import EPS, UNIT, norm_error, scaled_error, spread
from goldens.case import Case, Kernel, Tensors
from reference import mla_query as reference
from reference.numerics.formats import E4M3, to_bf16
from reference.numerics.ulp import key

QUERY, LATENT, NOPE, HEAD = reference.QUERY, reference.LATENT, reference.NOPE, reference.HEAD
LEAST = insert.LEAST

# Inputs.

# label, heads and B to query [B, 1536], w_qa, w_qb, w_uk
Values = Callable[[str, int, int], Tensors]


@dataclass(frozen=True)
class Recipe:
    """``values`` makes the query's tensors, the recipe ``insert`` of ``goldens.cache_insert`` those of the cache's row;
    ``scale`` is q_scale_inv, never that one's k_scale_inv. ``exact_only`` as in Case."""

    values: Values
    scale: float
    insert: str = "normal"
    eps: float = EPS
    exact_only: str | None = None


def _weights(heads: int, q_b: float = 1.0, uk: float = 1.0) -> Tensors:
    """Normal weights, the same in all cases: q and the latent are about as large as x̂, times a number each."""
    label = f"mla_query/weights/h{heads}"
    return {
        "w_qb": draw.normal_bf16(f"{label}/w_qb", (heads * HEAD, QUERY), q_b / 40),
        "w_uk": draw.normal_bf16(f"{label}/w_uk", (heads, NOPE, LATENT), uk / 12),
    }


def _scaled(q_b: float = 1.0, uk: float = 1.0, x: float = 1.0) -> Values:
    return lambda label, heads, rows: {
        "query": draw.normal_bf16(f"{label}/query", (rows, QUERY), x),
        "w_qa": draw.normal_bf16(f"{label}/w_qa", (QUERY,)),
        **_weights(heads, q_b, uk),
    }


_normal = _scaled()


def _padded(label: str, heads: int, rows: int) -> Tensors:
    """Every second row is NaN."""
    x = _normal(label, heads, rows)
    x["query"][1::2] = torch.nan
    return x


def _choosing(heads: int, columns: Tensor) -> Tensors:
    """Weights of 0 and powers of two: row r of Q_B takes x̂ of columns[r], latent l takes q of p = l mod 128."""
    w_qb = torch.zeros(heads * HEAD, QUERY)
    w_qb[torch.arange(heads * HEAD), columns] = 1.0
    latent = torch.arange(LATENT)
    w_uk = torch.zeros(heads, NOPE, LATENT)
    w_uk[:, latent % NOPE, latent] = torch.tensor([1.0, 0.5, 2.0, 4.0])[latent // NOPE]
    return {"w_qb": to_bf16(w_qb), "w_uk": to_bf16(w_uk)}


def _ties(label: str, heads: int, rows: int) -> Tensors:
    """x̂ of ±1 times chosen weights, exactly: whatever decides a rounding to e4m3, a rotation of it in each head."""
    values = insert.e4m3_ties() / torch.tensor(4.0)
    return {
        "query": to_bf16(insert.signs(f"{label}/query", (rows, QUERY))),
        "w_qa": to_bf16(values[torch.arange(QUERY) % len(values)]),
        **_choosing(heads, torch.arange(heads * HEAD) * 7 % QUERY),
    }


def _pairs(label: str, count: int) -> tuple[Tensor, Tensor]:
    """The numbers below ``count`` in random pairs."""
    order = draw.words(f"{label}/pairs", count).argsort()
    return order[0::2], order[1::2]


def _cancel(label: str, heads: int, rows: int) -> Tensors:
    """Each product of Q_B has its negative somewhere: q is what the roundings of the sum leave."""
    x = _normal(label, heads, rows)
    first, second = _pairs(label, QUERY)
    for name in ("query", "w_qa"):
        x[name][..., second] = x[name][..., first]
    x["w_qb"][:, second] = -x["w_qb"][:, first]
    return x


def _cancel_latent(label: str, heads: int, rows: int) -> Tensors:
    """Each product of the absorption has its negative somewhere: the latent is what the roundings of the sum leave."""
    x = _normal(label, heads, rows)
    first, second = _pairs(label, NOPE)
    w_qb = x["w_qb"].view(heads, HEAD, QUERY)
    w_qb[:, second] = w_qb[:, first]
    x["w_uk"][:, second] = -x["w_uk"][:, first]
    return x


def _halfway(label: str, heads: int, rows: int) -> Tensors:
    """x̂ as close to the middle of two bf16 as a weight can bring it, so that an ULP of the norm may decide it; q is x̂
    less a neighbour that it does not decide, 1 to 3 ULP, so that the output shows it."""
    half = QUERY // 2
    x = draw.normal_bf16(f"{label}/query", (rows, half)).repeat(1, 2)
    w, off, _ = insert.halfway(x, EPS)
    w[half:] = (w[:half].view(torch.int16) + 1).view(torch.bfloat16)
    closest = off[:half].argsort(stable=True)[torch.arange(heads * HEAD) % half]
    weights = _choosing(heads, closest)
    weights["w_qb"][torch.arange(heads * HEAD), closest + half] = -1.0
    return {"query": x, "w_qa": w, **weights}


def _zeros(label: str, heads: int, rows: int) -> Tensors:
    """A row of zeros of both signs, then normal rows; zeros among the weights."""
    x = _normal(label, heads, rows)
    x["query"][0] = to_bf16(insert.signs(f"{label}/zero", (QUERY,)) * 0.0)
    x["w_qb"][::3] = -0.0
    x["w_uk"][:, ::2, ::4] = 0.0
    return x


def _wide(label: str, heads: int, rows: int) -> Tensors:
    """Exponents far apart everywhere."""
    spread_of = {"query": (rows, QUERY), "w_qa": (QUERY,)}
    x = {name: draw.wide_bf16(f"{label}/{name}", shape, -10, 10) for name, shape in spread_of.items()}
    label = f"mla_query/wide/h{heads}"
    return x | {
        "w_qb": draw.wide_bf16(f"{label}/w_qb", (heads * HEAD, QUERY), -10, 2),
        "w_uk": draw.wide_bf16(f"{label}/w_uk", (heads, NOPE, LATENT), -10, 2),
    }


def _bits(label: str, heads: int, rows: int) -> Tensors:
    """Row 0 is any bits; the others have an infinity, or squares that overflow, in turn."""
    x = _normal(label, heads, rows)
    x["query"][0] = draw.bits_bf16(f"{label}/bits", (QUERY,))
    x["query"][1::2, 5] = torch.inf
    x["query"][2::2] = to_bf16(x["query"][2::2].to(torch.float32) * 2.0**64)
    return x


RECIPES: dict[str, Recipe] = {
    "normal": Recipe(_normal, 30.0),
    "padded": Recipe(_padded, 5.0, "padded"),
    "ties": Recipe(_ties, 4.0, "ties", eps=0.0),
    "saturating": Recipe(_normal, 500.0, "saturating"),
    "subnormal": Recipe(_normal, 0.005, "subnormal"),
    "cancel": Recipe(_cancel, 2.0**24),
    "cancel-latent": Recipe(_cancel_latent, 2.0**25),
    "halfway": Recipe(_halfway, 100.0, "halfway"),
    "zeros": Recipe(_zeros, 11.0, "zeros"),
    "scale-zero": Recipe(_normal, 0.0),
    "k-scale-zero": Recipe(_normal, 31.0, "scale-zero"),
    "scale-tiny": Recipe(_scaled(q_b=2.0**120), 2.0**-127, "scale-tiny"),
    "scale-huge": Recipe(_scaled(q_b=2.0**-122), 2.5e38, "scale-huge"),
    "wide": Recipe(_wide, 0.7, "wide"),
    "underflow": Recipe(
        _scaled(x=2.0**-72), 25.0, "underflow", eps=0.0, exact_only="squares below the normal range lose their bits"
    ),
    "bits": Recipe(_bits, 13.0, "bits", exact_only="squares overflow in fp32"),
}


def inputs(case: Case) -> Tensors:
    """All inputs of a case, whose recipe is "VALUES@SLOTS". Columns of qkv that are not read are any bits."""
    values, pattern = case.recipe.split("@")
    recipe = RECIPES[values]
    rows, width, pages, page_size = (case.dims[name] for name in ("rows", "width", "pages", "page_size"))
    x = recipe.values(case.id, case.params["heads"], rows)
    row = insert.make_inputs(insert.RECIPES[recipe.insert], pattern, case.id, rows, pages, page_size)
    unread = draw.bits_bf16(f"{case.id}/unread", (rows, width - reference.QKV))
    qkv = torch.cat([x.pop("query"), row.pop("kv"), row.pop("k_pe"), unread], dim=1)
    return {"qkv": qkv, **x, **row, "q_scale_inv": torch.tensor([recipe.scale], dtype=torch.float32)}


# Cases.


def make_case(
    heads: int,
    rows: int,
    values: str = "normal",
    slots: str = "spread",
    *,
    pages: int = 1,
    page_size: int = 3,
    width: int = reference.QKV,
    whole: bool = False,
    committed: bool = True,
    seed: int = 0,
) -> Case:
    """A case by heads, B, the recipe of its values and the pattern of its slots; ``whole`` keeps the large weights in
    its file."""
    parts = [f"h{heads}", f"b{rows}", f"w{width}" if width != reference.QKV else ""]
    parts += [f"p{pages}x{page_size}" if (pages, page_size) != (1, 3) else ""]
    parts += [slots if slots != "spread" else "", values, f"s{seed}" if seed else ""]
    return Case(
        kernel="mla_query",
        name="-".join(part for part in parts if part),
        dims={"rows": rows, "width": width, "pages": pages, "page_size": page_size},
        params={"heads": heads, "eps": RECIPES[values].eps},
        recipe=f"{values}@{slots}",
        seed=seed,
        schedules=("tiled",) if reference.small_refusal(heads, rows) else ("small", "tiled"),
        committed=committed,
        exact_only=RECIPES[values].exact_only,
        regenerated=() if whole else ("w_qb", "w_uk"),
    )


def _large(heads: int, rows: int, values: str = "normal", width: int = reference.QKV) -> Case:
    """A case on demand, in a larger cache."""
    return make_case(heads, rows, values, pages=9, page_size=16, width=width, committed=False)


_CASES = (
    # One head. The first file is whole; the others have its weights, or some that their recipe makes.
    make_case(1, 1, "normal", whole=True),
    make_case(1, 4, "padded", "alternate", pages=2),
    make_case(1, 1, "ties", page_size=1),
    make_case(1, 2, "cancel", "beyond", page_size=1),
    make_case(1, 1, "cancel-latent", "none", page_size=1),
    # Seeds that between them notice, in both schedules, each wrong order, division and root of the norm tried.
    *(make_case(1, 1, "halfway", page_size=1, seed=seed) for seed in (10, 990, 3546)),
    make_case(1, 1, "underflow", page_size=1),
    make_case(1, 1, "scale-huge", page_size=1),
    # On demand: every recipe with one head, every B of small, a row pitch.
    *(_large(1, 5, values) for values in RECIPES),
    *(_large(1, rows, width=2176) for rows in (1, 2, 3, 4, 6, 17, 64)),
    # The two head counts in use, on both sides of the switch and of each tile's edge.
    *(_large(12, rows) for rows in (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64)),
    *(_large(6, rows) for rows in (1, 2, 3, 4, 5, 6, 16, 31, 64)),
    *(_large(heads, 3, values) for heads in (12, 6) for values in RECIPES if values != "normal"),
    *(
        make_case(heads, rows, "padded", slots, pages=3, page_size=32, committed=False)
        for heads, rows in ((6, 5), (12, 64))
        for slots in ("alternate", "none", "page", "crossing", "beyond")
    ),
    _large(12, 64, "wide"),
    _large(12, 64, "cancel"),
)


# Tolerances.

# The three roundings to bf16 are part of the mathematics, so a schedule differs from the oracle by its roundings in
# fp32, and by what these push over a tie between two bf16 (``insert.spread``: nothing unless a tie is that close).
# Roundings, in units u = 2^-24, of
#   norm:    the sum of squares and the root, as in ``goldens.cache_insert``. small 8 FMAs + 5 butterfly stages + 6
#            warps; tiled 12 FMAs + 2 + 5; both divide by 1536, add eps, take rsqrt.approx
#   q_b:     relative to Σ|w·x̂|. small 24 FMAs + 1 + 5; tiled 12 MMAs and 8 partial sums; model a product, 11 halvings
#   absorb:  relative to Σ|q·w|. small at most 16 FMAs + 1 + 4 groups or 8 + 1 + 8; tiled 8 MMAs; model a product, 7
#            halvings
# One MMA cuts 17 terms to multiples of 2^(E − 25) and the sum to fp32, where 2^E is at most the largest term (or that
# of a subnormal operand, 2^-252): at most 17/2 + 2 units of Σ|terms|.
# With δ the distance before a step, error of q = |w|·δx̂ + c·u·|w|(|x̂| + δx̂), and so on; sums and products below the
# normal range lose 2^-149 a step. In the end the product with the scale.

_MMA = 17 / 2 + 2
_ROUNDINGS: dict[str, dict[str, float]] = {
    "small": {"sum": 19, "root": 5, "q_b": 30, "absorb": 21},
    "tiled": {"sum": 19, "root": 5, "q_b": 12 * _MMA + 8, "absorb": 8 * _MMA},
    "model": {"sum": 12, "root": 2, "q_b": 12, "absorb": 8},
}


def _product_bound(w: Tensor, x: Tensor, moved: Tensor, roundings: float) -> Tensor:
    """|error| of x · w before its rounding: x […, M, K] with errors ``moved``, w […, K, N]."""
    w = w.abs()
    return moved @ w + 1.01 * UNIT * roundings * ((x.abs() + moved) @ w) + w.shape[-2] * LEAST


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |output − oracle| and |cache − oracle| before their conversion to e4m3."""
    if schedule not in _ROUNDINGS:
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {', '.join(_ROUNDINGS)}")
    c, heads, eps = _ROUNDINGS[schedule], params["heads"], params["eps"]
    qkv, w_qa, w_qb, w_uk, scale = (
        tensors[name].to(torch.float64) for name in ("qkv", "w_qa", "w_qb", "w_uk", "q_scale_inv")
    )
    x, rounded = qkv[:, :QUERY], insert.reference.round_bf16
    x_hat = x / torch.sqrt((x * x).mean(1, keepdim=True) + eps) * w_qa
    moved = spread(x_hat, norm_error(x_hat, c["sum"], c["root"]))
    x_hat = rounded(x_hat)

    q = x_hat @ w_qb.t()
    moved = spread(q, _product_bound(w_qb.t(), x_hat, moved, c["q_b"])).view(-1, heads, HEAD)
    q = rounded(q).view(-1, heads, HEAD)

    by_head, by_head_moved = (t[..., :NOPE].transpose(0, 1) for t in (q, moved))  # [heads, B, 128]
    latent = by_head @ w_uk
    error = spread(latent, _product_bound(w_uk, by_head, by_head_moved, c["absorb"])).transpose(0, 1)
    values = torch.cat([rounded(latent).transpose(0, 1), q[..., NOPE:]], dim=-1)
    result = {"output": scaled_error(values, torch.cat([error, moved[..., NOPE:]], dim=-1), scale)}
    own = "model" if schedule == "model" else "insert"
    return result | insert.bound(reference.insert_inputs(tensors), {"eps": eps}, own)


def agreement(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensor:
    """How many e4m3 steps the outputs of ``small`` and ``tiled`` may be apart, int64 [B, heads, 576]: each rounds
    something within its own bound of the oracle, and rounding is monotone. Means nothing where the oracle is NaN."""
    oracle = reference.model(tensors, params, torch.float64)["output"]
    ends = []
    for schedule in ("small", "tiled"):
        limit = bound(tensors, params, schedule)["output"]
        ends.append([key(reference.to_e4m3(x.to(torch.float32))) for x in (oracle - limit, oracle + limit)])
    (low, high), (other_low, other_high) = ends
    return torch.maximum(high - other_low, other_high - low)


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """Row and head of an element of output, in ``small`` also the CTA of the cluster; an element of the cache as in the
    insert's own room."""
    if output == "cache":
        return insert.locate(case, "insert", output, index)
    row, head, column = index
    place = {"row": row, "head": head}
    if schedule == "small":
        ctas = reference.CLUSTER[case.params["heads"]]
        rope = column - LATENT
        place["rank"] = column // (LATENT // ctas) if rope < 0 else (NOPE + rope) // (HEAD // ctas)
    return place


FORMATS = {"output": E4M3.dtype, "cache": E4M3.dtype}
KERNEL = Kernel("mla_query", reference, _CASES, inputs, bound, locate, FORMATS)
