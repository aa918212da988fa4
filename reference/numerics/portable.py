"""Sums, products of matrices, exponentials and logarithms with the same bits on every machine.

For the models: ordinary accuracy, no schedule. torch's own depend on the library's version, the number
of threads and the CPU; these use element-wise operations of IEEE 754 alone, in the order written here.
They take fp32 or fp64 and return the same dtype. With u = 2^-24 (fp32) or 2^-53 (fp64):

| function | order | error bound |
|---|---|---|
| ``total`` | halves added pairwise | ⌈log2 n⌉ · u · Σ|x| |
| ``matmul`` | ascending k: a product, then an addition | (K + 1) · u · Σ|a·b| |
| ``exp`` | in fp64, rounded once more for fp32 | 2 ULP in fp64; ½ ULP and a 2^-27th in fp32 |
| ``log`` | in fp64, rounded once more for fp32 | 3 ULP in fp64; ½ ULP and a 2^-26th in fp32 |
"""

import math

import torch
from torch import Tensor

from reference.numerics.ieee import CPU_BLOCK_ELEMS, CUDA_BLOCK_ELEMS, sqrt_rn

_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # ln 2 with its last 21 bits clear: k · _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EXP_COEFFICIENTS = [1.0 / math.factorial(n) for n in range(14)]


def total(x: Tensor, dim: int = -1) -> Tensor:
    """Σ x along ``dim``: the upper half is added to the lower until one is left (odd middles carried)."""
    x = x.movedim(dim, 0)
    if x.shape[0] == 0:
        return torch.zeros(x.shape[1:], dtype=x.dtype, device=x.device)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        sums = x[:half] + x[half : 2 * half]
        x = torch.cat([sums, x[2 * half :]]) if x.shape[0] % 2 else sums
    return x[0]


def matmul(a: Tensor, b: Tensor, keep: Tensor | None = None) -> Tensor:
    """a · b for a [M, K] and b [K, N]: ascending k, product and addition rounded apart.

    Where ``keep`` (bool [M, K]) is False the product is left out, NaN or not.
    """
    rows, columns = a.shape[0], b.shape[1]
    out = torch.zeros(rows, columns, dtype=a.dtype, device=a.device)
    block = max(1, (CUDA_BLOCK_ELEMS if a.is_cuda else CPU_BLOCK_ELEMS) // max(1, columns))
    for i in range(0, rows, block):
        part = out[i : i + block]
        product = torch.empty_like(part)
        a_columns = a[i : i + block].t().contiguous()
        kept = None if keep is None else keep[i : i + block].t().contiguous()
        for k in range(a.shape[1]):
            torch.mul(a_columns[k, :, None], b[k], out=product)
            part.add_(product if kept is None else torch.where(kept[k, :, None], product, 0.0))
    return out


def exp(x: Tensor) -> Tensor:
    """e^x: x = k·ln 2 + r with |r| ≤ ½ ln 2 (Cody and Waite), then Taylor's polynomial of degree 13 in r."""
    wide = x.to(torch.float64)
    clipped = torch.where(wide < -746.0, -746.0, torch.where(wide > 710.0, 710.0, wide))
    k = torch.floor(clipped * (1.0 / math.log(2.0)) + 0.5)
    r = (clipped - k * _LN2_HIGH) - k * _LN2_LOW
    y = torch.full_like(r, _EXP_COEFFICIENTS[-1])
    for coefficient in reversed(_EXP_COEFFICIENTS[:-1]):
        y = y * r + coefficient
    # 2^k in two factors, so that subnormal and overflowing results come out of one final rounding.
    half = torch.floor(k * 0.5)
    y = (y * _power_of_two(half)) * _power_of_two(k - half)
    return torch.where(wide != wide, wide, y).to(x.dtype)


def log(x: Tensor) -> Tensor:
    """ln x: x = 2^k · m with m in [√½, √2), ln m = 2·artanh((m − 1)/(m + 1)) by its series to the 23rd power."""
    wide = x.to(torch.float64)
    scaled = torch.where(wide < 2.0**-1022, wide * 2.0**54, wide)
    bits = scaled.view(torch.int64)
    k = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    large = m > math.sqrt(2.0)
    m = torch.where(large, m * 0.5, m)
    k = (k + large.to(torch.int64)).to(torch.float64) - torch.where(wide < 2.0**-1022, 54.0, 0.0)
    z = (m - 1.0) / (m + 1.0)
    square = z * z
    y = torch.full_like(z, 2.0 / 23.0)
    for power in range(21, 0, -2):
        y = y * square + torch.full_like(z, 2.0 / power)
    y = k * _LN2_HIGH + (k * _LN2_LOW + y * z)
    y = torch.where(wide == 0, -torch.inf, torch.where(wide == torch.inf, wide, y))
    return torch.where(wide >= 0, y, torch.nan).to(x.dtype)


def sqrt(x: Tensor) -> Tensor:
    """√x; fp32 correctly rounded (``ieee.sqrt_rn``). torch's fp64 root may be an ULP off: nothing stored takes it."""
    return sqrt_rn(x) if x.dtype == torch.float32 else torch.sqrt(x)


def _power_of_two(k: Tensor) -> Tensor:
    """2^k for integer-valued fp64 ``k`` of normal results."""
    return ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
