"""What the MLA query owes bit for bit: a row alone or among others, a head anywhere, each scale its own bytes alone."""

import torch
from torch import Tensor

from goldens.cache_insert.properties import places, rows
from goldens.case import Case, Params, Part, Tensors, Variant
from goldens.invariance import some, strides
from reference import mla_query as reference


def _takes(case: Case, count: int) -> bool:
    """Whether every schedule of the case takes so many rows."""
    heads = case.params["heads"]
    return count <= reference.MAX_B and not ("small" in case.schedules and reference.small_refusal(heads, count))


def heads(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """The heads in reverse order, and one whose neighbours' weights are NaN."""
    count = params["heads"]
    own = {"w_qb": inputs["w_qb"].unflatten(0, (count, -1)), "w_uk": inputs["w_uk"]}

    def called(name: str, weights: Tensors, part: Part) -> Variant:
        made = {"w_qb": weights["w_qb"].flatten(0, 1), "w_uk": weights["w_uk"]}
        return Variant(name, inputs | made, params, (part, Part("cache")))

    back = torch.arange(count, device=inputs["w_uk"].device).flip(0)
    variants = []
    if count > 1:
        reverse = {name: x.flip(0) for name, x in own.items()}
        variants.append(called("heads reversed", reverse, Part("output", mine=(slice(None), back))))
    for head in some(count):
        amid = {name: _amid_nan(x, head) for name, x in own.items()}
        part = (slice(None), head)
        variants.append(called(f"head {head} amid NaN", amid, Part("output", part, part)))
    return variants


def _amid_nan(x: Tensor, index: int) -> Tensor:
    """NaN but for x[index]."""
    result = torch.full_like(x, torch.nan)
    result[index] = x[index]
    return result


def scales(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Another scale of the query leaves the cache alone, another scale of the cache the query."""
    return [
        Variant(f"another {scale}", inputs | {scale: inputs[scale] * 1.5 + 1.0}, params, (Part(other),))
        for scale, other in (("q_scale_inv", "cache"), ("k_scale_inv", "output"))
    ]


def unread(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Columns of qkv that are not read are NaN, and eight more of them."""
    qkv = inputs["qkv"][:, : reference.QKV]
    wide = torch.nn.functional.pad(qkv, (0, inputs["qkv"].shape[1] - reference.QKV + 8), value=torch.nan)
    return [Variant("unread columns NaN", inputs | {"qkv": wide}, params)]


PROPERTIES = (rows("qkv", takes=_takes), heads, scales, places, unread, strides("qkv"))
