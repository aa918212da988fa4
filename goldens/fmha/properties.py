"""What attention owes bit for bit: a head (and its group of query heads) of the batch, or a packed sequence."""

from collections.abc import Callable

import torch
from torch import Tensor

from goldens.case import Case, Params, Part, Tensors, Variant
from goldens.invariance import nan_like, some, strides


def _by_head(inputs: Tensors, make: Callable[[Tensor], list[Tensor]]) -> Tensors:
    """q, k and v with other heads put around them."""
    return inputs | {name: torch.cat(make(inputs[name])) for name in ("q", "k", "v")}


def heads(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    query_heads, kv_heads = inputs["q"].shape[0], inputs["k"].shape[0]
    group, variants = query_heads // kv_heads, []
    for h in some(kv_heads):
        rows = slice(h * group, (h + 1) * group)
        alone = inputs | {"q": inputs["q"][rows], "k": inputs["k"][h : h + 1], "v": inputs["v"][h : h + 1]}
        parts = tuple(Part(name, base=(rows,)) for name in ("o", "lse"))
        variants.append(Variant(f"head {h} alone", alone, params, parts))
    behind = tuple(Part(name, mine=(slice(query_heads, 2 * query_heads),)) for name in ("o", "lse"))
    others = _by_head(inputs, lambda x: [x.flip(1), x])
    nan = _by_head(inputs, lambda x: [nan_like(x), x, nan_like(x)])
    return [*variants, Variant("behind others", others, params, behind), Variant("amid NaN", nan, params, behind)]


def packed(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Each packed sequence that has queries: alone, in the reverse order, and with all others NaN."""
    if "cu_seqlens_q" not in inputs:
        return []
    offsets = {"q": inputs["cu_seqlens_q"].tolist(), "k": inputs["cu_seqlens_k"].tolist()}
    offsets["v"] = offsets["k"]
    count = len(offsets["q"]) - 1
    pieces = [{n: inputs[n][:, at[i] : at[i + 1]] for n, at in offsets.items()} for i in range(count)]

    def pack(chosen: list[Tensors]) -> Tensors:
        made = {name: torch.cat([piece[name] for piece in chosen], dim=1) for name in ("q", "k", "v")}
        lengths = {n: torch.tensor([0, *(piece[n].shape[1] for piece in chosen)]) for n in ("q", "k")}
        return made | {f"cu_seqlens_{n}": x.cumsum(0).to(torch.int32) for n, x in lengths.items()}

    variants, at = [], offsets["q"]
    for i in range(count):
        rows = slice(at[i], at[i + 1])
        back = slice(at[-1] - at[i + 1], at[-1] - at[i])
        if not pieces[i]["q"].shape[1]:
            continue
        everywhere = tuple(Part(name, (slice(None), rows), (slice(None), rows)) for name in ("o", "lse"))
        nan = pack([piece if j == i else {n: nan_like(x) for n, x in piece.items()} for j, piece in enumerate(pieces)])
        alone = tuple(Part(name, base=(slice(None), rows)) for name in ("o", "lse"))
        reverse = tuple(Part(name, (slice(None), back), (slice(None), rows)) for name in ("o", "lse"))
        variants += [
            Variant(f"sequence {i} alone", pack([pieces[i]]), params, alone),
            Variant(f"sequence {i} amid NaN", nan, params, everywhere),
            Variant(f"sequence {i} in reverse order", pack(pieces[::-1]), params, reverse),
        ]
    return variants


def causality(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows that do not see the last key, with another one in its place; and all but the last query changed.

    Not where that key or its value is no number: a schedule that visits it may be NaN.
    """
    rows, keys = inputs["q"].shape[1], inputs["k"].shape[1]
    if "cu_seqlens_q" in inputs or not params.get("causal", False) or rows < 2:
        return []
    if not all(inputs[name][:, -1].isfinite().all() for name in ("k", "v")):
        return []

    def changed(name: str, where: slice) -> Tensor:
        x = inputs[name].clone()
        x[:, where] = 1.0
        return x

    last = {name: changed(name, slice(keys - 1, keys)) for name in ("k", "v")}
    before, final = (slice(None), slice(rows - 1)), (slice(None), slice(rows - 1, rows))

    def parts(at: tuple[slice, slice]) -> tuple[Part, ...]:
        return tuple(Part(name, at, at) for name in ("o", "lse"))

    queries = inputs | {"q": changed("q", slice(rows - 1))}
    return [
        Variant("another last key", inputs | last, params, parts(before)),
        Variant("other queries before the last", queries, params, parts(final)),
    ]


def row_strides(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows further apart; and tokens before heads, [N, B · H, d] in memory."""
    names = ("q", "k", "v")
    tokens_first = {name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1) for name in names}
    variants = strides(*names)(case, inputs, params)
    return [*variants, Variant("tokens before heads", inputs | tokens_first, params, may_refuse=True)]


PROPERTIES = (heads, packed, causality, row_strides)
