"""Reductions by name: each function is one order of roundings, used by every kernel's exact model."""

from typing import Callable

import torch
from torch import Tensor

from reference.numerics.ieee import CPU_BLOCK_ELEMS, add_rn, has_tiny_products, sum_to_narrow


def chain_add(x: Tensor, dim: int = -1) -> Tensor:
    """((0 + x0) + x1) + … along ``dim``, ascending; fp32."""
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.unbind(dim):
        total = add_rn(total, part)
    return total


def butterfly(x: Tensor, offsets: tuple[int, ...], op: Callable[[Tensor, Tensor], Tensor] = add_rn) -> Tensor:
    """One value a lane along the last dimension: x ← op(x, x[lane ^ offset]) for each offset in turn.

    Returns all lanes; addition commutes, so the lanes that met hold the same bits.
    """
    lanes = torch.arange(x.shape[-1], device=x.device)
    for offset in offsets:
        x = op(x, x.index_select(-1, lanes ^ offset))
    return x


def chain_matmul(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """a · b with each element a chain of FMAs over ascending k, starting from c (or 0).

    a [B, M, K], b [B, K, N], c [B, M, N], all fp32; returns fp32 [B, M, N].
    """
    batch, rows, _ = a.shape
    out = torch.zeros(batch, rows, b.shape[-1], device=a.device) if c is None else c.clone()
    if a.is_cuda:
        _chain_block(a, b, out)
        return out
    block = max(1, CPU_BLOCK_ELEMS // max(1, b.shape[-1]))
    for i in range(batch):
        for j in range(0, rows, block):
            _chain_block(a[i, j : j + block], b[i], out[i, j : j + block])
    return out


def _chain_block(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out ← the chain of ``chain_matmul`` from out, in place: a […, M, K], b […, K, N], out […, M, N]."""
    tiny = has_tiny_products(a, b)
    columns = a.to(torch.float64).movedim(-1, 0).contiguous().unsqueeze(-1)  # [K, …, M, 1]
    rows = b.to(torch.float64).movedim(-2, 0).contiguous().unsqueeze(-2)  # [K, …, 1, N]
    c, product, total = torch.empty(3, *out.shape, dtype=torch.float64, device=out.device)
    scratch = torch.empty(out.shape, dtype=torch.int64, device=out.device)
    c.copy_(out)
    for column, row in zip(columns, rows, strict=True):
        torch.mul(column, row, out=product)
        sum_to_narrow(product, c, total, scratch, tiny)
        out.copy_(total)
        c.copy_(out)
