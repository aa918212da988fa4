"""KDA's kernel on the GPU: goldens, the exact model on fresh inputs, invariance, isolation, launching.

Fresh inputs, 14 recipes: a packed batch of 60 sequences and 8 heads, 4.0 million outputs, and two batches of 0.9
million, 80 million in all beside the last states, each on four cluster sizes.
"""

import pytest
import torch

import goldens
from cute_impl import kda as module
from cute_impl.kda import fla
from cute_impl.kda.chunk16 import CLUSTERS, ORDERED
from goldens import store
from goldens.compare import against_exact
from goldens.judge import judge, select
from goldens.kda import RECIPES
from reference import kda as reference
from tools import candidates

pytestmark = pytest.mark.hopper

KERNEL = goldens.KERNELS["kda"]
OWN = [case for case in KERNEL.cases if "chunk16" in case.schedules]
COMMITTED = [case for case in OWN if case.committed]
ON_DEMAND = [case for case in OWN if not case.committed]
D, SCALE = 128, 128**-0.5
HEADS = 8
LENGTHS = [37 * i % 131 for i in range(60)]  # 0 … 130, one of them 0
TOKENS = sum(LENGTHS)
GUARD_BYTES, POISON = 4096, 0x5A
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def ident(value):
    return value.id if hasattr(value, "id") else None


def offsets_of(lengths, gpu, dtype=torch.int64):
    return torch.tensor([0, *lengths], device=gpu).cumsum(0).to(dtype)


def spread(values, label, batch, tokens, heads, gpu):
    """A recipe's tensors [batch, tokens, heads, …], drawn for one head; the others have it with tokens and channels
    rotated, the tensors by different numbers, so that no two heads meet the same chunks."""
    one = RECIPES[values].values(label, (batch, tokens, 1))
    made = RECIPES[values].values(label, (1, 1, heads))
    x = {name: made[name].to(gpu) for name in ("A_log", "dt_bias")}
    for shift, name in enumerate(("q", "k", "v", "g", "beta")):
        source = one[name].to(gpu)
        heads_of = [source.roll(h * (13 + 2 * shift), 1) for h in range(heads)]
        if name != "beta":
            heads_of = [y.roll(h * 34, -1) for h, y in enumerate(heads_of)]
        x[name] = torch.cat(heads_of, 2).contiguous()
    return x


def first_states(values, label, sequences, heads, dtype, gpu):
    state = RECIPES[values].state(label, (1, heads, D, D)).to(gpu)
    return torch.cat([state.roll(n, -1) for n in range(sequences)]).to(dtype)


def normal(gpu, lengths=(33, 0, 100, 1, 16), heads=2, seed=1, state="fp32", values="normal"):
    """A packed batch and its parameters."""
    x = spread(values, f"test/{seed}", 1, sum(lengths), heads, gpu)
    x["cu_seqlens"] = offsets_of(lengths, gpu)
    if state:
        x["initial_state"] = first_states(values, f"test/{seed}", len(lengths), heads, STATES[state], gpu)
    return x, {"scale": SCALE, "lower_bound": -5.0, "final_state": state or "fp32"}


