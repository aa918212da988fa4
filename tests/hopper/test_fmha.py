"""FMHA's rungs on the GPU: equal to their goldens and to the exact model, bit for bit, and invariant."""

import itertools
from typing import Any

import pytest
import torch
from cutlass.cute.runtime import from_dlpack

import goldens
from cute_impl import fmha
from cute_impl.fmha import k2
from goldens import store
from goldens.compare import against_exact
from goldens.fmha import RECIPES, WGMMA, make_case
from goldens.judge import judge, select
from reference import fmha as reference

pytestmark = pytest.mark.hopper

KERNEL = goldens.KERNELS["fmha"]
SCALAR, TENSOR_CORE = tuple(fmha.SCALAR), tuple(fmha.TENSOR_CORE)
PAIRS = [(rung, "k2") for rung in SCALAR] + list(itertools.product(TENSOR_CORE, WGMMA))
VARIANTS = [(d, causal) for d in (64, 128) for causal in (False, True)]
FRESH_ELEMS = 420_000  # outputs a fresh run of k2 and k3 compares; 23 recipes × 4 variants make 38.6 million
FRESH_ELEMS_WGMMA = 2_500_000  # of k4 …; 23 recipes × 4 variants make 230 million a schedule


def of(committed: bool) -> list[Any]:
    """Each golden with each rung of each schedule that it holds."""
    cases = [case for case in KERNEL.cases if case.committed == committed]
    return [
        pytest.param(case, rung, schedule, id=f"{case.name}-{rung}-{schedule}")
        for case in cases
        for rung, schedule in PAIRS
        if schedule in case.schedules
    ]


def on(device, inputs):
    return {name: x.to(device) for name, x in inputs.items()}


def normal_inputs(gpu, d=64, n=256, batch=3, seed=1):
    return on(gpu, KERNEL.inputs(make_case(d, True, n, "normal", batch=batch, seed=seed)))


def assert_equal(got, want):
    assert set(got) == set(want)
    for name, x in want.items():
        verdict = against_exact(name, got[name], x)
        assert verdict.passed, (verdict.reason, verdict.worst)


def same(a, b):
    """Bits of o and, where both have it, of lse."""
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


@pytest.mark.parametrize(("case", "rung", "schedule"), of(committed=True))
def test_committed_goldens(case, rung, schedule, gpu):
    golden = store.load(case, store.read_manifest())
    outputs = fmha.run(on(gpu, select(golden, "in/")), case.params, schedule, rung)
    verdicts = judge(KERNEL, case, golden, outputs, schedule)
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize(("case", "rung", "schedule"), of(committed=False))
def test_large_goldens_by_digest(case, rung, schedule, gpu):
    """The CPU wrote the digests; the kernel must meet them."""
    digests = store.read_manifest()[case.id]["sha256"]
    for name, x in fmha.run(on(gpu, KERNEL.inputs(case)), case.params, schedule, rung).items():
        assert store.digest(x) == digests[f"exact/{schedule}/{name}"]


@pytest.mark.parametrize("case", [c for c in KERNEL.cases if not c.committed], ids=lambda case: case.id)
def test_exact_on_cuda_is_exact_on_the_cpu(case, gpu):
    digests = store.read_manifest()[case.id]["sha256"]
    for schedule in case.schedules:
        for name, x in reference.exact(on(gpu, KERNEL.inputs(case)), case.params, schedule).items():
            assert store.digest(x) == digests[f"exact/{schedule}/{name}"]


