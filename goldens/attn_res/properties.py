"""What AttnRes owes bit for bit: a token, alone or among others; what is not read; what is written besides."""

from collections.abc import Callable

import torch
from torch import Tensor

from goldens.case import Case, Params, Part, Tensors, Variant
from goldens.invariance import nan_like, some, strides

MANY = 33  # tokens in front: more clusters than an H200 holds at once


def _other(x: Tensor) -> Tensor:
    """Other rows; 32-bit words stay whole, so that none becomes the mailbox's sentinel."""
    return x.roll(2, -1)


def _tokens(inputs: Tensors, params: Params, make: Callable[[Tensor], Tensor]) -> Tensors:
    """delta, prefix and blocks through ``make``, a function of tensors whose first dimension is the tokens."""
    tokens = inputs["prefix"].shape[0]
    made = {name: make(inputs[name]) for name in ("prefix", "blocks")}
    if params["slots"]:
        made["delta"] = make(inputs["delta"][:, :tokens].transpose(0, 1)).transpose(0, 1).contiguous()
    else:
        made["delta"] = make(inputs["delta"])
    return inputs | made


def _token_parts(params: Params, mine: slice, base: slice) -> tuple[Part, ...]:
    names = ("output", "prefix", "blocks", *(f"aux{i}" for i in range(params["aux"])))
    parts = tuple(Part(name, (mine,), (base,)) for name in names)
    return (*parts, Part("delta", (slice(None), mine), (slice(None), base))) if params["slots"] else parts


def tokens(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    count = inputs["prefix"].shape[0]
    variants = [
        Variant(
            f"token {t} alone",
            _tokens(inputs, params, lambda x, t=t: x[t : t + 1].contiguous()),  # type: ignore[misc]
            params,
            _token_parts(params, slice(0, 1), slice(t, t + 1)),
            batch=True,
        )
        for t in some(count)
    ]
    behind = _token_parts(params, slice(count, 2 * count), slice(0, count))
    others = _tokens(inputs, params, lambda x: torch.cat([_other(x), x]))
    nan = _tokens(inputs, params, lambda x: torch.cat([nan_like(x), x, nan_like(x)]))
    variants += [
        Variant("behind others", others, params, behind, batch=True),
        Variant("amid NaN", nan, params, behind, batch=True),
    ]
    times = -(-MANY // max(count, 1))
    many = _tokens(inputs, params, lambda x: torch.cat([_other(x)] * times + [x]))
    parts = _token_parts(params, slice(times * count, (times + 1) * count), slice(0, count))
    variants.append(Variant("behind many others", many, params, parts, batch=True))
    if count > 1:
        turned = _tokens(inputs, params, lambda x: x.flip(0).contiguous())
        parts = tuple(
            part
            for t in range(count)
            for part in _token_parts(params, slice(t, t + 1), slice(count - 1 - t, count - t))
        )
        variants.append(Variant("tokens reversed", turned, params, parts, batch=True))
    return variants


def unread(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows of blocks that are no source, mailbox rows behind the tokens, and a prefix that is replaced may be NaN."""
    nb, write, tokens = params["nb"], params["write"], inputs["prefix"].shape[0]
    row = torch.full_like(inputs["blocks"][:, :1], torch.nan)
    poisoned = {"blocks": torch.cat([inputs["blocks"][:, :nb], nan_like(inputs["blocks"][:, nb:]), row], 1)}
    if not params["has_delta"]:
        poisoned["prefix"] = nan_like(inputs["prefix"])
    if params["slots"]:
        behind = inputs["delta"][:, tokens:]
        poisoned["delta"] = torch.cat([inputs["delta"][:, :tokens], nan_like(behind), nan_like(behind[:, :1])], 1)
    names = ("output", "prefix", *(f"aux{i}" for i in range(params["aux"])))
    parts = [Part(name) for name in names] + [Part("blocks", (slice(None), b), (slice(None), b)) for b in range(nb)]
    if write >= nb:
        parts.append(Part("blocks", (slice(None), write), (slice(None), write)))
    if params["slots"]:
        own = (slice(None), slice(tokens))
        parts.append(Part("delta", own, own))
    return [Variant("unread rows NaN", inputs | poisoned, params, tuple(parts))]


def kept_rows(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows of blocks that are neither sources nor written come back as they were, in another order if given in one."""
    rows = [r for r in range(params["nb"], inputs["blocks"].shape[1]) if r != params["write"]]
    if len(rows) < 2:
        return []
    blocks = inputs["blocks"].clone()
    blocks[:, rows] = inputs["blocks"][:, rows[::-1]]
    moved = tuple(
        Part("blocks", (slice(None), mine), (slice(None), base)) for mine, base in zip(rows, rows[::-1], strict=True)
    )
    return [Variant("kept rows reversed", inputs | {"blocks": blocks}, params, (Part("output"), *moved))]


def beside(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Output and new prefix do not depend on where the new prefix is written besides."""
    if params["write"] < 0 and not params["aux"]:
        return []
    parts = (Part("output"), Part("prefix"))
    return [Variant("nothing written besides", inputs, {**params, "write": -1, "aux": 0}, parts)]


PROPERTIES = (tokens, unread, kept_rows, beside, strides("blocks"))
