"""AttnRes on sm_90a: attention over residual sources, then RMSNorm; schedules ``cluster7`` and ``cluster7_direct``.

``attn_res(delta, prefix, blocks, norm, query, gamma, …)`` is the plain function, ``torch.ops.goldens.attn_res`` and
``attn_res_mailbox`` the same as custom operators, without the checks, ``run(inputs, params, schedule)`` the same as a
candidate for the suite. All work in place: prefix, a row of blocks and the mailbox are overwritten.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from cute_impl import runtime
from cute_impl.attn_res.cluster7 import (
    COLUMNS,
    MAX_BLOCKS,
    RANKS,
    ROW_BYTES,
    SCHEDULES,
    TENSORS,
    Config,
    D,
    compile_variant,
    starts_early,
)

MAX_AUX = 64
BOUNDED_POLLS = 1 << 20  # reads of a fragment before ``run`` gives up: of the order of a second


def attn_res(
    delta: Tensor,
    prefix: Tensor,
    blocks: Tensor,
    norm: Tensor,
    query: Tensor,
    gamma: Tensor,
    *,
    nb: int | None = None,
    slots: int = 0,
    has_delta: bool = True,
    write: int = -1,
    final: bool = False,
    eps: float = 1e-6,
    out_eps: float = 1e-6,
    aux: Sequence[Tensor] = (),
    out: Tensor | None = None,
    schedule: str = "cluster7",
    all_but_delta_complete: bool = False,
    polls: int = 0,
    status: Tensor | None = None,
) -> Tensor:
    """The output [T, D] on an sm_90 GPU; prefix, aux, row ``write`` of blocks and a mailbox are overwritten.

    delta: [T, D], or a mailbox [slots, capacity, D] if slots > 0. prefix [T, D], blocks [T, R, D], norm, query, gamma
    [D]; all bf16, columns contiguous, everything else at any multiple of 8 elements, mailbox and weights contiguous.
    eps, out_eps: of the source norms and of the output norm, rounded to the nearest fp32 number, which is normal.
    nb: rows of blocks that are sources, all unless given. aux: tensors [T, D] that take copies of the new prefix.
    out: where the output goes, a new tensor unless given; it may lie beside the rows of blocks, not in them.
    all_but_delta_complete: the caller's promise that prefix, blocks, norm, query and gamma are complete at launch: not
    written by the launch before on this stream, nor by those that it may overlap, back to the last ordinary one and
    including it; so not by a call of this kernel right before. They are then read at once, by programmatic dependent
    launch, while launches before still run; a delta tensor may come from the launch before. With a mailbox whoever
    publishes must not touch a token's prefix, blocks, aux and out once its row is sent. Without the promise the kernel
    starts when all before it on the stream has ended, and any argument may come from there.
    polls: reads of a mailbox fragment before giving up, 0 for no bound; it then counts as what was last read, and
    status, int32 [4], is set to 1.

    ValueError names the argument that is not supported, RuntimeError a missing GPU.
    """
    if nb is None:
        nb = blocks.shape[1] if isinstance(blocks, Tensor) and blocks.dim() == 3 else 0
    if not isinstance(aux, Sequence):
        raise ValueError(f"aux: got {type(aux).__name__}, allowed is a sequence of tensors")
    config = _config(nb, slots, has_delta, write, final, len(aux), schedule)
    eps, out_eps = _normal_fp32("eps", eps), _normal_fp32("out_eps", out_eps)
    _check_options(polls, all_but_delta_complete)
    tensors = {"prefix": prefix, "delta": delta, "blocks": blocks, "norm": norm, "query": query, "gamma": gamma}
    tensors |= {} if out is None else {"out": out}
    tensors |= {f"aux{i}": x for i, x in enumerate(aux)}
    _check_tensors(config, tensors)
    _check_status(status, prefix)
    _check_overlaps(config, tensors)
    output = torch.empty(prefix.shape, dtype=prefix.dtype, device=prefix.device) if out is None else out
    if prefix.shape[0] == 0:
        return output
    runtime.require_hopper(prefix.device)
    parameters = (nb, has_delta, write, final, eps, out_eps, schedule, all_but_delta_complete)
    rest = (prefix, blocks, norm, query, gamma, output, list(aux))
    if slots:
        torch.ops.goldens.attn_res_mailbox(delta, *rest, status, polls, *parameters)
    else:
        torch.ops.goldens.attn_res(delta, *rest, *parameters)
    return output


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str = "cluster7") -> dict[str, Tensor]:
    """The kernel as a candidate: what the interface calls output, prefix, blocks, aux0 … and, with a mailbox, delta.

    The given prefix, blocks and delta are overwritten and returned. A mailbox that is never filled is a TimeoutError.
    """
    runtime.require_names("inputs", inputs, TENSORS[:6])
    runtime.require_names("params", params, ("nb", "slots", "has_delta", "write", "final", "eps", "out_eps", "aux"))
    prefix, slots = inputs["prefix"], params["slots"]
    flags = (params["has_delta"], params["write"], params["final"])
    _config(params["nb"], slots, *flags, params["aux"], schedule)
    _check_form("prefix", prefix, "[T, D]")
    aux = [torch.empty_like(prefix) for _ in range(params["aux"])]
    options = {name: params[name] for name in ("nb", "slots", "has_delta", "write", "final", "eps", "out_eps")}
    status = torch.zeros(4, dtype=torch.int32, device=prefix.device) if slots else None
    tensors = [inputs[name] for name in ("delta", "prefix", "blocks", "norm", "query", "gamma")]
    output = attn_res(*tensors, **options, aux=aux, schedule=schedule, polls=BOUNDED_POLLS, status=status)
    if status is not None and int(status[0]):
        raise TimeoutError(f"delta: a fragment was not published within {BOUNDED_POLLS} reads")
    result = {"output": output, "prefix": prefix, "blocks": inputs["blocks"]}
    result |= {f"aux{i}": x for i, x in enumerate(aux)}
    return result | ({"delta": inputs["delta"]} if slots else {})


def _config(nb: int, slots: int, has_delta: bool, write: int, final: bool, aux: int, schedule: str) -> Config:
    """The compile-time parameters, each within its range."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    for name, flag in (("has_delta", has_delta), ("final", final)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: got {flag!r}, allowed are True and False")
    for name, value, low, high in (
        ("nb", nb, 0, MAX_BLOCKS),
        ("slots", slots, 0, None),
        ("write", write, -1, None),
        ("aux", aux, 0, MAX_AUX),
    ):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            limits = f"from {low} on" if high is None else f"{low} … {high}"
            raise ValueError(f"{name}: got {value!r}, allowed are whole numbers {limits}")
    return Config(nb, slots, has_delta, write, final, aux, schedule)


