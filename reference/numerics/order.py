"""Reductions by name: each function is one order of roundings, used by every kernel's exact model."""

from collections.abc import Callable

import torch
from torch import Tensor

from reference.numerics.ieee import CPU_BLOCK_ELEMS, add_rn, fma_rn, has_tiny_products, sum_to_narrow


def chain_add(x: Tensor, dim: int = -1) -> Tensor:
    """((0 + x0) + x1) + … along ``dim``, ascending; fp32."""
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.unbind(dim):
        total = add_rn(total, part)
    return total


def chain_fma(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """fma(a_n, b_n, … fma(a_1, b_1, fma(a_0, b_0, c))) along the first dimension, ascending, from c (or 0); fp32."""
    total = torch.zeros(torch.broadcast_shapes(a.shape[1:], b.shape[1:]), device=a.device) if c is None else c
    for x, y in zip(a, b, strict=True):
        total = fma_rn(x, y, total)
    return total


def pairwise(x: Tensor, dim: int = -1) -> Tensor:
    """Neighbours added, then neighbours of the sums, until one is left: (x0 + x1) + (x2 + x3); fp32.

    ValueError unless the extent is a power of two.
    """
    extent = x.shape[dim]
    if extent < 1 or extent & (extent - 1):
        raise ValueError(f"x: got {extent} values along dimension {dim}, pairwise takes a power of two")
    x = x.movedim(dim, 0)
    while x.shape[0] > 1:
        x = add_rn(x[0::2], x[1::2])
    return x[0]


def strided(x: Tensor, dim: int = -1) -> Tensor:
    """The chain of the even ones along ``dim`` and that of the odd ones, each from 0, added at the end; fp32."""
    x = x.movedim(dim, 0)
    return add_rn(chain_add(x[0::2], 0), chain_add(x[1::2], 0))


def strided_fma(a: Tensor, b: Tensor, ways: int) -> Tensor:
    """A chain of FMAs from 0 for each position modulo ``ways`` along the first dimension, added pairwise; fp32.

    Two ways: the even positions' chain + the odd ones'. ValueError unless ``ways`` is a power of two.
    """
    return pairwise(torch.stack([chain_fma(a[way::ways], b[way::ways]) for way in range(ways)]), 0)


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
