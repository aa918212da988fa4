"""AttnRes: a softmax mixture over saved residual rows and the running residual, then RMSNorm.

T tokens, D = 7168 columns, R saved rows a token of which the first ``nb`` are sources.

| input | shape, bf16 | |
|---|---|---|
| delta | [T, D], or with slots > 0 a mailbox [slots, capacity ≥ T, D] | what the previous sub-layer adds |
| prefix | [T, D] | always given, for its shape; read only if ``has_delta`` |
| blocks | [T, R, D], any token and row strides | rows 0 … nb − 1 are sources |
| norm, query, gamma | [D] | weight of the source norms, query projection, weight of the output norm |

Parameters, all required: ``nb`` (0 … 8), ``slots`` (0: delta is a tensor), ``has_delta`` (False: delta *is* the new
prefix), ``write`` (row of blocks that takes the new prefix, −1: none), ``final`` (the mixture is rounded to bf16
before its norm), ``eps`` and ``out_eps`` (of the source norms and the output norm, rounded to the nearest fp32 number,
which is normal), ``aux`` (how many further copies of the new prefix).

Outputs, all bf16: output [T, D]; prefix [T, D], the new one; blocks [T, R, D], all of it after the call; aux0, aux1, …
[T, D]; with a mailbox also delta, the mailbox after the call: every 32-bit word of the rows 0 … T − 1 of each slot is
the sentinel 0x80000000 again, rows from T on are as they were. ``model`` returns only output: the others are copies
of bits, for ``exact`` alone to judge.

What is read is what was there before the call, whatever row is written. A NaN is 0x7fff wherever it comes out, in the
prefix as well: the new prefix is always a conversion from fp32, never a copy of delta's bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference.numerics import portable
from reference.numerics.formats import canonical_nan, fp32_number, to_bf16
from reference.numerics.ieee import add_rn, fma_rn, max_f32, mul_rn, rcp_rn, require_subnormals, sub_rn
from reference.numerics.mufu import ex2_approx_ftz, rsqrt_approx_ftz
from reference.numerics.order import butterfly, chain_add, chain_fma, pairwise, strided

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]

D = 7168
MAX_NB, MAX_AUX = 8, 64
CTAS, WARPS, LANES, COLUMNS = 7, 4, 32, 8  # of a cluster, of a CTA, of a warp, of a thread
THREADS = CTAS * WARPS * LANES
SENTINEL = -0x80000000  # 0x80000000 as int32: the bf16 pair (+0, −0)
LOG2_E = 1.4426950408889634
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

_TENSORS = ("delta", "prefix", "blocks", "norm", "query", "gamma")
_PARAMS = ("nb", "slots", "has_delta", "write", "final", "eps", "out_eps", "aux")
_CPU_TOKENS, _CUDA_TOKENS = 64, 1024  # computed at once, to bound the memory; tokens do not meet


def check(inputs: Mapping[str, Tensor], params: Params) -> None:
    """ValueError, naming the argument, if inputs or parameters are outside the interface."""
    for what, given, names in (("inputs", inputs, _TENSORS), ("params", params, _PARAMS)):
        for words, wrong in (("missing", set(names) - set(given)), ("unknown", set(given) - set(names))):
            if wrong:
                raise ValueError(f"{what}: {', '.join(sorted(wrong))} {words}; attn_res takes {', '.join(names)}")
    _check_params(params)
    _check_tensors(inputs, params)


def _check_params(params: Params) -> None:
    for name in ("has_delta", "final"):
        if not isinstance(params[name], bool):
            raise ValueError(f"{name}: got {params[name]!r}, allowed are True and False")
    for name, low, high in (("nb", 0, MAX_NB), ("slots", 0, None), ("write", -1, None), ("aux", 0, MAX_AUX)):
        value = params[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and value >= low and (high is None or value <= high)):
            limits = f"from {low} on" if high is None else f"{low} … {high}"
            raise ValueError(f"{name}: got {value!r}, allowed are whole numbers {limits}")
    epsilons(params)


def epsilons(params: Params) -> tuple[float, float]:
    """eps and out_eps as every schedule and precision takes them: the nearest fp32 numbers.

    ValueError if one is not normal.
    """
    eps, out_eps = (fp32_number(name, params[name]) for name in ("eps", "out_eps"))
    for name, value in (("eps", eps), ("out_eps", out_eps)):
        if value < _SMALLEST_NORMAL:
            raise ValueError(f"{name}: got {params[name]!r}, allowed is a number from {_SMALLEST_NORMAL} on")
    return eps, out_eps


def _check_tensors(inputs: Mapping[str, Tensor], params: Params) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
    prefix, blocks, delta = inputs["prefix"], inputs["blocks"], inputs["delta"]
    tokens, slots = prefix.shape[0] if prefix.dim() else 0, params["slots"]
    shapes = {
        "prefix": "[T, D]",
        "delta": "[slots, capacity, D]" if slots else "[T, D]",
        "blocks": "[T, R, D]",
        "norm": "[D]",
        "query": "[D]",
        "gamma": "[D]",
    }
    for name, form in shapes.items():
        x = inputs[name]
        if x.dim() != form.count(",") + 1:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {form}")
        if x.shape[-1] != D:
            raise ValueError(f"{name}: got width {x.shape[-1]}, allowed is D = {D}")
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name}: got {x.dtype}, allowed is torch.bfloat16")
        if x.device != prefix.device:
            raise ValueError(f"{name}: is on {x.device}, prefix on {prefix.device}; all must be on one device")
        if name == "blocks" and x.numel() and x.stride(-1) != 1:
            raise ValueError(f"blocks: got strides {x.stride()}, the last one must be 1")
        if name != "blocks" and not x.is_contiguous():
            raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")
    if blocks.shape[0] != tokens:
        raise ValueError(f"blocks: got {blocks.shape[0]} tokens, prefix has {tokens}")
    if slots == 0 and delta.shape[0] != tokens:
        raise ValueError(f"delta: got {delta.shape[0]} tokens, prefix has {tokens}")
    if slots and delta.shape[0] != slots:
        raise ValueError(f"delta: got {delta.shape[0]} slots, the parameter slots is {slots}")
    if slots and delta.shape[1] < tokens:
        raise ValueError(f"delta: got capacity {delta.shape[1]}, prefix has {tokens} tokens")
    if params["nb"] > blocks.shape[1]:
        raise ValueError(f"nb: got {params['nb']}, blocks has R = {blocks.shape[1]} rows")
    if params["write"] >= blocks.shape[1]:
        raise ValueError(f"write: got {params['write']}, blocks has R = {blocks.shape[1]} rows: allowed are −1 … R − 1")
    if slots and bool((delta[:, :tokens].view(torch.int32) == SENTINEL).any()):
        raise ValueError("delta: got a word 0x80000000, the sentinel of what is not published: a publisher sends +0")


def new_prefix(inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    """p [T, D] bf16: the sum in fp32, rounded once; of several slots their sum is rounded to bf16 before.

    A mailbox is summed from 0 even if it has one slot: its −0 counts as +0.
    """
    prefix = inputs["prefix"]
    if params["slots"]:
        d = chain_add(inputs["delta"][:, : prefix.shape[0]].to(torch.float32), 0)
        if params["slots"] > 1:
            d = to_bf16(d).to(torch.float32)
    else:
        d = inputs["delta"].to(torch.float32)
    return to_bf16(add_rn(prefix.to(torch.float32), d) if params["has_delta"] else d)


def model(inputs: Mapping[str, Tensor], params: Params, dtype: torch.dtype = torch.float32) -> Tensors:
    """The mathematics without a schedule: output in ``dtype`` (fp32, or fp64 as oracle).

    The new prefix is part of the interface, bit for bit, so both precisions start from it; the rounding of the
    mixture, if final, is part of the mathematics.
    """
    check(inputs, params)
    require_subnormals()
    p, blocks = new_prefix(inputs, params), inputs["blocks"]
    w = inputs["norm"].to(dtype) * inputs["query"].to(dtype)
    gamma = inputs["gamma"].to(dtype)
    eps, out_eps, width = (torch.tensor(x, dtype=dtype, device=p.device) for x in (*epsilons(params), D))
    output = torch.empty(p.shape, dtype=dtype, device=p.device)
    for part in _parts(p):
        # [t, nb + 1, D]
        x = torch.cat([blocks[part, : params["nb"]].to(dtype), p[part, None].to(dtype)], dim=1)
        logit = portable.total(x * w) / portable.sqrt(portable.total(x * x) / width + eps)
        e = portable.exp(logit - logit.amax(1, keepdim=True))
        weight = e / portable.total(e)[:, None]
        mixture = portable.total(weight[..., None] * x, dim=1)
        if params["final"]:
            # From fp64 through fp32: a double rounding, so close to a tie that the bound allows for both sides.
            mixture = to_bf16(mixture.to(torch.float32)).to(dtype)
        rms = portable.sqrt(portable.total(mixture * mixture) / width + out_eps)
        output[part] = mixture / rms[:, None] * gamma
    return {"output": canonical_nan(output) if dtype == torch.float32 else output}


def exact(inputs: Mapping[str, Tensor], params: Params, schedule: str) -> Tensors:
    """All outputs of a schedule, bit for bit; the inputs stay as they are. ValueError if the call is not supported."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    check(inputs, params)
    require_subnormals()
    p = new_prefix(inputs, params)
    blocks = inputs["blocks"].clone(memory_format=torch.contiguous_format)
    if params["write"] >= 0:
        blocks[:, params["write"]] = p
    outputs = {"output": SCHEDULES[schedule](inputs, params, p), "prefix": p, "blocks": blocks}
    outputs |= {f"aux{i}": p.clone() for i in range(params["aux"])}
    if params["slots"]:
        outputs["delta"] = inputs["delta"].clone()
        outputs["delta"].view(torch.int32)[:, : p.shape[0]] = SENTINEL
    return outputs


