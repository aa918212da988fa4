"""Cache insert: RMSNorm of the KV latent, then both halves of a token's row to e4m3 in the paged cache.

| input | shape, dtype | |
|---|---|---|
| kv | [B, 512] bf16, any row stride | KV latent |
| k_pe | [B, 64] bf16, any row stride | rotary part of the key, taken as it is |
| w_kva | [512] bf16 | weight of the norm |
| cache | [pages, page_size, 576], uint8 (e4m3 bytes) or float8_e4m3fn, contiguous | |
| slots | [B] int64 | page · page_size + offset |
| k_scale_inv | [1] fp32 | multiplied before conversion |

Parameter: ``eps``, a number ≥ 0, rounded to the nearest of fp32. Output: cache, uint8, all of it after the call; the
model's holds the rows' values before conversion, and what the bytes of all others stand for.

cache[slot] = e4m3(bf16(kv · rsqrt(mean(kv²) + eps) · w_kva) · k_scale_inv), e4m3(k_pe · k_scale_inv), saturating, NaN
0x7f. A row whose slot is −1 or otherwise outside the cache is skipped. Two rows of one non-negative slot would race:
they are refused, in the cache or not. Rows do not meet: a NaN stays in its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference.numerics import portable
from reference.numerics.formats import E4M3, canonical_nan, fp32_number, to_bf16, to_e4m3
from reference.numerics.ieee import add_rn, fma_rn, mul_rn, require_subnormals
from reference.numerics.mufu import rsqrt_approx_ftz
from reference.numerics.order import butterfly, chain_fma

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
LANES, COLUMNS = 32, 8  # of a warp, of a thread: 2 warps hold a row's latent

# name: (shape, allowed dtypes); a letter is free, the same letter everywhere is the same number
Forms = Mapping[str, tuple[tuple[int | str, ...], tuple[torch.dtype, ...]]]
_FORMS: Forms = {
    "kv": (("B", LATENT), (torch.bfloat16,)),
    "k_pe": (("B", ROPE), (torch.bfloat16,)),
    "w_kva": ((LATENT,), (torch.bfloat16,)),
    "cache": (("pages", "page_size", WIDTH), (torch.uint8, E4M3.dtype)),
    "slots": (("B",), (torch.int64,)),
    "k_scale_inv": ((1,), (torch.float32,)),
}


def check(inputs: Mapping[str, Tensor], params: Params) -> None:
    """ValueError, naming the argument, if inputs or parameters are outside the interface."""
    check_names("inputs", inputs, _FORMS, "cache_insert")
    check_names("params", params, ("eps",), "cache_insert")
    eps_of(params)
    check_forms(inputs, _FORMS)
    check_slots(inputs["slots"])


def check_names(what: str, given: Mapping[str, Any], names: Mapping[str, Any] | tuple[str, ...], kernel: str) -> None:
    """ValueError if ``given`` does not have just these names."""
    for words, wrong in (("missing", set(names) - set(given)), ("unknown", set(given) - set(names))):
        if wrong:
            raise ValueError(f"{what}: {', '.join(sorted(wrong))} {words}; {kernel} takes {', '.join(names)}")


def eps_of(params: Params) -> float:
    """eps as fp32 holds it. ValueError unless it is a number from 0 on."""
    eps = fp32_number("eps", params["eps"])
    if params["eps"] < 0:
        raise ValueError(f"eps: got {params['eps']!r}, allowed is a finite number from 0 on")
    return eps


def check_forms(inputs: Mapping[str, Tensor], forms: Forms) -> None:
    """ValueError where a tensor has another shape, dtype or device than the interface, or no room for a view."""
    first = next(iter(forms))
    free: dict[str, tuple[int, str]] = {}
    for name, (shape, dtypes) in forms.items():
        x = inputs[name]
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
        form = "[" + ", ".join(str(extent) for extent in shape) + "]"
        if x.dim() != len(shape):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {form}")
        for got, extent in zip(x.shape, shape, strict=True):
            if isinstance(extent, int) and got != extent:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {form}")
            if isinstance(extent, str) and free.setdefault(extent, (got, name))[0] != got:
                known, other = free[extent]
                raise ValueError(f"{name}: got {extent} = {got}, {other} has {known}")
            if got == 0:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed are extents from 1 on")
        if x.dtype not in dtypes:
            raise ValueError(f"{name}: got {x.dtype}, allowed is {' or '.join(str(dtype) for dtype in dtypes)}")
        if x.device != inputs[first].device:
            raise ValueError(f"{name}: is on {x.device}, {first} on {inputs[first].device}; all must be on one device")
        rows_apart = isinstance(shape[0], str) and len(shape) == 2 and x.stride(1) == 1
        if not (x.is_contiguous() or rows_apart):
            raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")


def check_slots(slots: Tensor) -> None:
    """ValueError if two rows have the same non-negative slot."""
    used = slots[slots >= 0].sort().values
    twice = used[1:][used[1:] == used[:-1]]
    if twice.numel():
        rows = (slots == twice[0]).nonzero().flatten().tolist()
        raise ValueError(f"slots: rows {', '.join(map(str, rows))} all have slot {int(twice[0])}, and would race")


def write(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """A copy of cache [pages, page_size, 576] with rows [B, 576] at their slots; rows outside the cache are skipped."""
    flat = cache.flatten(0, 1).clone()
    inside = ((slots >= 0) & (slots < flat.shape[0])).nonzero().squeeze(1)
    return flat.index_copy_(0, slots.index_select(0, inside), rows.index_select(0, inside)).view(cache.shape)


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """bf16(x / √(mean(x²) + eps) · w) of x [B, n] and w [n], fp32 or fp64, for the models; their dtype.

    The rounding is part of the mathematics. From fp64 it goes through fp32, a double rounding that takes a tie's other
    side where the distance to the tie is below 2^-24 of the value; bounds allow for both sides there.
    """
    mean = portable.total(x * x) / torch.tensor(x.shape[1], dtype=x.dtype, device=x.device)
    square = mean + torch.tensor(eps, dtype=x.dtype, device=x.device)
    return round_bf16(x / portable.sqrt(square)[:, None] * w)


def round_bf16(x: Tensor) -> Tensor:
    """fp32 or fp64 rounded to bf16's values, in its own dtype."""
    return to_bf16(x.to(torch.float32)).to(x.dtype)


