"""AttnRes variants compiled for sm_90a without a GPU: PTX and SASS hold the roundings the exact model assumes.

Also the host side that needs no GPU: every refusal names its argument, no tokens return at once.
"""

import re
from collections import Counter

import pytest
import torch

from cute_impl import attn_res as module
from cute_impl.attn_res import cluster7, mailbox
from cute_impl.attn_res.cluster7 import COLUMNS, Config, D, lanes_a_value
from tools.disassemble import sass

CONFIGS = (
    # The shapes of the interface one by one, then the others pairwise.
    Config(nb=0),
    Config(nb=1),
    Config(nb=8),
    Config(nb=8, schedule="cluster7_direct"),
    Config(nb=8, final=True),
    Config(nb=8, slots=8, write=7, aux=2),
    Config(nb=0, slots=2, has_delta=False, write=0, final=True, aux=1),
    Config(nb=0, has_delta=False, aux=2, schedule="cluster7_direct"),
    Config(nb=1, slots=1, write=1, final=True, schedule="cluster7_direct"),
    Config(nb=1, slots=2, has_delta=False),
    Config(nb=2, has_delta=False, write=1, aux=1),
    Config(nb=3, slots=1, aux=2, schedule="cluster7_direct"),
    Config(nb=4, slots=4, write=0, final=True, aux=1),
    Config(nb=5, has_delta=False, write=7, schedule="cluster7_direct"),
    Config(nb=6, slots=2, final=True),
    Config(nb=7, slots=1, has_delta=False, write=2, aux=1),
)
# ptxas makes rcp.rn.f32 of a MUFU.RCP and Newton's steps, inline and once more where the operand is scaled.
RCP_FFMAS = 10


def name_of(config):
    flags = [f"nb{config.nb}", f"slots{config.slots}", "add" if config.has_delta else "set", f"write{config.write}"]
    return "-".join([*flags, *(["final"] if config.final else []), f"aux{config.aux}", config.schedule])


@pytest.fixture(scope="module", params=CONFIGS, ids=name_of)
def variant(request, tmp_path_factory):
    """(config, PTX, SASS, host code) of a variant."""
    folder = tmp_path_factory.mktemp("attn_res")
    compiled = cluster7.compile_variant(request.param, f"--keep-ptx --keep-cubin --dump-dir={folder}")
    return request.param, compiled.__ptx__, sass(compiled.__cubin__), str(compiled.ir_module)


def instructions(ptx):
    """PTX instructions by name."""
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)\s", ptx, re.MULTILINE))


def machine(text):
    """SASS instructions by name, up to the exit: what follows are loops and copies for warps that have diverged."""
    names = re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.MULTILINE)
    return Counter(names[: names.index("EXIT")])


def fold_steps(n):
    """Shuffles, and sums, of folding n values in a warp."""
    values, steps = 32 // lanes_a_value(n), 0
    for _ in range(5):
        values = max(1, values // 2)
        steps += values
    return steps


def expected(config):
    """Roundings a thread makes, by the spec."""
    nb, own, quad = config.nb, config.own_norm, config.nb > 0 and not config.own_norm
    rows = nb > 0
    folds = sum(fold_steps(n) for n in config.exchanges)
    collects = len(config.exchanges)
    dots = 2 * nb + (4 if quad else 3 if own else 1)
    doublings = (nb - 1).bit_length() if rows else 0
    return {
        # dot8; the mixture; rstd; den, quad, r
        "fma.rn.f32": COLUMNS * (dots + nb) + (3 if rows else 1) + rows * (1 + COLUMNS) + 2 * quad,
        # w; logits, exponentials; quad and its eps; a, e and r; direct norm; gamma
        "mul.rn.f32": rows * (COLUMNS + 2 + 3 + 2 + COLUMNS) + 7 * quad + COLUMNS * (own or not rows) + COLUMNS,
        # fold; collect: three sums of four warps and one link a rank, even + odd; slots; prefix; sum of e
        "add.rn.f32": folds + collects * (4 * 4 + 1) + COLUMNS * (config.slots + config.has_delta) + nb,
        "sub.rn.f32": 3 * rows,
        "max.f32": doublings + rows,
        "ex2.approx.ftz.f32": 3 * rows,
        "rsqrt.approx.ftz.f32": 3 if rows else 1,
        "rcp.rn.f32": int(own),
        # p; output; the slots' sum; the final mixture
        "cvt.rn.bf16x2.f32": COLUMNS // 2 * (2 + (config.slots > 1) + (config.final and rows)),
        "shfl.sync.bfly.b32": folds + collects + rows + doublings,
        # e of each block, sums of the post-phase; one more tells ptxas that shared memory's address is uniform
        "shfl.sync.idx.b32": nb + (config.exchanges[-2 if own else -1] if rows else 0) + 1,
    }


def test_ptx_spells_every_rounding(variant):
    config, ptx, *_ = variant
    found, wanted = instructions(ptx), expected(config)
    assert {name: found[name] for name in wanted} == wanted


def test_ptx_has_no_other_float_arithmetic(variant):
    config, ptx, *_ = variant
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32)(x2)?\b", name)}
    assert floating <= {*expected(config), "selp.f32", "mov.f32"}


