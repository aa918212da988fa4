"""AttnRes' kernels on the GPU: equal to their goldens and to the exact model, bit for bit, and invariant.

The chains at the end hand rows over through a mailbox while publisher and reader overlap; every wait is bounded.
"""

import pytest
import torch

import goldens
from cute_impl import attn_res as module
from cute_impl.attn_res import mailbox
from cute_impl.attn_res.cluster7 import SCHEDULES, SENTINEL, D
from cute_impl.probes_launch import write_late
from goldens import store
from goldens.attn_res import RECIPES, make_case
from goldens.compare import against_exact
from goldens.judge import judge, select
from reference import attn_res as reference
from tools import candidates

pytestmark = pytest.mark.hopper

KERNEL = goldens.KERNELS["attn_res"]
CASES = [(case, schedule) for case in KERNEL.cases for schedule in case.schedules]
COMMITTED = [pair for pair in CASES if pair[0].committed]
ON_DEMAND = [pair for pair in CASES if not pair[0].committed]
FRESH_TOKENS = 32  # 16 recipes × 7 variants × 32 tokens × 7168 columns: 25.7 million outputs
VARIANTS = {
    "nb0": ("cluster7", {"nb": 0, "write": 0}),
    "nb1": ("cluster7", {"nb": 1}),
    "nb4-slots2": ("cluster7", {"nb": 4, "slots": 2, "capacity": FRESH_TOKENS + 1, "write": 1, "aux": 1}),
    "nb3-replace": ("cluster7", {"nb": 3, "rows": 5, "slots": 1, "has_delta": False, "write": 4}),
    "nb8-final": ("cluster7", {"nb": 8, "final": True, "write": 7}),
    "nb8-direct": ("cluster7_direct", {"nb": 8, "rows": 9}),
    "nb2-direct-slots3": ("cluster7_direct", {"nb": 2, "slots": 3, "aux": 2}),
}
ROUNDS_A_GRAPH, REPLAYS = 8, 1250


def ident(value):
    return value.id if hasattr(value, "id") else None


def drawn(case, gpu):
    return {name: x.to(gpu) for name, x in KERNEL.inputs(case).items()}


def run_clone(inputs, params, schedule="cluster7"):
    return module.run({name: x.clone() for name, x in inputs.items()}, params, schedule)


def bits(x):
    return x.contiguous().view(torch.int16)


def assert_same(got, want):
    """Every output bit for bit; returns how many elements of output were compared."""
    assert got.keys() == want.keys()
    for name, wish in want.items():
        verdict = against_exact(name, got[name], wish)
        assert verdict.passed, (name, verdict.reason, verdict.worst)
    return want["output"].numel()


def assert_exact(inputs, params, schedule="cluster7"):
    return assert_same(run_clone(inputs, params, schedule), reference.exact(inputs, params, schedule))


def normal(gpu, nb=2, tokens=4, seed=1, **options):
    case = make_case(nb, tokens, seed=seed, **options)
    return drawn(case, gpu), dict(case.params)


# Goldens and fresh inputs.


@pytest.mark.parametrize(("case", "schedule"), COMMITTED, ids=ident)
def test_committed_goldens(case, schedule):
    golden = store.load(case, store.read_manifest())
    candidate = candidates.ours("attn_res", schedule)
    verdicts = judge(KERNEL, case, golden, candidate(select(golden, "in/"), case.params), schedule)
    assert [(v.output, v.against, v.reason, v.worst) for v in verdicts if not v.passed] == []
    assert {v.against for v in verdicts} >= {"exact"}


@pytest.mark.parametrize(("case", "schedule"), ON_DEMAND, ids=ident)
def test_large_goldens_by_digest(case, schedule, gpu):
    """The CPU wrote the digests; the model on CUDA tensors and the kernel must both meet them."""
    digests = select(store.read_manifest()[case.id]["sha256"], f"exact/{schedule}/")
    inputs = drawn(case, gpu)
    for outputs in (reference.exact(inputs, case.params, schedule), run_clone(inputs, case.params, schedule)):
        assert {name: store.digest(outputs[name]) for name in digests} == digests


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fresh_seeds(recipe, variant, gpu):
    schedule, options = VARIANTS[variant]
    case = make_case(recipe=recipe, tokens=FRESH_TOKENS, seed=20260, **options)
    assert assert_exact(drawn(case, gpu), case.params, schedule) == FRESH_TOKENS * D