@pytest.mark.parametrize(("d", "causal"), VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fresh_seeds_of_the_scalar_rungs(recipe, d, causal, gpu):
    n = 256
    case = make_case(d, causal, n, recipe, batch=-(-FRESH_ELEMS // (n * d)), seed=20260)
    inputs = on(gpu, KERNEL.inputs(case))
    want = reference.exact(inputs, case.params, "k2")
    for rung in SCALAR:
        assert_equal(fmha.run(inputs, case.params, "k2", rung), want)


@pytest.mark.parametrize("schedule", WGMMA)
@pytest.mark.parametrize(("d", "causal"), VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fresh_seeds_of_the_tensor_core_rungs(recipe, d, causal, schedule, gpu):
    n_q, n_k = 512, 768
    batch = -(-FRESH_ELEMS_WGMMA // (2 * n_q * d))
    case = make_case(d, causal, (n_q, n_k), recipe, batch=batch, heads=(2, 1), seed=20261, schedules=(schedule,))
    inputs = on(gpu, KERNEL.inputs(case))
    want = reference.exact(inputs, case.params, schedule)
    assert want["o"].numel() >= FRESH_ELEMS_WGMMA
    for rung in TENSOR_CORE:
        assert_equal(fmha.run(inputs, case.params, schedule, rung), want)


LENGTHS = [(1, 1), (1, 513), (64, 64), (65, 64), (64, 65), (127, 129), (129, 127), (300, 5), (5, 300), (511, 1025)]
LENGTHS += [(400, 900), (900, 400), (1153, 1153)]


@pytest.mark.parametrize("schedule", WGMMA)
@pytest.mark.parametrize(("d", "causal"), VARIANTS)
@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
def test_lengths(n_q, n_k, d, causal, schedule, gpu):
    case = make_case(d, causal, (n_q, n_k), "normal", heads=(4, 2), seed=7, schedules=(schedule,))
    inputs = on(gpu, KERNEL.inputs(case))
    want = reference.exact(inputs, case.params, schedule)
    for rung in TENSOR_CORE:
        assert_equal(fmha.run(inputs, case.params, schedule, rung), want)


@pytest.mark.parametrize("rung", SCALAR)
@pytest.mark.parametrize("n", [64, 128, 320, 1024])
def test_lengths_of_the_scalar_rungs(n, rung, gpu):
    inputs = on(gpu, KERNEL.inputs(make_case(64, True, n, "normal", batch=2, seed=7)))
    assert_equal(fmha.run(inputs, {"causal": True}, "k2", rung), reference.exact(inputs, {"causal": True}, "k2"))


@pytest.mark.parametrize("rung", TENSOR_CORE)
@pytest.mark.parametrize(("d", "causal"), VARIANTS)
def test_packed_sequences(d, causal, rung, gpu):
    """Ragged neighbours, one of them NaN where no query looks; lengths 0 and 1."""
    lengths = ((130, 200), (1, 1), (0, 77), (64, 128), (3, 0), (200, 129), (257, 600))
    total = (sum(q for q, _ in lengths), sum(k for _, k in lengths))
    case = make_case(d, causal, total, "normal", heads=(4, 2), seed=3, packed=lengths, schedules=WGMMA)
    inputs = on(gpu, KERNEL.inputs(case))
    assert bool(inputs["k"].isnan().any())
    for schedule in WGMMA:
        got = fmha.run(inputs, case.params, schedule, rung)
        assert_equal(got, reference.exact(inputs, case.params, schedule))


@pytest.mark.parametrize("schedule", WGMMA)
@pytest.mark.parametrize(("d", "causal"), VARIANTS)
@pytest.mark.parametrize(("n", "heads"), [(8192, 12), (640, 300), (64, 4000)])
def test_rungs_of_a_schedule_agree(n, heads, d, causal, schedule, gpu):
    """Long sequences, and more heads than fit the L2 cache or a wave: many items a persistent CTA."""
    generator = torch.Generator(gpu).manual_seed(11)
    q = torch.randn(heads, n, d, device=gpu, generator=generator).to(torch.bfloat16)
    k, v = (torch.randn(heads // 2, n, d, device=gpu, generator=generator).to(torch.bfloat16) for _ in range(2))
    inputs, params = {"q": q, "k": k, "v": v}, {"causal": causal}
    first, *others = (fmha.run(inputs, params, schedule, rung) for rung in TENSOR_CORE)
    assert bool(first["o"].isfinite().all())
    for other in others:
        assert same(other, first)


@pytest.mark.parametrize("rung", TENSOR_CORE)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_beyond_the_used_ones_are_not_read(causal, rung, gpu):
    """Buffers of 128 rows of which 65 are used, NaN beyond; used as views, without a copy."""
    used = on(gpu, KERNEL.inputs(make_case(64, causal, 65, "normal", batch=2, seed=5)))
    buffers = {name: torch.full((2, 128, 64), torch.nan, dtype=torch.bfloat16, device=gpu) for name in used}
    for name, x in used.items():
        buffers[name][:, :65] = x
    got = fmha.run({name: x[:, :65] for name, x in buffers.items()}, {"causal": causal}, rung=rung)
    assert bool(got["o"].isfinite().all())
    assert same(got, fmha.run(used, {"causal": causal}, rung=rung))


@pytest.mark.parametrize("rung", TENSOR_CORE)
@pytest.mark.parametrize("causal", [False, True])
def test_batch_n_heads_d_without_copies(causal, rung, gpu):
    """[B, N, H, d], also cut out of one tensor of q, k and v, has the bits of folded heads."""
    qkv = torch.randn(2, 300, 3, 4, 128, device=gpu).to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    k, v = k[:, :, :2], v[:, :, :2]
    o, lse = fmha.attention(q, k, v, causal, rung=rung, return_lse=True)
    folded = [x.transpose(1, 2).reshape(-1, 300, 128) for x in (q, k, v)]
    want, want_lse = fmha.attention(*folded, causal, rung=rung, return_lse=True)
    assert torch.equal(o.transpose(1, 2).reshape(want.shape), want)
    assert torch.equal(lse.reshape(want_lse.shape), want_lse)


@pytest.mark.parametrize("rung", TENSOR_CORE)
def test_no_keys_and_no_queries(rung, gpu):
    x = torch.randn(2, 70, 64, device=gpu).to(torch.bfloat16)
    o, lse = fmha.attention(x, x[:, :0], x[:, :0], rung=rung, return_lse=True)
    assert not bool(o.any())
    assert bool((lse == -torch.inf).all())
    assert fmha.attention(x[:, :0], x, x, rung=rung).shape == (2, 0, 64)


@pytest.mark.parametrize(("rung", "schedule"), PAIRS)
@pytest.mark.parametrize("causal", [False, True])
def test_same_call_a_thousand_times(rung, schedule, causal, gpu):
    x = normal_inputs(gpu, d=128, n=512)
    first = fmha.run(x, {"causal": causal}, schedule, rung)
    differ = torch.zeros((), dtype=torch.int64, device=gpu)
    for _ in range(1000):
        again = fmha.run(x, {"causal": causal}, schedule, rung)
        for name, want in first.items():
            differ += (again[name].view(torch.uint8) != want.view(torch.uint8)).sum()
    assert int(differ) == 0


@pytest.mark.parametrize(("rung", "schedule"), PAIRS)
def test_a_sequence_alone_and_in_a_batch_of_nan(rung, schedule, gpu):
    x, params = normal_inputs(gpu), {"causal": False}
    whole = fmha.run(x, params, schedule, rung)
    for i in range(3):
        alone = fmha.run({name: t[i : i + 1] for name, t in x.items()}, params, schedule, rung)
        assert same(alone, {name: t[i : i + 1] for name, t in whole.items()})
    poisoned = {name: t.clone() for name, t in x.items()}
    for t in poisoned.values():
        t[0], t[2] = torch.nan, torch.nan
    among_nan = fmha.run(poisoned, params, schedule, rung)
    assert same({name: t[1] for name, t in among_nan.items()}, {name: t[1] for name, t in whole.items()})


@pytest.mark.parametrize("rung", TENSOR_CORE)
def test_a_packed_sequence_is_a_sequence_alone(rung, gpu):
    """At any position, whatever its neighbours."""
    x = normal_inputs(gpu, d=128, n=200)
    alone = [fmha.attention(*(t[i : i + 1] for t in x.values()), causal=True, rung=rung) for i in range(3)]
    packed = [t.reshape(1, 600, 128).transpose(0, 1) for t in x.values()]
    offsets = torch.tensor([0, 200, 400, 600], dtype=torch.int32, device=gpu)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 200}
    together = fmha.attention(*packed, causal=True, rung=rung, **options)
    assert torch.equal(together[:, 0].reshape(3, 200, 128), torch.cat(alone))


@pytest.mark.parametrize(("rung", "schedule"), PAIRS)
def test_strided_inputs(rung, schedule, gpu):
    x = normal_inputs(gpu)
    strided = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in x.items()}
    assert not strided["q"].is_contiguous()
    params = {"causal": True}
    assert same(fmha.run(strided, params, schedule, rung), fmha.run(x, params, schedule, rung))


@pytest.mark.parametrize("rung", fmha.RUNGS)
def test_graph_replay_with_changed_inputs(rung, gpu):
    x = normal_inputs(gpu)
    fmha.run(x, {"causal": True}, rung=rung)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fmha.attention(x["q"], x["k"], x["v"], causal=True, rung=rung)
    for round_ in range(12):
        fresh = normal_inputs(gpu, seed=100 + round_)
        for name, t in x.items():
            t.copy_(fresh[name])
        graph.replay()
        assert torch.equal(out, fmha.run(fresh, {"causal": True}, rung=rung)["o"])


@pytest.mark.parametrize("rung", fmha.RUNGS)
def test_other_stream(rung, gpu):
    x = normal_inputs(gpu)
    want = fmha.run(x, {"causal": True}, rung=rung)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = fmha.run(x, {"causal": True}, rung=rung)
    stream.synchronize()
    assert same(got, want)


@pytest.mark.parametrize(("d", "causal"), VARIANTS)
def test_worklog_interface(d, causal, gpu):
    """compile_kernel and run_kernel on CuTe views of shape (N, d, B), static or dynamic."""
    x = normal_inputs(gpu, d=d)
    o = torch.full_like(x["q"], torch.nan)
    views = {f"{n}_cute": from_dlpack(t.permute(1, 2, 0), assumed_align=16) for n, t in (*x.items(), ("o", o))}
    handle = k2.compile_kernel(3, 256, d, causal, views)
    k2.run_kernel(handle, views)
    assert torch.equal(o, fmha.run(x, {"causal": causal}, "k2")["o"])


@pytest.mark.parametrize("rung", fmha.RUNGS)
def test_custom_operator(rung, gpu):
    x = normal_inputs(gpu)
    rung, schedule = fmha.resolve(rung, None)
    arguments = (x["q"], x["k"], x["v"], True, 0.125, rung, schedule)
    torch.library.opcheck(torch.ops.goldens.fmha, arguments)
    got = torch.ops.goldens.fmha(*arguments)[0]
    assert torch.equal(got, fmha.attention(*arguments[:4], scale=0.125, rung=rung))


@pytest.mark.parametrize("rung", fmha.RUNGS)
def test_every_output_is_written(rung, gpu):
    """Fresh memory that held NaN comes back full of numbers."""
    x = normal_inputs(gpu, n=512)
    poison = torch.full_like(x["q"], torch.nan)
    del poison
    assert bool(fmha.run(x, {"causal": True}, rung=rung)["o"].isfinite().all())
