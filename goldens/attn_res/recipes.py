"""AttnRes' input recipes."""

from collections.abc import Callable

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Tensors
from reference import attn_res as reference
from reference.numerics import portable
from reference.numerics.formats import to_bf16

D = reference.D


Fill = Callable[[str, tuple[int, ...]], Tensor]
_QUERY = 2.0**-6  # scores of normal rows are then about 1


def _rows(case: Case, fill: Fill, query: float = _QUERY) -> Tensors:
    """delta, prefix and blocks by ``fill``, normal weights, the query's times ``query``."""
    tokens, rows, capacity = (case.dims[name] for name in ("tokens", "rows", "capacity"))
    slots = case.params["slots"]
    shapes = {
        "delta": (slots, capacity, D) if slots else (tokens, D),
        "prefix": (tokens, D),
        "blocks": (tokens, rows, D),
    }
    x = {name: fill(f"{case.id}/{name}", shape) for name, shape in shapes.items()}
    scales = {"norm": 1.0, "query": query, "gamma": 1.0}
    return x | {name: draw.normal_bf16(f"{case.id}/{name}", (D,), scale) for name, scale in scales.items()}


def _weight_product(x: Tensors) -> Tensor:
    return x["norm"].to(torch.float32) * x["query"].to(torch.float32)


def _scaled(scale: float) -> Fill:
    return lambda label, shape: draw.normal_bf16(label, shape, scale)


def _set_new_prefix(case: Case, x: Tensors, p: Tensor) -> None:
    """Make the new prefix ``p`` [T, D]."""
    x["delta"].zero_()
    if case.params["has_delta"]:
        x["prefix"] = p
    elif case.params["slots"]:
        x["delta"][0, : p.shape[0]] = p
    else:
        x["delta"] = p


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent of int64 exponents."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _normal(case: Case) -> Tensors:
    return _rows(case, _scaled(1.0))


def _small(case: Case) -> Tensors:
    """Rows of rms near 1e-3, whose mean squares are near the epsilons, and scores near 80."""
    x = _rows(case, _scaled(1.0), query=2.0**-4)
    lean = _weight_product(x).sign()
    rows = {n: to_bf16((x[n].to(torch.float32) + lean) * 2.0**-10) for n in ("delta", "prefix", "blocks")}
    return x | rows


def _wide(case: Case) -> Tensors:
    """Exponents far apart within every row."""
    x = _rows(case, lambda label, shape: draw.wide_bf16(label, shape, -20, 20))
    return x | {"norm": draw.wide_bf16(f"{case.id}/norm", (D,), -6, 2), "gamma": draw.wide_bf16(case.id, (D,), -8, 8)}


def _cancel(case: Case) -> Tensors:
    """The second slot undoes the large first one, so the order of the sum decides; without slots the prefix does."""
    x = _normal(case)
    large = draw.wide_bf16(f"{case.id}/large", x["prefix"].shape, 8, 28)
    if case.params["slots"] > 1:
        x["delta"][0, : large.shape[0]] = large
        x["delta"][1, : large.shape[0]] = -large
    else:
        x["prefix"] = large
        kept = x["delta"].view(-1, *large.shape[1:])[: large.shape[0], ::8].clone()
        x["delta"].view(-1, D)[: large.shape[0]] = -large
        x["delta"].view(-1, D)[: large.shape[0], ::8] = kept
    return x


def _opposing(case: Case) -> Tensors:
    """x_0 = −p of rms 100 and scores near 0: cluster7's square of the mixture cancels, down to NaN."""
    x = _rows(case, _scaled(100.0), query=2.0**-20)
    _set_new_prefix(case, x, -x["blocks"][:, 0])
    return x


def _nearly_opposing(case: Case) -> Tensors:
    """Nearly equal weights and a new prefix that all but undoes the blocks: κ near 2^13, so that one ULP in a weight or
    in a sum of the square is thousands in the output's norm. The mixture's mean square is near the epsilons."""
    x = _rows(case, _scaled(2.0**-1), query=2.0**-13)
    rest = draw.normal(f"{case.id}/rest", x["prefix"].shape) * 2.0**-7
    p = rest - portable.total(x["blocks"][:, : case.params["nb"]].to(torch.float32), 1)
    _set_new_prefix(case, x, to_bf16(p))
    return x