def _parts(p: Tensor) -> list[slice]:
    step = _CUDA_TOKENS if p.is_cuda else _CPU_TOKENS
    return [slice(i, i + step) for i in range(0, p.shape[0], step)]


def _threads(x: Tensor) -> Tensor:
    """bf16 […, D] to fp32 [8, …, 896]: a thread's 8 columns come first, threads (rank, warp, lane) last."""
    return x.to(torch.float32).unflatten(-1, (THREADS, COLUMNS)).movedim(-1, 0).contiguous()


def _columns(x: Tensor) -> Tensor:
    """[8, …, 896] back to […, D]."""
    return x.movedim(0, -1).flatten(-2)


def _exchange(x: Tensor) -> Tensor:
    """The cluster-wide sum of one value a thread: […, 896] to […]."""
    warps = butterfly(x.unflatten(-1, (CTAS, WARPS, LANES)), (16, 8, 4, 2, 1))[..., 0]
    return strided(pairwise(warps))


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """exchange(dot8(a, b)): [8, …, 896] each to […]."""
    return _exchange(chain_fma(a, b))


def _fp32(x: float, device: torch.device) -> Tensor:
    return torch.tensor(x, dtype=torch.float32, device=device)


def _rstd(total: Tensor, eps: Tensor) -> Tensor:
    return rsqrt_approx_ftz(fma_rn(total, _fp32(1.0 / D, total.device), eps))


