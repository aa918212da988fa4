"""A candidate for cache_insert in Triton, a program a row.

goldens verify --candidate docs/examples/triton_cache_insert.py:cache_insert --kernel cache_insert
"""

import torch
import triton
import triton.language as tl

LATENT, ROPE = 512, 64


@triton.jit
def insert_row(
    kv,
    k_pe,
    w_kva,
    cache,
    slots,
    k_scale_inv,
    kv_pitch,
    k_pe_pitch,
    capacity,
    eps,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < capacity):
        scale = tl.load(k_scale_inv)
        place = cache + slot * (LATENT + ROPE)

        column = tl.arange(0, LATENT)
        x = tl.load(kv + row * kv_pitch + column).to(tl.float32)
        w = tl.load(w_kva + column).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) * (1.0 / LATENT) + eps)
        latent = (x * rstd * w).to(tl.bfloat16).to(tl.float32)  # a rounding of the interface
        tl.store(place + column, (latent * scale).to(tl.float8e4nv))

        column = tl.arange(0, ROPE)
        rope = tl.load(k_pe + row * k_pe_pitch + column).to(tl.float32)
        tl.store(place + LATENT + column, (rope * scale).to(tl.float8e4nv))


def cache_insert(inputs, params):
    """The cache after the call, as bytes; the given one is written in place."""
    kv, k_pe, cache = inputs["kv"], inputs["k_pe"], inputs["cache"]
    insert_row[(kv.shape[0],)](
        kv,
        k_pe,
        inputs["w_kva"],
        cache.view(torch.float8_e4m3fn),
        inputs["slots"],
        inputs["k_scale_inv"],
        kv.stride(0),
        k_pe.stride(0),
        cache.shape[0] * cache.shape[1],
        params["eps"],
        LATENT,
        ROPE,
    )
    return {"cache": cache}
