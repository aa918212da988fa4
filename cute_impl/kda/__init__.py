"""KDA forward on sm_90a: every rounding is that of docs/kda.md, whatever the batch or the GPU.

Schedule ``chunk16``, and for few long sequences ``chunk16_scan64``, ``chunk16_scan416`` and ``chunk16_scan512``, which
run segments of so many tokens in parallel.

``fwd(q, …)`` has FlashKDA's arguments, ``torch.ops.goldens.kda`` is the same as a custom operator, without the checks,
``run(inputs, params, schedule)`` the same as a candidate for the suite, ``fla.chunk_kda`` takes the arguments of
flash-linear-attention.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from cute_impl import runtime
from cute_impl.kda import checks, chunk16, scan
from cute_impl.kda.chunk16 import CLUSTERS, TOKENWISE
from cute_impl.kda.layout import D

# Tokens; 0: the whole sequence.
SEGMENTS = {"chunk16": 0, "chunk16_scan64": 64, "chunk16_scan416": 416, "chunk16_scan512": 512}
SCHEDULES = tuple(SEGMENTS)
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
OPTIONAL = ("initial_state", "cu_seqlens")
PARAMS = ("scale", "lower_bound", "final_state")


def get_workspace_size(T_total: int, H: int, N: int = 1, schedule: str = "chunk16") -> int:
    """Bytes of workspace that ``fwd`` needs for T_total tokens, H heads, N sequences.

    None for ``chunk16``, whose chunks stay on chip; 128 KB for every head and whole segment of a scan but the last,
    however many sequences they are of.
    """
    for name, x in (("T_total", T_total), ("H", H), ("N", N)):
        if not isinstance(x, int) or isinstance(x, bool) or x < 0:
            raise ValueError(f"{name}: got {x!r}, allowed is a whole number from 0 on")
    segment = checks.check_schedule(schedule, SEGMENTS)
    return scan.workspace_bytes(T_total, H, segment) if segment else 0


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    workspace: Tensor | None = None,
    *,
    check: bool = False,
    cluster: int | None = None,
    schedule: str = "chunk16",
) -> None:
    """Write ``out`` and, if given, ``final_state`` on an sm_90 GPU.

    q, k, v, g, out: [B, T, H, 128] bf16, g the gate before activation. beta: [B, T, H] bf16 logits. A_log [H], dt_bias
    [H, 128] fp32. scale: any finite number. lower_bound: from −5 to 5, natural log. Both are rounded to fp32.
    initial_state, final_state: [N, H, V, K] bf16 or fp32, one dtype; they may be the same tensor. cu_seqlens: [N + 1]
    int64 or int32 on the device, B = 1: sequence n has tokens cu_seqlens[n] … cu_seqlens[n + 1] − 1; without it N = B.
    All contiguous, at multiples of 16 bytes (beta 2, A_log 4, offsets their size). What is written overlaps with
    nothing else, but for the states.
    workspace: uint8, ``get_workspace_size`` bytes or more, at a multiple of 128; allocated unless given. ``chunk16``
    needs none and does not touch a given one.
    check: read cu_seqlens back first, which waits for the GPU; ValueError unless they rise from 0 to T.
    Without it bad offsets are brought into range, each at least its predecessor in a pair: memory-safe, not meaningful.
    cluster: CTAs that share a sequence (or segment) and head, 1, 2, 4 or 8, by their number and the GPU's size unless
    given; the same bits.
    schedule: one of ``SCHEDULES``; other bits. A scan is for sequences and heads that are fewer than a GPU's
    multiprocessors; sequences of one segment have chunk16's bits.

    ValueError names the argument that is not supported, RuntimeError a missing GPU.
    """
    tensors = {
        **dict(zip(INPUTS, (q, k, v, g, beta, A_log, dt_bias), strict=True)),
        "out": out,
        "initial_state": initial_state,
        "final_state": final_state,
        "cu_seqlens": cu_seqlens,
        "workspace": workspace,
    }
    segment = checks.check_schedule(schedule, SEGMENTS)
    checks.check_call(tensors, scale, lower_bound, cluster, segment)
    if check and cu_seqlens is not None:
        checks.check_offsets(cu_seqlens, q.shape[1])
    runtime.require_hopper(q.device)
    scale, lower_bound = runtime.fp32_number("scale", scale), runtime.fp32_number("lower_bound", lower_bound)
    torch.ops.goldens.kda(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, out, final_state, workspace if segment else None,
        scale, lower_bound, cluster or 0, segment,
    )  # fmt: skip


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str = "chunk16") -> dict[str, Tensor]:
    """The kernel as a candidate: out, and final_state if ``params`` asks for one ("bf16" or "fp32")."""
    checks.check_schedule(schedule, SEGMENTS)
    runtime.require_names("inputs", inputs, INPUTS)
    runtime.require_names("params", params, PARAMS)
    q, offsets = inputs["q"], inputs.get("cu_seqlens")
    made = {"out": torch.empty_like(inputs["v"])}
    if params["final_state"] is not None:
        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
        if not isinstance(params["final_state"], str) or params["final_state"] not in dtypes:
            raise ValueError(f"final_state: got {params['final_state']!r}, allowed are None, 'bf16', 'fp32'")
        sequences = checks.check_offsets_form(offsets, q)
        shape = (sequences, q.shape[2], D, D)
        made["final_state"] = torch.empty(shape, dtype=dtypes[params["final_state"]], device=q.device)
    tensors = {name: inputs.get(name) for name in (*INPUTS, *OPTIONAL)}
    options = {name: params[name] for name in ("scale", "lower_bound")}
    fwd(**tensors, **made, **options, check=True, schedule=schedule)  # type: ignore[arg-type]
    return made


def cluster_for(pairs: int, multiprocessors: int) -> int:
    """The largest cluster up to 4 with which all pairs of a sequence and a head run at once, a CTA on a multiprocessor.

    8 took longer than 4 at every shape of tools.bench_kda, which times all sizes by ``clusters``.
    """
    return max((c for c in CLUSTERS if c <= 4 and pairs * c <= multiprocessors), default=1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.custom_op("goldens::kda", mutates_args=("out", "final_state", "workspace"))
def _kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    workspace: Tensor | None,
    scale: float,
    lower_bound: float,
    cluster: int,
    segment: int,
) -> None:
    """As ``fwd``, which has made the checks. cluster 0: by the call and the GPU's size. segment: tokens of a scan's
    segments, 0 for chunk16.

    No argument has a default: torch 2.11 drops trailing ones and then looks for a mutable one in vain.
    """
    batch, tokens, heads, _ = q.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if segment and initial_state is not None and final_state is not None:
        if initial_state.data_ptr() == final_state.data_ptr():
            # The first segment's CTA reads it, and nothing holds back the last one's until then.
            initial_state = initial_state.clone()
    tensors = (q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens)
    addresses = [Int64(0 if x is None else x.data_ptr()) for x in tensors]
    pitches = [Int32(2 * D * heads)] * len(TOKENWISE)
    wide = any(x is not None and x.dtype == torch.float32 for x in (initial_state, final_state))
    offset_bytes = 0 if cu_seqlens is None else cu_seqlens.element_size()
    numbers = (tokens, heads, sequences, offset_bytes, int(wide))
    units = _multiprocessors(q.device)
    with torch.cuda.device(q.device):
        if segment:
            if workspace is None:
                size = scan.workspace_bytes(batch * tokens, heads, segment)
                workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
            pairs = [heads * count for count in scan.grids(batch * tokens, sequences, segment)]
            clusters = [cluster or cluster_for(count, units) for count in pairs]
            options = (scale, lower_bound, segment, workspace.data_ptr(), clusters, runtime.stream())
            scan.launch(addresses, pitches, numbers, *options)
        else:
            kernel = chunk16.compile_variant(chunk16.Config(cluster or cluster_for(sequences * heads, units)))
            kernel(addresses, pitches, *map(Int32, numbers), Float32(scale), Float32(lower_bound), runtime.stream())


@_kda.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


def variants() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Name and compile function (of the compiler's options) of each variant."""
    for cluster in CLUSTERS:
        yield f"chunk16-cluster{cluster}", functools.partial(chunk16.compile_variant, chunk16.Config(cluster))
    for part in scan.PARTS:
        for cluster in CLUSTERS:
            config = chunk16.Config(cluster, part=part)
            yield f"scan-{part}-cluster{cluster}", functools.partial(scan.compile_segments, config)
    yield "scan-combine", scan.compile_combine
