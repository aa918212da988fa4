"""MLA query: RMSNorm, Q_B projection, W_UK absorption, e4m3 query; and the insert of ``reference.cache_insert``.

| input | shape, dtype | |
|---|---|---|
| qkv | [B, W ≥ 2112] bf16, any row stride | columns 0 … 1535 query latent, 1536 … 2047 KV latent, 2048 … 2111 k_pe |
| w_qa, w_kva | [1536], [512] bf16 | weights of the norms |
| w_qb | [heads · 192, 1536] bf16 | a head's rows: 128 "nope", then 64 "rope" |
| w_uk | [heads, 128, 512] bf16 | absorption |
| cache | [pages, page_size, 576], uint8 (e4m3 bytes) or float8_e4m3fn, contiguous | |
| slots | [B] int64 | page · page_size + offset; rows outside the cache, −1 among them, are skipped |
| q_scale_inv, k_scale_inv | [1] fp32 | multiplied before conversion |

Parameters: ``heads`` (12, 6 or 1) and ``eps`` (a number ≥ 0, rounded to the nearest of fp32). B is 1 … 64. How many
ranks share a context (dcp) is no part of the mathematics.

Outputs: output [B, heads, 576] uint8, e4m3 bytes, 512 absorbed and 64 rope; cache, uint8, all of it after the call.
The model's are values: output before its conversion, cache as in ``reference.cache_insert``.

x̂ = bf16(x · rsqrt(mean(x²) + eps) · w_qa); q = bf16(w_qb x̂); latent_l = bf16(Σ_p q_p · w_uk[h, p, l]); output =
e4m3(latent · q_scale_inv), e4m3(q_{128 … 191} · q_scale_inv), saturating, NaN 0x7f. The roundings to bf16 are part of
the mathematics, so the model has them too. Rows do not meet: a NaN stays in its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference import cache_insert
from reference.cache_insert import Forms, check_forms, check_names, check_slots, eps_of, norm, round_bf16
from reference.numerics import portable
from reference.numerics.formats import E4M3, canonical_nan, to_bf16, to_e4m3
from reference.numerics.ieee import add_rn, div_rn, mul_rn, require_subnormals
from reference.numerics.mufu import rsqrt_approx
from reference.numerics.order import butterfly, chain_add, chain_fma, strided_fma
from reference.numerics.tensor_core import mma

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]

QUERY, LATENT, ROPE = 1536, cache_insert.LATENT, cache_insert.ROPE
QKV = QUERY + LATENT + ROPE
NOPE = 128
HEAD = NOPE + ROPE
MAX_B = 64
LANES, COLUMNS = 32, 8  # of a warp, of a thread
MMA_WARPS, MMA_K = 8, 16  # that share the k of Q_B, of one instruction

CLUSTER = {12: 8, 6: 16, 1: 8}  # CTAs a head in ``small``
# The largest B of ``small``. One head exists for goldens, and takes what any other number of heads takes.
SMALL_B = {12: 3, 6: 5, 1: 5}


def check(inputs: Mapping[str, Tensor], params: Params) -> None:
    """ValueError, naming the argument, if inputs or parameters are outside the interface."""
    check_names("params", params, ("heads", "eps"), "mla_query")
    heads = params["heads"]
    if isinstance(heads, bool) or heads not in CLUSTER:
        raise ValueError(f"heads: got {heads!r}, allowed are {', '.join(map(str, CLUSTER))}")
    eps_of(params)
    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    forms: Forms = {
        "qkv": (("B", "W"), bf16),
        "w_qa": ((QUERY,), bf16),
        "w_kva": ((LATENT,), bf16),
        "w_qb": ((heads * HEAD, QUERY), bf16),
        "w_uk": ((heads, NOPE, LATENT), bf16),
        "cache": (("pages", "page_size", cache_insert.WIDTH), (torch.uint8, E4M3.dtype)),
        "slots": (("B",), (torch.int64,)),
        "q_scale_inv": ((1,), fp32),
        "k_scale_inv": ((1,), fp32),
    }
    check_names("inputs", inputs, forms, "mla_query")
    check_forms(inputs, forms)
    rows, width = inputs["qkv"].shape
    if width < QKV:
        raise ValueError(f"qkv: got W = {width}, allowed is from {QKV} on")
    if rows > MAX_B:
        raise ValueError(f"qkv: got B = {rows}, allowed are 1 … {MAX_B}")
    check_slots(inputs["slots"])


def small_refusal(heads: int, rows: int) -> str | None:
    """Why schedule ``small`` does not support B = ``rows``, or None."""
    if rows > SMALL_B[heads]:
        return f"qkv: got B = {rows}, schedule small takes 1 … {SMALL_B[heads]} with {heads} heads"
    return None


def schedule_for(heads: int, rows: int) -> str:
    """The schedule that B = ``rows`` requests take by default."""
    return "tiled" if small_refusal(heads, rows) else "small"


def insert_inputs(inputs: Mapping[str, Tensor]) -> Tensors:
    """The inputs of ``cache_insert`` among those of a call; kv and k_pe are views of qkv."""
    kv, k_pe = inputs["qkv"][:, QUERY:QKV].split((LATENT, ROPE), dim=1)
    return {"kv": kv, "k_pe": k_pe} | {name: inputs[name] for name in ("w_kva", "cache", "slots", "k_scale_inv")}


def model(inputs: Mapping[str, Tensor], params: Params, dtype: torch.dtype = torch.float32) -> Tensors:
    """The mathematics without a schedule: output and cache as values in ``dtype`` (fp32, or fp64 as oracle)."""
    check(inputs, params)
    require_subnormals()
    heads, eps = params["heads"], eps_of(params)
    x, w_qa, w_qb, w_uk, scale = (inputs[n].to(dtype) for n in ("qkv", "w_qa", "w_qb", "w_uk", "q_scale_inv"))
    normed = norm(x[:, :QUERY], w_qa, eps)
    output = torch.empty(x.shape[0], heads, LATENT + ROPE, dtype=dtype, device=x.device)
    for row in range(x.shape[0]):
        q = round_bf16(portable.total(w_qb * normed[row])).view(heads, HEAD)
        latent = round_bf16(portable.total(q[:, :NOPE, None] * w_uk, dim=1))
        output[row] = torch.cat([latent, q[:, NOPE:]], dim=1) * scale
    cache = cache_insert.model(insert_inputs(inputs), {"eps": eps}, dtype)["cache"]
    return {"output": canonical_nan(output) if dtype == torch.float32 else output, "cache": cache}


def exact(inputs: Mapping[str, Tensor], params: Params, schedule: str) -> Tensors:
    """All outputs of a schedule, bit for bit; the inputs stay as they are. ValueError if the call is not supported."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    check(inputs, params)
    require_subnormals()
    query = SCHEDULES[schedule](inputs, {**params, "eps": eps_of(params)})
    return {
        "output": query,
        "cache": cache_insert.exact(insert_inputs(inputs), {"eps": params["eps"]}, "insert")["cache"],
    }


