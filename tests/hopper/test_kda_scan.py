"""KDA's schedules ``chunk16_scan…`` on the GPU: goldens, the exact model on fresh inputs, invariance, launching.

Fresh inputs, 6 recipes: a packed batch of 40 sequences and 8 heads by segments of 64 tokens under two bounds, and two
sequences of 4 heads by segments of 416 and of 512: 16 million outputs a recipe, 94 million in all beside the last
states, each on four cluster sizes.
"""

import pytest
import torch

import goldens
from cute_impl import kda as module
from cute_impl.kda.chunk16 import CLUSTERS
from cute_impl.probes_launch import write_late
from goldens import store
from goldens.judge import judge, select
from reference import kda as reference
from tests.hopper.test_kda import (
    BAD_OFFSETS,
    POISON,
    SCALE,
    STATES,
    D,
    alone,
    assert_bits,
    first_states,
    launch,
    normal,
    of_sequence,
    offsets_of,
    same,
    spread,
)
from tools import candidates

pytestmark = pytest.mark.hopper

KERNEL = goldens.KERNELS["kda"]
SCANS = [schedule for schedule, segment in module.SEGMENTS.items() if segment]
SCAN, *LONG = SCANS
GOLDENS = [(case, schedule) for case in KERNEL.cases for schedule in case.schedules if schedule in SCANS]
COMMITTED = [pair for pair in GOLDENS if pair[0].committed]
ON_DEMAND = [pair for pair in GOLDENS if not pair[0].committed]
FRESH = ("normal", "repeated", "collinear", "bound-beside-none", "wide", "nan")
LENGTHS = [37 * i % 301 for i in range(40)]  # 0 … 300, one of them 0
LASTING = -0.0625  # a bound of which much of the state is left after 64 tokens


def ident(value):
    return value.id if hasattr(value, "id") else None


def lasting(gpu, lengths, heads=2, **more):
    x, params = normal(gpu, lengths, heads, **more)
    return x, params | {"lower_bound": LASTING}


@pytest.mark.parametrize(("case", "schedule"), COMMITTED, ids=ident)
def test_committed_goldens(case, schedule):
    golden = store.load(case, store.read_manifest())
    outputs = candidates.ours("kda", schedule)(select(golden, "in/"), case.params)
    verdicts = judge(KERNEL, case, golden, outputs, schedule)
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize(("case", "schedule"), ON_DEMAND, ids=ident)
def test_large_goldens_by_digest(case, schedule, gpu):
    digests = select(store.read_manifest()[case.id]["sha256"], f"exact/{schedule}/")
    inputs = {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}
    assert digests
    for made in (module.run(inputs, case.params, schedule), reference.exact(inputs, case.params, schedule)):
        assert {name: store.digest(made[name]) for name in digests} == digests


@pytest.mark.parametrize("values", FRESH)
def test_fresh_packed(values, gpu):
    x = spread(values, f"scan/{values}", 1, sum(LENGTHS), 8, gpu)
    x["cu_seqlens"] = offsets_of(LENGTHS, gpu)
    x["initial_state"] = first_states(values, f"scan/{values}", len(LENGTHS), 8, torch.float32, gpu)
    for lower_bound in (-5.0, LASTING):
        params = {"scale": SCALE, "lower_bound": lower_bound, "final_state": "fp32"}
        want = reference.exact(x, params, SCAN)
        for cluster in CLUSTERS:
            assert_bits(launch(x, params, cluster=cluster, schedule=SCAN), want)


@pytest.mark.parametrize("schedule", LONG)
@pytest.mark.parametrize("values", FRESH)
def test_fresh_batch_of_long_sequences(values, schedule, gpu):
    x = spread(values, f"long/{values}", 2, 1700, 4, gpu)
    x["initial_state"] = first_states(values, f"long/{values}", 2, 4, torch.bfloat16, gpu)
    params = {"scale": -0.3, "lower_bound": -0.0078125, "final_state": "bf16"}
    want = reference.exact(x, params, schedule)
    for cluster in CLUSTERS:
        assert_bits(launch(x, params, cluster=cluster, schedule=schedule), want)


@pytest.mark.parametrize("tokens", [1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 129, 192, 193, 320])
def test_every_length(tokens, gpu):
    """With every kind of state, and without; up to 64 tokens the bits are chunk16's."""
    for state in (None, *STATES):
        x, params = lasting(gpu, (tokens,), 3, state=state)
        want = reference.exact(x, params, SCAN)
        assert_bits(launch(x, params, schedule=SCAN), want)
        packed = {name: y for name, y in x.items() if name != "cu_seqlens"}
        assert same(launch(packed, params, schedule=SCAN), launch(x, params, schedule=SCAN))
        if tokens <= 64:
            assert same(launch(x, params, schedule=SCAN), launch(x, params))


