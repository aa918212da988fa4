"""The schedules ``chunk16_scan…`` of ``reference.kda``, their bound, and where the kernels find their segments."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import goldens
from cute_impl.kda import SEGMENTS, scan
from goldens import inputs as draw
from goldens import kda as room
from goldens import store
from goldens.compare import against_exact
from goldens.judge import select
from reference import kda as reference
from reference.kda import exact, model
from reference.numerics import ulp
from reference.numerics.formats import to_bf16

D, SEGMENT = 128, 64
SCAN = "chunk16_scan64"
ROWS = ("q", "k", "v", "g", "beta")
LONG = [
    c for c in goldens.KERNELS["kda"].cases if c.committed and {"chunk16_scan416", "chunk16_scan512"} & set(c.schedules)
]
CASES = [c for c in goldens.KERNELS["kda"].cases if c.committed and SCAN in c.schedules]


def params(final: str | None = "fp32", lower_bound: float = -0.0625) -> dict[str, Any]:
    """A decay that leaves much of the state after 64 tokens, unless told otherwise."""
    return {"scale": room.SCALE, "lower_bound": lower_bound, "final_state": final}


def call(tokens: int, heads: int = 1, values: str = "normal", **more: Tensor) -> dict[str, Tensor]:
    return room.RECIPES[values].values(f"test_kda_scan/{values}", (1, tokens, heads)) | more


def states(count: int, heads: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    x = draw.normal("test_kda_scan/state", (count, heads, D, D))
    return to_bf16(x) if dtype == torch.bfloat16 else x


def packed(lengths: tuple[int, ...], heads: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return call(sum(lengths), heads, cu_seqlens=ends, initial_state=states(len(lengths), heads, dtype))


def alone(x: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Sequence n of a packed batch as a call of its own."""
    start, end = x["cu_seqlens"][n : n + 2].tolist()
    own = {name: x[name][:, start:end].contiguous() for name in ROWS} | {name: x[name] for name in ("A_log", "dt_bias")}
    return own | {"initial_state": x["initial_state"][n : n + 1]}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for name, x in want.items():
        assert against_exact(name, got[name], x).passed if x.numel() else got[name].shape == x.shape, name


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


# The model.


@pytest.mark.parametrize("case", [*CASES, *LONG], ids=lambda case: case.name)
def test_committed_goldens_are_those_of_the_model(case: goldens.Case) -> None:
    tensors, [schedule] = store.load(case, store.read_manifest()), case.schedules
    assert_same(exact(select(tensors, "in/"), case.params, schedule), select(tensors, f"exact/{schedule}/"))


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_committed_long_segments_have_not_the_bits_of_chunk16(case: goldens.Case) -> None:
    """Nor would they with other segments: little decays, and the last segment begins with S · M + C."""
    tensors, [schedule] = store.load(case, store.read_manifest()), case.schedules
    got = exact(select(tensors, "in/"), case.params, "chunk16")["final_state"]
    assert not torch.equal(got, tensors[f"exact/{schedule}/final_state"])


def test_some_committed_case_has_three_segments_and_an_empty_sequence() -> None:
    lengths = [[b - a for a, b in pairwise(reference.offsets(room.inputs(case)))] for case in CASES]
    assert any(max(own) > 2 * SEGMENT and 0 in own for own in lengths)


def by_hand(x: dict[str, Tensor], p: dict[str, Any]) -> dict[str, Tensor]:
    """One sequence by calls of chunk16, segment after segment."""
    tokens, heads = x["q"].shape[1:3]
    state = x["initial_state"].float()
    rest = {name: x[name] for name in ("A_log", "dt_bias")}
    unit = torch.eye(D).expand(1, heads, -1, -1).contiguous()
    outs = []
    for begin in range(0, tokens, SEGMENT):
        part = rest | {name: x[name][:, begin : begin + SEGMENT].contiguous() for name in ROWS}
        made = exact(part | {"initial_state": state}, p | {"final_state": "fp32"}, "chunk16")
        outs.append(made["out"])
        if begin + SEGMENT < tokens:
            fp32 = p | {"final_state": "fp32"}
            total = exact(part, fp32, "chunk16")["final_state"]
            without = part | {"v": torch.zeros_like(part["v"]), "initial_state": unit}
            m = exact(without, fp32, "chunk16")["final_state"]
            for k in range(D):
                total = reference.fma_rn(state[..., k : k + 1], m[..., k : k + 1, :], total)
            state = total
    return {"out": torch.cat(outs, 1), "final_state": made["final_state"]}


