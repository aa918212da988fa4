"""The MLA query's input recipes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.cache_insert import recipes as insert
from goldens.cache_insert.recipes import EPS
from goldens.case import Case, Tensors
from reference import mla_query as reference
from reference.numerics.formats import to_bf16

QUERY, LATENT, NOPE, HEAD = reference.QUERY, reference.LATENT, reference.NOPE, reference.HEAD


# label, heads and B to query [B, 1536], w_qa, w_qb, w_uk
Values = Callable[[str, int, int], Tensors]


@dataclass(frozen=True)
class Recipe:
    """``values`` makes the query's tensors, the recipe ``insert`` of ``goldens.cache_insert`` those of the cache's row;
    ``scale`` is q_scale_inv, never that one's k_scale_inv."""

    values: Values
    scale: float
    insert: str = "normal"
    eps: float = EPS


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


# Rows as the insert's ``EDGE_ROWS``, in both schedules; five are what ``small`` takes.
_EDGE_ROWS = ((238759, 61003, 114721, 34864, 29309), (299976, 218282, 31293, 55611, 252242))


def _edge(numbers: tuple[int, ...]) -> Values:
    """x̂ close to the middle of two bf16, on both of its sides, where q_scale_inv sends these to two e4m3."""

    def make(label: str, heads: int, rows: int) -> Tensors:
        query = insert.edge_rows("mla_query", numbers[:rows], QUERY)
        w, columns = insert.edges(query, EPS, HEAD // len(query))
        taken = columns.flatten()[torch.arange(heads * HEAD) % columns.numel()]
        return {"query": query[torch.arange(rows) % len(query)], "w_qa": w, **_choosing(heads, taken)}

    return make


def _sevenths(label: str, heads: int, rows: int) -> Tensors:
    """As ``_ties``, of ``insert.sevenths``."""
    x, values = _ties(label, heads, rows), insert.sevenths()
    return x | {"w_qa": to_bf16(values[torch.arange(QUERY) % len(values)])}


def _operands(label: str, heads: int, rows: int) -> Tensors:
    """As ``_cancel``; of each eight pairs one has a subnormal x̂ and another an x̂ of 0, with weights at bf16's end."""
    x = _cancel(label, heads, rows)
    first, second = _pairs(label, QUERY)
    for name, part, power in (("w_qa", slice(0, None, 8), 2.0**-130), ("w_qb", slice(0, None, 8), 2.0**126)):
        for columns in (first[part], second[part]):
            x[name][..., columns] = to_bf16(x[name][..., columns].to(torch.float32) * power)
    for columns in (first[1::8], second[1::8]):
        x["w_qa"][columns] = 0.0
        x["w_qb"][:, columns] = to_bf16(x["w_qb"][:, columns].to(torch.float32) * 2.0**126)
    return x


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
    "edge": Recipe(_edge(_EDGE_ROWS[0]), 32.125, "specials"),
    "edge-more": Recipe(_edge(_EDGE_ROWS[1]), 32.125, "edge"),
    "sevenths": Recipe(_sevenths, insert.SEVENTH / 2, "sevenths", eps=0.0),
    "operands": Recipe(_operands, 2.0**24),
    "faint": Recipe(_scaled(x=2.0**-10), 30.0, "faint-halfway"),  # mean squares of about eps
    "zeros": Recipe(_zeros, 11.0, "zeros"),
    "scale-zero": Recipe(_normal, 0.0),
    "k-scale-zero": Recipe(_normal, 31.0, "scale-zero"),
    "scale-tiny": Recipe(_scaled(q_b=2.0**120), 2.0**-127, "scale-tiny"),
    "scale-huge": Recipe(_scaled(q_b=2.0**-122), 2.5e38, "scale-huge"),
    "wide": Recipe(_wide, 0.7, "wide"),
    "underflow": Recipe(_scaled(x=2.0**-72), 25.0, "underflow", eps=0.0),
    "bits": Recipe(_bits, 13.0, "bits"),
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