def test_nothing_but_empty_sequences(gpu):
    x, params = lasting(gpu, (0, 0, 0))
    for schedule in SCANS:
        assert torch.equal(launch(x, params, schedule=schedule)["final_state"], x["initial_state"])


@pytest.mark.parametrize("heads", [1, 5, 33, 96])
def test_numbers_of_heads(heads, gpu):
    x, params = lasting(gpu, (140, 17), heads)
    want = reference.exact(x, params, SCAN)
    for cluster in (None, *CLUSTERS):
        assert_bits(launch(x, params, cluster=cluster, schedule=SCAN), want)


def test_many_sequences(gpu):
    """More than a binary search of a few steps; many of them empty or of one segment."""
    lengths = [97 * n % 67 if n % 3 else 0 for n in range(700)]
    x, params = lasting(gpu, (sum(lengths),), 1)
    x["initial_state"] = x["initial_state"].expand(len(lengths), -1, -1, -1).contiguous()
    x["cu_seqlens"] = offsets_of(lengths, gpu, torch.int32)
    assert_bits(launch(x, params, schedule=SCAN), reference.exact(x, params, SCAN))


# What must not matter.


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_sequence_alone_and_in_a_batch(cluster, gpu):
    x, params = lasting(gpu, LENGTHS)
    whole = launch(x, params, cluster=cluster, schedule=SCAN)
    for n, length in enumerate(LENGTHS):
        if length:
            assert same(launch(alone(x, n, LENGTHS), params, schedule=SCAN), of_sequence(whole, n, LENGTHS))


def test_every_position_of_a_batch(gpu):
    lengths = [150] * 7
    x, params = lasting(gpu, lengths)
    first = of_sequence(launch(x, params, schedule=SCAN), 0, lengths)
    for n in range(1, 7):
        moved = {name: x[name].roll(150 * n, 1) if name in reference._BY_TOKEN else x[name] for name in x}
        moved["initial_state"] = x["initial_state"].roll(n, 0)
        assert same(of_sequence(launch(moved, params, schedule=SCAN), n, lengths), first)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nan_stays_in_its_sequence(cluster, gpu):
    lengths = [120, 133, 1, 64, 200]
    x, params = lasting(gpu, lengths)
    whole = launch(x, params, cluster=cluster, schedule=SCAN)
    for n in range(len(lengths)):
        start, stop = sum(lengths[:n]), sum(lengths[: n + 1])
        among = dict(x)
        for name in reference._BY_TOKEN:
            among[name] = torch.full_like(x[name], torch.nan)
            among[name][:, start:stop] = x[name][:, start:stop]
        among["initial_state"] = torch.full_like(x["initial_state"], torch.nan)
        among["initial_state"][n] = x["initial_state"][n]
        got = launch(among, params, cluster=cluster, schedule=SCAN)
        assert same(of_sequence(got, n, lengths), of_sequence(whole, n, lengths))
        others = [m for m in range(len(lengths)) if m != n]
        assert bool(got["final_state"][others].isnan().all())


def test_what_the_workspace_held(gpu):
    """Poison, NaN, another call's operators: none of it is read; nothing beyond the stated size is written."""
    lengths = (300, 0, 65, 64)
    x, params = lasting(gpu, lengths)
    want = launch(x, params, schedule=SCAN)
    size = module.get_workspace_size(sum(lengths), 2, len(lengths), SCAN)
    for fill in (POISON, 0xFF, 0x7F):
        memory = torch.full((size + 4096,), fill, dtype=torch.uint8, device=gpu)
        assert same(launch(x, params, schedule=SCAN, workspace=memory[:size]), want)
        assert bool((memory[size:] == fill).all())
        assert same(launch(x, params, schedule=SCAN, workspace=memory), want)


