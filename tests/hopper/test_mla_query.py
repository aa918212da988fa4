"""The MLA query's kernels on the GPU: goldens, the exact model on fresh inputs, invariance, decode context parallelism.

Fresh inputs: 16 recipes × 3 numbers of heads × 10 numbers of requests, 152 rows in ``tiled`` and up to 15 in ``small``
of 576 bytes a head: 27.7 million bytes of output, and the whole cache each time.
"""

import functools

import pytest
import torch

import goldens
from cute_impl import mla_query as module
from cute_impl.attn_res import mailbox as on_device
from cute_impl.mla_query import SMALL_B, dcp
from cute_impl.probes_launch import write_late
from goldens import store
from goldens.compare import against_exact
from goldens.judge import judge, select
from goldens.mla_query import RECIPES, make_case
from reference import cache_insert as insert_reference
from reference import mla_query as reference
from tools import candidates

# Slots beyond the cache are reported by the debug check; here they are meant.
pytestmark = [pytest.mark.hopper, pytest.mark.filterwarnings("ignore:slots. rows:RuntimeWarning")]

KERNEL = goldens.KERNELS["mla_query"]
CASES = [(case, schedule) for case in KERNEL.cases for schedule in case.schedules]
COMMITTED = [pair for pair in CASES if pair[0].committed]
ON_DEMAND = [pair for pair in CASES if not pair[0].committed]
HEADS = (12, 6, 1)
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 64)
PAGES, PAGE_SIZE = 9, 16
GUARD_BYTES, POISON = 4096, 0x5A
ROUNDS_A_GRAPH, REPLAYS = 8, 1250
POLLS = 1 << 20


def ident(value):
    return value.id if hasattr(value, "id") else None


def drawn(case, gpu):
    return {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}


@functools.lru_cache(maxsize=4)
def weights(heads):
    return {name: x.cuda() for name, x in KERNEL.inputs(make_case(heads, 1)).items() if name in ("w_qb", "w_uk")}


def normal(gpu, heads, rows, seed=1, slots="spread"):
    """Normal inputs, whose weights are the same for every B and seed."""
    case = make_case(1, rows, slots=slots, pages=PAGES, page_size=PAGE_SIZE, seed=seed)
    return drawn(case, gpu) | weights(heads), {"heads": heads, "eps": case.params["eps"]}


def first_rows(x, rows):
    return x | {name: x[name][:rows] for name in ("qkv", "slots")}