def model_rows(inputs: Mapping[str, Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    """The rows before their conversion to e4m3, [B, 576] in ``dtype``, whatever their slots."""
    kv, k_pe, w_kva, scale = (inputs[name].to(dtype) for name in ("kv", "k_pe", "w_kva", "k_scale_inv"))
    return torch.cat([norm(kv, w_kva, eps), k_pe], dim=1) * scale


def model(inputs: Mapping[str, Tensor], params: Params, dtype: torch.dtype = torch.float32) -> Tensors:
    """The mathematics without a schedule: cache [pages, page_size, 576] as values, the new ones not yet in e4m3."""
    check(inputs, params)
    require_subnormals()
    cache = inputs["cache"].view(E4M3.dtype).to(dtype)
    cache = write(cache, inputs["slots"], model_rows(inputs, eps_of(params), dtype))
    return {"cache": canonical_nan(cache) if dtype == torch.float32 else cache}


def insert_rows(inputs: Mapping[str, Tensor], eps: float) -> Tensor:
    """The bytes of the rows, [B, 576] uint8, whatever their slots; the insert of ``mla_query``'s schedules too.

    64 threads of 8 consecutive values: a chain of FMAs each, butterfly in the warp, warp 0 + warp 1.
    """
    kv, k_pe, w_kva = (inputs[name].to(torch.float32) for name in ("kv", "k_pe", "w_kva"))
    threads = kv.unflatten(1, (2, LANES, COLUMNS)).movedim(3, 0)
    warps = butterfly(chain_fma(threads, threads), (16, 8, 4, 2, 1))[..., 0]  # [B, 2]
    share, offset = (torch.tensor(x, dtype=torch.float32, device=kv.device) for x in (1.0 / LATENT, eps))
    rr = rsqrt_approx_ftz(fma_rn(add_rn(warps[:, 0], warps[:, 1]), share, offset))
    latent = to_bf16(mul_rn(mul_rn(kv, rr[:, None]), w_kva)).to(torch.float32)
    return to_e4m3(mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"])).view(torch.uint8)


def exact(inputs: Mapping[str, Tensor], params: Params, schedule: str) -> Tensors:
    """The cache after the call, bit for bit; the inputs stay as they are. ValueError if the call is not supported."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    check(inputs, params)
    require_subnormals()
    rows = SCHEDULES[schedule](inputs, eps_of(params))
    return {"cache": write(inputs["cache"].view(torch.uint8), inputs["slots"], rows)}


SCHEDULES: dict[str, Callable[[Mapping[str, Tensor], float], Tensor]] = {"insert": insert_rows}