@pytest.mark.parametrize("state", STATES)
def test_the_state_in_place(state, gpu):
    x, params = lasting(gpu, (33, 0, 200, 64), state=state)
    want = launch(x, params, schedule=SCAN)
    out, both = torch.empty_like(x["v"]), x["initial_state"].clone()
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    module.fwd(**(x | {"initial_state": both}), out=out, final_state=both, schedule=SCAN, **numbers)
    assert same({"out": out, "final_state": both}, want)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("values", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
def test_bad_offsets_stay_in_memory(values, cluster, gpu):
    """Inputs, workspace and outputs amid poison; what is read of tokens is theirs, not the NaN beyond."""
    x, params = lasting(gpu, (150,))
    for name in reference._BY_TOKEN:
        memory = torch.full((3, *x[name].shape[1:]), torch.nan, dtype=torch.bfloat16, device=gpu)
        memory[1] = x[name][0]
        x[name] = memory[1:2]
    x["cu_seqlens"] = torch.tensor(values, device=gpu)
    x["initial_state"] = x["initial_state"].expand(len(values) - 1, -1, -1, -1).contiguous()
    size = module.get_workspace_size(150, 2, len(values) - 1, SCAN)
    workspace = torch.zeros(size + 4096, dtype=torch.uint8, device=gpu)
    workspace[size:] = POISON
    got = launch(x, params, cluster=cluster, schedule=SCAN, workspace=workspace[:size])
    assert bool((workspace[size:] == POISON).all())
    assert bool(got["final_state"].isfinite().all())
    with pytest.raises(ValueError, match="cu_seqlens"):
        launch(x, params, check=True, schedule=SCAN)


# Launching.


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_two_hundred_launches(cluster, gpu):
    x, params = lasting(gpu, (300, 31, 0, 165), 6)
    first = launch(x, params, cluster=cluster, schedule=SCAN)
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    out, final = torch.empty_like(first["out"]), torch.empty_like(first["final_state"])
    wrong = torch.zeros((), dtype=torch.int64, device=gpu)
    for _ in range(200):
        out.fill_(torch.nan)
        module.fwd(**x, out=out, final_state=final, cluster=cluster, schedule=SCAN, **numbers)
        wrong += (out != first["out"]).sum() + (final != first["final_state"]).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("cluster", [None, *CLUSTERS])
def test_graph_replay_with_changed_inputs_and_offsets(cluster, gpu):
    x, params = lasting(gpu, (130, 140, 150))
    out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    numbers = {name: params[name] for name in ("scale", "lower_bound")}

    def call():
        module.fwd(**x, out=out, final_state=final, cluster=cluster, schedule=SCAN, **numbers)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    for i in range(8):
        fresh, _ = normal(gpu, (20 * i, 420 - 60 * i, 40 * i), seed=20 + i)
        for name in x:
            x[name].copy_(fresh[name])
        out.fill_(torch.nan)
        graph.replay()
        assert_bits({"out": out, "final_state": final}, reference.exact(fresh, params, SCAN))


def test_other_stream(gpu):
    x, params = lasting(gpu, (200, 70))
    want = launch(x, params, schedule=SCAN)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = launch(x, params, schedule=SCAN)
    stream.synchronize()
    assert same(got, want)


def test_no_synchronisation_without_check(gpu):
    x, params = lasting(gpu, (200, 70))
    out = torch.empty_like(x["v"])
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    module.fwd(**x, out=out, schedule=SCAN, **numbers)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.fwd(**x, out=out, schedule=SCAN, **numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_custom_operator(gpu):
    x, params = lasting(gpu, (200, 70))
    tensors = [x[name] for name in (*module.INPUTS, *module.OPTIONAL)]
    out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    size = module.get_workspace_size(270, 2, 2, SCAN)
    workspace = torch.empty(size, dtype=torch.uint8, device=gpu)
    numbers = (params["scale"], params["lower_bound"], 2, 64)
    torch.library.opcheck(torch.ops.goldens.kda, (*tensors, out, final, None, *numbers))
    torch.library.opcheck(torch.ops.goldens.kda, (*tensors, out, final, workspace, *numbers))


def test_a_state_that_is_the_identity(gpu):
    """No update and no decay: M is the identity, and the state goes through three segments as it is."""
    x, params = lasting(gpu, (190,))
    x["g"], x["beta"] = torch.full_like(x["g"], -torch.inf), torch.full_like(x["beta"], -200.0)
    x["initial_state"] = torch.eye(D, device=gpu).mul(3.0).expand(1, 2, -1, -1).contiguous()
    assert torch.equal(launch(x, params, schedule=SCAN)["final_state"], x["initial_state"])


@pytest.mark.parametrize("schedule", [SCAN, "chunk16"])
@pytest.mark.parametrize("name", [*module.INPUTS, "initial_state", "cu_seqlens"])
def test_any_argument_may_come_from_the_launch_before(name, schedule, gpu):
    """Behind a writer of it that lets the kernel start at once."""
    (x, params), (fresh, _) = lasting(gpu, (140, 70)), lasting(gpu, (70, 140), seed=2)
    want, stale = (reference.exact(x | {name: y[name]}, params, schedule) for y in (fresh, x))
    assert not same(want, stale)
    options = {key: params[key] for key in ("scale", "lower_bound")} | {"schedule": schedule}
    given = {key: t.clone() for key, t in x.items()}
    made = {key: torch.empty_like(y) for key, y in want.items()}
    # Nothing else may stand between the two launches, so compile and load before.
    module.fwd(**given, **made, **options)
    write_late(given[name], given[name])
    torch.cuda.synchronize()
    write_late(given[name], fresh[name])
    module.fwd(**given, **made, **options)
    assert_bits(made, want)