def test_sass_contracts_nothing(variant):
    """As many FMUL, FADD and FFMA as PTX has products, sums and FMAs, apart from those of one correct reciprocal."""
    config, ptx, text, _ = variant
    found, made = instructions(ptx), machine(text)
    extra = made["FFMA"] - found["fma.rn.f32"]
    assert extra == 0 or (config.own_norm and 0 < extra + made["FFMA.RP"] + made["FFMA.RM"] <= RCP_FFMAS)
    assert made["FADD"] == found["add.rn.f32"] + found["sub.rn.f32"]
    assert made["FMUL"] == found["mul.rn.f32"]
    assert made["MUFU.EX2"] == found["ex2.approx.ftz.f32"]
    assert made["MUFU.RSQ"] == found["rsqrt.approx.ftz.f32"]
    assert (made["MUFU.RCP"] > 0) == config.own_norm
    assert made["F2FP.BF16.F32.PACK_AB"] == found["cvt.rn.bf16x2.f32"]


def test_nothing_spills(variant):
    *_, text, _ = variant
    assert not re.search(r"\b(LDL|STL)\b", text)


def test_registers(variant):
    """Few enough that all CTAs of 64 tokens find a place on 132 SMs at once: 4 on each, 5 for nb ≤ 8 without slots."""
    config, _, text, _ = variant
    highest = max(int(n) for n in re.findall(r"\bR(\d+)\b", text))
    assert highest < (102 if config.slots <= 4 else 170)


def test_shared_memory_cluster_and_threads(variant):
    config, ptx, _, host = variant
    data = 112 * sum(config.exchanges)
    assert f"constant({data + 8 * len(config.exchanges)} : i64)" in host
    seven = re.search(r"(%\d+) = llvm\.mlir\.constant\(7 : i32\)", host)[1]
    assert re.search(rf"llvm\.mul %arg\d+, {seven} : i32", host), "the grid is 7 CTAs a token"
    assert re.search(rf"llvm\.store {seven}, %\d+ : i32", host), "the cluster is 7 CTAs"
    assert re.search(r"\.reqntid 128, 1, 1", ptx)
    assert ".target sm_90a" in ptx


def test_memory_traffic(variant):
    """Each row once, 16 bytes a thread; the mailbox by strong loads, twice in the code: at first and again."""
    config, ptx, *_ = variant
    found = instructions(ptx)
    weights = 3 if config.nb else 1
    assert found["ld.global.v4.b32"] == config.nb + weights + config.has_delta + (config.slots == 0)
    assert found["ld.relaxed.sys.global.v4.b32"] == 2 * config.slots
    status = 1 if config.slots else 0
    copies = 1 + config.aux + (config.write >= 0)
    assert found["st.global.v4.b32"] == 1 + copies + config.slots + status


