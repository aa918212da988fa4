"""Cache insert on sm_90a: RMSNorm of the KV latent, e4m3 conversion, one row of the paged cache a token.

``cache_insert(kv, k_pe, w_kva, cache, slots, k_scale_inv, eps)`` is the plain function,
``torch.ops.goldens.cache_insert`` the same as a custom operator, without the checks, ``run(inputs, params, schedule)``
the same as a candidate for the suite. The cache is written in place. ``cute_impl.mla_query`` does the same in its own
launch, by the same device code.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from cute_impl import runtime
from cute_impl.mla_query import checks
from cute_impl.mla_query.insert import LATENT, ROPE, WIDTH, insert_row, load_weights

SCHEDULES = ("insert",)
WARPS = 8
NAMES = ("kv", "k_pe", "w_kva", "cache", "slots", "k_scale_inv")


class CacheInsert:
    """8 rows a CTA, a warp each."""

    @cute.jit
    def __call__(
        self,
        addresses: list,
        pitches: list,
        rows: Int32,
        capacity: Int64,
        eps: Float32,
        pdl: Int32,
        stream,
    ):
        """addresses: Int64, as ``NAMES``. pitches: bytes between rows of kv, k_pe. capacity: rows of the cache."""
        self.kernel(addresses, pitches, rows, capacity, eps).launch(
            grid=[(rows + WARPS - 1) // WARPS, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(self, addresses: list, pitches: list, rows: Int32, capacity: Int64, eps: Float32):
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = dict(zip(NAMES, addresses, strict=True))
        weights = load_weights(at["w_kva"], thread % 32)
        row = Int64(block * WARPS + thread // 32)
        cute.arch.griddepcontrol_wait()
        if row < rows:
            insert_row(
                at["kv"] + row * pitches[0],
                at["k_pe"] + row * pitches[1],
                weights,
                at["cache"],
                at["slots"] + row * 8,
                at["k_scale_inv"],
                capacity,
                eps,
            )


def compile_variant(options: str = ""):
    """The kernel, for any B, pitches and cache; needs no GPU."""
    arguments = ([Int64(0)] * len(NAMES), [Int64(0)] * 2, Int32(1), Int64(0), Float32(0.0), Int32(0))
    return runtime.compile_kernel(("cache_insert", options), CacheInsert, *arguments, options=options)


def cache_insert(
    kv: Tensor,
    k_pe: Tensor,
    w_kva: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale_inv: Tensor,
    eps: float,
    *,
    weights_complete: bool = False,
    debug: bool = False,
) -> None:
    """Write rows into the cache on an sm_90 GPU, in place.

    kv [B, 512] and k_pe [B, 64] bf16, rows at any multiple of 8 elements; w_kva [512] bf16; cache [pages, page_size,
    576], uint8 or float8_e4m3fn, contiguous; slots [B] int64, page · page_size + offset; k_scale_inv [1] fp32; eps from
    0 on, rounded to fp32. All at multiples of 16 bytes, slots and k_scale_inv of 8 and 4. A row whose slot is outside
    the cache (−1) is skipped. Two rows of the same slot race: which bytes remain is not defined. weights_complete: the
    caller's promise that w_kva is complete at launch: not written by the launch before on this stream, nor by those
    that it may overlap, back to the last ordinary one and including it. It is then read at once, by programmatic
    dependent launch, while launches before still run; everything else may come from the launch before. Without the
    promise the kernel starts when all before it on the stream has ended. debug: read the slots back first; ValueError
    if two rows have the same non-negative one, a RuntimeWarning lists those outside the cache but −1.

    ValueError names the argument that is not supported, RuntimeError a missing GPU.
    """
    tensors = dict(zip(NAMES, (kv, k_pe, w_kva, cache, slots, k_scale_inv), strict=True))
    eps = checks.eps_number(eps)
    checks.check_flags(weights_complete=weights_complete, debug=debug)
    checks.check_forms(
        tensors,
        {
            "kv": checks.Form(("B", LATENT), torch.bfloat16, rows=True),
            "k_pe": checks.Form(("B", ROPE), torch.bfloat16, rows=True),
            "w_kva": checks.Form((LATENT,), torch.bfloat16),
            "cache": checks.Form(("pages", "page_size", WIDTH), *checks.BYTES),
            "slots": checks.Form(("B",), torch.int64, align=8),
            "k_scale_inv": checks.Form((1,), torch.float32, align=4),
        },
    )
    if debug:
        checks.check_slots(slots, cache)
    runtime.require_hopper(kv.device)
    torch.ops.goldens.cache_insert(*tensors.values(), eps, weights_complete)


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str = "insert") -> dict[str, Tensor]:
    """The kernel as a candidate: inputs and eps in, the cache out as bytes. The given cache is written."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    runtime.require_names("inputs", inputs, NAMES)
    runtime.require_names("params", params, ("eps",))
    tensors: dict[str, Any] = {name: inputs[name] for name in NAMES}
    cache_insert(**tensors, eps=params["eps"], debug=True)
    return {"cache": inputs["cache"].view(torch.uint8)}


@torch.library.custom_op("goldens::cache_insert", mutates_args=("cache",))
def _cache_insert(
    kv: Tensor,
    k_pe: Tensor,
    w_kva: Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale_inv: Tensor,
    eps: float,
    weights_complete: bool,
) -> None:
    addresses = [Int64(x.data_ptr()) for x in (kv, k_pe, w_kva, cache, slots, k_scale_inv)]
    pitches = [Int64(2 * x.stride(0)) for x in (kv, k_pe)]
    numbers = (Int32(kv.shape[0]), Int64(cache.shape[0] * cache.shape[1]), Float32(eps), Int32(weights_complete))
    with torch.cuda.device(kv.device):
        compile_variant()(addresses, pitches, *numbers, runtime.stream())


@_cache_insert.register_fake
def _(*_: Any) -> None:
    return None


def variants() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Name and compile function (of the compiler's options) of the one variant."""
    yield "insert", compile_variant
