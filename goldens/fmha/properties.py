"""What attention owes bit for bit: heads with their groups, packed sequences, and rows whatever they do not see."""

from collections.abc import Callable

import torch
from torch import Tensor

from goldens.case import Case, Params, Part, Tensors, Variant
from goldens.invariance import nan_like, some, strides
from reference.fmha import OFFSETS, sequences

_NAMES = ("q", "k", "v")
_ALL = slice(None)
_APPENDED = 64  # rows and keys: k2 takes multiples of this


def _by_head(inputs: Tensors, make: Callable[[Tensor], list[Tensor]]) -> Tensors:
    """q, k and v with other heads put around them."""
    return inputs | {name: torch.cat(make(inputs[name])) for name in _NAMES}


def _parts(*places: tuple[slice | Tensor | tuple[slice, slice], slice | tuple[slice, slice]]) -> tuple[Part, ...]:
    """o and lse at each pair of places, the variant's and the case's."""
    index = [tuple(at if isinstance(at, tuple) else (at,) for at in pair) for pair in places]
    return tuple(Part(name, mine, base) for name in ("o", "lse") for mine, base in index)


def heads(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """KV heads with their groups of query heads: alone, among others, thrice, in another order; and without groups."""
    query_heads, kv_heads = inputs["q"].shape[0], inputs["k"].shape[0]
    group, variants = query_heads // kv_heads, []
    for h in some(kv_heads):
        rows = slice(h * group, (h + 1) * group)
        alone = inputs | {"q": inputs["q"][rows], "k": inputs["k"][h : h + 1], "v": inputs["v"][h : h + 1]}
        variants.append(Variant(f"head {h} alone", alone, params, _parts((_ALL, rows)), batch=True))
    if kv_heads > 1:
        rotated = _by_head(inputs, lambda x: [x[x.shape[0] // kv_heads :], x[: x.shape[0] // kv_heads]])
        places = torch.arange(query_heads).roll(group)  # where each went
        variants.append(Variant("heads rotated", rotated, params, _parts((places, _ALL))))
    if group > 1:
        own = inputs | {name: inputs[name].repeat_interleave(group, 0) for name in ("k", "v")}
        variants.append(Variant("a KV head each", own, params))
    behind = _parts((slice(query_heads, 2 * query_heads), _ALL))
    others = _by_head(inputs, lambda x: [x.flip(1), x])
    nan = _by_head(inputs, lambda x: [nan_like(x), x, nan_like(x)])
    thrice = _parts(*((slice(i * query_heads, (i + 1) * query_heads), _ALL) for i in range(3)))
    return [
        *variants,
        Variant("behind others", others, params, behind, batch=True),
        Variant("amid NaN", nan, params, behind, batch=True),
        Variant("thrice", _by_head(inputs, lambda x: [x, x, x]), params, thrice, batch=True),
    ]


def _pack(chosen: list[Tensors]) -> Tensors:
    made = {name: torch.cat([piece[name] for piece in chosen], dim=1) for name in _NAMES}
    for name, of in zip(OFFSETS, _NAMES, strict=False):
        made[name] = torch.tensor([0, *(piece[of].shape[1] for piece in chosen)]).cumsum(0).to(torch.int32)
    return made


def packed(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Packed sequences: each alone, in the reverse order, every other one NaN. A batch: its sequences packed."""
    if OFFSETS[0] not in inputs:
        return _batch_as_packed(case, inputs, params)
    rows, pieces = zip(*sequences(inputs), strict=True)
    total = inputs["q"].shape[1]
    variants = [
        Variant(f"sequence {i} alone", _pack([piece]), params, _parts((_ALL, (_ALL, at))), batch=True)
        for i, (at, piece) in enumerate(zip(rows, pieces, strict=True))
        if piece["q"].shape[1]
    ]
    back = [((_ALL, slice(total - at.stop, total - at.start)), (_ALL, at)) for at in rows]
    variants.append(Variant("in reverse order", _pack([*pieces[::-1]]), params, _parts(*back), batch=True))
    for first, name in enumerate(("even", "odd")):
        kept = [x if i % 2 == first else {n: nan_like(t) for n, t in x.items()} for i, x in enumerate(pieces)]
        places = _parts(*(((_ALL, at), (_ALL, at)) for at in rows[first::2]))
        variants.append(Variant(f"{name} sequences amid NaN", _pack(kept), params, places, batch=True))
    return variants


def _batch_as_packed(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    batch, rows = case.dims["batch"], case.dims["n_q"]
    if batch == 1:
        return []
    apart = [{name: x.chunk(batch)[i] for name, x in inputs.items()} for i in range(batch)]
    query_heads = apart[0]["q"].shape[0]
    places = [
        ((_ALL, slice(i * rows, (i + 1) * rows)), slice(i * query_heads, (i + 1) * query_heads)) for i in range(batch)
    ]
    parts = _parts(*places)
    return [Variant("packed", _pack(apart), params, parts, may_refuse=True, not_owed_by=("k2",), batch=True)]


def causality(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows that do not see a key, with others in its place from the middle on, and the last alone; all but the last
    query changed; rows and keys behind the last.

    Of the longest packed sequence, the others stay as they are. Not where keys or values that change are no numbers: a
    schedule that visits them may be NaN.
    """
    pieces = [own for _, own in sequences(inputs)]
    longest = max(range(len(pieces)), key=lambda i: pieces[i]["q"].shape[1])
    own = pieces[longest]
    rows, keys = own["q"].shape[1], own["k"].shape[1]
    if not params.get("causal", False) or rows < 2 or keys < 1:
        return []
    start = sum(piece["q"].shape[1] for piece in pieces[:longest])

    def among(changed: Tensors) -> Tensors:
        return _pack([*pieces[:longest], changed, *pieces[longest + 1 :]]) if OFFSETS[0] in inputs else changed

    def changed(name: str, where: slice) -> Tensor:
        x = own[name].clone()
        x[:, where] = 1.0
        return x

    def at(name: str, change: Tensors, seen: slice, batch: bool = False) -> Variant:
        place = (_ALL, slice(start + (seen.start or 0), start + seen.stop))
        return Variant(name, among(own | change), params, _parts((place, place)), batch=batch)

    queries = {"q": changed("q", slice(rows - 1))}
    variants = [at("other queries before the last", queries, slice(rows - 1, rows))]
    for name, first in (("another last key", rows - 1), (f"other keys for row {rows // 2} on", rows // 2)):
        later = slice(max(0, first + keys - rows), keys)
        if all(own[n][:, later].isfinite().all() for n in ("k", "v")):
            variants.append(at(name, {n: changed(n, later) for n in ("k", "v")}, slice(first)))
    longer = {n: torch.cat([x, torch.ones_like(x[:, :1]).expand(-1, _APPENDED, -1)], 1) for n, x in own.items()}
    return [*variants, at("rows and keys appended", longer, slice(rows), batch=True)]


def row_strides(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows further apart; and tokens before heads, [N, B · H, d] in memory."""
    tokens_first = {name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1) for name in _NAMES}
    variants = strides(*_NAMES)(case, inputs, params)
    return [*variants, Variant("tokens before heads", inputs | tokens_first, params, may_refuse=True)]


PROPERTIES = (heads, packed, causality, row_strides)
