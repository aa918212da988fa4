"""The stand-alone cache insert on the GPU: its goldens and the exact model, bit for bit; nothing else is written."""

import pytest
import torch

import goldens
from cute_impl import cache_insert as module
from cute_impl.probes_launch import write_late
from goldens import store
from goldens.cache_insert import RECIPES, make_case
from goldens.compare import against_exact
from goldens.judge import judge, select
from reference import cache_insert as reference
from tools import candidates

pytestmark = pytest.mark.hopper

KERNEL = goldens.KERNELS["cache_insert"]
COMMITTED = [case for case in KERNEL.cases if case.committed]
ON_DEMAND = [case for case in KERNEL.cases if not case.committed]
FRESH_ROWS, PAGES, PAGE_SIZE = 1024, 20, 64  # 14 recipes × 1024 rows × 576 bytes: 8.2 million
PATTERNS = ("spread", "alternate", "none", "page", "crossing", "beyond")
GUARD_BYTES, POISON = 4096, 0x5A

# Slots beyond the cache are reported by the debug check; here they are meant.
pytestmark = [pytestmark, pytest.mark.filterwarnings("ignore:slots. rows:RuntimeWarning")]


def drawn(case, gpu):
    return {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}


def guarded(cache):
    """A copy of the cache amid poisoned memory, and that memory."""
    memory = torch.full((cache.numel() + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=cache.device)
    inner = memory[GUARD_BYTES:-GUARD_BYTES].view(cache.shape)
    inner.copy_(cache.view(torch.uint8))
    return inner, memory


def assert_guards(memory):
    assert bool((memory[:GUARD_BYTES] == POISON).all())
    assert bool((memory[-GUARD_BYTES:] == POISON).all())


def assert_exact(inputs, params):
    """The whole cache bit for bit, and nothing written around it."""
    cache, memory = guarded(inputs["cache"])
    got = module.run(inputs | {"cache": cache}, params)["cache"]
    verdict = against_exact("cache", got, reference.exact(inputs, params, "insert")["cache"])
    assert verdict.passed, (verdict.reason, verdict.worst)
    assert_guards(memory)


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.id)
def test_committed_goldens(case):
    golden = store.load(case, store.read_manifest())
    candidate = candidates.ours("cache_insert", "insert")
    verdicts = judge(KERNEL, case, golden, candidate(select(golden, "in/"), case.params), "insert")
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize("case", ON_DEMAND, ids=lambda case: case.id)
def test_large_goldens_by_digest(case, gpu):
    """The CPU wrote the digest; the model on CUDA tensors and the kernel must both meet it."""
    digest = store.read_manifest()[case.id]["sha256"]["exact/insert/cache"]
    inputs = drawn(case, gpu)
    assert store.digest(reference.exact(inputs, case.params, "insert")["cache"]) == digest
    assert store.digest(module.run(inputs, case.params)["cache"]) == digest


@pytest.mark.parametrize("recipe", RECIPES)
def test_fresh_seeds(recipe, gpu):
    case = make_case(FRESH_ROWS, recipe, pages=PAGES, page_size=PAGE_SIZE, seed=20260)
    inputs = drawn(case, gpu)
    assert int((inputs["slots"] >= 0).sum()) == FRESH_ROWS
    assert_exact(inputs, case.params)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 65])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_slots(pattern, rows, gpu):
    case = make_case(rows, "normal", pattern, pages=3, page_size=32, seed=5)
    assert_exact(drawn(case, gpu), case.params)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_views_of_qkv_and_both_types_of_cache(dtype, gpu):
    """kv and k_pe as columns of a pitched row whose other columns, and rows beyond the last, are NaN."""
    case = make_case(5, "normal", pages=3, page_size=3, seed=6)
    inputs = drawn(case, gpu)
    qkv = torch.full((8, 2120), torch.nan, dtype=torch.bfloat16, device=gpu)
    kv, k_pe = qkv[:5, 1536:2048], qkv[:5, 2048:2112]
    kv.copy_(inputs["kv"])
    k_pe.copy_(inputs["k_pe"])
    assert_exact(inputs | {"kv": kv, "k_pe": k_pe, "cache": inputs["cache"].view(dtype)}, case.params)