def guarded(shape, device):
    """Memory [shape] amid poison, and all of it."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
    return memory[GUARD_BYTES:-GUARD_BYTES].view(shape), memory


def assert_guards(*memories):
    for memory in memories:
        assert bool((memory[:GUARD_BYTES] == POISON).all())
        assert bool((memory[-GUARD_BYTES:] == POISON).all())


def launch(x, params, schedule, **options):
    """(output, cache) of the kernel on a copy of the cache, with poison around both that must survive."""
    rows, heads = x["qkv"].shape[0], params["heads"]
    out, out_memory = guarded((rows, heads, 576), x["qkv"].device)
    cache, cache_memory = guarded(x["cache"].shape, x["qkv"].device)
    cache.copy_(x["cache"].view(torch.uint8))
    tensors = x | {"cache": cache.view(x["cache"].dtype)}
    module.mla_query(**tensors, eps=params["eps"], schedule=schedule, out=out, **options)
    assert_guards(out_memory, cache_memory)
    return out, cache


def assert_bits(name, got, want):
    verdict = against_exact(name, got, want)
    assert verdict.passed, (name, verdict.reason, verdict.worst)


def assert_exact(x, params, schedule, **options):
    want = reference.exact(x, params, schedule)
    output, cache = launch(x, params, schedule, **options)
    assert_bits("output", output, want["output"])
    assert_bits("cache", cache, want["cache"])


def both(heads, rows):
    return ("small", "tiled") if rows <= SMALL_B[heads] else ("tiled",)


EITHER = [("small", 12, 2), ("small", 6, 5), ("small", 1, 4), ("tiled", 12, 40), ("tiled", 6, 7), ("tiled", 1, 64)]


# Goldens and fresh inputs.


@pytest.mark.parametrize(("case", "schedule"), COMMITTED, ids=ident)
def test_committed_goldens(case, schedule):
    golden = store.load(case, store.read_manifest())
    candidate = candidates.ours("mla_query", schedule)
    verdicts = judge(KERNEL, case, golden, candidate(select(golden, "in/"), case.params), schedule)
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize(("case", "schedule"), ON_DEMAND, ids=ident)
def test_large_goldens_by_digest(case, schedule, gpu):
    """The CPU wrote the digests; the model on CUDA tensors and the kernel must both meet them."""
    digests = select(store.read_manifest()[case.id]["sha256"], f"exact/{schedule}/")
    inputs = drawn(case, gpu)
    want = reference.exact(inputs, case.params, schedule)
    assert {name: store.digest(want[name]) for name in digests} == digests
    got = module.run(inputs, case.params, schedule)
    assert {name: store.digest(got[name]) for name in digests} == digests


@pytest.fixture(scope="module", params=[(r, h) for h in HEADS for r in RECIPES], ids=lambda p: f"{p[0]}-h{p[1]}")
def fresh(request, gpu):
    """Inputs for 64 requests, and what each schedule makes of them: a row does not depend on the others."""
    recipe, heads = request.param
    case = make_case(heads, 64, recipe, pages=PAGES, page_size=PAGE_SIZE, seed=20260)
    x = drawn(case, gpu)
    rows = {"small": SMALL_B[heads], "tiled": 64}
    want = {s: reference.exact(first_rows(x, n), case.params, s)["output"] for s, n in rows.items()}
    return x, case.params, want


@pytest.mark.parametrize("rows", ROWS)
def test_fresh_seeds(fresh, rows):
    x, params, want = fresh
    some = first_rows(x, rows)
    cache = insert_reference.exact(reference.insert_inputs(some), {"eps": params["eps"]}, "insert")["cache"]
    for schedule in both(params["heads"], rows):
        output, got_cache = launch(some, params, schedule)
        assert_bits(f"output of {schedule}", output, want[schedule][:rows])
        assert_bits(f"cache of {schedule}", got_cache, cache)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("slots", ["spread", "alternate", "none", "page", "crossing", "beyond"])
def test_slots(slots, heads, gpu):
    for rows in (SMALL_B[heads], 64):
        for schedule in both(heads, rows):
            assert_exact(*normal(gpu, heads, rows, seed=3, slots=slots), schedule)


@pytest.mark.parametrize("heads", HEADS)
def test_both_ways_to_stage(heads, gpu):
    for rows in range(1, SMALL_B[heads] + 1):
        for cp_async in (False, True):
            for early in (False, True):
                x = normal(gpu, heads, rows, seed=4)
                assert_exact(*x, "small", q_b_cp_async=cp_async, weights_complete=early)


@pytest.mark.parametrize("cp_async", [False, True])
@pytest.mark.parametrize(("heads", "rows"), [(12, 2), (12, 3), (6, 5)])
def test_overlapping_launches(heads, rows, cp_async, gpu):
    """200 launches back to back in a graph: each stages its weights while its predecessor runs."""
    x, params = normal(gpu, heads, rows, seed=8)
    want = reference.exact(x, params, "small")
    out = torch.empty(rows, heads, 576, dtype=torch.uint8, device=gpu)
    options = {"eps": params["eps"], "schedule": "small", "out": out, "q_b_cp_async": cp_async}
    options["weights_complete"] = True
    module.mla_query(**x, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            module.mla_query(**x, **options)
    out.fill_(POISON)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want["output"])
    assert torch.equal(x["cache"], want["cache"])


@pytest.mark.parametrize("heads", HEADS)
def test_the_schedule_by_default(heads, gpu):
    for rows in (SMALL_B[heads], SMALL_B[heads] + 1):
        x, params = normal(gpu, heads, rows, seed=5)
        by_default, _ = launch(x, params, None)
        assert_bits("output", by_default, reference.exact(x, params, reference.schedule_for(heads, rows))["output"])


@pytest.mark.parametrize("heads", HEADS)
def test_every_number_of_requests(heads, gpu):
    """One compiled kernel a tile of requests: B, pitch and pages change from call to call."""
    x, params = normal(gpu, heads, 64, seed=6)
    want = reference.exact(x, params, "tiled")["output"]
    for rows in range(1, 65):
        width = 2112 + 8 * (rows % 5)
        qkv = torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device=gpu)
        qkv[:, :2112] = x["qkv"][:rows, :2112]
        cache = x["cache"].view(-1, rows % 3 + 1, 576)[: 70 // (rows % 3 + 1)].contiguous()
        some = x | {"qkv": qkv, "slots": x["slots"][:rows], "cache": cache}
        output, got = launch(some, params, "tiled")
        assert torch.equal(output, want[:rows])
        insert = insert_reference.exact(reference.insert_inputs(some), {"eps": params["eps"]}, "insert")
        assert torch.equal(got, insert["cache"])


# Invariance.


@pytest.mark.parametrize(("schedule", "heads", "rows"), EITHER)
def test_same_call_twice(schedule, heads, rows, gpu):
    x, params = normal(gpu, heads, rows)
    first = launch(x, params, schedule)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(launch(x, params, schedule), first, strict=True))


@pytest.mark.parametrize(("schedule", "heads", "rows"), EITHER)
def test_a_request_alone_and_among_nan(schedule, heads, rows, gpu):
    """At every place; rows beyond the last live one are NaN as well."""
    x, params = normal(gpu, heads, rows)
    whole, _ = launch(x, params, schedule)
    for row in {0, 1, rows // 2, rows - 1}:
        memory = torch.full((rows + 3, 2112), torch.nan, dtype=torch.bfloat16, device=gpu)
        qkv = memory[:rows]
        qkv[row] = x["qkv"][row, :2112]
        among, cache = launch(x | {"qkv": qkv}, params, schedule)
        alone, _ = launch(x | {name: x[name][row : row + 1] for name in ("qkv", "slots")}, params, schedule)
        assert torch.equal(among[row], whole[row])
        assert torch.equal(alone[0], whole[row])
        others = torch.arange(rows, device=gpu) != row
        assert bool((among[others] == 0x7F).all())
        slot = int(x["slots"][row])
        assert not bool((cache.flatten(0, 1)[slot] == 0x7F).any())


@pytest.mark.parametrize(("schedule", "heads", "rows"), EITHER)
def test_requests_in_any_order(schedule, heads, rows, gpu):
    x, params = normal(gpu, heads, rows)
    output, cache = launch(x, params, schedule)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(gpu)
    moved, same = launch(x | {name: x[name][order] for name in ("qkv", "slots")}, params, schedule)
    assert torch.equal(moved, output[order])
    assert torch.equal(same, cache)


def test_cache_of_float8(gpu):
    for rows in (2, 20):
        x, params = normal(gpu, 1, rows)
        as_float = x | {"cache": x["cache"].view(torch.float8_e4m3fn)}
        for a, b in zip(launch(as_float, params, None), launch(x, params, None), strict=True):
            assert torch.equal(a, b)


# Launching.


@pytest.mark.parametrize("weights_complete", [False, True])
@pytest.mark.parametrize(("schedule", "heads", "rows"), EITHER)
def test_graph_replay_with_changed_inputs(schedule, heads, rows, weights_complete, gpu):
    """Two launches a graph on one output and one cache, the second with programmatic dependent launch or without."""
    x, params = normal(gpu, heads, rows)
    out = torch.empty(rows, heads, 576, dtype=torch.uint8, device=gpu)
    options = {"eps": params["eps"], "schedule": schedule, "out": out, "weights_complete": weights_complete}
    module.mla_query(**x, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            module.mla_query(**x, **options)
    for round_ in range(13):
        fresh_x, _ = normal(gpu, heads, rows, seed=100 + round_)
        for name in ("qkv", "slots", "cache", "w_qa", "w_kva"):
            x[name].copy_(fresh_x[name])
        want = reference.exact(fresh_x, params, schedule)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, want["output"])
        assert torch.equal(x["cache"], want["cache"])


def test_other_stream(gpu):
    x, params = normal(gpu, 12, 3)
    want = reference.exact(x, params, "small")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output, cache = launch(x, params, "small")
    stream.synchronize()
    assert torch.equal(output, want["output"])
    assert torch.equal(cache, want["cache"])


def test_custom_operators(gpu):
    x, params = normal(gpu, 1, 3)
    tensors = [x[name] for name in module.INPUTS]
    out = torch.empty(3, 1, 576, dtype=torch.uint8, device=gpu)
    options = (params["eps"], "small", False, False)
    torch.library.opcheck(torch.ops.goldens.mla_query, (*tensors, out, *options))
    box = dcp.Mailbox([dcp.Mailbox.empty(1, 1, 3, gpu)], 0, polls=100)
    rest = (box.buffers, box.state, box.status, box.rank, box.polls)
    # Each call is another round of the mailbox.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.goldens.mla_query_dcp, (*tensors, out, *rest, *options), test_utils=tests)


READ = [name for name in module.INPUTS if name != "cache"]
WEIGHTS = ("w_qa", "w_kva", "w_qb", "w_uk")


def behind_a_late_writer(gpu, name, schedule, rows, **options):
    """(output, cache) of the kernel, launched behind a writer of argument ``name`` that lets it start at once; what
    they should be, and what they are of the argument as it was before."""
    cases = [make_case(1, rows, pages=PAGES, page_size=PAGE_SIZE, seed=seed) for seed in (1, 2)]
    (x, fresh), params = (drawn(case, gpu) for case in cases), cases[0].params
    # Every seed has the same large weights and scales.
    fresh |= {key: -x[key] for key in ("w_qb", "w_uk")} | {key: 2 * x[key] for key in ("q_scale_inv", "k_scale_inv")}
    wanted = [reference.exact(x | {name: y[name]}, params, schedule) for y in (fresh, x)]
    given, out = {key: t.clone() for key, t in x.items()}, torch.empty(rows, 1, 576, dtype=torch.uint8, device=gpu)
    options |= {"eps": params["eps"], "schedule": schedule}
    # Nothing else may stand between the two launches, so compile and load before.
    module.mla_query(**{key: t.clone() for key, t in x.items()}, **options)
    write_late(given[name], given[name])
    torch.cuda.synchronize()
    write_late(given[name], fresh[name])
    module.mla_query(**given, **options, out=out)
    return (out, given["cache"]), *((want["output"], want["cache"]) for want in wanted)


def equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("schedule", "rows"), [("small", 2), ("tiled", 9)])
@pytest.mark.parametrize("name", READ)
def test_any_argument_may_come_from_the_launch_before(name, schedule, rows, gpu):
    got, want, stale = behind_a_late_writer(gpu, name, schedule, rows)
    assert not equal(want, stale)
    assert equal(got, want)


ATTEMPTS = 10  # of the promise: other work on the GPU may keep two launches apart


@pytest.mark.parametrize(("schedule", "rows"), [("small", 2), ("tiled", 9)])
@pytest.mark.parametrize("name", READ)
def test_by_the_promise_the_weights_are_read_at_once(name, schedule, rows, gpu):
    """So the late writer is late; and everything else is waited for."""
    attempts = (behind_a_late_writer(gpu, name, schedule, rows, weights_complete=True) for _ in range(ATTEMPTS))
    if name in WEIGHTS:
        assert any(equal(got, stale) for got, _, stale in attempts)
    else:
        assert all(equal(got, want) for got, want, _ in attempts)


# Decode context parallelism.


def foreign(ranks, heads, rows, seed, gpu):
    """Other ranks' bytes: any but 0xff."""
    generator = torch.Generator(gpu).manual_seed(seed)
    shape = (rows, ranks * heads, 576)
    return torch.randint(0, 255, shape, dtype=torch.uint8, device=gpu, generator=generator)


