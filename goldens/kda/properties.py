"""What KDA owes bit for bit: a sequence in any batch, packed or not; any order of heads; no look ahead; parts."""

import torch

from goldens.case import Case, Index, Params, Part, Tensors, Variant
from goldens.invariance import nan_like, some, strides
from reference import kda as reference

_SCANS = tuple(schedule for schedule in reference.SCHEDULES if "_scan" in schedule)  # cut a sequence by its length
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


def sequences(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    own = _sequences(inputs)
    last, variants = len(own) - 1, []

    def add(name: str, chosen: list[Tensors], places: dict[int, int]) -> None:
        """``places``: which sequence of ``chosen`` is which of the case's."""
        parts = tuple(x for mine, base in places.items() for x in _sequence_parts(inputs, chosen, mine, base))
        variants.append(Variant(name, _batch(inputs, chosen), params, parts, batch=True))

    nan = [{name: nan_like(x) for name, x in sequence.items()} for sequence in own]
    for i in some(len(own)):
        add(f"sequence {i} alone", [own[i]], {0: i})
        add(f"sequence {i} amid NaN", [own[i] if j == i else nan[j] for j in range(len(own))], {i: i})
    if last:
        rotated = [*range(1, len(own)), 0]
        add("sequences rotated", [own[i] for i in rotated], dict(enumerate(rotated)))
    flipped = {name: x.flip(1) for name, x in own[0].items()}
    for i in sorted({0, last}):
        add(f"sequence {i} behind another", [flipped, *own], {i + 1: i})
        add(f"sequence {i} before NaN", [*own, nan[0]], {i: i})
    return variants


def packed(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """A batch of B × T as B packed sequences, and packed ones of equal lengths as a batch."""
    own = _sequences(inputs)
    tokens = own[0]["q"].shape[1]
    if any(x["q"].shape[1] != tokens for x in own) or not tokens:
        return []
    if "cu_seqlens" in inputs:
        other = {name: x for name, x in inputs.items() if name != "cu_seqlens"}
        name = "as a batch"
    else:
        other = inputs | {"cu_seqlens": torch.arange(len(own) + 1) * tokens}
        name = "packed"
    ranks = [(slice(n, n + 1),) for n in range(len(own))]
    rows = [(slice(None), slice(n * tokens, (n + 1) * tokens)) for n in range(len(own))]
    pairs = zip(ranks, rows, strict=True) if "cu_seqlens" in inputs else zip(rows, ranks, strict=True)
    parts = (*(Part("out", mine, base) for mine, base in pairs), Part("final_state"))
    return [Variant(name, _batch(other, own), params, parts, batch=True)]


def heads(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """The heads in another order, with their parameters and states."""
    count = inputs["q"].shape[2]
    if count == 1:
        return []
    order = torch.arange(count).roll(1)
    axes = {**dict.fromkeys(_BY_TOKEN, 2), "A_log": 0, "dt_bias": 0, "initial_state": 1}
    moved = {name: x.index_select(axes[name], order) if name in axes else x for name, x in inputs.items()}
    places = torch.arange(count).roll(-1)  # where each went
    parts = (Part("out", (slice(None), slice(None), places)), Part("final_state", (slice(None), places)))
    return [Variant("heads rotated", moved, params, parts)]


def causal(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """The second half of the longest sequence otherwise: its first half is as it was. NaN and inf may reach back."""
    own = _sequences(inputs)
    i = max(range(len(own)), key=lambda n: own[n]["q"].shape[1])
    tokens = own[i]["q"].shape[1]
    at = tokens // 2 + (tokens // 2 % reference.CHUNK == 0)  # within a chunk
    finite = all(bool(x.isfinite().all()) for n, x in inputs.items() if n in ("q", "k", "v", "initial_state"))
    if at >= tokens or not finite or bool(inputs["g"].isnan().any()):
        return []
    changed = dict(own[i])
    for name in _BY_TOKEN:
        later = own[i][name][:, at:]
        changed[name] = torch.cat([own[i][name][:, :at], -later if name == "beta" else later.roll(1, -1)], 1)
    batch, start = (slice(None), int(inputs["cu_seqlens"][i])) if "cu_seqlens" in inputs else (slice(i, i + 1), 0)
    first = (batch, slice(start, start + at))
    batched = _batch(inputs, [changed if n == i else x for n, x in enumerate(own)])
    return [Variant(f"other tokens from {at} on", batched, params, (Part("out", first, first),))]


def split(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
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
            not_owed_by=_SCANS,
        ),
        Variant(
            f"the rest after {at} tokens",
            lambda before: _batch(inputs, [cut[1] | {"initial_state": before["final_state"]}]),
            fp32,
            (Part("out", base=(batch, slice(start + at, end))), Part("final_state", base=(slice(i, i + 1),))),
            not_owed_by=_SCANS,
        ),
    ]


PROPERTIES = (sequences, packed, heads, causal, split, strides("q", "k", "v", "g"))
