"""FMHA forward on sm_90a: one module a rung of the ladder, one function for torch tensors.

``attention(q, k, v)`` is the plain function, ``torch.ops.goldens.fmha`` the same as a custom operator, without the
checks, and ``run(inputs, params, schedule)`` the same as a candidate for the suite. Rungs k2 and k3 share the bits of
schedule ``k2``; the others have those of ``wgmma128`` or ``wgmma176``, by the keys of a tile.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from cutlass import Float32
from torch import Tensor

from cute_impl import runtime
from cute_impl.fmha import checks, k2, k3, launch
from cute_impl.fmha.k4 import K4
from cute_impl.fmha.k5 import K5
from cute_impl.fmha.k6 import K6
from cute_impl.fmha.problem import Config

SCALAR = {"k2": k2, "k3": k3}
TENSOR_CORE: dict[str, Any] = {"k4": K4, "k5": K5, "k6": K6}
RUNGS = (*SCALAR, *TENSOR_CORE)  # slowest first
SCHEDULES = ("k2", "wgmma128", "wgmma176")  # of a rung the fastest first


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    rung: str | None = None,
    schedule: str | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(q kᵀ · scale) v on an sm_90 GPU; o like q, with ``return_lse`` also lse, fp32.

    q, k, v: bf16 [B·H, N, d] or [B, N, H, d], of any strides that TMA takes (1 along d, else multiples of 8); with
    ``cu_seqlens_q`` and ``cu_seqlens_k``, int32 [B + 1], packed sequences [ΣN, H, d], the longest in q of
    ``max_seqlen_q`` rows. d is 64 or 128; the heads of q are a multiple of those of k; lengths are free. causal: query
    i sees key j if j ≤ i + Nk − Nq; a row that sees no key has o = 0, lse = −inf. scale: 1/√d unless given, rounded to
    fp32. lse: [B·H, N], [B, H, N] or [H, ΣN]. rung: one of ``RUNGS``, by default the fastest that has the schedule; k2
    and k3 take [B·H, N, d] of one shape, N a multiple of 64, and make no lse. schedule: one of ``SCHEDULES``, by
    default the rung's first. ValueError names the argument that is not supported, RuntimeError a missing GPU.
    """
    checks.tensors(q, k, v)
    checks.numbers(causal, scale)
    rung, schedule = resolve(rung, schedule)
    checks.offsets(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    if rung in SCALAR:
        checks.scalar_rung(rung, q, k, cu_seqlens_q is not None, return_lse)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    else:
        packed = cu_seqlens_q is not None
        checks.heads(launch.extents(q, packed).heads, launch.extents(k, packed).heads)
        if not packed and q.dim() == 4 and q.shape[0] != k.shape[0]:
            raise ValueError(f"k: got a batch of {k.shape[0]}, q has {q.shape[0]}")
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.strides(name, x)
    runtime.require_hopper(q.device)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    o, lse = torch.ops.goldens.fmha(
        q, k, v, causal, scale, rung, schedule, cu_seqlens_q, cu_seqlens_k, max_seqlen_q or 0
    )
    return (o, lse) if return_lse else o


def resolve(rung: str | None, schedule: str | None) -> tuple[str, str]:
    """The rung and the schedule of a call that names both, one or none. ValueError if they do not go together."""
    if rung is not None and rung not in RUNGS:
        raise ValueError(f"rung: got {rung!r}, allowed are {', '.join(RUNGS)}")
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    if rung is None:
        rung = "k2" if schedule == "k2" else RUNGS[-1]
    allowed = SCHEDULES[:1] if rung in SCALAR else SCHEDULES[1:]
    if schedule is not None and schedule not in allowed:
        raise ValueError(f"schedule: got {schedule!r}, rung {rung} has {', '.join(allowed)}")
    return rung, schedule or allowed[0]


def run(
    inputs: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str | None = None, rung: str | None = None
) -> dict[str, Tensor]:
    """A schedule or rung as a candidate; by default the fastest.

    inputs: q, k, v, head-folded or packed [H, ΣN, d] with ``cu_seqlens_q`` and ``cu_seqlens_k``; parameters causal and
    scale. Outputs o and, from the tensor-core rungs, lse.
    """
    runtime.require_names("inputs", inputs, ("q", "k", "v"))
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    causal, scale = params.get("causal", False), params.get("scale")
    checks.tensors(q, k, v)
    checks.numbers(causal, scale)
    rung, schedule = resolve(rung, schedule)
    options: dict[str, Any] = {}
    packed = "cu_seqlens_q" in inputs
    if packed:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        options = {name: inputs.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options["max_seqlen_q"] = int(inputs["cu_seqlens_q"].diff().max())
    if rung in SCALAR:
        return {"o": attention(q, k, v, causal, scale, rung, **options)}
    o, lse = attention(q, k, v, causal, scale, rung, schedule, return_lse=True, **options)
    return {"o": o.transpose(0, 1) if packed else o, "lse": lse}


def config_of(rung: str, schedule: str, d: int, causal: bool, packed: bool) -> Config:
    """The configuration in which a tensor-core rung computes such calls."""
    return TENSOR_CORE[rung].configure(d, causal, packed, int(schedule.removeprefix("wgmma")))


def variants() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Name and compile function (of the compiler's options) of each variant of each rung."""
    for d, causal in itertools.product((64, 128), (False, True)):
        shape = f"d{d}{'-causal' * causal}"
        for rung, module in SCALAR.items():
            yield f"{rung}-{shape}", functools.partial(module.compile_variant, d, causal)
        for rung, schedule, packed in itertools.product(TENSOR_CORE, SCHEDULES[1:], (False, True)):
            config = config_of(rung, schedule, d, causal, packed)
            name = f"{rung}-{schedule}-{shape}{'-packed' * packed}"
            yield name, functools.partial(launch.compile_variant, TENSOR_CORE[rung], config)


def _lse_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    if q.dim() == 4:
        return q.shape[0], q.shape[2], q.shape[1]
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[1])


@torch.library.custom_op("goldens::fmha", mutates_args=())
def _fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    rung: str,
    schedule: str,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
) -> tuple[Tensor, Tensor]:
    """o and lse; k2 and k3 leave lse empty."""
    o = torch.empty_like(q)
    number = runtime.fp32_number("scale", scale)  # before it is multiplied by log2 e
    with torch.cuda.device(q.device):
        if rung in SCALAR:
            views = [runtime.view(x.permute(1, 2, 0), {0: k2.TILE, 2: 1}, order=k2.ORDER) for x in (q, k, v, o)]
            SCALAR[rung].compile_variant(q.shape[2], causal)(*views, Float32(number), runtime.stream())
            return o, q.new_empty(0, dtype=torch.float32)
        packed = cu_seqlens_q is not None
        lse = q.new_empty(_lse_shape(q, packed), dtype=torch.float32)
        if q.numel() == 0 or k.numel() == 0:
            return o.zero_(), lse.fill_(-torch.inf)
        config = config_of(rung, schedule, q.shape[-1], causal, packed)
        offsets = None if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
        longest = max_seqlen_q if packed else launch.extents(q, packed).n
        if longest:
            launch.launch(TENSOR_CORE[rung], config, (q, k, v), (o, lse), offsets, longest, number)
    return o, lse


@_fmha.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    rung: str,
    schedule: str,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
) -> tuple[Tensor, Tensor]:
    shape = (0,) if rung in SCALAR else _lse_shape(q, cu_seqlens_q is not None)
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)
