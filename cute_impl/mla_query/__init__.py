"""MLA query on sm_90a, with the FP8 cache insert in the same launch: schedules ``small`` and ``tiled``.

``mla_query(qkv, …)`` is the plain function, ``torch.ops.goldens.mla_query`` and ``mla_query_dcp`` the same as custom
operators, without the checks, ``run(inputs, params, schedule)`` the same as a candidate for the suite. The cache is
written in place.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from cute_impl import runtime
from cute_impl.mla_query import checks, dcp, small, tiled
from cute_impl.mla_query.device import HEAD, NAMES, NOPE, QUERY
from cute_impl.mla_query.insert import LATENT, WIDTH

SCHEDULES = ("small", "tiled")
CLUSTER = {12: 8, 6: 16, 1: 8}  # CTAs a head in ``small``
SMALL_B = {12: 3, 6: 5, 1: 5}  # its largest B
MAX_B = 64
MAILBOX_RANKS = (1, 2, 4, 8)  # numbers of ranks that ``variants`` lists
INPUTS = NAMES[:-1]


def schedule_for(heads: int, rows: int) -> str:
    """The schedule that B = ``rows`` requests take unless told otherwise."""
    return "small" if rows <= SMALL_B[heads] else "tiled"


def mla_query(
    qkv: Tensor,
    w_qa: Tensor,
    w_kva: Tensor,
    w_qb: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    eps: float,
    *,
    schedule: str | None = None,
    q_b_cp_async: bool = True,
    out: Tensor | None = None,
    mailbox: dcp.Mailbox | None = None,
    weights_complete: bool = False,
    debug: bool = False,
) -> Tensor:
    """The query bytes [B, heads, 576] (e4m3 in uint8) on an sm_90 GPU; rows of the cache are written at their slots.

    qkv: [B, W ≥ 2112] bf16, rows at any multiple of 8 elements, B = 1 … 64; w_qa [1536], w_kva [512], w_qb [heads ·
    192, 1536], w_uk [heads, 128, 512] bf16, heads 12, 6 or 1; cache [pages, page_size, 576], uint8 or float8_e4m3fn;
    slots [B] int64, page · page_size + offset; q_scale_inv, k_scale_inv [1] fp32; eps from 0 on, rounded to fp32.
    Contiguous where nothing else is said, at multiples of 16 bytes (slots 8, scales 4). A row whose slot is outside the
    cache (−1) is not inserted. Two rows of the same slot race: which bytes remain is not defined. schedule: by B unless
    given. q_b_cp_async: ``small`` stages Q_B by cp.async, or by one bulk copy, the same bits.
    out: where the output goes, a new tensor unless given. mailbox: the output goes to all ranks' mailboxes too, and
    this rank's holds all ranks' bytes when the kernel ends; see ``dcp``.
    weights_complete: the caller's promise that the four weights are complete at launch: not written by the launch
    before on this stream, nor by those that it may overlap, back to the last ordinary one and including it. They are
    then read at once, by programmatic dependent launch, while launches before still run; everything else may come from
    the launch before. Without the promise the kernel starts when all before it on the stream has ended.
    debug: read the slots back first; ValueError if two rows have the same non-negative one, a RuntimeWarning lists
    those outside the cache but −1.

    ValueError names the argument that is not supported, RuntimeError a missing GPU.
    """
    tensors = dict(zip(INPUTS, (qkv, w_qa, w_kva, w_qb, w_uk, cache, slots, q_scale_inv, k_scale_inv), strict=True))
    heads = _check_tensors(tensors, out)
    rows = qkv.shape[0]
    eps = checks.eps_number(eps)
    schedule = schedule_for(heads, rows) if schedule is None else schedule
    _check_schedule(schedule, heads, rows)
    checks.check_flags(q_b_cp_async=q_b_cp_async, weights_complete=weights_complete)
    if mailbox is not None:
        _check_mailbox(mailbox, heads, qkv)
    if debug:
        checks.check_slots(slots, cache)
    runtime.require_hopper(qkv.device)
    if out is None:
        out = torch.empty(rows, heads, WIDTH, dtype=torch.uint8, device=qkv.device)
    options = (eps, schedule, q_b_cp_async, weights_complete)
    if mailbox is None:
        torch.ops.goldens.mla_query(*tensors.values(), out, *options)
    else:
        rest = (mailbox.buffers, mailbox.state, mailbox.status, mailbox.rank, mailbox.polls)
        torch.ops.goldens.mla_query_dcp(*tensors.values(), out, *rest, *options)
    return out


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str = "small") -> dict[str, Tensor]:
    """The kernel as a candidate: output and cache, as bytes. The given cache is written."""
    runtime.require_names("inputs", inputs, INPUTS)
    runtime.require_names("params", params, ("heads", "eps"))
    tensors: dict[str, Any] = {name: inputs[name] for name in INPUTS}
    heads = _check_tensors(tensors, None)
    if params["heads"] != heads:
        raise ValueError(f"heads: got {params['heads']}, w_uk has {heads}")
    output = mla_query(**tensors, eps=params["eps"], schedule=schedule, debug=True)
    return {"output": output, "cache": inputs["cache"].view(torch.uint8)}


def _check_tensors(tensors: Mapping[str, Tensor], out: Tensor | None) -> int:
    """Shapes, dtypes, devices, strides and alignment; returns the number of heads."""
    w_uk, qkv = tensors["w_uk"], tensors["qkv"]
    cube = isinstance(w_uk, Tensor) and w_uk.dim() == 3
    heads = w_uk.shape[0] if cube else 0
    if cube and heads not in CLUSTER:
        raise ValueError(f"heads: got {heads} (of w_uk), allowed are {', '.join(map(str, CLUSTER))}")
    bf16, fp32 = torch.bfloat16, torch.float32
    forms = {
        "qkv": checks.Form(("B", "W"), bf16, rows=True),
        "w_qa": checks.Form((QUERY,), bf16),
        "w_kva": checks.Form((LATENT,), bf16),
        "w_qb": checks.Form((heads * HEAD, QUERY), bf16),
        "w_uk": checks.Form(("heads", NOPE, LATENT), bf16),
        "cache": checks.Form(("pages", "page_size", WIDTH), *checks.BYTES),
        "slots": checks.Form(("B",), torch.int64, align=8),
        "q_scale_inv": checks.Form((1,), fp32, align=4),
        "k_scale_inv": checks.Form((1,), fp32, align=4),
    }
    checks.check_forms(tensors, {"w_uk": forms.pop("w_uk")})
    checks.check_forms(tensors, forms)
    if w_uk.device != qkv.device:
        raise ValueError(f"w_uk: is on {w_uk.device}, qkv on {qkv.device}; all must be on one device")
    rows, width = qkv.shape
    if width < QUERY + WIDTH:
        raise ValueError(f"qkv: got W = {width}, allowed is from {QUERY + WIDTH} on")
    if rows > MAX_B:
        raise ValueError(f"qkv: got B = {rows}, allowed are 1 … {MAX_B}")
    if out is not None:
        checks.check_forms({"out": out}, {"out": checks.Form((rows, heads, WIDTH), torch.uint8)})
        if out.device != qkv.device:
            raise ValueError(f"out: is on {out.device}, qkv on {qkv.device}; all must be on one device")
    return heads


def _check_schedule(schedule: str, heads: int, rows: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    if schedule == "small" and rows > SMALL_B[heads]:
        raise ValueError(f"qkv: got B = {rows}, schedule small takes 1 … {SMALL_B[heads]} with {heads} heads")


def _check_mailbox(mailbox: dcp.Mailbox, heads: int, qkv: Tensor) -> None:
    if mailbox.heads != heads:
        raise ValueError(f"mailbox: got {mailbox.heads} heads a rank, the weights have {heads}")
    if mailbox.capacity < qkv.shape[0]:
        raise ValueError(f"mailbox: got a capacity of {mailbox.capacity} rows, qkv has {qkv.shape[0]}")
    if mailbox.state.device != qkv.device:
        raise ValueError(f"mailbox: is on {mailbox.state.device}, qkv on {qkv.device}; all must be on one device")


def _launch(
    tensors: Sequence[Tensor], eps: float, schedule: str, q_b_cp_async: bool, pdl: bool, mailbox: list, ranks: int
) -> None:
    """tensors as ``NAMES``."""
    named = dict(zip(NAMES, tensors, strict=True))
    qkv, cache = named["qkv"], named["cache"]
    rows, heads = qkv.shape[0], named["w_uk"].shape[0]
    addresses = [Int64(x.data_ptr()) for x in tensors]
    sizes = (Int64(2 * qkv.stride(0)), Int64(cache.shape[0] * cache.shape[1]), Int32(heads))
    rest = (Float32(eps), Int32(pdl))
    with torch.cuda.device(qkv.device):
        if schedule == "small":
            kernel = small.compile_variant(small.Config(CLUSTER[heads], rows, q_b_cp_async, ranks))
            kernel(addresses, mailbox, *sizes, *rest, runtime.stream())
        else:
            groups, tiles = tiled.groups_for(heads, rows)
            kernel = tiled.compile_variant(tiled.Config(tiles, ranks))
            kernel(addresses, mailbox, *sizes, Int32(groups), Int32(rows), *rest, runtime.stream())


@torch.library.custom_op("goldens::mla_query", mutates_args=("cache", "output"))
def _mla_query(
    qkv: Tensor,
    w_qa: Tensor,
    w_kva: Tensor,
    w_qb: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    output: Tensor,
    eps: float,
    schedule: str,
    q_b_cp_async: bool,
    weights_complete: bool,
) -> None:
    tensors = (qkv, w_qa, w_kva, w_qb, w_uk, cache, slots, q_scale_inv, k_scale_inv, output)
    _launch(tensors, eps, schedule, q_b_cp_async, weights_complete, dcp.stand_in(0), 0)


@torch.library.custom_op("goldens::mla_query_dcp", mutates_args=("cache", "output", "mailboxes", "state", "status"))
def _mla_query_dcp(
    qkv: Tensor,
    w_qa: Tensor,
    w_kva: Tensor,
    w_qb: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    slots: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    output: Tensor,
    mailboxes: Sequence[Tensor],
    state: Tensor,
    status: Tensor,
    rank: int,
    polls: int,
    eps: float,
    schedule: str,
    q_b_cp_async: bool,
    weights_complete: bool,
) -> None:
    tensors = (qkv, w_qa, w_kva, w_qb, w_uk, cache, slots, q_scale_inv, k_scale_inv, output)
    mailbox = dcp.to_list(mailboxes, state, status, rank, polls)
    _launch(tensors, eps, schedule, q_b_cp_async, weights_complete, mailbox, len(mailboxes))


@_mla_query.register_fake
@_mla_query_dcp.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


def variants() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Name and compile function (of the compiler's options) of each variant; with mailboxes, those of some B."""
    sizes = {(CLUSTER[heads], rows) for heads, most in SMALL_B.items() for rows in range(1, most + 1)}
    configs = [small.Config(*size, cp_async) for size in sorted(sizes) for cp_async in (True, False)]
    configs += [small.Config(*size, dcp=ranks) for size in ((8, 2), (8, 4), (16, 5)) for ranks in MAILBOX_RANKS]
    for config in configs:
        staging = "" if config.q_b_cp_async else "-bulk"
        name = f"small-cluster{config.cluster}-b{config.rows}{staging}" + (f"-dcp{config.dcp}" if config.dcp else "")
        yield name, functools.partial(small.compile_variant, config)
    all_tiles = range(1, MAX_B // tiled.TILE + 1)
    shapes = [(tiles, 0) for tiles in all_tiles] + [(tiles, n) for tiles in all_tiles[:3] for n in MAILBOX_RANKS]
    for tiles, ranks in shapes:
        name = f"tiled-tiles{tiles}" + (f"-dcp{ranks}" if ranks else "")
        yield name, functools.partial(tiled.compile_variant, tiled.Config(tiles, ranks))