def _normed(x: Tensor, w: Tensor, total: Tensor, eps: float) -> Tensor:
    """x̂ [B, 1536] bf16 from fp32 x and the sums of squares [B]: the same roundings in both schedules."""
    width, offset = (torch.tensor(value, dtype=torch.float32, device=x.device) for value in (QUERY, eps))
    rr = rsqrt_approx(add_rn(div_rn(total, width), offset))
    return to_bf16(mul_rn(mul_rn(x, rr[:, None]), w))


def _to_bytes(latent: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """output [B, heads, 576] uint8 of latent [B, heads, 512] and q [B, heads, 192], both bf16."""
    values = torch.cat([latent, q[..., NOPE:]], dim=-1).to(torch.float32)
    return to_e4m3(mul_rn(values, scale)).view(torch.uint8)


def _small(inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    """Schedule ``small``: a cluster of CTAs a head, scalar FP32; output [B, heads, 576]."""
    heads, rows = params["heads"], inputs["qkv"].shape[0]
    refusal = small_refusal(heads, rows)
    if refusal:
        raise ValueError(refusal)
    x, w_qa, w_qb, w_uk = (inputs[name].to(torch.float32) for name in ("qkv", "w_qa", "w_qb", "w_uk"))
    x = x[:, :QUERY]

    # Thread t < 192 owns values 8 t … 8 t + 7; the two other warps' sums are 0 and change nothing.
    threads = x.unflatten(1, (-1, LANES, COLUMNS)).movedim(3, 0)
    warps = butterfly(chain_fma(threads, threads), (16, 8, 4, 2, 1))[..., 0]  # [B, 6]
    x_hat = _normed(x, w_qa, chain_add(warps), params["eps"]).to(torch.float32)

    # Lane j owns k = (32 c + j) · 8 + i, at position 8 c + i of its chains.
    w_lanes, x_lanes = (_by_lane(t) for t in (w_qb, x_hat))  # [48, rows, 32], [48, B, 32]
    lanes = strided_fma(w_lanes[:, None], x_lanes[:, :, None], 2)
    q = to_bf16(butterfly(lanes, (16, 8, 4, 2, 1))[..., 0]).view(rows, heads, HEAD)

    # 256 threads, one latent column each in turn: 256 / L groups, each of L / 2 consecutive p.
    columns = LATENT // CLUSTER[heads]
    share = columns // 2
    w_groups = w_uk.unflatten(1, (-1, share)).movedim(2, 0)[:, None]  # [L/2, 1, heads, 256/L, 512]
    q_groups = q[..., :NOPE].to(torch.float32).unflatten(2, (-1, share)).movedim(3, 0)[..., None]
    latent = to_bf16(chain_add(strided_fma(w_groups, q_groups, 2), dim=-2))
    return _to_bytes(latent, q, inputs["q_scale_inv"])


def _by_lane(x: Tensor) -> Tensor:
    """[n, 1536] to [48, n, 32]: the values that a lane owns, k = 256 c + 8 j + i, c before i, come first."""
    return x.unflatten(1, (-1, LANES, COLUMNS)).permute(1, 3, 0, 2).flatten(0, 1).contiguous()


def q_b_order(device: torch.device) -> Tensor:
    """[12, 16]: the k that each MMA of a warp takes, counted from the warp's first.

    Of each 32 consecutive k the first MMA takes those with k mod 8 < 4, the second the others.
    """
    k = torch.arange(QUERY // MMA_WARPS, device=device).view(-1, 2 * MMA_K // 8, 2, 4)  # [6, 4, halves of 8, 4]
    return k.transpose(1, 2).reshape(-1, MMA_K)


def _tiled(inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    """Schedule ``tiled``: tensor cores, any B; output [B, heads, 576]."""
    heads, rows = params["heads"], inputs["qkv"].shape[0]
    x, w_qa = (inputs[name].to(torch.float32) for name in ("qkv", "w_qa"))
    x, w_qb, w_uk = x[:, :QUERY], inputs["w_qb"], inputs["w_uk"]

    lanes = _by_lane(x)
    total = butterfly(strided_fma(lanes, lanes, 4), (16, 8, 4, 2, 1))[..., 0]
    x_hat = _normed(x, w_qa, total, params["eps"])

    x_warps, w_warps = (t.unflatten(1, (MMA_WARPS, -1)).transpose(0, 1) for t in (x_hat, w_qb))
    partial = mma(x_warps, w_warps, k_order=q_b_order(x.device))  # [8, B, heads · 192]
    q = to_bf16(chain_add(partial, 0)).view(rows, heads, HEAD)

    latent = mma(q[..., :NOPE].transpose(0, 1), w_uk.transpose(1, 2))  # [heads, B, 512]
    return _to_bytes(to_bf16(latent).transpose(0, 1), q, inputs["q_scale_inv"])


SCHEDULES: dict[str, Callable[[Mapping[str, Tensor], Params], Tensor]] = {"small": _small, "tiled": _tiled}
