"""What a kernel owes bit for bit whatever its schedule, as functions of a case, and the trial of it.

A property is a function of a case and its inputs that lists further calls, and which part of their outputs must equal
which part of the case's own call by the same candidate: the same call twice, a row, token or sequence alone or among
others, neighbours full of NaN, other strides, graph replay, and for kda a sequence in two parts. A candidate may be
inexact and yet invariant, or the reverse.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from goldens.case import Case, Tensors
from goldens.compare import Verdict, against_exact
from goldens.judge import CallFailed, Unsupported
from reference import mla_query

Params = Mapping[str, Any]
Index = tuple[slice | int | Tensor, ...]
AGAINST = "invariance"


@dataclass(frozen=True)
class Part:
    """``output[mine]`` of the further call must have the bits of ``output[base]`` of the case's own."""

    output: str
    mine: Index = ()
    base: Index = ()


@dataclass(frozen=True)
class Variant:
    """One further call; no ``parts``: every output as a whole.

    inputs: tensors, or a function that makes them of the outputs of the variant before. graph: recorded in a CUDA graph
    on other numbers and replayed on these. may_refuse: a ValueError is an answer too.
    """

    name: str
    inputs: Tensors | Callable[[Tensors], Tensors]
    params: Params
    parts: tuple[Part, ...] = ()
    graph: bool = False
    may_refuse: bool = False


@dataclass(frozen=True)
class Skipped:
    """A variant that the candidate does not do, and its words."""

    name: str
    reason: str


Property = Callable[[Case, Tensors, Params], list[Variant]]
Call = Callable[[Tensors, Params, bool], Tensors]


def check(case: Case, inputs: Tensors, call: Call, schedule: str | None, graphs: bool) -> Iterator[Verdict | Skipped]:
    """Every property of the case's kernel, tried on ``call(inputs, params, graph)``; graphs only if asked for.

    CallFailed or Unsupported if the case's own call fails.
    """
    base = call(inputs, case.params, False)
    for tried in PROPERTIES[case.kernel]:
        before: Tensors | None = None
        for variant in tried(case, inputs, case.params):
            if (variant.graph and not graphs) or (tried is kda_split and "_scan" in (schedule or "")):
                continue
            if callable(variant.inputs):
                if before is None:
                    continue
                made = variant.inputs(before)
            else:
                made = variant.inputs
            before = None
            try:
                before = call(made, variant.params, variant.graph)
            except Unsupported as refused:
                yield Skipped(variant.name, str(refused))
                continue
            except CallFailed as error:
                if variant.may_refuse and error.refusal:
                    yield Skipped(variant.name, str(error))
                else:
                    yield Verdict(f"{variant.name}: call", AGAINST, False, str(error))
                continue
            yield from _compared(variant, before, base)


def _compared(variant: Variant, outputs: Tensors, base: Tensors) -> Iterator[Verdict]:
    for part in variant.parts or tuple(Part(name) for name in base):
        if part.output not in base:
            continue
        name, want = f"{variant.name}: {part.output}", base[part.output][part.base]
        if part.output not in outputs:
            yield Verdict(name, AGAINST, False, "missing: the candidate returned no such output")
        elif want.numel():
            yield replace(against_exact(name, outputs[part.output][part.mine], want), against=AGAINST)


# For every kernel.


