"""FMHA's kernels on the GPU: equal to their goldens and to the exact model, bit for bit, and invariant."""

import pytest
import torch
from cutlass.cute.runtime import from_dlpack

import goldens
from cute_impl import fmha
from cute_impl.fmha import k2
from goldens import store
from goldens.compare import against_exact
from goldens.fmha import RECIPES, make_case
from goldens.judge import judge, select
from reference import fmha as reference
from tools import candidates

pytestmark = pytest.mark.hopper

KERNEL = goldens.KERNELS["fmha"]
COMMITTED = [case for case in KERNEL.cases if case.committed and case.schedules]
ON_DEMAND = [case for case in KERNEL.cases if not case.committed]
VARIANTS = [(d, causal) for d in (64, 128) for causal in (False, True)]
FRESH_ELEMS = 420_000  # outputs a fresh run compares; 13 recipes × 4 variants make 21.8 million


def run_on(device, inputs, params):
    return fmha.run({name: x.to(device) for name, x in inputs.items()}, params, "k2")["o"]


def normal_inputs(gpu, d=64, n=256, batch=3, seed=1):
    case = make_case(d, True, n, "normal", batch=batch, seed=seed)
    return {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.id)
def test_committed_goldens(case):
    golden = store.load(case, store.read_manifest())
    candidate = candidates.ours("fmha", "k2")
    verdicts = judge(KERNEL, case, golden, candidate(select(golden, "in/"), case.params), "k2")
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize("case", ON_DEMAND, ids=lambda case: case.id)
def test_large_goldens_by_digest(case, gpu):
    """The CPU wrote the digest; the model on CUDA tensors and the kernel must both meet it."""
    digest = store.read_manifest()[case.id]["sha256"]["exact/k2/o"]
    inputs = {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}
    assert store.digest(reference.exact(inputs, case.params, "k2")["o"]) == digest
    assert store.digest(run_on(gpu, inputs, case.params)) == digest


@pytest.mark.parametrize(("d", "causal"), VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fresh_seeds(recipe, d, causal, gpu):
    n = 256
    case = make_case(d, causal, n, recipe, batch=-(-FRESH_ELEMS // (n * d)), seed=20260)
    inputs = {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}
    want = reference.exact(inputs, case.params, "k2")["o"]
    verdict = against_exact("o", run_on(gpu, inputs, case.params), want)
    assert verdict.passed, (verdict.reason, verdict.worst)
    assert verdict.elements >= FRESH_ELEMS


@pytest.mark.parametrize("n", [64, 128, 320, 1024])
def test_lengths(n, gpu):
    case = make_case(64, True, n, "normal", batch=2, seed=7)
    inputs = {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}
    assert torch.equal(run_on(gpu, inputs, case.params), reference.exact(inputs, case.params, "k2")["o"])


def test_same_call_twice(gpu):
    x = normal_inputs(gpu)
    first = run_on(gpu, x, {"causal": True})
    for _ in range(20):
        assert torch.equal(run_on(gpu, x, {"causal": True}), first)


def test_a_sequence_alone_and_in_a_batch_of_nan(gpu):
    x = normal_inputs(gpu)
    whole = run_on(gpu, x, {"causal": False})
    for i in range(3):
        alone = run_on(gpu, {name: t[i : i + 1] for name, t in x.items()}, {"causal": False})
        assert torch.equal(alone[0], whole[i])
    poisoned = {name: t.clone() for name, t in x.items()}
    for t in poisoned.values():
        t[0], t[2] = torch.nan, torch.nan
    assert torch.equal(run_on(gpu, poisoned, {"causal": False})[1], whole[1])


def test_strided_inputs(gpu):
    x = normal_inputs(gpu)
    strided = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in x.items()}
    assert not strided["q"].is_contiguous()
    assert torch.equal(run_on(gpu, strided, {"causal": True}), run_on(gpu, x, {"causal": True}))


def test_graph_replay_with_changed_inputs(gpu):
    x = normal_inputs(gpu)
    run_on(gpu, x, {"causal": True})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fmha.attention(x["q"], x["k"], x["v"], causal=True)
    for round_ in range(12):
        fresh = normal_inputs(gpu, seed=100 + round_)
        for name, t in x.items():
            t.copy_(fresh[name])
        graph.replay()
        assert torch.equal(out, run_on(gpu, fresh, {"causal": True}))


def test_other_stream(gpu):
    x = normal_inputs(gpu)
    want = run_on(gpu, x, {"causal": True})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run_on(gpu, x, {"causal": True})
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize(("d", "causal"), VARIANTS)
def test_worklog_interface(d, causal, gpu):
    """compile_kernel and run_kernel on CuTe views of shape (N, d, B), static or dynamic."""
    x = normal_inputs(gpu, d=d)
    o = torch.full_like(x["q"], torch.nan)
    views = {f"{n}_cute": from_dlpack(t.permute(1, 2, 0), assumed_align=16) for n, t in (*x.items(), ("o", o))}
    handle = k2.compile_kernel(3, 256, d, causal, views)
    k2.run_kernel(handle, views)
    assert torch.equal(o, run_on(gpu, x, {"causal": causal}))


def test_custom_operator(gpu):
    x = normal_inputs(gpu)
    arguments = (x["q"], x["k"], x["v"], True, 0.125)
    torch.library.opcheck(torch.ops.goldens.fmha, arguments)
    assert torch.equal(torch.ops.goldens.fmha(*arguments), fmha.attention(*arguments[:4], scale=0.125))


def test_every_output_is_written(gpu):
    """Fresh memory that held NaN comes back full of numbers."""
    x = normal_inputs(gpu, n=512)
    poison = torch.full_like(x["q"], torch.nan)
    del poison
    assert bool(run_on(gpu, x, {"causal": True}).isfinite().all())
