"""Candidates as a user writes them, in plain torch: right ones, and each way to be wrong, to refuse and to end."""

import math
import os
import signal
import sys
import time

import torch

from goldens.judge import Unsupported


def right(inputs, params):
    """cache_insert; on small cases also the bits of its schedule."""
    kv, cache = inputs["kv"].float(), inputs["cache"].clone()
    latent = kv * torch.rsqrt(kv.square().mean(-1, keepdim=True) + params["eps"]) * inputs["w_kva"].float()
    row = torch.cat([latent.bfloat16(), inputs["k_pe"]], -1).float() * inputs["k_scale_inv"]
    number = torch.where(row.isnan(), row, row.clamp(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8)
    number = torch.where(row.isnan(), 0x7F, number)
    flat, slots = cache.flatten(0, 1), inputs["slots"]
    inside = (slots >= 0) & (slots < len(flat))
    flat[slots[inside]] = number[inside]
    return {"cache": flat.view(cache.shape)}


def claims(inputs, params):
    return right(inputs, params)


def mistyped(inputs, params):
    return right(inputs, params)


def one_word(inputs, params):
    return right(inputs, params)


def other_outputs(inputs, params):
    return right(inputs, params)


claims.schedules = ("insert",)
mistyped.schedules, one_word.schedules, other_outputs.outputs = ("isnert",), "insert", ("lse",)


def raises(inputs, params):
    raise KeyError("no such page")


def renames(inputs, params):
    return {"caches": right(inputs, params)["cache"]}


def adds(inputs, params):
    return right(inputs, params) | {"lse": torch.zeros(1)}


def reshapes(inputs, params):
    return {"cache": right(inputs, params)["cache"].flatten()}


def widens(inputs, params):
    return {"cache": right(inputs, params)["cache"].view(torch.float8_e4m3fn).float()}


def lists(inputs, params):
    return [right(inputs, params)["cache"]]


def tuples(inputs, params):
    return {"cache": (1, 2)}


def numbers(inputs, params):
    return {1: right(inputs, params)["cache"]}


def empties(inputs, params):
    return {}


def refuses(inputs, params):
    raise Unsupported("pages of one row")


def refuses_but_one(inputs, params):
    if inputs["kv"].shape[0] != 1:
        raise Unsupported("more than a row")
    return right(inputs, params)


def hangs(inputs, params):
    if inputs["kv"].shape[0] == 1:
        time.sleep(3600)
    return right(inputs, params)


def crashes(inputs, params):
    """By a signal for one row, by an exit for two."""
    rows = inputs["kv"].shape[0]
    if rows == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if rows == 2:
        os._exit(7)
    return right(inputs, params)


def leaves(inputs, params):
    """By sys.exit for one row, by an interruption of its own for two."""
    rows = inputs["kv"].shape[0]
    if rows == 1:
        sys.exit(0)
    if rows == 2:
        raise KeyboardInterrupt("mine")
    return right(inputs, params)


def overwrites(inputs, params):
    outputs = right(inputs, params)
    for x in inputs.values():
        x.zero_()
    params.clear()
    return outputs


def sick(inputs, params):
    """Hangs the GPU for one row, loses it for two."""
    rows = inputs["kv"].shape[0]
    if rows == 1:
        torch.cuda._sleep(1 << 62)
    if rows == 2:
        index = torch.full((1,), 1 << 40, device="cuda")
        torch.zeros(4, device="cuda")[index]
    return right(inputs, params)


CALLS = [0]


def fails_third(inputs, params):
    CALLS[0] += 1
    outputs = right(inputs, params)
    if CALLS[0] == 3:
        outputs["cache"].fill_(0x38)
    return outputs


def attention(inputs, params):
    """fmha: o and lse."""
    q, k, v = (inputs[name].float() for name in ("q", "k", "v"))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (params["scale"] or 1 / math.sqrt(q.shape[2]))
    if params["causal"]:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return {"o": (weights @ v).bfloat16(), "lse": lse}


def only_o(inputs, params):
    return {"o": attention(inputs, params)["o"]}


def silent_o(inputs, params):
    return only_o(inputs, params)


only_o.outputs = ("o",)


def fp32_o(inputs, params):
    return {name: x.float() for name, x in attention(inputs, params).items()}


not_callable = 3


class Odd:
    """Callable, and every attribute an error."""

    def __call__(self, inputs, params):
        return right(inputs, params)

    def __getattr__(self, name):
        raise RuntimeError(name)


odd = Odd()