def twice(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    return [Variant("twice", inputs, params)]


def graph_replay(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    return [Variant("graph replay", inputs, params, graph=True)]


def _pitched(x: Tensor, extra: int = 8) -> Tensor:
    """The same values, every dimension but the last two rows or columns longer in memory; NaN between."""
    shape = [n + (extra if axis == x.dim() - 1 else 1 if axis == x.dim() - 2 else 0) for axis, n in enumerate(x.shape)]
    inner = tuple(slice(n) for n in x.shape)
    result = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)[inner]
    return result.copy_(x)


def _strides(*names: str) -> Property:
    """The tensors ``names`` with rows further apart in memory."""

    def strides(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
        pitched = {name: _pitched(inputs[name]) for name in names}
        return [Variant("strides", inputs | pitched, params, may_refuse=True)]

    return strides


def _some(count: int) -> list[int]:
    """The first and the last of ``count``, if there is more than one."""
    return sorted({0, count - 1}) if count > 1 else []


def _nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan) if x.dtype.is_floating_point else x


# Attention: a head (and its group of query heads) of the batch, or a packed sequence.


def _by_head(inputs: Tensors, make: Callable[[Tensor], list[Tensor]]) -> Tensors:
    """q, k and v with other heads put around them."""
    return inputs | {name: torch.cat(make(inputs[name])) for name in ("q", "k", "v")}


def fmha_heads(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    heads, kv_heads = inputs["q"].shape[0], inputs["k"].shape[0]
    group, variants = heads // kv_heads, []
    for h in _some(kv_heads):
        rows = slice(h * group, (h + 1) * group)
        alone = inputs | {"q": inputs["q"][rows], "k": inputs["k"][h : h + 1], "v": inputs["v"][h : h + 1]}
        parts = tuple(Part(name, base=(rows,)) for name in ("o", "lse"))
        variants.append(Variant(f"head {h} alone", alone, params, parts))
    behind = tuple(Part(name, mine=(slice(heads, 2 * heads),)) for name in ("o", "lse"))
    others = _by_head(inputs, lambda x: [x.flip(1), x])
    nan = _by_head(inputs, lambda x: [_nan_like(x), x, _nan_like(x)])
    return [*variants, Variant("behind others", others, params, behind), Variant("amid NaN", nan, params, behind)]


def fmha_packed(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Each packed sequence that has queries: alone, in the reverse order, and with all others NaN."""
    if "cu_seqlens_q" not in inputs:
        return []
    offsets = {"q": inputs["cu_seqlens_q"].tolist(), "k": inputs["cu_seqlens_k"].tolist()}
    offsets["v"] = offsets["k"]
    count = len(offsets["q"]) - 1
    pieces = [{n: inputs[n][:, at[i] : at[i + 1]] for n, at in offsets.items()} for i in range(count)]

    def pack(chosen: list[Tensors]) -> Tensors:
        made = {name: torch.cat([piece[name] for piece in chosen], dim=1) for name in ("q", "k", "v")}
        lengths = {n: torch.tensor([0, *(piece[n].shape[1] for piece in chosen)]) for n in ("q", "k")}
        return made | {f"cu_seqlens_{n}": x.cumsum(0).to(torch.int32) for n, x in lengths.items()}

    variants, at = [], offsets["q"]
    for i in range(count):
        rows = slice(at[i], at[i + 1])
        back = slice(at[-1] - at[i + 1], at[-1] - at[i])
        if not pieces[i]["q"].shape[1]:
            continue
        everywhere = tuple(Part(name, (slice(None), rows), (slice(None), rows)) for name in ("o", "lse"))
        nan = pack([piece if j == i else {n: _nan_like(x) for n, x in piece.items()} for j, piece in enumerate(pieces)])
        alone = tuple(Part(name, base=(slice(None), rows)) for name in ("o", "lse"))
        reverse = tuple(Part(name, (slice(None), back), (slice(None), rows)) for name in ("o", "lse"))
        variants += [
            Variant(f"sequence {i} alone", pack([pieces[i]]), params, alone),
            Variant(f"sequence {i} amid NaN", nan, params, everywhere),
            Variant(f"sequence {i} in reverse order", pack(pieces[::-1]), params, reverse),
        ]
    return variants


def fmha_strides(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """Rows further apart; and tokens before heads, [N, B · H, d] in memory."""
    names = ("q", "k", "v")
    tokens_first = {name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1) for name in names}
    variants = _strides(*names)(case, inputs, params)
    return [*variants, Variant("tokens before heads", inputs | tokens_first, params, may_refuse=True)]


# AttnRes: a token.


def _tokens(inputs: Tensors, params: Params, make: Callable[[Tensor], Tensor]) -> Tensors:
    """delta, prefix and blocks through ``make``, a function of tensors whose first dimension is the tokens."""
    tokens = inputs["prefix"].shape[0]
    made = {name: make(inputs[name]) for name in ("prefix", "blocks")}
    if params["slots"]:
        made["delta"] = make(inputs["delta"][:, :tokens].transpose(0, 1)).transpose(0, 1).contiguous()
    else:
        made["delta"] = make(inputs["delta"])
    return inputs | made


def _token_parts(params: Params, mine: slice, base: slice) -> tuple[Part, ...]:
    names = ("output", "prefix", "blocks", *(f"aux{i}" for i in range(params["aux"])))
    parts = tuple(Part(name, (mine,), (base,)) for name in names)
    return (*parts, Part("delta", (slice(None), mine), (slice(None), base))) if params["slots"] else parts


def attn_res_tokens(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    tokens = inputs["prefix"].shape[0]
    variants = [
        Variant(
            f"token {t} alone",
            _tokens(inputs, params, lambda x, t=t: x[t : t + 1].contiguous()),  # type: ignore[misc]
            params,
            _token_parts(params, slice(0, 1), slice(t, t + 1)),
        )
        for t in _some(tokens)
    ]
    behind = _token_parts(params, slice(tokens, 2 * tokens), slice(0, tokens))
    others = _tokens(inputs, params, lambda x: torch.cat([x.flip(-1), x]))
    nan = _tokens(inputs, params, lambda x: torch.cat([_nan_like(x), x, _nan_like(x)]))
    return [*variants, Variant("behind others", others, params, behind), Variant("amid NaN", nan, params, behind)]


# Rows that are written to a paged cache: MLA query and cache insert.


def _row_parts(inputs: Tensors, row: int, mine: int) -> tuple[Part, ...]:
    """A row's output, and its place in the cache if it has one."""
    parts = [Part("output", (slice(mine, mine + 1),), (slice(row, row + 1),))]
    page_size, slot = inputs["cache"].shape[1], int(inputs["slots"][row])
    if 0 <= slot < inputs["cache"].shape[0] * page_size:
        place = (slot // page_size, slot % page_size)
        parts.append(Part("cache", place, place))
    return tuple(parts)


def _rows(*names: str) -> Property:
    """Rows of the tensors ``names``: alone, in reverse order, with all others NaN, behind one that is not inserted."""

    def rows(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
        rows_of = {name: inputs[name] for name in (*names, "slots")}
        count, variants = len(inputs["slots"]), []
        for row in _some(count):
            alone = inputs | {name: x[row : row + 1].contiguous() for name, x in rows_of.items()}
            nan = inputs | {name: _nan_like(x) if name != "slots" else x for name, x in rows_of.items()}
            for name in names:
                nan[name][row] = inputs[name][row]
            variants += [
                Variant(f"row {row} alone", alone, params, _row_parts(inputs, row, 0)),
                Variant(f"row {row} amid NaN", nan, params, _row_parts(inputs, row, row)),
            ]
        if count > 1:
            back = inputs | {name: x.flip(0) for name, x in rows_of.items()}
            order = torch.arange(count).flip(0)
            parts = (Part("output", mine=(order,)), Part("cache"))
            variants.append(Variant("reverse order", back, params, parts))
        if _takes(case, count + 1):
            more = {name: torch.cat([x[:1].flip(-1), x]) for name, x in rows_of.items() if name != "slots"}
            more["slots"] = torch.cat([torch.full_like(inputs["slots"][:1], -1), inputs["slots"]])
            parts = (Part("output", mine=(slice(1, None),)), Part("cache"))
            variants.append(Variant("behind another", inputs | more, params, parts))
        return variants

    return rows


def _takes(case: Case, rows: int) -> bool:
    """Whether every schedule of the case takes so many rows."""
    if case.kernel != "mla_query":
        return True
    heads = case.params["heads"]
    return rows <= mla_query.MAX_B and not ("small" in case.schedules and mla_query.small_refusal(heads, rows))


# KDA: a sequence of the batch, or packed.

_BY_TOKEN = ("q", "k", "v", "g", "beta")


def _sequences(inputs: Tensors) -> list[Tensors]:
    """The sequences, each as a batch of one."""
    names = [name for name in _BY_TOKEN if name in inputs]
    if "cu_seqlens" in inputs:
        at = inputs["cu_seqlens"].tolist()
        made = [{name: inputs[name][:, at[i] : at[i + 1]] for name in names} for i in range(len(at) - 1)]
    else:
        made = [{name: inputs[name][i : i + 1] for name in names} for i in range(inputs["q"].shape[0])]
    if "initial_state" in inputs:
        made = [x | {"initial_state": inputs["initial_state"][i : i + 1]} for i, x in enumerate(made)]
    return made


def _batch(inputs: Tensors, chosen: list[Tensors]) -> Tensors:
    """``chosen`` sequences, packed if the inputs are."""
    packed = "cu_seqlens" in inputs
    made = {n: torch.cat([x[n] for x in chosen], 1 if packed and n != "initial_state" else 0) for n in chosen[0]}
    if packed:
        ends = torch.tensor([0, *(x["q"].shape[1] for x in chosen)]).cumsum(0)
        made["cu_seqlens"] = ends.to(inputs["cu_seqlens"].dtype)
    return inputs | {name: x.contiguous() for name, x in made.items()}


def _sequence_parts(inputs: Tensors, chosen: list[Tensors], mine: int, base: int) -> tuple[Part, ...]:
    """Sequence ``mine`` of ``chosen`` as sequence ``base`` of the case."""

    def index(sequences: list[Tensors], i: int) -> Index:
        if "cu_seqlens" not in inputs:
            return (slice(i, i + 1),)
        start = sum(x["q"].shape[1] for x in sequences[:i])
        return (slice(None), slice(start, start + sequences[i]["q"].shape[1]))

    states = Part("final_state", (slice(mine, mine + 1),), (slice(base, base + 1),))
    return (Part("out", index(chosen, mine), index(_sequences(inputs), base)), states)


def kda_sequences(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    own = _sequences(inputs)
    last, variants = len(own) - 1, []

    def add(name: str, chosen: list[Tensors], mine: int, base: int) -> None:
        parts = _sequence_parts(inputs, chosen, mine, base)
        variants.append(Variant(name, _batch(inputs, chosen), params, parts))

    nan = [{name: _nan_like(x) for name, x in sequence.items()} for sequence in own]
    for i in _some(len(own)):
        add(f"sequence {i} alone", [own[i]], 0, i)
        add(f"sequence {i} amid NaN", [own[i] if j == i else nan[j] for j in range(len(own))], i, i)
        add(f"sequence {i} in reverse order", own[::-1], last - i, i)
    flipped = {name: x.flip(1) for name, x in own[0].items()}
    for i in sorted({0, last}):
        add(f"sequence {i} behind another", [flipped, *own], i + 1, i)
        add(f"sequence {i} before NaN", [*own, nan[0]], i, i)
    return variants


def kda_split(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """The longest sequence up to a multiple of a chunk, and the rest from the state that it left, in fp32."""
    own = _sequences(inputs)
    i = max(range(len(own)), key=lambda n: own[n]["q"].shape[1])
    tokens, state = own[i]["q"].shape[1], own[i].get("initial_state")
    at = next((chunk for chunk in (64, 16) if tokens > chunk), None)
    if at is None or (state is not None and state.dtype != torch.float32) or params["final_state"] == "bf16":
        return []
    cut = [{n: x[:, part] if n in _BY_TOKEN else x for n, x in own[i].items()} for part in (slice(at), slice(at, None))]
    packed = "cu_seqlens" in inputs
    batch, start = (slice(None), int(inputs["cu_seqlens"][i])) if packed else (slice(i, i + 1), 0)
    end = start + tokens
    fp32 = {**params, "final_state": "fp32"}
    return [
        Variant(
            f"first {at} tokens",
            _batch(inputs, [cut[0]]),
            fp32,
            (Part("out", base=(batch, slice(start, start + at))),),
        ),
        Variant(
            f"the rest after {at} tokens",
            lambda before: _batch(inputs, [cut[1] | {"initial_state": before["final_state"]}]),
            fp32,
            (Part("out", base=(batch, slice(start + at, end))), Part("final_state", base=(slice(i, i + 1),))),
        ),
    ]


_EVERY: tuple[Property, ...] = (twice, graph_replay)
PROPERTIES: dict[str, tuple[Property, ...]] = {
    "fmha": (*_EVERY, fmha_heads, fmha_packed, fmha_strides),
    "attn_res": (*_EVERY, attn_res_tokens, _strides("blocks")),
    "mla_query": (*_EVERY, _rows("qkv"), _strides("qkv")),
    "cache_insert": (*_EVERY, _rows("kv", "k_pe"), _strides("kv", "k_pe")),
    "kda": (*_EVERY, kda_sequences, kda_split, _strides("q", "k", "v", "g")),
}