def _normal_fp32(name: str, value: Any) -> float:
    """The fp32 number nearest to ``value``. ValueError if it is not normal."""
    fp32 = torch.finfo(torch.float32)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= fp32.max
    rounded = torch.tensor(float(value), dtype=torch.float32).item() if number else 0.0
    if rounded < fp32.tiny:
        raise ValueError(f"{name}: got {value!r}, allowed is a number from {fp32.tiny} to {fp32.max}")
    return rounded


def _check_options(polls: int, promise: bool) -> None:
    if not isinstance(promise, bool):
        raise ValueError(f"all_but_delta_complete: got {promise!r}, allowed are True and False")
    if not isinstance(polls, int) or isinstance(polls, bool) or not 0 <= polls < 1 << 31:
        raise ValueError(f"polls: got {polls!r}, allowed are 0 (no bound) … 2^31 − 1")


def _check_tensors(config: Config, tensors: Mapping[str, Tensor]) -> None:
    """Shapes, dtypes, devices, strides and alignment."""
    prefix = tensors["prefix"]
    vector, matrix = ("norm", "query", "gamma"), "[T, D]"
    for name, x in tensors.items():
        form = "[D]" if name in vector else "[T, R, D]" if name == "blocks" else matrix
        form = "[slots, capacity, D]" if name == "delta" and config.slots else form
        _check_form(name, x, form)
        if x.shape[-1] != D:
            raise ValueError(f"{name}: got width {x.shape[-1]}, allowed is D = {D}")
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name}: got {x.dtype}, allowed is torch.bfloat16")
        if x.device != prefix.device:
            raise ValueError(f"{name}: is on {x.device}, prefix on {prefix.device}; all must be on one device")
        _check_strides(name, x, compact=form not in (matrix, "[T, R, D]"))
        if form in (matrix, "[T, R, D]") and x.shape[0] != prefix.shape[0]:
            raise ValueError(f"{name}: got {x.shape[0]} tokens, prefix has {prefix.shape[0]}")
    delta, rows = tensors["delta"], tensors["blocks"].shape[1]
    if config.slots and (delta.shape[0] != config.slots or delta.shape[1] < prefix.shape[0]):
        raise ValueError(
            f"delta: got shape {tuple(delta.shape)}, allowed is [slots, capacity, D] with slots = {config.slots} and "
            f"capacity at least {prefix.shape[0]}"
        )
    if config.nb > rows:
        raise ValueError(f"nb: got {config.nb}, blocks has R = {rows} rows: allowed are 0 … R")
    if config.write >= rows:
        raise ValueError(f"write: got {config.write}, blocks has R = {rows} rows: allowed are −1 … R − 1")
    if RANKS * prefix.shape[0] >= 1 << 31:
        raise ValueError(f"prefix: got {prefix.shape[0]} tokens, allowed are at most {((1 << 31) - 1) // RANKS}")