def test_successor_starts_in_time_and_predecessor_is_waited_for(variant):
    """The successor may start first of all, or before the exchange, or behind the wait; one wait: before the delta
    tensor, or last."""
    config, ptx, text, _ = variant
    assert ptx.count("griddepcontrol.launch_dependents;") == 2
    assert ptx.count("griddepcontrol.wait;") == 1
    order = re.findall(r"(PREEXIT|ACQBULK|LDG\.E\.128(?:\.STRONG\.SYS)?|STG\.E\.128)", text)
    assert order[0] == "PREEXIT"
    assert ("PREEXIT" in order[1 : order.index("ACQBULK")]) != config.in_pairs
    after = [name for name in order[order.index("ACQBULK") :] if name != "PREEXIT"]
    if config.slots:
        assert after == ["ACQBULK"]
    else:
        assert after.count("LDG.E.128") == 1
        assert "STG.E.128" not in order[: order.index("ACQBULK")]


def test_first_reads_of_all_slots_are_in_flight_together(variant):
    config, _, text, _ = variant
    if config.slots:
        strong = [m.start() for m in re.finditer(r"LDG\.E\.128\.STRONG\.SYS", text)]
        first_wait = text.index("SYNCS.PHASECHK")
        assert len(strong) == 2 * config.slots
        assert sum(at < first_wait for at in strong) == config.slots or config.nb == 0


def test_the_test_kernels_compile(tmp_path):
    options = f"--keep-ptx --dump-dir={tmp_path}"
    publish = instructions(mailbox.compile_publish(options).__ptx__)
    assert publish["st.relaxed.sys.global.v4.b32"] == 1
    check = instructions(mailbox.compile_check(3, options).__ptx__)
    assert check["red.relaxed.gpu.global.add.u32"] == 1


# The host side.


def tensors(tokens=2, rows=3, **changed):
    bf16 = torch.bfloat16
    shapes = {"delta": (tokens, D), "prefix": (tokens, D), "blocks": (tokens, rows, D)}
    shapes |= dict.fromkeys(("norm", "query", "gamma"), (D,))
    return {name: torch.zeros(shape, dtype=bf16) for name, shape in shapes.items()} | changed


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


REFUSALS = {
    "width": ({"norm": zeros(D - 8)}, {}, r"norm: got width 7160, allowed is D = 7168"),
    "dims": ({"prefix": zeros(D)}, {}, r"prefix: got shape \(7168,\), allowed is \[T, D\]"),
    "dtype": ({"query": zeros(D, dtype=torch.float16)}, {}, r"query: got torch.float16, allowed is torch.bfloat16"),
    "device": ({"gamma": zeros(D).to("meta")}, {}, r"gamma: is on meta, prefix on cpu"),
    "tokens": ({"delta": zeros(3, D)}, {}, r"delta: got 3 tokens, prefix has 2"),
    "block tokens": ({"blocks": zeros(1, 3, D)}, {}, r"blocks: got 1 tokens, prefix has 2"),
    "columns": ({"blocks": zeros(2, 3, 2 * D)[..., ::2]}, {}, r"blocks: got strides .*, allowed are 1 for the columns"),
    "row stride": ({"blocks": zeros(2, 3, D + 4)[..., :D]}, {}, r"blocks: got strides .* multiples of 8 elements"),
    "token stride": ({"prefix": zeros(2, D + 1)[:, :D]}, {}, r"prefix: got strides \(7169, 1\)"),
    "address": (
        {"delta": zeros(2 * D + 8)[1 : 2 * D + 1].view(2, D)},
        {},
        r"delta: got address .*, allowed are multiples of 16",
    ),
    "weights": ({"norm": zeros(2 * D)[::2]}, {}, r"norm: got strides \(2,\) .*, allowed is contiguous"),
    "nb": ({}, {"nb": 4}, r"nb: got 4, blocks has R = 3 rows: allowed are 0 … R"),
    "nb range": ({}, {"nb": 9}, r"nb: got 9, allowed are whole numbers 0 … 8"),
    "nb kind": ({}, {"nb": True}, r"nb: got True, allowed are whole numbers"),
    "write": ({}, {"write": 3}, r"write: got 3, blocks has R = 3 rows: allowed are −1 … R − 1"),
    "write range": ({}, {"write": -2}, r"write: got -2, allowed are whole numbers from -1 on"),
    "slots": ({}, {"slots": -1}, r"slots: got -1, allowed are whole numbers from 0 on"),
    "mailbox dims": ({}, {"slots": 2}, r"delta: got shape \(2, 7168\), allowed is \[slots, capacity, D\]"),
    "mailbox slots": (
        {"delta": zeros(3, 4, D)},
        {"slots": 2},
        r"delta: got shape \(3, 4, 7168\), allowed .* slots = 2",
    ),
    "capacity": ({"delta": zeros(2, 1, D)}, {"slots": 2}, r"delta: got shape \(2, 1, 7168\), .* capacity at least 2"),
    "has_delta": ({}, {"has_delta": 1}, r"has_delta: got 1, allowed are True and False"),
    "final": ({}, {"final": None}, r"final: got None, allowed are True and False"),
    "eps": ({}, {"eps": 0.0}, r"eps: got 0.0, allowed is a number from"),
    "eps subnormal": ({}, {"eps": 1e-40}, r"eps: got 1e-40, allowed is a number from"),
    "eps too large": ({}, {"eps": 10**400}, r"eps: got 10+, allowed is a number from"),
    "out_eps": ({}, {"out_eps": float("nan")}, r"out_eps: got nan, allowed is a number from"),
    "promise": ({}, {"all_but_delta_complete": 1}, r"all_but_delta_complete: got 1, allowed are True and False"),
    "polls": ({}, {"polls": -1}, r"polls: got -1, allowed are 0"),
    "schedule": ({}, {"schedule": "cluster8"}, r"schedule: got 'cluster8', allowed are cluster7, cluster7_direct"),
    "out": ({}, {"out": zeros(2, D - 8)}, r"out: got width 7160"),
    "aux": ({}, {"aux": [zeros(2, D), zeros(3, D)]}, r"aux1: got 3 tokens, prefix has 2"),
    "status": ({}, {"status": zeros(4)}, r"status: got torch.bfloat16 \(4,\)"),
}


