"""What AttnRes owes bit for bit: a token, alone or among others."""

from collections.abc import Callable

import torch
from torch import Tensor

from goldens.case import Case, Params, Part, Tensors, Variant
from goldens.invariance import nan_like, some, strides


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
        )
        for t in some(count)
    ]
    behind = _token_parts(params, slice(count, 2 * count), slice(0, count))
    others = _tokens(inputs, params, lambda x: torch.cat([x.flip(-1), x]))
    nan = _tokens(inputs, params, lambda x: torch.cat([nan_like(x), x, nan_like(x)]))
    return [*variants, Variant("behind others", others, params, behind), Variant("amid NaN", nan, params, behind)]


PROPERTIES = (tokens, strides("blocks"))
