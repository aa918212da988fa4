"""Host side of the tensor-core rungs: compile for a configuration, describe tensors by integers, launch."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from cute_impl import runtime
from cute_impl.fmha import checks
from cute_impl.fmha.k6 import K6
from cute_impl.fmha.problem import TENSORS, Config
from cute_impl.fmha.work import section_heads

LOG2_E = 1.4426950408889634
MAX_ITEMS = (1 << 31) - 1024  # numbered by 32 bits, and each CTA asks for one too many


def compile_variant(kernel: type, config: Config, options: str = ""):
    """A rung's kernel for one configuration, any lengths, heads, batch and strides; needs no GPU."""
    numbers = [Int64(0)] * 7, [Int32(1)] * 5, [Int64(8)] * 3 * len(TENSORS)
    rest: tuple = Int32(1), Int32(1), Float32(1.0), Float32(1.0)
    if kernel is K6:
        rest += Int64(0), Int32(1), Int32(1)
    key = ("fmha", kernel.__name__, config, options)
    return runtime.compile_kernel(key, lambda: kernel(config), *numbers, *rest, options=options)


@dataclass(frozen=True)
class Extents:
    """A tensor as (N, d, heads, B): its extents, and its strides in elements of N, heads and B."""

    n: int
    heads: int
    batch: int
    strides: tuple[int, int, int]


def extents(x: Tensor, packed: bool) -> Extents:
    """Of [B·H, N, d], whose heads are all of one batch, of [B, N, H, d], or of packed [ΣN, H, d]."""
    shape, stride = x.shape, [s if extent > 1 else x.shape[-1] for s, extent in zip(x.stride(), x.shape, strict=True)]
    if packed:
        return Extents(shape[0], shape[1], 1, (stride[0], stride[1], shape[-1]))
    if x.dim() == 3:
        return Extents(shape[1], shape[0], 1, (stride[1], stride[0], shape[-1]))
    return Extents(shape[1], shape[2], shape[0], (stride[1], stride[2], stride[0]))


def numbers(scale: float) -> tuple[Float32, Float32]:
    """c = fp32(scale · log2 e) and the scale; scale is a number that fp32 holds."""
    return Float32(scale * LOG2_E), Float32(scale)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    kernel: type,
    config: Config,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    offsets: tuple[Tensor, Tensor] | None,
    longest: int,
    scale: float,
) -> None:
    """Fill o and lse on PyTorch's current stream; ``longest`` bounds the rows of a sequence."""
    q, k, v = inputs
    described = [extents(x, config.packed) for x in (q, k, v, outputs[0])]
    sequences = offsets[0].numel() - 1 if offsets else described[0].batch
    for name, count in (("heads", described[0].heads), ("sequences", sequences)):
        if count > checks.MAX_GRID:
            raise ValueError(f"q: got {count} {name}, allowed are at most {checks.MAX_GRID}")
    pointers = [x.data_ptr() for x in (q, k, v, *outputs, *(offsets or ()))] + [0] * (0 if offsets else 2)
    sizes = [described[0].n, described[1].n, described[0].heads, described[1].heads, described[0].batch]
    arguments: list[Any] = [
        [Int64(x) for x in pointers],
        [Int32(x) for x in sizes],
        [Int64(s) for x in described for s in x.strides],
        Int32(-(-longest // config.rows)),
        Int32(sequences),
        *numbers(scale),
    ]
    if kernel is K6:
        heads, group = described[0].heads * sequences, described[0].heads // described[1].heads
        items = heads * -(-longest // config.rows)
        if items > MAX_ITEMS:
            raise ValueError(f"q: got {items} tiles in all, allowed are at most {MAX_ITEMS}")
        keys = described[1].n // (sequences if offsets else 1)
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        section, ctas = min(section_heads(keys, config.d, group), heads), min(items, multiprocessors(q.device))
        arguments += [Int64(counter.data_ptr()), Int32(section), Int32(ctas)]
    compile_variant(kernel, config)(*arguments, runtime.stream())