def _aligned(case: Case, query: float) -> Tensors:
    """One source, the prefix if there is but one block, has the signs of the weights."""
    x = _rows(case, _scaled(1.0), query)
    w = _weight_product(x)
    if case.params["nb"] > 1:
        row = x["blocks"][:, case.params["nb"] // 2]
        row.copy_(torch.where(w < 0, -row.abs(), row.abs()))
    else:
        p = draw.normal_bf16(f"{case.id}/p", x["prefix"].shape).abs()
        _set_new_prefix(case, x, torch.where(w < 0, -p, p))
    return x


def _dominant(case: Case) -> Tensors:
    """One source outweighs the others by about e^80."""
    return _aligned(case, 2.0**-5.5)


def _flushed(case: Case) -> Tensors:
    """One source outweighs the others by more than 2^126: their weights are flushed to 0."""
    return _aligned(case, 2.0**-4.75)


def _equal(case: Case) -> Tensors:
    """Equal weights and integer rows: means of 2^n integers, many halfway between two bf16."""
    return _rows(case, lambda label, shape: to_bf16(draw.integers(label, shape, 128, 256).to(torch.float32)), 0.0)


def _halfway(case: Case) -> Tensors:
    """For nb = 0: every output is halfway between two bf16 if 1/rms is 2^8, which the square of the new prefix hits to
    a fraction of an ULP. So one ULP in a sum, in an epsilon or in rsqrt turns thousands of roundings.

    The new prefix is odd integers 107 … 169 and gamma 1.5, times powers of two: a product has nine bits, the last set.
    """
    x = _normal(case)
    exponent = draw.integers(f"{case.id}/exponent", (D,), 15, 19)
    exponent += 8 * (draw.integers(f"{case.id}/fine", (D,), 0, 8) == 0)
    odd = 2 * draw.integers(f"{case.id}/odd", (D,), 53, 85) + 1
    unit = 1 << 2 * (26 - exponent)  # of squares, in 2^-52
    mean = 2.0**-16 + 0.4 * 2.0**-39 - case.params["out_eps"]  # 0.4 of the ULP above 2^-16
    missing = round(mean * D * 2.0**52) - int((odd * odd * unit).sum())
    for i in exponent.sort(stable=True).indices.tolist():  # the coarse ones first
        u, n = int(unit[i]), int(odd[i])
        if abs(missing) > 200 * u:  # half of the least change
            left = {m: missing - (m * m - n * n) * u for m in range(107, 170, 2)}
            odd[i] = best = min(left, key=lambda m: abs(left[m]))
            missing = left[best]
    sign = 1 - 2 * draw.integers(f"{case.id}/sign", (D,), 0, 2)
    p = to_bf16((sign * odd).to(torch.float32) * _power_of_two(-exponent))
    _set_new_prefix(case, x, p.expand(x["prefix"].shape).contiguous())
    return x | {"gamma": to_bf16(_power_of_two(draw.integers(f"{case.id}/power", (D,), -3, 4)) * 1.5)}


def _halfway_mantissa(x: Tensor, target: Callable[[Tensor], Tensor]) -> Tensor:
    """bf16 x with the mantissas that bring ``target`` of it, fp32 of its shape, nearest to halfway between two bf16."""
    pattern = x.view(torch.int16).to(torch.int32) & -128
    found = torch.full(x.shape, 1 << 30, dtype=torch.int32)
    for mantissa in range(128):
        value = target(((pattern | mantissa) << 16).view(torch.float32))
        apart = ((value.view(torch.int32) & 0xFFFF) - 0x8000).abs()
        found = torch.minimum(found, apart << 7 | mantissa)
    return (pattern | found & 127).to(torch.int16).view(torch.bfloat16)


def _ties(case: Case) -> Tensors:
    """Mean squares near the epsilons, and most columns within 2^-16 of a rounding's turning point: one ULP in a weight,
    a sum or a norm turns some of them, in every token.

    Half of the columns are 2^12 times smaller than the others and move no sum. There the first block brings the
    mixture, if final, or the output halfway between two bf16; in the others gamma does so with the output, for the
    tokens by turns. Of 16 columns one is zeros of both signs, one subnormal.
    """
    x, params = _rows(case, _scaled(2.0**-7)), case.params
    kind = draw.integers(f"{case.id}/kind", (D,), 0, 16)
    large = kind < 8
    scale = _power_of_two(torch.where(large, 0, torch.where(kind == 14, -120, -12)))
    for name in ("delta", "prefix", "blocks"):
        wide = x[name].to(torch.float32)
        x[name] = to_bf16(torch.where(kind == 15, torch.where(wide < 0, -0.0, 0.0), wide * scale))

    p = reference.new_prefix(x, params)[:, None]
    rows = torch.cat([x["blocks"][:, : params["nb"]], p], 1).to(torch.float32)
    gamma, w = x["gamma"].to(torch.float32), _weight_product(x)
    width, eps, out_eps = (torch.tensor(value, dtype=torch.float32) for value in (D, *reference.epsilons(params)))
    logits = portable.total(rows * w) / portable.sqrt(portable.total(rows * rows) / width + eps)
    e = portable.exp(logits - logits.amax(1, keepdim=True))
    weight = (e / portable.total(e)[:, None])[..., None]  # [T, nb + 1, 1]
    mixture = portable.total(weight * rows, 1)
    rms = portable.sqrt(portable.total(mixture * mixture) / width + out_eps)[:, None]
    if params["nb"]:
        rest = portable.total((weight * rows)[:, 1:], 1)
        factor = torch.ones(1) if params["final"] else gamma / rms
        first = _halfway_mantissa(x["blocks"][:, 0], lambda value: (weight[:, 0] * value + rest) * factor)
        x["blocks"][:, 0] = torch.where(large | (kind == 15), x["blocks"][:, 0], first)
    if params["final"]:
        mixture = to_bf16(mixture).to(torch.float32)
    columns = torch.arange(D)
    normed = (mixture / rms)[columns % case.dims["tokens"], columns]
    turned = _halfway_mantissa(x["gamma"], lambda value: normed * value)
    return x | {"gamma": torch.where(large | (params["nb"] == 0), turned, x["gamma"])}


def _edge_of_flush(case: Case) -> Tensors:
    """The first block is 2^126 times the other rows, and its weight 2^-125.4 of theirs; in the next token 2^-129.1,
    which is flushed to 0 or an eighth of the mixture. Beside its own score theirs are beyond fp32's range; all blocks
    of the last token are the first."""
    x = _rows(case, _scaled(2.0**-72), 2.0**-5)
    w, width = _weight_product(x), torch.tensor(float(D))
    for token in range(case.dims["tokens"]):
        noise = draw.normal(f"{case.id}/noise/{token}", (D,))
        low, high = 0, 2048
        while high - low > 1:  # a share of −w that gives the score
            middle = (low + high) // 2
            row = to_bf16((noise - w * (middle / 64)) * 2.0**54)
            wide = row.to(torch.float32)
            score = portable.total(wide * w) / portable.sqrt(portable.total(wide * wide) / width)
            low, high = (middle, high) if float(score) > -86.9 - 2.6 * token else (low, middle)
        x["blocks"][token, 0] = row
    x["blocks"][-1] = x["blocks"][-1, :1]
    return x


def _far_below(case: Case) -> Tensors:
    """Scores near −55000 that differ by several: rows have the signs of −w, and each its own where w is 0."""
    free = draw.integers(f"{case.id}/free", (D,), 0, 4) == 0

    def signs(label: str, shape: tuple[int, ...]) -> Tensor:
        size = 1.0 + 2.0**-7 * (draw.integers(label, shape, 0, 8) == 0)
        own = 1.0 - 2.0 * draw.integers(f"{label}/sign", shape, 0, 2).to(torch.float32)
        return to_bf16(size * torch.where(free, own, 1.0))

    x = _rows(case, signs, 2.0**4)
    sign = torch.where(free, 1.0, -_weight_product(x).sign())
    rows = {name: to_bf16(x[name].to(torch.float32) * sign) for name in ("delta", "prefix", "blocks")}
    return x | rows | {"norm": torch.where(free, 0.0, x["norm"])}


def _half(case: Case) -> Tensors:
    """Two different rows of equal length and equal score 168, in FP64 and in any order: each weight is exactly ½.

    Of each pair of columns the block has (1, 7) and the prefix (5, 5) where the weights are (1, 2) / 64, all with
    random signs. Rounding x / rms to bf16 before the score would move the weights by 4 %.
    """
    x = _normal(case)
    sign = 1.0 - 2.0 * draw.integers(f"{case.id}/sign", (D,), 0, 2).to(torch.float32)
    pairs = {name: sign * torch.tensor(pair).repeat(D // 2) for name, pair in (("x", [1.0, 7.0]), ("w", [1.0, 2.0]))}
    x["norm"], x["query"] = to_bf16(pairs["w"]), torch.full((D,), 2.0**-6, dtype=torch.bfloat16)
    x["blocks"][:, 0] = to_bf16(pairs["x"])
    _set_new_prefix(case, x, to_bf16(5.0 * sign).expand(x["prefix"].shape).contiguous())
    return x


def _half_nan(case: Case) -> Tensors:
    """Token 0 is any bits, so its new prefix is every kind of number and its output NaN; the others are ``half``'s.

    Of more than two slots the second undoes the first in a quarter of its columns, so the order of the sum decides.
    """
    x = _half(case)
    for name in ("delta", "prefix"):
        x[name][..., 0, :] = draw.bits_bf16(f"{case.id}/bits/{name}", x[name][..., 0, :].shape)
    if case.params["slots"] > 2:
        x["delta"][1, 0, ::4] = -x["delta"][0, 0, ::4]
    return x


def _three_kinds(case: Case) -> Tensors:
    """Every token is one of three, in an order of no period: many tokens in few different rows."""
    x = _normal(case)
    tokens = case.dims["tokens"]
    kinds = draw.integers(f"{case.id}/kinds", (tokens,), 0, min(3, tokens))
    for name in ("delta", "prefix", "blocks"):
        rows = x[name].transpose(0, 1) if name == "delta" and case.params["slots"] else x[name]
        rows[:tokens] = rows[kinds]
    return x


def _nan(case: Case) -> Tensors:
    """A NaN in a block of token 0, one in the new prefix of the last token."""
    x = _normal(case)
    x["blocks"][0, 0, 5] = torch.nan
    x["delta"][..., case.dims["tokens"] - 1, 7] = torch.nan
    return x


def _inf(case: Case) -> Tensors:
    """+inf in a block of token 0, −inf in the new prefix of the last token."""
    x = _normal(case)
    x["blocks"][0, 0, 5] = torch.inf
    x["delta"][..., case.dims["tokens"] - 1, 7] = -torch.inf
    return x


def _zeros(case: Case) -> Tensors:
    """Zeros of both signs everywhere but in the weights."""

    def zeros(label: str, shape: tuple[int, ...]) -> Tensor:
        return to_bf16(torch.where(draw.integers(label, shape, 0, 2) == 1, -0.0, 0.0))

    return _rows(case, zeros)


def _subnormal(case: Case) -> Tensors:
    return _rows(case, lambda label, shape: draw.wide_bf16(label, shape, -127, -124))


def _overflow(case: Case) -> Tensors:
    """Rows whose Σx² is around the largest fp32."""
    return _rows(case, _scaled(2.0**57.5))


RECIPES: dict[str, Callable[[Case], Tensors]] = {
    "normal": _normal,
    "small": _small,
    "wide": _wide,
    "cancel": _cancel,
    "opposing-sources": _opposing,
    "nearly-opposing": _nearly_opposing,
    "dominant": _dominant,
    "flushed": _flushed,
    "edge-of-flush": _edge_of_flush,
    "far-below": _far_below,
    "equal": _equal,
    "halfway": _halfway,
    "ties": _ties,
    "half": _half,
    "half-nan": _half_nan,
    "three-kinds": _three_kinds,
    "nan": _nan,
    "inf": _inf,
    "zeros": _zeros,
    "subnormal": _subnormal,
    "overflow": _overflow,
}


def inputs(case: Case) -> Tensors:
    """The tensors of a case, all bf16. What the kernel must not read is any bits: blocks from nb on, the mailbox's rows
    from T on, the prefix if the delta replaces it."""
    x, params, tokens = RECIPES[case.recipe](case), case.params, case.dims["tokens"]
    x["blocks"][:, params["nb"] :] = draw.bits_bf16(f"{case.id}/unread/blocks", x["blocks"][:, params["nb"] :].shape)
    if not params["has_delta"]:
        x["prefix"] = draw.bits_bf16(f"{case.id}/unread/prefix", x["prefix"].shape)
    if params["slots"]:
        published = x["delta"][:, :tokens].view(torch.int32)
        published.masked_fill_(published == reference.SENTINEL, 0)  # a row that is read has none
        x["delta"][:, tokens:] = draw.bits_bf16(f"{case.id}/unread/delta", x["delta"][:, tokens:].shape)
    return x
