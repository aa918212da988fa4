"""Input values that are the same on every machine.

numpy's Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) counts; its raw
words are guaranteed not to change. They are mapped to values by integer arithmetic and one exact
division by a power of two, then rounded by ``reference.numerics.formats``; no float distribution is used.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from reference.numerics.formats import BF16, to_bf16


def words(label: str, count: int) -> Tensor:
    """``count`` uniformly random 64-bit words as int64; each label has a stream of its own."""
    digest = hashlib.sha256(label.encode()).digest()
    philox = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64))
    return torch.from_numpy(philox.random_raw(count).astype(np.uint64).view(np.int64))


def integers(label: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """int64 in [low, high); high − low must be at most 2^32, its remainder bias is below 2^-16 up to 2^16."""
    count = 1
    for extent in shape:
        count *= extent
    return (((words(label, count) >> 16) & 0xFFFFFFFF) % (high - low) + low).view(shape)


def normal(label: str, shape: tuple[int, ...]) -> Tensor:
    """fp32 with mean 0, variance 1 and a bell's shape: the sum of four 16-bit uniforms, at most 3.5."""
    count = 1
    for extent in shape:
        count *= extent
    word = words(label, count)
    quarters = (word & 0xFFFF) + ((word >> 16) & 0xFFFF) + ((word >> 32) & 0xFFFF) + ((word >> 48) & 0xFFFF)
    # The sum of four has variance 4 · 65536² / 12; 37837 is its root.
    return ((2 * quarters - 4 * 65535).to(torch.float32) / torch.tensor(2.0 * 37837.0)).view(shape)


def normal_bf16(label: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """bf16 nearest to ``scale`` times ``normal``."""
    return to_bf16(normal(label, shape) * scale)


def wide_bf16(label: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """bf16 with random sign and mantissa and exponents uniform in [low, high), smallest normal 2^-126."""
    exponent = integers(label + "/exponent", shape, low + 127, high + 127)
    rest = integers(label + "/rest", shape, 0, 256)  # sign and 7 bits of mantissa
    return _bf16((rest >> 7 << 15) | (exponent << 7) | (rest & 0x7F))


def bits_bf16(label: str, shape: tuple[int, ...]) -> Tensor:
    """bf16 of any bit pattern: subnormals, infinities and NaNs among them."""
    return _bf16(integers(label, shape, 0, 1 << 16))


def power_of_two(exponent: Tensor) -> Tensor:
    """fp64 2^exponent of int64 exponents from −1022 to 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def times(x: Tensor, factor: float) -> Tensor:
    """bf16 nearest to the fp32 product of bf16 ``x`` and a number."""
    return to_bf16(x.to(torch.float32) * factor)


def _bf16(pattern: Tensor) -> Tensor:
    return pattern.to(BF16.integer).view(BF16.dtype)
