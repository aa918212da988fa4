"""IEEE 754 binary32 with one rounding an operation: the ``.rn`` instructions of PTX.

PyTorch's element-wise sums, differences, products and quotients round once each, on the CPU and on
CUDA tensors, and calls are not contracted with each other; its square root does not (see ``sqrt_rn``).
NaN payloads depend on the machine; what is stored goes through ``formats.canonical_nan`` or a
conversion. Subnormals are kept; ``require_subnormals`` refuses a CPU of which any thread that computes flushes them.

The fused multiply-add: the product of two fp32 is exact in fp64; the fp64 sum with c is rounded to
odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd", 2008), after which rounding to fp32 gives the correctly rounded result, since fp64
keeps 53 ≥ 24 + 2 bits.
"""

import torch
from torch import Tensor

CPU_BLOCK_ELEMS = 1 << 16  # a block's temporaries stay in the L2 cache
CUDA_BLOCK_ELEMS = 1 << 25

_SMALLEST, _SMALLEST_NORMAL = 2.0**-149, 2.0**-126
_GRAIN_ELEMS = 1 << 15  # torch shares out element-wise work from here on: at::internal::GRAIN_SIZE
_TRIED_EVERY = 1 << 12
_MIDPOINT = -(1 << 63)  # the low 29 bits of a midpoint, 1000…0, moved to the top
# Below this a product can have bits that fp64 drops from a subnormal sum: 2^-126 minus 53 bits, plus 48 of product.
_TINY_PRODUCT = 2.0**-131


def require_subnormals() -> None:
    """RuntimeError if a thread that computes element-wise operations for this one flushes subnormal numbers to zero.

    A thread has a mode of its own, that of the thread which started it at that time. So each of torch's takes its share
    of one product here, and the call is made wherever exact results or models are computed.
    """
    share = torch.zeros(torch.get_num_threads(), _GRAIN_ELEMS)
    share[:, ::_TRIED_EVERY] = 2.0 * _SMALLEST  # few: a subnormal product takes a CPU a hundred cycles
    halved = share.mul_(0.5)[:, ::_TRIED_EVERY].view(torch.int32)  # bits: a comparison may flush too
    if not bool((halved == 1).all()):
        raise RuntimeError(
            "the CPU flushes subnormal numbers to zero (some library set it so): call torch.set_flush_denormal(False), "
            "and since threads that torch started before keep it, torch.set_num_threads(1), or begin in a new process"
        )


def add_rn(a: Tensor, b: Tensor) -> Tensor:
    """a + b in fp32, rounded once."""
    return a + b


def sub_rn(a: Tensor, b: Tensor) -> Tensor:
    """a − b in fp32, rounded once."""
    return a - b


def mul_rn(a: Tensor, b: Tensor) -> Tensor:
    """a · b in fp32, rounded once."""
    return a * b


def div_rn(a: Tensor, b: Tensor) -> Tensor:
    """a / b in fp32, rounded once. Both are tensors: torch multiplies by the reciprocal of a number on CUDA."""
    return a / b


def rcp_rn(a: Tensor) -> Tensor:
    """1 / a in fp32, rounded once."""
    return torch.ones_like(a) / a


def sqrt_rn(a: Tensor) -> Tensor:
    """√a in fp32, rounded once (``sqrt.rn.f32``).

    By way of fp64: torch's own fp32 root is off by an ULP at one input in 200 on CPUs where MKL computes it. The root
    of an fp32 is at least 2^-27 ULP away from every midpoint, which is 4 ULP of fp64: its error does no harm.
    """
    return torch.sqrt(a.to(torch.float64)).to(torch.float32)


def max_f32(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two fp32; a NaN loses to a number, −0 to +0 (``max.f32``)."""
    larger = torch.where((a > b) | (b != b), a, b)
    zeros = (a == 0) & (b == 0)
    return torch.where(zeros, a + b, larger)


def fma_rn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of fp32 tensors (broadcast together), rounded once; fp32."""
    a, b, c = (x.contiguous() for x in torch.broadcast_tensors(a, b, c))
    out = torch.empty_like(a)
    if out.numel() == 0:
        return out
    block = CUDA_BLOCK_ELEMS if a.is_cuda else CPU_BLOCK_ELEMS
    parts = [x.view(-1).split(block) for x in (a, b, c, out)]
    wide = torch.empty(4, min(block, out.numel()), dtype=torch.float64, device=a.device)
    for a_part, b_part, c_part, out_part in zip(*parts, strict=True):
        a64, b64, c64, total = wide[:, : out_part.numel()]
        a64.copy_(a_part)
        b64.copy_(b_part)
        c64.copy_(c_part)
        torch.mul(a64, b64, out=a64)
        sum_to_narrow(a64, c64, total, b64.view(torch.int64), tiny=True)
        out_part.copy_(total)
    return out


def has_tiny_products(a: Tensor, b: Tensor) -> bool:
    """Whether some non-zero product of an element of a and one of b may lie below 2^-131."""
    smallest = [torch.where(x == 0, torch.inf, x.abs()).amin() if x.numel() else 1.0 for x in (a, b)]
    return bool(smallest[0] * smallest[1] < _TINY_PRODUCT)


def sum_to_narrow(product: Tensor, c: Tensor, total: Tensor, scratch: Tensor, tiny: bool) -> None:
    """total ← an fp64 number whose conversion to fp32 is the exact ``product + c`` rounded once.

    product: fp64, each the exact product of two fp32; c: fp64 holding fp32; total (fp64) and scratch
    (int64) are overwritten; all contiguous. The fp64 sum can go wrong only where it sits on the
    midpoint of two fp32: for a normal result one pattern of its low 29 bits, for a subnormal one
    only if ``product`` is below 2^-131. ``tiny`` says whether such products may occur.
    """
    torch.add(product, c, out=total)
    torch.bitwise_left_shift(total.view(torch.int64), 35, out=scratch)
    if bool(scratch.min() == _MIDPOINT):
        _round_to_odd_at(scratch == _MIDPOINT, product, c, total)
    if tiny:
        _round_to_odd_at(total.abs() < _SMALLEST_NORMAL, product, c, total)


def _round_to_odd_at(where: Tensor, product: Tensor, c: Tensor, total: Tensor) -> None:
    """Where told, total ← product + c in fp64 rounded to odd, from the rounded total."""
    index = where.view(-1).nonzero().squeeze(1)
    a, b, s = (x.view(-1).index_select(0, index) for x in (product, c, total))
    b_part = s - a
    error = (a - (s - b_part)) + (b - b_part)  # exact: Knuth's two-sum
    bits = s.view(torch.int64)
    away = ((error > 0) & (s > 0)) | ((error < 0) & (s < 0))
    toward = ((error > 0) & (s < 0)) | ((error < 0) & (s > 0))
    odd = torch.where((bits & 1) == 0, bits + away.to(torch.int64) - toward.to(torch.int64), bits)
    total.view(-1).index_copy_(0, index, odd.view(torch.float64))