def test_rows_do_not_meet(gpu):
    case = make_case(16, "normal", pages=1, page_size=16, seed=7)
    x = drawn(case, gpu)
    whole = module.run(x | {"cache": x["cache"].clone()}, case.params)["cache"]
    for row in (0, 7, 15):
        poisoned = {name: x[name].clone() for name in ("kv", "k_pe")}
        for t in poisoned.values():
            t[:row], t[row + 1 :] = torch.nan, torch.nan
        among = module.run(x | poisoned | {"cache": x["cache"].clone()}, case.params)["cache"]
        alone = {name: x[name][row : row + 1] for name in ("kv", "k_pe", "slots")}
        single = module.run(x | alone | {"cache": x["cache"].clone()}, case.params)["cache"]
        slot = int(x["slots"][row])
        assert torch.equal(among[0, slot], whole[0, slot])
        assert torch.equal(single[0, slot], whole[0, slot])


@pytest.mark.parametrize("weights_complete", [False, True])
def test_graph_replay_with_changed_inputs(weights_complete, gpu):
    cases = [make_case(24, "normal", "spread", pages=4, page_size=16, seed=100 + i) for i in range(14)]
    x, eps = drawn(cases[0], gpu), cases[0].params["eps"]
    module.cache_insert(**x, eps=eps, weights_complete=weights_complete)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.cache_insert(**x, eps=eps, weights_complete=weights_complete)
    for case in cases:
        fresh = drawn(case, gpu)
        for name, t in x.items():
            t.copy_(fresh[name])
        graph.replay()
        assert torch.equal(x["cache"], reference.exact(fresh, case.params, "insert")["cache"])


def test_other_stream_and_custom_operator(gpu):
    case = make_case(9, "normal", pages=2, page_size=8, seed=8)
    x = drawn(case, gpu)
    want = reference.exact(x, case.params, "insert")["cache"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = module.run(x | {"cache": x["cache"].clone()}, case.params)["cache"]
    stream.synchronize()
    assert torch.equal(got, want)
    torch.library.opcheck(torch.ops.goldens.cache_insert, (*x_in_order(x), case.params["eps"], False))


def behind_a_late_writer(gpu, name, **options):
    """The cache, inserted behind a writer of argument ``name`` that lets the kernel start at once; the cache that it
    should be, and that of the argument as it was before."""
    cases = [make_case(8, "normal", "spread", pages=2, page_size=8, seed=seed) for seed in (1, 2)]
    x, fresh = (drawn(case, gpu) for case in cases)
    fresh["k_scale_inv"] = 2 * x["k_scale_inv"]  # every seed has the same
    eps = cases[0].params["eps"]
    wanted = [reference.exact(x | {name: y[name]}, {"eps": eps}, "insert")["cache"] for y in (fresh, x)]
    given = {key: t.clone() for key, t in x.items()}
    # Nothing else may stand between the two launches, so compile and load before.
    module.cache_insert(**{key: t.clone() for key, t in x.items()}, eps=eps, **options)
    write_late(given[name], given[name])
    torch.cuda.synchronize()
    write_late(given[name], fresh[name])
    module.cache_insert(**given, eps=eps, **options)
    return given["cache"], *wanted


@pytest.mark.parametrize("name", [name for name in module.NAMES if name != "cache"])
def test_any_argument_may_come_from_the_launch_before(name, gpu):
    got, want, stale = behind_a_late_writer(gpu, name)
    assert not torch.equal(want, stale)
    assert torch.equal(got, want)


ATTEMPTS = 10  # of the promise: other work on the GPU may keep two launches apart


@pytest.mark.parametrize("name", [name for name in module.NAMES if name != "cache"])
def test_by_the_promise_the_weights_are_read_at_once(name, gpu):
    """So the late writer is late; and everything else is waited for."""
    attempts = (behind_a_late_writer(gpu, name, weights_complete=True) for _ in range(ATTEMPTS))
    if name == "w_kva":
        assert any(torch.equal(got, stale) for got, _, stale in attempts)
    else:
        assert all(torch.equal(got, want) for got, want, _ in attempts)


def x_in_order(x):
    return [x[name] for name in module.NAMES]