def _exp(x: Tensor) -> Tensor:
    return ex2_approx_ftz(mul_rn(x, _fp32(LOG2_E, x.device)))


def _cluster7(inputs: Mapping[str, Tensor], params: Params, p: Tensor, direct: bool = False) -> Tensor:
    """Schedules ``cluster7`` and, if ``direct``, ``cluster7_direct``: a cluster of 7 CTAs a token; output [T, D].

    They differ in how the norm of the mixture is found if it is not rounded (not final): from four sums that are
    known before the mixture is, or from the mixture itself. The first cancels when sources oppose each other, down
    to a negative square and NaN; the second is finite wherever the model is, unless a sum of squares or the
    mixture before its division overflows fp32.
    """
    w = mul_rn(_threads(inputs["norm"]), _threads(inputs["query"]))
    gamma = _threads(inputs["gamma"])
    eps, out_eps = (_fp32(x, p.device) for x in epsilons(params))
    output = torch.empty_like(p)
    for part in _parts(p):
        x, last = _threads(inputs["blocks"][part, : params["nb"]]), _threads(p[part])
        if params["nb"] == 0:
            scaled = mul_rn(last, _rstd(_sum_of_products(last, last), out_eps)[:, None])
        else:
            scaled = _mixture(x, last, w[:, None], eps, out_eps, params["final"], direct)
        output[part] = to_bf16(_columns(mul_rn(scaled, gamma[:, None])))
    return output


def _mixture(x: Tensor, p: Tensor, w: Tensor, eps: Tensor, out_eps: Tensor, final: bool, direct: bool) -> Tensor:
    """The mixture of x [8, t, nb, 896] and p [8, t, 896] over its norm, before gamma: [8, t, 896]."""
    # Pre-phase: the blocks alone.
    logits = mul_rn(_sum_of_products(x, w[:, :, None]), _rstd(_sum_of_products(x, x), eps))  # [t, nb]
    m = logits[:, 0]
    for b in range(1, logits.shape[1]):
        m = max_f32(m, logits[:, b])
    e_blocks = _exp(sub_rn(logits, m[:, None]))
    total = chain_add(e_blocks)
    mix = chain_fma(e_blocks.t()[:, None, :, None], x.movedim(2, 0))

    # Post-phase: with the new prefix.
    ss = _sum_of_products(p, p)
    logit = mul_rn(_sum_of_products(p, w), _rstd(ss, eps))
    top = max_f32(m, logit)
    a, e = _exp(sub_rn(m, top)), _exp(sub_rn(logit, top))
    den = fma_rn(a, total, e)
    if final or direct:
        inv = rcp_rn(den)
        r = fma_rn(mul_rn(a, inv)[:, None], mix, mul_rn(mul_rn(e, inv)[:, None], p))
        r = to_bf16(r).to(torch.float32) if final else r
        return mul_rn(r, _rstd(_sum_of_products(r, r), out_eps)[:, None])
    mp, mm = _sum_of_products(mix, p), _sum_of_products(mix, mix)
    crossed = fma_rn(mul_rn(add_rn(a, a), e), mp, mul_rn(mul_rn(e, e), ss))
    quad = fma_rn(mul_rn(a, a), mm, crossed)
    scale = _rstd(quad, mul_rn(mul_rn(out_eps, den), den))
    return fma_rn(mul_rn(a, scale)[:, None], mix, mul_rn(mul_rn(e, scale)[:, None], p))


def _cluster7_direct(inputs: Mapping[str, Tensor], params: Params, p: Tensor) -> Tensor:
    return _cluster7(inputs, params, p, direct=True)


SCHEDULES: dict[str, Callable[[Mapping[str, Tensor], Params, Tensor], Tensor]] = {
    "cluster7": _cluster7,
    "cluster7_direct": _cluster7_direct,
}