def boxes(ranks, heads, capacity, rank, gpu, polls=POLLS):
    return dcp.Mailbox([dcp.Mailbox.empty(ranks, heads, capacity, gpu) for _ in range(ranks)], rank, polls)


def block(rank, heads):
    return slice(rank * heads, (rank + 1) * heads)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("schedule", "heads", "rows"), EITHER)
def test_gather(schedule, heads, rows, ranks, gpu):
    """Three rounds of different B: own mailbox, the other ranks', what is armed again, output and cache."""
    rank = ranks - 1
    box = boxes(ranks, heads, rows + 1, rank, gpu)
    others = [i for i in range(ranks) if i != rank]
    for round_, some in enumerate((rows, max(1, rows // 2), rows)):
        x, params = normal(gpu, heads, some, seed=10 + round_)
        want = foreign(ranks, heads, some, round_, gpu)
        dcp.publish_others(want, box)
        output, cache = launch(x, params, schedule, mailbox=box)
        exact = reference.exact(x, params, schedule)
        want[:, block(rank, heads)] = exact["output"]
        box.check()
        assert_bits("output", output, exact["output"])
        assert_bits("cache", cache, exact["cache"])
        assert_bits("gathered", box.gathered(some), want)
        half, other = round_ % 2, 1 - round_ % 2
        assert bool((box.buffers[rank][half, some:] == 0xFF).all())
        assert bool((box.buffers[rank][other] == 0xFF).all()), "the half of the round before is armed again"
        for i in others:
            assert torch.equal(box.buffers[i][half, :some, block(rank, heads)], exact["output"])
            outside = box.buffers[i].clone()
            outside[half, :some, block(rank, heads)] = 0xFF
            assert bool((outside == 0xFF).all())
            box.buffers[i].fill_(0xFF)


def test_a_publisher_that_is_missing_ends_the_wait(gpu):
    x, params = normal(gpu, 12, 2)
    box = boxes(2, 12, 2, 0, gpu, polls=2000)
    want = foreign(2, 12, 2, 1, gpu)
    dcp.publish_others(want, box)
    box.buffers[0].view(torch.int32)[0, 1, 20, 77] = -1
    output, _ = launch(x, params, "small", mailbox=box)
    with pytest.raises(TimeoutError, match="mailbox: a word was not published within 2000 reads"):
        box.check()
    assert_bits("output", output, reference.exact(x, params, "small")["output"])


class Rounds:
    """Publisher → mla_query → check, round after round, in a graph of an even number of rounds.

    The publisher is an ordinary launch behind the last check, the other two start early. The check counts wrong words
    of output and of all mailboxes, the own one's other half included, and empties the other ranks' mailboxes.
    """

    def __init__(self, gpu, schedule, heads, rows, ranks, rank):
        self.schedule, self.rank, self.heads, self.gpu = schedule, rank, heads, gpu
        self.box = boxes(ranks, heads, rows + 1, rank, gpu)
        self.empty = self.box.buffers[0].clone()
        self.x, self.foreign, self.want = [], [], []
        for i in range(ROUNDS_A_GRAPH):
            x, params = normal(gpu, heads, rows, seed=500 + i)
            self.params = params
            bytes_ = foreign(ranks, heads, rows, i, gpu)
            output = reference.exact(x, params, schedule)["output"]
            own, peer = self.empty.clone(), self.empty.clone()
            own[i % 2, :rows] = bytes_
            own[i % 2, :rows, block(rank, heads)] = output
            peer[i % 2, :rows, block(rank, heads)] = output
            self.x.append(x)
            self.foreign.append(bytes_)
            self.want.append([output, *(own if other == rank else peer for other in range(ranks))])
        self.output = torch.full((rows, heads, 576), POISON, dtype=torch.uint8, device=gpu)
        self.poison = self.output.clone()
        self.wrong = torch.zeros(1, dtype=torch.int32, device=gpu)

    def round(self, i):
        """Round i, with other delays each."""
        dcp.publish_others(self.foreign[i], self.box, delay_ns=(0, 100, 700, 2000)[i % 4])
        options = {"schedule": self.schedule, "out": self.output, "mailbox": self.box, "weights_complete": True}
        module.mla_query(**self.x[i], eps=self.params["eps"], **options)
        back = [None if other == self.rank else self.empty for other in range(len(self.box.buffers))]
        on_device.check([self.output, *self.box.buffers], self.want[i], [self.poison, *back], self.wrong)


@pytest.mark.parametrize(
    ("schedule", "heads", "rows", "ranks", "rank"),
    [("small", 12, 2, 2, 0), ("small", 6, 5, 8, 7), ("tiled", 12, 17, 4, 1)],
)
def test_rounds_by_graph_replay(schedule, heads, rows, ranks, rank, gpu):
    """10,000 rounds of alternating parity and changing inputs."""
    rounds = Rounds(gpu, schedule, heads, rows, ranks, rank)
    for i in range(ROUNDS_A_GRAPH):
        rounds.round(i)
    rounds.box.check()
    assert int(rounds.wrong) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(ROUNDS_A_GRAPH):
            rounds.round(i)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    rounds.box.check()
    assert int(rounds.wrong) == 0
    assert int(rounds.box.state[0]) == ROUNDS_A_GRAPH * (REPLAYS + 1)


def test_the_check_of_rounds_notices_a_wrong_word(gpu):
    rounds = Rounds(gpu, "small", 1, 1, 2, 0)
    rounds.want[0] = rounds.want[2]
    rounds.round(0)
    assert int(rounds.wrong) > 0