def _check_form(name: str, x: Any, form: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor {form}")
    if x.dim() != form.count(",") + 1:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {form}")


def _check_strides(name: str, x: Tensor, compact: bool) -> None:
    if x.numel() == 0:
        return
    outer = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    if compact and not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")
    if x.stride(-1) != 1 or any(s % COLUMNS for s in outer):
        raise ValueError(
            f"{name}: got strides {x.stride()}, allowed are 1 for the columns, multiples of {COLUMNS} elements before"
        )
    if x.data_ptr() % (2 * COLUMNS):
        raise ValueError(f"{name}: got address {x.data_ptr():#x}, allowed are multiples of {2 * COLUMNS} bytes")


def _check_status(status: Tensor | None, prefix: Tensor) -> None:
    if status is None:
        return
    shape = tuple(status.shape)
    if status.dtype != torch.int32 or shape != (4,) or status.device != prefix.device or not status.is_contiguous():
        raise ValueError(
            f"status: got {status.dtype} {shape} on {status.device}, allowed is contiguous int32 [4] on {prefix.device}"
        )


def _check_overlaps(config: Config, tensors: Mapping[str, Tensor]) -> None:
    """ValueError if a row that is written is also a row of another tensor, or twice one of its own."""
    written = {name for name in tensors if name in ("prefix", "out") or name.startswith("aux")}
    written |= {"blocks"} if config.write >= 0 else set()
    written |= {"delta"} if config.slots else set()
    names = [name for name, x in tensors.items() if x.numel()]
    spans = {name: _span(tensors[name]) for name in names}
    for name in names:
        if name not in written:
            continue
        if _overlap(tensors[name], None):
            raise ValueError(f"{name}: got strides {tensors[name].stride()}, its rows overlap")
        for other in names:
            apart = spans[name][1] <= spans[other][0] or spans[other][1] <= spans[name][0]
            if other != name and not apart and _overlap(tensors[name], tensors[other]):
                raise ValueError(f"{name}: overlaps {other}, allowed is memory of its own since it is written")


def _span(x: Tensor) -> tuple[int, int]:
    """First byte and the one behind the last."""
    offsets = [s * (n - 1) for s, n in zip(x.stride(), x.shape, strict=True)]
    start = x.data_ptr() + 2 * sum(o for o in offsets if o < 0)
    return start, x.data_ptr() + 2 * (sum(o for o in offsets if o > 0) + 1)


def _overlap(x: Tensor, other: Tensor | None) -> bool:
    """Whether a row of x overlaps one of other, or two of its own if other is None; free for compact tensors."""
    if other is None and x.is_contiguous():
        return False
    starts = _row_starts(x) if other is None else torch.cat([_row_starts(x), _row_starts(other)])
    if other is not None:
        mine = torch.arange(starts.numel()) < _row_starts(x).numel()
        starts, order = starts.sort()
        meets = (starts.diff() < ROW_BYTES) & (mine[order].diff() != 0)
        return bool(meets.any())
    return bool((starts.sort().values.diff() < ROW_BYTES).any())


def _row_starts(x: Tensor) -> Tensor:
    """Addresses of all rows, int64 on the CPU."""
    starts = torch.tensor([x.data_ptr()])
    for stride, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True):
        starts = (starts[:, None] + 2 * stride * torch.arange(extent)).flatten()
    return starts