@pytest.mark.parametrize("tokens", [65, 128, 150])
def test_the_model_against_calls_of_chunk16(tokens: int) -> None:
    x = call(tokens, initial_state=states(1))
    assert_same(exact(x, params(), SCAN), by_hand(x, params()))


@pytest.mark.parametrize("tokens", [1, 63, 64])
@pytest.mark.parametrize("state", ["bf16", "fp32"])
def test_one_segment_has_the_bits_of_chunk16(tokens: int, state: str) -> None:
    x = call(tokens, initial_state=states(1, 1, reference.STATE_DTYPES[state]))
    assert_same(exact(x, params(state), SCAN), exact(x, params(state), "chunk16"))


def test_a_longer_sequence_has_not() -> None:
    x = call(90, initial_state=states(1))
    assert not torch.equal(exact(x, params(), SCAN)["final_state"], exact(x, params(), "chunk16")["final_state"])


@pytest.mark.parametrize("tokens", [65, 130, 200])
def test_the_model_against_the_oracle(tokens: int) -> None:
    x = call(tokens, initial_state=states(1))
    got, oracle = exact(x, params(), SCAN), model(x, params(), torch.float64)
    for name in ("out", "final_state"):
        assert relative(got[name], oracle[name]) < 5e-3


INPUTS = {
    "normal": lambda: (call(256), params(lower_bound=-5.0)),
    "slow": lambda: (call(256), params()),
    "no-decay": lambda: (call(256, initial_state=states(1)), params(lower_bound=0.0)),
    "repeated": lambda: (call(512, 1, "repeated"), params(lower_bound=-5.0)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_error_is_that_of_chunk16(name: str) -> None:
    x, p = INPUTS[name]()
    oracle = model(x, p, torch.float64)
    scan_, chunk16 = (exact(x, p, schedule) for schedule in (SCAN, "chunk16"))
    for output, want in oracle.items():
        assert relative(scan_[output], want) < 1.25 * relative(chunk16[output], want), output


@given(
    label=st.text("abcdef", min_size=1, max_size=8),
    values=st.sampled_from(["normal", "saturated", "faint", "zeros", "sizes"]),
    tokens=st.integers(60, 90),
    lower_bound=st.floats(-3.0, -0.5, width=32),
)
@settings(max_examples=4, deadline=None)
def test_drawn_calls_are_within_their_bound(label: str, values: str, tokens: int, lower_bound: float) -> None:
    x = room.RECIPES[values].values(f"test_kda_scan/{label}", (1, tokens, 1)) | {"initial_state": states(1)}
    p = params(lower_bound=lower_bound)
    got, oracle, allowed = exact(x, p, SCAN), model(x, p, torch.float64), room.bound(x, p, SCAN)
    for name, y in got.items():
        limit = allowed[name] + 0.5 * ulp.size(oracle[name].abs() + allowed[name], y.dtype)
        assert bool(((y.double() - oracle[name]).abs() <= limit).all()), name


def test_the_bound_of_one_segment_is_that_of_chunk16() -> None:
    x = call(64, initial_state=states(1))
    got, want = (room.bound(x, params(), schedule) for schedule in (SCAN, "chunk16"))
    assert all(torch.equal(got[name], want[name]) for name in want)


# What a sequence owes whatever the batch.

LENGTHS = (70, 0, 3, 129)


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x = packed(LENGTHS)
    return x, exact(x, params(), SCAN)


@pytest.mark.parametrize("n", range(len(LENGTHS)))
def test_a_sequence_has_the_same_bits_alone(n: int, whole: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    x, made = whole
    start, end = x["cu_seqlens"][n : n + 2].tolist()
    want = {"out": made["out"][:, start:end], "final_state": made["final_state"][n : n + 1]}
    assert_same(exact(alone(x, n), params(), SCAN), want)


def test_a_batch_is_its_sequences_packed() -> None:
    x = room.RECIPES["normal"].values("test_kda_scan/batch", (2, 70, 1)) | {"initial_state": states(2)}
    flat = {n: t.flatten(0, 1)[None] if n in ROWS else t for n, t in x.items()}
    got = exact(flat | {"cu_seqlens": torch.tensor([0, 70, 140], dtype=torch.int32)}, params(), SCAN)
    want = exact(x, params(), SCAN)
    assert_same(got | {"out": got["out"].view(want["out"].shape)}, want)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sequence_without_tokens_returns_its_state(dtype: str) -> None:
    x = packed((0, 70, 0), dtype=reference.STATE_DTYPES[dtype])
    got = exact(x, params(dtype), SCAN)["final_state"]
    assert torch.equal(got[::2], x["initial_state"][::2])
    assert not torch.equal(got[1], x["initial_state"][1])
    nothing = call(0, 2, cu_seqlens=torch.tensor([0, 0]), initial_state=states(1, 2))
    assert torch.equal(exact(nothing, params(), SCAN)["final_state"], nothing["initial_state"])


@pytest.mark.parametrize("name", ["k", "v", "initial_state"])
def test_what_is_no_number_stays_in_its_sequence(name: str, whole: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    x, clean = whole
    changed = x | {name: x[name].clone()}
    changed[name][(slice(0, 1) if name == "initial_state" else (slice(None), slice(5, 6)))] = torch.nan
    got = exact(changed, params(), SCAN)
    assert bool(got["final_state"][0].isnan().all())
    assert bool(got["out"][:, SEGMENT : LENGTHS[0]].isnan().all())
    assert torch.equal(got["out"][:, LENGTHS[0] :], clean["out"][:, LENGTHS[0] :])
    assert torch.equal(got["final_state"][1:], clean["final_state"][1:])


# Faults.

Operators = tuple[Tensor, Tensor]
FAULTS: dict[str, Callable[[Tensor, Tensor], Operators]] = {
    "history-dropped": lambda c, m: (c, m * 0.0),
    "segment-forgotten": lambda c, m: (c * 0.0, m),
    "operators-transposed": lambda c, m: (c, m.transpose(-1, -2)),
    "matrix-in-bf16": lambda c, m: (c, to_bf16(m).float()),
    "offset-in-bf16": lambda c, m: (to_bf16(c).float(), m),
    "matrix-of-head-0": lambda c, m: (c, m[:, :1].expand_as(m)),
    "operators-of-the-first-sequence": lambda c, m: (c[:1].expand_as(c), m[:1].expand_as(m)),
    "operators-of-the-next-segment": lambda c, m: (c.roll(-1, 0), m.roll(-1, 0)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_fails_a_committed_case(monkeypatch: pytest.MonkeyPatch, fault: Callable) -> None:
    operators, manifest = reference._operators, store.read_manifest()
    monkeypatch.setattr(reference, "_operators", lambda *a: fault(*operators(*a)))
    [case] = [case for case in CASES if case.params["final_state"]]
    golden = store.load(case, manifest)
    got = exact(select(golden, "in/"), case.params, SCAN)
    want = select(golden, f"exact/{SCAN}/")
    assert not all(against_exact(name, got[name], x).passed for name, x in want.items())


# Where the kernels find their segments.


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    segment=st.sampled_from([16, *reference.SEGMENTS]),
)
def test_every_segment_has_a_place_and_a_slot_of_its_own(lengths: list[int], segment: int) -> None:
    tokens, begin = sum(lengths), 0
    used: dict[int, list[int]] = {0: [], 1: []}
    for n, length in enumerate(lengths):
        last = max(length - 1, 0) // segment
        for apart, count in ((0, last), (1, last + 1)):
            first = scan.first_place(begin, n, segment, apart)
            used[apart] += range(first, first + count)
        begin += length
    for apart, limit in ((0, scan.slots(tokens, segment)), (1, scan.places(tokens, len(lengths), segment))):
        assert used[apart] == sorted(set(used[apart]))
        assert all(place < limit for place in used[apart])
    firsts = [scan.first_place(sum(lengths[:n]), n, segment, 0) for n in range(len(lengths))]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(("tokens", "want"), [(0, (0, 1)), (1, (0, 1)), (512, (0, 1)), (513, (2, 2)), (2048, (6, 4))])
def test_one_sequence_has_no_surplus(tokens: int, want: tuple[int, int]) -> None:
    assert scan.grids(tokens, 1, 512) == want


def test_segments_of_416_fill_a_gpu() -> None:
    """2048 tokens of 12 heads, on 132 multiprocessors: a CTA for each operator, two for each output."""
    operators, outputs = scan.grids(2048, 1, 416)
    assert (operators, outputs) == (8, 5)
    assert 12 * operators <= 12 * outputs * 2 <= 132


def test_the_kernels_segments_are_the_models() -> None:
    assert tuple(SEGMENTS) == tuple(reference.SCHEDULES)
    assert tuple(SEGMENTS.values()) == (0, *reference.SEGMENTS)
    assert all(segment % reference.CHUNK == 0 for segment in reference.SEGMENTS)