def guarded(shape, dtype, device):
    """Memory of that shape amid poison, and all of its bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.full((count + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
    return memory[GUARD_BYTES : GUARD_BYTES + count].view(dtype).view(shape), memory


def assert_guards(memory):
    assert bool((memory[:GUARD_BYTES] == POISON).all())
    assert bool((memory[-GUARD_BYTES:] == POISON).all())


def launch(x, params, **options):
    """out and final_state, with poison around both that must survive; everywhere within they are written."""
    q = x["q"]
    sequences = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else q.shape[0]
    out, out_memory = guarded(q.shape, torch.bfloat16, q.device)
    made, memories = {"out": out}, [out_memory]
    if params["final_state"]:
        shape = (sequences, q.shape[2], D, D)
        made["final_state"], memory = guarded(shape, STATES[params["final_state"]], q.device)
        memories.append(memory)
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    module.fwd(**x, **made, **numbers, **options)
    for memory in memories:
        assert_guards(memory)
    return made


def assert_bits(got, want):
    assert got.keys() == want.keys()
    for name in want:
        verdict = against_exact(name, got[name], want[name])
        assert verdict.passed, (name, verdict.reason, verdict.worst)


def same(a, b):
    """Byte for byte."""
    return all(torch.equal(a[n].flatten().view(torch.uint8), b[n].flatten().view(torch.uint8)) for n in a | b)


# Goldens and fresh inputs.


@pytest.mark.parametrize("case", COMMITTED, ids=ident)
def test_committed_goldens(case):
    golden = store.load(case, store.read_manifest())
    candidate = candidates.ours("kda", "chunk16")
    verdicts = judge(KERNEL, case, golden, candidate(select(golden, "in/"), case.params), "chunk16")
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize("case", ON_DEMAND, ids=ident)
def test_large_goldens_by_digest(case, gpu):
    """The CPU wrote the digests; the kernel must meet them, and the model on CUDA tensors too where it is quick."""
    digests = select(store.read_manifest()[case.id]["sha256"], "exact/chunk16/")
    inputs = {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}
    got = module.run(inputs, case.params, "chunk16")
    assert {name: store.digest(got[name]) for name in digests} == digests
    if case.dims["tokens"] <= 1024:
        want = reference.exact(inputs, case.params, "chunk16")
        assert {name: store.digest(want[name]) for name in digests} == digests


@pytest.mark.parametrize("values", RECIPES)
def test_fresh_packed(values, gpu):
    x = spread(values, f"fresh/{values}", 1, TOKENS, HEADS, gpu)
    x["cu_seqlens"] = offsets_of(LENGTHS, gpu)
    x["initial_state"] = first_states(values, f"fresh/{values}", len(LENGTHS), HEADS, torch.float32, gpu)
    params = {"scale": SCALE, "lower_bound": -5.0, "final_state": "fp32"}
    want = reference.exact(x, params, "chunk16")
    for cluster in CLUSTERS:
        assert_bits(launch(x, params, cluster=cluster), want)


@pytest.mark.parametrize("values", RECIPES)
def test_fresh_batch(values, gpu):
    """Equal lengths, bf16 states, other bounds and scales."""
    x = spread(values, f"batch/{values}", 6, 87, 13, gpu)
    x["initial_state"] = first_states(values, f"batch/{values}", 6, 13, torch.bfloat16, gpu)
    for lower_bound, scale in ((-0.7, 1.0), (5.0, -0.3)):
        params = {"scale": scale, "lower_bound": lower_bound, "final_state": "bf16"}
        want = reference.exact(x, params, "chunk16")
        for cluster in CLUSTERS:
            assert_bits(launch(x, params, cluster=cluster), want)


@pytest.mark.parametrize("tokens", [*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_every_length(tokens, gpu):
    """Fewer chunks than CTAs, than stages, than teams; no state in, a state out or none."""
    x = spread("normal", "length", 1, max(tokens, 1), 3, gpu)
    x = {name: y[:, :tokens].contiguous() if name not in ("A_log", "dt_bias") else y for name, y in x.items()}
    if tokens == 0:
        x["cu_seqlens"] = torch.zeros(3, dtype=torch.int32, device=gpu)
    for final in ("fp32", "bf16", None):
        params = {"scale": SCALE, "lower_bound": -5.0, "final_state": final}
        want = reference.exact(x, params, "chunk16")
        for cluster in CLUSTERS:
            got = launch(x, params, cluster=cluster)
            # A comparison of nothing is refused.
            names = [name for name in want if want[name].numel()]
            assert_bits({name: got[name] for name in names}, {name: want[name] for name in names})


@pytest.mark.parametrize("heads", [1, 5, 96])
def test_numbers_of_heads(heads, gpu):
    x, params = normal(gpu, (40, 17), heads)
    want = reference.exact(x, params, "chunk16")
    for cluster in (None, *CLUSTERS):
        assert_bits(launch(x, params, cluster=cluster), want)


# What must not matter.


def alone(x, n, lengths):
    """Sequence n by itself, as a batch of one without offsets."""
    start = sum(lengths[:n])
    part = {name: x[name][:, start : start + lengths[n]].contiguous() for name in ("q", "k", "v", "g", "beta")}
    part |= {name: x[name] for name in ("A_log", "dt_bias")}
    return part | {"initial_state": x["initial_state"][n : n + 1].contiguous()}


def of_sequence(made, n, lengths):
    start = sum(lengths[:n])
    return {"out": made["out"][:, start : start + lengths[n]], "final_state": made["final_state"][n : n + 1]}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_sequence_alone_and_in_a_batch(cluster, gpu):
    x, params = normal(gpu, LENGTHS)
    whole = launch(x, params, cluster=cluster)
    for n, length in enumerate(LENGTHS):
        if length:
            assert same(launch(alone(x, n, LENGTHS), params), of_sequence(whole, n, LENGTHS))


def test_every_position_of_a_batch(gpu):
    lengths = [50] * 9
    x, params = normal(gpu, lengths)
    first = of_sequence(launch(x, params), 0, lengths)
    for n in range(1, 9):
        moved = dict(x)
        for name in ("q", "k", "v", "g", "beta"):
            moved[name] = x[name].roll(50 * n, 1)
        moved["initial_state"] = x["initial_state"].roll(n, 0)
        assert same(of_sequence(launch(moved, params), n, lengths), first)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nan_stays_in_its_sequence(cluster, gpu):
    lengths = [20, 33, 1, 48]
    x, params = normal(gpu, lengths)
    whole = launch(x, params, cluster=cluster)
    for n in range(4):
        among = dict(x)
        start, stop = sum(lengths[:n]), sum(lengths[: n + 1])
        for name in ("q", "k", "v", "g", "beta"):
            among[name] = torch.full_like(x[name], torch.nan)
            among[name][:, start:stop] = x[name][:, start:stop]
        among["initial_state"] = torch.full_like(x["initial_state"], torch.nan)
        among["initial_state"][n] = x["initial_state"][n]
        got = launch(among, params, cluster=cluster)
        assert same(of_sequence(got, n, lengths), of_sequence(whole, n, lengths))
        others = [m for m in range(4) if m != n]
        assert bool(got["final_state"][others].isnan().all())


def test_nan_stays_in_its_head(gpu):
    x, params = normal(gpu, (70,), 4)
    whole = launch(x, params)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, :, 2] = torch.nan
    got = launch(x, params)
    heads = [0, 1, 3]
    assert torch.equal(got["out"][:, :, heads], whole["out"][:, :, heads])
    assert torch.equal(got["final_state"][:, heads], whole["final_state"][:, heads])


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_split_at_sixteen_tokens_changes_nothing(cluster, gpu):
    x, params = normal(gpu, (100,), 3)
    whole = launch(x, params, cluster=cluster)
    for split in (16, 48, 96):
        names = ("q", "k", "v", "g", "beta")
        rest = {name: y for name, y in x.items() if name not in (*names, "cu_seqlens")}
        head = launch(rest | {n: x[n][:, :split].contiguous() for n in names}, params, cluster=cluster)
        rest["initial_state"] = head["final_state"]
        tail = launch(rest | {n: x[n][:, split:].contiguous() for n in names}, params, cluster=cluster)
        joined = {"out": torch.cat([head["out"], tail["out"]], 1), "final_state": tail["final_state"]}
        assert same(joined, whole)


@pytest.mark.parametrize("sequences", [2, ORDERED, ORDERED + 1, 2 * ORDERED])
def test_the_order_of_work_changes_nothing(sequences, gpu):
    """Longest first up to ``ORDERED`` sequences: rising, falling, all alike, many of them empty."""
    for length in (lambda n: n % 40, lambda n: (sequences - n) % 40, lambda n: 17, lambda n: 33 * (n % 5 == 1)):
        lengths = [length(n) for n in range(sequences)]
        x, params = normal(gpu, (sum(lengths),), 1)
        x["initial_state"] = x["initial_state"].expand(sequences, -1, -1, -1).contiguous()
        x["cu_seqlens"] = offsets_of(lengths, gpu)
        want = reference.exact(x, params, "chunk16")
        for cluster in CLUSTERS:
            assert_bits(launch(x, params, cluster=cluster), want)


def test_offsets_of_32_bits(gpu):
    x, params = normal(gpu)
    narrow = x | {"cu_seqlens": x["cu_seqlens"].to(torch.int32)}
    assert same(launch(narrow, params), launch(x, params))


@pytest.mark.parametrize("state", STATES)
def test_the_state_in_place(state, gpu):
    x, params = normal(gpu, state=state)
    want = launch(x, params)
    out, both = torch.empty_like(x["v"]), x["initial_state"].clone()
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    module.fwd(**(x | {"initial_state": both}), out=out, final_state=both, **numbers)
    assert same({"out": out, "final_state": both}, want)


def test_the_workspace_is_not_touched(gpu):
    x, params = normal(gpu)
    workspace = torch.full((64,), POISON, dtype=torch.uint8, device=gpu)
    assert same(launch(x, params, workspace=workspace), launch(x, params))
    assert bool((workspace == POISON).all())


BAD_OFFSETS = {
    "beyond": [0, 5000, 90000],
    "negative": [-40, 20, 150],
    "falling": [0, 120, 30, 150],
    "huge": [-(1 << 62), 1 << 62, 3],
    "late": [70, 90, 100],
}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("values", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
def test_bad_offsets_stay_in_memory(values, cluster, gpu):
    """Inputs end where their memory ends but for NaN beyond; what is written is finite, and all within."""
    x, params = normal(gpu, (150,))
    for name in ("q", "k", "v", "g", "beta"):
        memory = torch.full((3, *x[name].shape[1:]), torch.nan, dtype=torch.bfloat16, device=gpu)
        memory[1] = x[name][0]
        x[name] = memory[1:2]
    x["cu_seqlens"] = torch.tensor(values, device=gpu)
    x["initial_state"] = x["initial_state"].expand(len(values) - 1, -1, -1, -1).contiguous()
    got = launch(x, params, cluster=cluster)
    assert bool(got["final_state"].isfinite().all())
    with pytest.raises(ValueError, match="cu_seqlens"):
        launch(x, params, check=True)


# Values by hand.


def plain(tokens, gpu, **changed):
    """One head, no decay (gate closed), nothing learnt (b = 0), q = 1024 · e_3."""
    zeros = torch.zeros(1, tokens, 1, D, dtype=torch.bfloat16, device=gpu)
    q = zeros.clone()
    q[..., 3] = 1024.0
    x = {"q": q, "k": zeros, "v": zeros, "g": torch.full_like(zeros, -torch.inf)}
    x["beta"] = torch.full((1, tokens, 1), -200.0, dtype=torch.bfloat16, device=gpu)
    x["A_log"], x["dt_bias"] = torch.zeros(1, device=gpu), torch.zeros(1, D, device=gpu)
    x["initial_state"] = torch.zeros(1, 1, D, D, device=gpu)
    return x | changed, {"scale": 0.25, "lower_bound": -5.0, "final_state": "fp32"}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_one_element_of_the_state(cluster, gpu):
    x, params = plain(1, gpu)
    x["initial_state"][0, 0, 7, 3] = 1.0
    got = launch(x, params, cluster=cluster)
    want = torch.zeros(D, device=gpu)
    want[7] = 0.25
    assert torch.equal(got["out"][0, 0, 0].float(), want)
    assert torch.equal(got["final_state"], x["initial_state"])


def test_the_state_is_rounded_as_an_operand_only(gpu):
    """S k̂ of 4098 is 4096 in bf16, so the update adds nothing where the recurrence takes 1 away."""
    x, params = plain(1, gpu)
    x["k"] = x["q"].roll(-3, -1)
    x["v"] = x["v"].clone()
    x["v"][..., 0], x["beta"][:] = 4096.0, 0.0
    x["initial_state"][0, 0, 0, 0] = 4098.0
    assert float(launch(x, params)["final_state"][0, 0, 0, 0]) == 4098.0


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 63, 64, 65])
def test_the_decay_of_a_last_chunk_that_is_short(tokens, gpu):
    x, params = plain(tokens, gpu)
    x["g"], params["lower_bound"] = torch.full_like(x["g"], torch.inf), -1.0
    x["initial_state"] += 1.0
    got = launch(x, params)["final_state"].double()
    want = torch.exp(torch.tensor(-float(tokens), dtype=torch.float64, device=gpu))
    assert bool(((got / want - 1).abs() < 1e-5).all())


# Launching.


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_thousand_launches(cluster, gpu):
    x, params = normal(gpu, (200, 31, 0, 5), 6)
    first = launch(x, params, cluster=cluster)
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    out, final = torch.empty_like(first["out"]), torch.empty_like(first["final_state"])
    wrong = torch.zeros((), dtype=torch.int64, device=gpu)
    for _ in range(1000):
        out.fill_(torch.nan)
        module.fwd(**x, out=out, final_state=final, cluster=cluster, **numbers)
        wrong += (out != first["out"]).sum() + (final != first["final_state"]).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_graph_replay_with_changed_inputs_and_offsets(cluster, gpu):
    x, params = normal(gpu, (30, 40, 50))
    out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    module.fwd(**x, out=out, final_state=final, cluster=cluster, **numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            module.fwd(**x, out=out, final_state=final, cluster=cluster, **numbers)
    for i in range(12):
        fresh, _ = normal(gpu, (i, 120 - 9 * i, 8 * i), seed=20 + i)
        for name in x:
            x[name].copy_(fresh[name])
        out.fill_(torch.nan)
        graph.replay()
        assert_bits({"out": out, "final_state": final}, reference.exact(fresh, params, "chunk16"))


def test_other_stream(gpu):
    x, params = normal(gpu)
    want = launch(x, params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = launch(x, params)
    stream.synchronize()
    assert same(got, want)


def test_no_synchronisation_without_check(gpu):
    """In a graph's capture any would be an error; ``check`` reads the offsets back and is refused there."""
    x, params = normal(gpu)
    out = torch.empty_like(x["v"])
    numbers = {name: params[name] for name in ("scale", "lower_bound")}
    module.fwd(**x, out=out, **numbers)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.fwd(**x, out=out, **numbers)
        with pytest.raises(RuntimeError):
            module.fwd(**x, out=out, **numbers, check=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_custom_operator(gpu):
    x, params = normal(gpu)
    tensors = [x[name] for name in (*module.INPUTS, *module.OPTIONAL)]
    out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    numbers = (params["scale"], params["lower_bound"], 2, 0)
    torch.library.opcheck(torch.ops.goldens.kda, (*tensors, out, final, None, *numbers))
    torch.library.opcheck(torch.ops.goldens.kda, (*tensors[:7], None, None, out, None, None, *numbers))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_the_arguments_of_flash_linear_attention(state_v_first, gpu):
    x, params = normal(gpu)
    want = launch(x, params)
    state = x.pop("initial_state")
    x["dt_bias"] = x["dt_bias"].flatten()
    switches = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    o, final = fla.chunk_kda(
        **x,
        **dict.fromkeys(switches, True),
        lower_bound=-5.0,
        initial_state=state if state_v_first else state.transpose(-1, -2).contiguous(),
        output_final_state=True,
        state_v_first=state_v_first,
    )
    final = final if state_v_first else final.transpose(-1, -2).contiguous()
    assert same({"out": o, "final_state": final}, want)