@pytest.fixture(scope="module", params=[1, 2, 16, 64, 1000, 4096])
def sized(request, gpu):
    """Inputs and parameters for a number of tokens."""
    return normal(gpu, nb=1, tokens=request.param, slots=2, write=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_token_counts(sized, schedule):
    assert_exact(*sized, schedule)


@pytest.mark.parametrize("nb", range(9))
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_number_of_blocks(schedule, final, nb, gpu):
    assert_exact(*normal(gpu, nb=nb, tokens=16, final=final), schedule)


def test_no_tokens(gpu):
    x, params = normal(gpu, tokens=2)
    none = {name: t[:0] if name in ("delta", "prefix", "blocks") else t for name, t in x.items()}
    assert module.run(none, params)["output"].shape == (0, D)


# Invariance.


def test_same_call_twice(gpu):
    x, params = normal(gpu, nb=8, tokens=16)
    first = run_clone(x, params)
    for _ in range(20):
        assert_same(run_clone(x, params), first)


@pytest.mark.parametrize("slots", [0, 2])
def test_a_token_alone_and_among_nan(slots, gpu):
    x, params = normal(gpu, nb=3, tokens=5, slots=slots, write=1)
    whole = run_clone(x, params)
    poisoned = {name: t.clone() for name, t in x.items()}
    for name in ("delta", "prefix", "blocks"):
        tokens = poisoned[name].movedim(1, 0) if name == "delta" and slots else poisoned[name]
        tokens[:2], tokens[3:] = torch.nan, torch.nan
    among = run_clone(poisoned, params)
    alone = {n: t[:, 2:3] if n == "delta" and slots else t[2:3] if t.dim() > 1 else t for n, t in x.items()}
    single = run_clone({name: t.contiguous() for name, t in alone.items()}, params)
    for name in ("output", "prefix", "blocks"):
        assert torch.equal(bits(among[name][2]), bits(whole[name][2]))
        assert torch.equal(bits(single[name][0]), bits(whole[name][2]))


def strided(x, gpu):
    """The blocks on other strides, with the memory around them."""
    tokens, rows, _ = x.shape
    memory = torch.full((tokens + 1, rows + 2, D + 24), torch.nan, dtype=x.dtype, device=gpu)
    padded = memory[:tokens, 1 : rows + 1, 8 : D + 8]
    swapped = torch.full((rows + 1, tokens, D), torch.nan, dtype=x.dtype, device=gpu)
    result = [(padded, memory), (swapped[:rows].transpose(0, 1), swapped)]
    for view, _ in result:
        view.copy_(x)
    return result


@pytest.mark.parametrize("nb", [0, 2])
def test_strides_and_untouched_memory(nb, gpu):
    x, params = normal(gpu, nb=nb, rows=4, tokens=6, write=3)
    want = reference.exact(x, params, "cluster7")
    for view, memory in strided(x["blocks"], gpu):
        prefix = torch.full((6, D + 8), torch.nan, dtype=torch.bfloat16, device=gpu)
        prefix[:, :D] = x["prefix"]
        before, outside = memory.clone(), torch.ones_like(memory, dtype=torch.bool)
        outside.as_strided(view.shape, view.stride(), view.storage_offset())[:, 3] = False
        arguments = x | {"blocks": view, "prefix": prefix[:, :D]}
        assert_same(module.run(arguments, params, "cluster7"), want)
        assert torch.equal(bits(memory)[outside], bits(before)[outside])
        assert bool(prefix[:, D:].isnan().all())


def test_output_beside_the_saved_rows(gpu):
    x, params = normal(gpu, nb=3, tokens=5)
    want = reference.exact(x, params, "cluster7")
    rows = torch.full((5, 5, D), torch.nan, dtype=torch.bfloat16, device=gpu)
    rows[:, :3] = x["blocks"]
    options = {name: value for name, value in params.items() if name != "aux"}
    arguments = {name: t.clone() for name, t in x.items()} | {"blocks": rows[:, :3]}
    module.attn_res(**arguments, **options, out=rows[:, 3], aux=[rows[:, 4]])
    assert torch.equal(bits(rows[:, :3]), bits(x["blocks"]))
    assert torch.equal(bits(rows[:, 3]), bits(want["output"]))
    assert torch.equal(bits(rows[:, 4]), bits(want["prefix"]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_direct_is_finite_where_the_quad_form_cancels(schedule, gpu):
    case = make_case(1, 256, "opposing-sources", seed=9)
    x = drawn(case, gpu)
    assert_exact(x, case.params, schedule)
    finite = bool(run_clone(x, case.params, schedule)["output"].isfinite().all())
    assert finite == (schedule == "cluster7_direct")


@pytest.mark.parametrize("nb", [0, 1])
def test_epsilons_are_rounded_to_fp32(nb, gpu):
    x, params = normal(gpu, nb=nb)
    x |= {name: x[name] * 2.0**-12 for name in ("delta", "prefix", "blocks")}
    held = params | {"eps": torch.tensor(1e-6).item(), "out_eps": torch.tensor(1e-5).item()}
    assert_same(run_clone(x, params | {"eps": 1e-6, "out_eps": 1e-5}), reference.exact(x, held, "cluster7"))


# Launching.


@pytest.mark.parametrize("early", [False, True])
def test_graph_replay_with_changed_inputs(early, gpu):
    x, params = normal(gpu, nb=4, tokens=8, write=2)
    options = {name: value for name, value in params.items() if name != "aux"} | {"all_but_delta_complete": early}
    out, copy = torch.empty_like(x["prefix"]), torch.empty_like(x["prefix"])
    module.attn_res(**x, **options, out=out, aux=[copy])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.attn_res(**x, **options, out=out, aux=[copy])
    for round_ in range(16):
        fresh, _ = normal(gpu, nb=4, tokens=8, seed=100 + round_, write=2)
        for name, t in x.items():
            t.copy_(fresh[name])
        graph.replay()
        got = {"output": out, "prefix": x["prefix"], "blocks": x["blocks"]}
        assert_same(got, reference.exact(fresh, params, "cluster7"))
        assert torch.equal(bits(copy), bits(x["prefix"]))


def test_other_stream(gpu):
    x, params = normal(gpu)
    want = run_clone(x, params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run_clone(x, params)
    stream.synchronize()
    assert_same(got, want)


def test_custom_operators(gpu):
    x, params = normal(gpu, nb=2, tokens=3, rows=3, write=2)
    names = ("delta", "prefix", "blocks", "norm", "query", "gamma")
    tensors = [*(x[name] for name in names), torch.empty_like(x["prefix"]), [torch.empty_like(x["prefix"])]]
    parameters = [2, True, 2, False, params["eps"], params["out_eps"], "cluster7", False]
    torch.library.opcheck(torch.ops.goldens.attn_res, (*tensors, *parameters))
    y, params = normal(gpu, nb=2, tokens=3, rows=3, write=2, slots=2)
    tensors = [*(y[name] for name in names), torch.empty_like(y["prefix"]), []]
    status = torch.zeros(4, dtype=torch.int32, device=gpu)
    # The rows are sent once: a second call waits for others, to the bound.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.goldens.attn_res_mailbox, (*tensors, status, 100, *parameters), test_utils=tests)


READ = ("delta", "prefix", "blocks", "norm", "query", "gamma")


def behind_a_late_writer(gpu, name, slots=0, schedule="cluster7", **options):
    """The kernel's output, launched behind a writer of argument ``name`` that lets it start at once; the output that
    it should have, and that of the argument as it was before."""
    x, params = normal(gpu, nb=2, tokens=3, slots=slots, write=0)
    fresh, _ = normal(gpu, nb=2, tokens=3, slots=slots, write=0, seed=2)
    wanted = [reference.exact(x | {name: y[name]}, params, schedule)["output"] for y in (fresh, x)]
    options |= {key: value for key, value in params.items() if key != "aux"}
    given, output = {key: t.clone() for key, t in x.items()}, torch.empty_like(x["prefix"])
    # Nothing else may stand between the two launches, so compile and load before.
    module.attn_res(**{key: t.clone() for key, t in x.items()}, **options, schedule=schedule)
    write_late(given[name], given[name])
    torch.cuda.synchronize()
    write_late(given[name], fresh[name])
    module.attn_res(**given, **options, schedule=schedule, out=output)
    return output, *wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("name", READ)
def test_any_argument_may_come_from_the_launch_before(name, slots, schedule, gpu):
    got, want, stale = behind_a_late_writer(gpu, name, slots, schedule)
    assert not torch.equal(bits(want), bits(stale))
    assert torch.equal(bits(got), bits(want))


ATTEMPTS = 10  # of the promise: other work on the GPU may keep two launches apart


@pytest.mark.parametrize("name", READ)
def test_by_the_promise_all_but_delta_is_read_at_once(name, gpu):
    """So the late writer is late; and a delta tensor is waited for."""
    attempts = (behind_a_late_writer(gpu, name, all_but_delta_complete=True) for _ in range(ATTEMPTS))
    if name == "delta":
        assert all(torch.equal(bits(got), bits(want)) for got, want, _ in attempts)
    else:
        assert any(torch.equal(bits(got), bits(stale)) for got, _, stale in attempts)


def test_calls_back_to_back_on_one_prefix_and_its_blocks(gpu):
    """Each call reads the prefix and the source that the call before wrote."""
    x, params = normal(gpu, nb=3, tokens=300, write=1)
    options = {name: value for name, value in params.items() if name != "aux"}
    given, wanted = {name: t.clone() for name, t in x.items()}, dict(x)
    for _ in range(8):
        output = module.attn_res(**given, **options)
    for _ in range(8):
        outputs = reference.exact(wanted, params, "cluster7")
        wanted |= {name: outputs[name] for name in ("prefix", "blocks")}
    assert_same({"output": output, **{n: given[n] for n in ("prefix", "blocks")}}, outputs)


# Mailbox.


def test_a_row_that_never_comes_ends_the_wait(gpu):
    x, params = normal(gpu, tokens=2, slots=2)
    x["delta"].view(torch.int32)[1, 1, 3000] = SENTINEL
    with pytest.raises(TimeoutError, match="delta: a fragment was not published"):
        module.run(x, params)
    assert bool((x["delta"].view(torch.int32) == SENTINEL).all())


def test_negative_subnormals_are_no_sentinel(gpu):
    """The word 0x80010000: its halves are +0 and a negative subnormal, a flushing comparison takes it for −0."""
    x, params = normal(gpu, tokens=2, slots=2)
    x["delta"].view(torch.int32)[:] = SENTINEL + 0x10000
    assert_exact(x, params)


def test_publisher_sends_no_negative_zero(gpu):
    x, params = normal(gpu, tokens=3, slots=2)
    words = x["delta"].view(torch.int32)
    for i, word in enumerate((SENTINEL, SENTINEL + 0x8000, 0x8000, SENTINEL + 0x3F80, 0x3F808000, SENTINEL + 0x10000)):
        words[:, :, i::7] = word
    box = mailbox.empty_mailbox(2, 3, gpu)
    mailbox.publish(x["delta"], box)
    sent = torch.where(x["delta"] == 0, 0.0, x["delta"])
    assert torch.equal(bits(box), bits(sent))
    assert_same(
        module.run(x | {"delta": box, "prefix": x["prefix"].clone()}, params),
        reference.exact(x | {"delta": sent}, params, "cluster7"),
    )


class Chain:
    """Publisher → attn_res → check, round after round on the same mailbox, prefix, blocks and output.

    The first kernel of a round is an ordinary launch behind the last one's check, the other two start early. The check
    counts wrong words of all that was written, the mailbox included, and puts prefix and output back on the device.
    """

    def __init__(self, gpu, schedule, nb, tokens, slots):
        self.schedule = schedule
        rounds = [
            normal(gpu, nb=nb, tokens=tokens, rows=nb + 1, slots=slots, capacity=tokens, write=nb, seed=500 + i)
            for i in range(ROUNDS_A_GRAPH)
        ]
        self.params = rounds[0][1]
        self.x = rounds[0][0]
        self.rows = [x["delta"].clone() for x, _ in rounds]
        self.old, self.blocks = self.x["prefix"].clone(), self.x["blocks"].clone()
        given = [self.x | {"delta": rows} for rows in self.rows]
        self.want = [reference.exact(x, self.params, schedule) for x in given]
        self.empty = mailbox.empty_mailbox(slots, tokens + 1, gpu)
        self.x["delta"] = self.empty.clone()
        self.output = torch.full_like(self.old, torch.nan)
        self.poison = self.output.clone()
        self.status = torch.zeros(4, dtype=torch.int32, device=gpu)
        self.wrong = torch.zeros(1, dtype=torch.int32, device=gpu)

    def round(self, i):
        """Round i, with other delays each."""
        options = {name: value for name, value in self.params.items() if name != "aux"}
        mailbox.publish(self.rows[i], self.x["delta"], delay_ns=(0, 100, 700, 2000)[i % 4])
        module.attn_res(
            **self.x,
            **options,
            out=self.output,
            schedule=self.schedule,
            all_but_delta_complete=True,
            polls=module.BOUNDED_POLLS,
            status=self.status,
        )
        want = self.want[i]
        mailbox.check(
            [self.output, self.x["prefix"], self.x["blocks"], self.x["delta"]],
            [want["output"], want["prefix"], want["blocks"], self.empty],
            [self.poison, self.old, self.blocks, None],
            self.wrong,
        )

    def verdict(self):
        """Wrong words, and whether a wait was given up."""
        return int(self.wrong), int(self.status[0])


@pytest.mark.parametrize(("schedule", "nb", "tokens", "slots"), [("cluster7", 2, 4, 2), ("cluster7_direct", 8, 17, 1)])
def test_chain_by_graph_replay(schedule, nb, tokens, slots, gpu):
    chain = Chain(gpu, schedule, nb, tokens, slots)
    for i in range(ROUNDS_A_GRAPH):
        chain.round(i)
    assert chain.verdict() == (0, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(ROUNDS_A_GRAPH):
            chain.round(i)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    assert chain.verdict() == (0, 0)
    assert torch.equal(bits(chain.x["delta"]), bits(chain.empty))


def test_chain_notices_a_wrong_word(gpu):
    """The check itself: another round's wanted values must count as wrong."""
    chain = Chain(gpu, "cluster7", 1, 2, 1)
    chain.want[0] = chain.want[1]
    chain.round(0)
    wrong, given_up = chain.verdict()
    assert wrong > D
    assert given_up == 0