@pytest.mark.parametrize(("changed", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_argument(changed, options, message):
    with pytest.raises(ValueError, match=message):
        module.attn_res(**tensors(**changed), **options)


def test_output_may_lie_beside_the_rows_but_not_in_one():
    rows = zeros(2, 5, D)
    given = tensors(blocks=rows[:, :3])
    with pytest.raises(RuntimeError, match="sm_90"):  # accepted; there is no GPU here
        module.attn_res(**given, out=rows[:, 3], aux=[rows[:, 4]])
    for out in (rows[:, 2], given["prefix"], given["delta"]):
        with pytest.raises(ValueError, match=r"out: overlaps (blocks|prefix|delta)|prefix: overlaps out"):
            module.attn_res(**given, out=out)
    with pytest.raises(ValueError, match=r"aux0: overlaps blocks"):
        module.attn_res(**given, aux=[rows.flatten()[D // 2 : D // 2 + 2 * D].view(2, D)])


def test_written_rows_must_not_overlap_each_other():
    with pytest.raises(ValueError, match=r"blocks: got strides .*, its rows overlap"):
        module.attn_res(**tensors(blocks=zeros(1, 3, D).expand(2, 3, D)), write=0)
    with pytest.raises(RuntimeError, match="sm_90"):
        module.attn_res(**tensors(blocks=zeros(1, 3, D).expand(2, 3, D)))


def test_epsilons_need_not_be_fp32_numbers():
    with pytest.raises(RuntimeError, match="sm_90"):  # accepted; there is no GPU here
        module.attn_res(**tensors(), eps=1e-6, out_eps=1e-5)
    for value in (1e-6, 1e-5):
        assert module._normal_fp32("eps", value) == torch.tensor(value, dtype=torch.float32).item() != value


def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="tensors are on cpu; the kernels run on an sm_90 GPU"):
        module.attn_res(**tensors())


def test_no_tokens_return_at_once():
    """Before a GPU is asked for; what is wrong is still refused."""
    given = tensors(tokens=0)
    assert module.attn_res(**given).shape == (0, D)
    out = zeros(0, D)
    assert module.attn_res(**given, out=out) is out
    with pytest.raises(ValueError, match="nb: got 4"):
        module.attn_res(**given, nb=4)