def _launch(config: Config, tensors: Mapping[str, Tensor], eps: float, out_eps: float, polls: int, pdl: bool) -> None:
    prefix, blocks, delta = tensors["prefix"], tensors["blocks"], tensors["delta"]
    tokens = prefix.shape[0]
    if tokens == 0:  # the operators may be called directly
        return
    names = (*TENSORS, *(f"aux{i}" for i in range(config.aux)))
    addresses = [Int64(tensors[name].data_ptr() if name in tensors else 0) for name in names]
    token_bytes = {name: 2 * x.stride(0) for name, x in tensors.items() if x.dim() > 1}
    slot_bytes = 0
    if config.slots:
        token_bytes["delta"], slot_bytes = ROW_BYTES, 2 * delta.stride(0)
    strides = [Int64(token_bytes.get(name, 0)) for name in names]
    strides += [Int64(2 * blocks.stride(1)), Int64(slot_bytes)]
    early = starts_early(tokens, config.nb)
    numbers = (Int32(tokens), Float32(eps), Float32(out_eps), Int32(polls), Int32(early), Int32(pdl))
    with torch.cuda.device(prefix.device):
        compile_variant(config)(addresses, strides, *numbers, runtime.stream())


@torch.library.custom_op("goldens::attn_res", mutates_args=("prefix", "blocks", "output", "aux"))
def _attn_res(
    delta: Tensor,
    prefix: Tensor,
    blocks: Tensor,
    norm: Tensor,
    query: Tensor,
    gamma: Tensor,
    output: Tensor,
    aux: Sequence[Tensor],
    nb: int,
    has_delta: bool,
    write: int,
    final: bool,
    eps: float,
    out_eps: float,
    schedule: str,
    all_but_delta_complete: bool,
) -> None:
    tensors = {"delta": delta, "prefix": prefix, "blocks": blocks, "norm": norm, "query": query, "gamma": gamma}
    tensors |= {"output": output} | {f"aux{i}": x for i, x in enumerate(aux)}
    config = _config(nb, 0, has_delta, write, final, len(aux), schedule)
    _launch(config, tensors, eps, out_eps, 0, all_but_delta_complete)


@torch.library.custom_op(
    "goldens::attn_res_mailbox", mutates_args=("mailbox", "prefix", "blocks", "output", "aux", "status")
)
def _attn_res_mailbox(
    mailbox: Tensor,
    prefix: Tensor,
    blocks: Tensor,
    norm: Tensor,
    query: Tensor,
    gamma: Tensor,
    output: Tensor,
    aux: Sequence[Tensor],
    status: Tensor | None,
    polls: int,
    nb: int,
    has_delta: bool,
    write: int,
    final: bool,
    eps: float,
    out_eps: float,
    schedule: str,
    all_but_delta_complete: bool,
) -> None:
    tensors = {"delta": mailbox, "prefix": prefix, "blocks": blocks, "norm": norm, "query": query, "gamma": gamma}
    tensors |= {"output": output} | {f"aux{i}": x for i, x in enumerate(aux)}
    tensors |= {} if status is None else {"status": status}
    config = _config(nb, mailbox.shape[0], has_delta, write, final, len(aux), schedule)
    _launch(config, tensors, eps, out_eps, polls, all_but_delta_complete)


@_attn_res.register_fake
@_attn_res_mailbox.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


def variants(calls: Iterable[tuple[Mapping[str, Any], str]] = ()) -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Name and compile function (of the compiler's options) of the variants that the suite proves.

    Every nb, with and without ``final``, and what ``calls``, the parameters and schedule of each, ask for beside these.
    """
    configs = [
        Config(nb, final=final, schedule=s)
        for s in SCHEDULES
        for nb in range(MAX_BLOCKS + 1)
        for final in (False, True)
    ]
    names = ("nb", "slots", "has_delta", "write", "final", "aux")
    configs += [Config(**{name: params[name] for name in names}, schedule=schedule) for params, schedule in calls]
    for config in dict.fromkeys(configs):
        yield config.name, functools.partial(compile_variant, config)
