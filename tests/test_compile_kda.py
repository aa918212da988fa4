"""KDA compiled for sm_90a without a GPU, its address formulas, and its device functions run on the CPU, bit for bit.

Also the host side that needs no GPU: every refusal names its argument.
"""

import re
from collections import Counter
from itertools import pairwise

import pytest
import torch

import goldens
from cute_impl import kda as module
from cute_impl.attn_res import cluster7
from cute_impl.kda import chunk16, fla, layout, prepare, step
from cute_impl.kda.chunk16 import CLUSTERS, SLABS, Config
from cute_impl.kda.layout import CHUNK, D
from reference import kda as reference
from tests.warps import LANES, Warps, banks_of
from tools.disassemble import sass

SM_BYTES = 227 * 1024  # of shared memory that a CTA may have on sm_90
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@pytest.fixture(scope="module", params=CLUSTERS)
def variant(request, tmp_path_factory):
    """(config, PTX, SASS, host code) of a variant."""
    config = Config(request.param)
    options = f"--keep-ptx --keep-cubin --dump-dir={tmp_path_factory.mktemp('kda')}"
    compiled = chunk16.compile_variant(config, options)
    return config, compiled.__ptx__, sass(compiled.__cubin__), str(compiled.ir_module)


def instructions(ptx):
    """PTX instructions by name, those within braces on one line too."""
    return Counter(re.findall(r"(?:^\s+(?:@!?%p\d+ )?|; )([a-z][\w.:]*)\s", ptx, re.MULTILINE))


def machine(text):
    """SASS instructions by name."""
    return Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.MULTILINE))


# Two channels of 16 tokens a thread; a fold of 16 values takes 8 + 4 + 2 + 1 + 1 sums.
PAIRS = 2 * CHUNK
FOLD = 16
SOLVE = CHUNK * (CHUNK - 1) // 2
STATE = 64  # of a lane
EXPECTED = Counter(
    {
        # squares, gate, q̂ and q̂⁺, k̂, K⁺, k⁻, Kᵉ; decay of the state; a, bound, beta, r_q, L; R
        "mul.rn.f32": PAIRS * (1 + 2 + 2 + 1 + 1 + 1 + 1) + STATE + 2 + 1 + 1 + 1 + 6 + 8,
        # g + dt_bias, 1 + …, G but for the first; q's and k's folds; warps, eps; beta; W
        "add.rn.f32": PAIRS * 3 - 2 + 2 * FOLD + 2 + 1 + 8,
        # low parts of K⁻ and Kᵉ; R
        "sub.rn.f32": 2 * PAIRS + 8,
        "fma.rn.f32": PAIRS + SOLVE,
        "ex2.approx.ftz.f32": PAIRS * 3 + 2,
        "rcp.approx.ftz.f32": PAIRS + 1,
        "rsqrt.approx.ftz.f32": 1,
        # K⁺, Q⁺, both parts of K⁻ and Kᵉ; T, P; S_b, R, U, o; the last state
        "cvt.rn.bf16x2.f32": 6 * CHUNK + 4 + 3 + STATE // 2 + 3 * 4 + STATE // 2,
        # κ or π; W, o of S_b, U, o of U, S
        MMA: 32 + 16 + 16 + 2 + 2 + 32,
    }
)
# What a consumer's second slab of 16 rows of V adds.
SECOND_SLAB = Counter(
    {
        "mul.rn.f32": STATE + 8,
        "add.rn.f32": 8,
        "sub.rn.f32": 8,
        "cvt.rn.bf16x2.f32": STATE // 2 + 3 * 4 + STATE // 2,
        MMA: 16 + 16 + 2 + 2 + 32,
    }
)


def expected(config):
    return EXPECTED + SECOND_SLAB if config.slabs == 2 else EXPECTED


def test_ptx_spells_every_rounding(variant):
    config, ptx, *_ = variant
    found, want = instructions(ptx), expected(config)
    assert {name: found[name] for name in want} == dict(want)


def test_ptx_has_no_other_float_arithmetic(variant):
    _, ptx, *_ = variant
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32)(x2)?\b", name)}
    assert floating <= {*EXPECTED, "selp.f32", "mov.f32", "neg.f32"}
    assert "f32x2" not in ptx.replace("bf16x2.f32", "")


def test_sass_contracts_nothing(variant):
    config, _, text, _ = variant
    made, want = machine(text), expected(config)
    assert made["FMUL"] == want["mul.rn.f32"]
    assert made["FADD"] == want["add.rn.f32"] + want["sub.rn.f32"]
    assert made["FFMA"] == want["fma.rn.f32"]
    assert made["MUFU.EX2"] == want["ex2.approx.ftz.f32"]
    assert made["MUFU.RCP"] == want["rcp.approx.ftz.f32"] + 1, "one for the integer division by H"
    assert made["F2FP.BF16.F32.PACK_AB"] == want["cvt.rn.bf16x2.f32"]
    assert made["HMMA.16816.F32.BF16"] == want[MMA]


def test_nothing_spills(variant):
    *_, text, _ = variant
    assert not re.search(r"\b(LDL|STL)\b", text)


def highest_register(text):
    return max(int(n) for n in re.findall(r"\bR(\d+)\b", text))


def test_registers(variant):
    """With one CTA the roles have together what the launch gives, a multiple of 8 a thread, and whole warpgroups change
    theirs; else a thread has its share of the register file."""
    config, ptx, text, _ = variant
    highest = highest_register(text)
    if config.cluster == 1:
        launched = 65536 // config.threads // 8 * 8 * config.threads
        teams = 2 * config.teams
        assert config.consumers % 4 == teams % 4 == 0
        assert 32 * (config.consumers * chunk16.CONSUMER_REGISTERS + teams * chunk16.TEAM_REGISTERS) == launched
        assert highest < chunk16.CONSUMER_REGISTERS
        assert highest_register(text.partition("USETMAXREG.DEALLOC")[2]) < chunk16.TEAM_REGISTERS
        assert ptx.count("setmaxnreg") == 2
    else:
        assert highest < min(255, 65536 // config.threads)
        assert "setmaxnreg" not in ptx


def test_shared_memory_cluster_and_threads(variant):
    config, ptx, _, host = variant
    assert re.search(rf"\.reqntid {config.threads}, 1, 1", ptx)
    assert ".target sm_90a" in ptx
    assert f"constant({config.smem_bytes} : i64)" in host
    assert config.smem_bytes <= SM_BYTES
    assert config.stages % config.cluster == 0
    assert config.cluster * config.teams <= config.stages


def test_only_clusters_copy_and_arrive_remotely(variant):
    """None of it releases at cluster scope, which would wait for all memory; the barriers' set-up does, once."""
    config, ptx, *_ = variant
    found = instructions(ptx)
    many = int(config.cluster > 1)
    assert found["cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"] == many
    assert found["mbarrier.arrive.expect_tx.shared::cluster.b64"] == many
    assert found["mbarrier.arrive.shared::cluster.b64"] == many
    assert re.findall(r"\S*release\.cluster\S*", ptx) == ["fence.mbarrier_init.release.cluster;"]
    assert ptx.count("barrier.cluster.arrive;") == ptx.count("barrier.cluster.wait;") == 2 * many
    assert ptx.count("fence.proxy.async.shared::cta;") == many


def test_inputs_are_copied_asynchronously(variant):
    """q, k and g of 16 tokens by a team's 64 threads, before the loop and in it; the patches of v."""
    config, ptx, *_ = variant
    found = instructions(ptx)
    by_team = 2 * len(layout.RAW) * layout.OPERAND_BYTES // (16 * prepare.TEAM_THREADS)
    by_consumer = config.values * config.slabs
    assert sum(n for name, n in found.items() if name.startswith("cp.async.cg.")) == by_team + by_consumer
    assert found["cp.async.mbarrier.arrive.noinc.shared::cta.b64"] == 2


# Addresses.

OPERAND = torch.arange(CHUNK * D).view(CHUNK, D)  # an element is its own number
LANE = torch.arange(LANES)
ROW, COLUMN = LANE // 4, LANE % 4 * 2  # of a lane in fragments


def pair(x, row, column):
    """The word of x[row, column] and x[row, column + 1], for every lane."""
    return x[row, column] | x[row, column + 1] << 16


def in_memory(x, address):
    """Memory with the elements of x [rows, columns] in 16-byte units: address(row, unit) of 8."""
    warps = Warps(LANES, x.numel() * 2)
    for row in range(x.shape[0]):
        for unit in range(x.shape[1] // 8):
            where = address(row, unit)
            part = x[row, unit * 8 : unit * 8 + 8].to(torch.int16)
            warps.memory[where : where + 16] = part.contiguous().view(torch.uint8)
    return warps


@pytest.fixture(scope="module")
def operand():
    """Memory with an operand, written as the teams write it."""
    warps = Warps(D // 2, layout.OPERAND_BYTES)
    u = torch.arange(D // 2)
    for token in range(CHUNK):
        x = OPERAND[token]
        warps.st_b32("shared", layout.word_of_channels(u, token), x[2 * u] | x[2 * u + 1] << 16)
    return warps.part(0, LANES)


@pytest.mark.parametrize("block", range(D // 16))
def test_fragments_of_operands(block, operand):
    x = OPERAND[:, 16 * block : 16 * block + 16]
    a = operand.ldmatrix_x4(layout.block_of(layout.rows_by_16(LANE), block))
    want = [pair(x, ROW + i % 2 * 8, COLUMN + i // 2 * 8) for i in range(4)]
    assert all(map(torch.equal, a, want)), "A [token, channel]"
    b = operand.ldmatrix_x4(layout.block_of(layout.rows_by_8(LANE), block))
    want = [pair(x, ROW + i // 2 * 8, COLUMN + i % 2 * 8) for i in range(4)]
    assert all(map(torch.equal, b, want)), "B [channel, token]"
    b = operand.ldmatrix_x4_trans(layout.block_of(layout.rows_by_16(LANE), block))
    want = [pair(x.t(), ROW + i // 2 * 8, COLUMN + i % 2 * 8) for i in range(4)]
    assert all(map(torch.equal, b, want)), "B [token, channel]"


def test_fragments_of_patches():
    x = torch.arange(CHUNK * CHUNK).view(CHUNK, CHUNK)  # [token, row of V]
    warps = in_memory(x, layout.patch_row)
    got = warps.ldmatrix_x4_trans(layout.patch_rows_by_8(LANE))
    want = [pair(x.t(), ROW + i % 2 * 8, COLUMN + i // 2 * 8) for i in range(4)]
    assert all(map(torch.equal, got, want))
    other = Warps(LANES, layout.PATCH_BYTES)
    other.stmatrix_x4_trans(layout.patch_rows_by_8(LANE), got)
    assert torch.equal(other.memory, warps.memory)


def test_fragments_of_t_and_decay():
    t = torch.arange(CHUNK * CHUNK).view(CHUNK, CHUNK)
    warps = Warps(LANES, layout.FRAGMENT_BYTES)
    for i in range(CHUNK):
        warps.st_b16("shared", layout.t_element(i, LANE % CHUNK), t[i, LANE % CHUNK])
    want = [pair(t, ROW + i // 2 * 8, COLUMN + i % 2 * 8) for i in range(4)]
    assert all(map(torch.equal, warps.ld_v4("shared", LANE * 16), want))
    warps, u = Warps(D // 2, 4 * D), torch.arange(D // 2)
    warps.st_v2("shared", layout.decay_pair(u), [2 * u, 2 * u + 1])
    for block in range(D // 16):
        got = warps.part(0, LANES).ld_v4("shared", layout.decay_of_block(LANE, block))
        assert all(torch.equal(x, 16 * block + COLUMN + i // 2 * 8 + i % 2) for i, x in enumerate(got))


def test_columns_of_b():
    warps = Warps(LANES, 4 * CHUNK)
    warps.st_b32("shared", layout.b_element(LANE % CHUNK), LANE % CHUNK)
    got = warps.ld_v4("shared", LANE % 4 * 16)
    assert all(torch.equal(x, COLUMN + i // 2 * 8 + i % 2) for i, x in enumerate(got))


def test_no_bank_conflicts():
    """Matrices are read and written 8 rows at a time, which is a phase of 16-byte accesses."""
    rows = [layout.rows_by_16(LANE), layout.rows_by_8(LANE), layout.patch_rows_by_8(LANE)]
    assert [banks_of(layout.block_of(x, b), 16) for x in rows[:2] for b in range(8)] == [1] * 16
    assert banks_of(rows[2], 16) == banks_of(layout.patch_row(LANE // 2, LANE % 2), 16) == 1
    for token in range(CHUNK):
        assert banks_of(layout.word_of_channels(LANE, token), 4) == 1
    assert banks_of(layout.decay_pair(LANE), 8) == 1


def test_parts_lie_side_by_side():
    operands = [layout.K_PLUS, layout.Q_PLUS, layout.K_HIGH, layout.K_LOW]
    starts = [*operands, layout.T_AT, layout.P_AT, layout.DECAY_AT, layout.B_AT, layout.STAGE_BYTES]
    assert [b - a for a, b in pairwise(starts)] == [4096] * 4 + [512] * 3 + [256]
    assert all(x % 256 == 0 for x in (*operands, layout.STAGE_BYTES)), "block_of flips bits below 256"
    assert layout.SCRATCH_BYTES == layout.L_AT + CHUNK * layout.L_PITCH
    assert layout.SCRATCH_BYTES % 128 == layout.L_PITCH % 16 == 0
    assert layout.L_PITCH >= 4 * CHUNK


# The device functions on the CPU.


class OnCpu:
    """The kernel of one head and sequence but for its loops, copies and barriers."""

    def __init__(self, x, params, slabs, patch):
        self.x, self.params, self.slabs, self.patch = x, params, slabs, patch
        self.consumers = D // (slabs * step.SLAB)
        self.tokens = x["q"].shape[1]
        self.head = 0

    def row(self, name, token):
        return self.x[name][0, min(token, self.tokens - 1), self.head].contiguous()

    def prepare(self, team, chunk):
        """A stage at 0 of the team's memory."""
        scratch, left = layout.STAGE_BYTES, self.tokens - chunk * CHUNK
        team.install(self.patch, prepare, step, cluster7)
        u = torch.arange(team.threads)
        warp, lane = u // LANES, u % LANES
        for i, name in enumerate(layout.RAW):
            for token in range(CHUNK):
                where = scratch + i * layout.OPERAND_BYTES + token * layout.ROW_BYTES
                row = self.row(name, chunk * CHUNK + token).view(torch.uint8)
                team.memory[where : where + layout.ROW_BYTES] = row
        q, k, g = (prepare.raw_words(scratch, name, u) for name in layout.RAW)
        scale = torch.full((team.threads,), self.params["scale"])
        roots = prepare.write_roots(q, k, left, scale, scratch, warp, lane, None)
        k_minus, decay, rows = prepare.operands(q, k, g, roots, left, self.gates(u), 0, u)
        sums = prepare.scores(0, warp * layout.OPERAND_BYTES, lane)
        prepare.end_operand(k_minus, decay, rows, 0, u)

        team.part(0, LANES).install(self.patch, prepare, step, cluster7)
        logit = torch.stack([self.row("beta", chunk * CHUNK + i % CHUNK) for i in range(LANES)]).to(torch.float32)
        b = torch.where(left > LANE % CHUNK, prepare.sigmoid(logit), 0.0)
        prepare.solve([[x[:LANES] for x in n] for n in sums], b, 0, scratch, LANE)
        prepare.mask([[x[LANES:] for x in n] for n in sums], 0, LANE)

    def gates(self, u):
        lower_bound = torch.tensor(float(self.params["lower_bound"]))
        a, bound = prepare.gate_numbers(self.x["A_log"][self.head].expand(len(u)), lower_bound.expand(len(u)))
        bias = self.x["dt_bias"][self.head]
        return {"a": a, "bound": bound, "bias": (bias[2 * u], bias[2 * u + 1])}

    def run(self):
        """out and final_state of fp32."""
        heads = self.x["q"].shape[2]
        out, last = torch.empty_like(self.x["v"]), torch.empty(1, heads, D, D)
        first = self.x["initial_state"].float() if "initial_state" in self.x else torch.zeros(1, heads, D, D)
        thread = torch.arange(self.consumers * LANES)
        row, column = thread // LANES * (self.slabs * step.SLAB) + thread % LANES // 4, thread % 4 * 2
        first_of_pairs = [divmod(step.place(m, i), D) for m in range(self.slabs) for i in range(step.PAIRS)]
        place = [(row + r, column + c + i) for r, c in first_of_pairs for i in range(2)]
        for self.head in range(heads):
            state = [first[0, self.head][at] for at in place]
            for chunk in range(-(-self.tokens // CHUNK)):
                self.chunk(chunk, state, out)
            for at, value in zip(place, state, strict=True):
                last[0, self.head][at] = value
        return {"out": out, "final_state": last}

    def chunk(self, chunk, state, out):
        """A chunk through a team and all consumers; their patches lie side by side."""
        first = layout.STAGE_BYTES + layout.SCRATCH_BYTES
        team = Warps(2 * LANES, first + D // step.SLAB * layout.PATCH_BYTES)
        self.prepare(team, chunk)
        tokens = range(min(CHUNK, self.tokens - chunk * CHUNK))
        units = {
            (token, unit): first + unit // 2 * layout.PATCH_BYTES + layout.patch_row(token, unit % 2)
            for token in range(CHUNK)
            for unit in range(D // 8)
        }
        for (token, unit), where in units.items():
            if token in tokens:
                values = self.row("v", chunk * CHUNK + token)[8 * unit : 8 * unit + 8]
                team.memory[where : where + 16] = values.view(torch.uint8)
        thread = torch.arange(self.consumers * LANES)
        warp, lane = thread // LANES, thread % LANES
        patches = first + warp * (self.slabs * layout.PATCH_BYTES)
        consumers = Warps(len(thread), 0)
        consumers.memory = team.memory
        consumers.install(self.patch, prepare, step, cluster7)
        for slab, words in enumerate(step.step(self.slabs, state, 0, patches, lane)):
            consumers.stmatrix_x4_trans(patches + slab * layout.PATCH_BYTES + layout.patch_rows_by_8(lane), words)
        for (token, unit), where in units.items():
            if token in tokens:
                o = team.memory[where : where + 16].view(torch.bfloat16)
                out[0, chunk * CHUNK + token, self.head, 8 * unit : 8 * unit + 8] = o


# Committed, up to 40 tokens, one sequence: what ``OnCpu`` takes.
ON_CPU = [
    case
    for case in goldens.KERNELS["kda"].cases
    if case.committed and case.dims["tokens"] <= 40 and case.dims["batch"] == 1 and "@-@" in case.recipe
]


@pytest.mark.parametrize("slabs", sorted(set(SLABS.values())))
@pytest.mark.parametrize("case", ON_CPU, ids=lambda case: case.name)
def test_device_functions_have_the_bits_of_the_exact_model(case, slabs, monkeypatch):
    x = goldens.KERNELS["kda"].inputs(case)
    bf16 = "initial_state" in x and x["initial_state"].dtype == torch.bfloat16
    params = {**case.params, "final_state": "bf16" if bf16 else "fp32"}
    want = reference.exact(x, params, "chunk16")
    got = OnCpu(x, params, slabs, monkeypatch).run()
    assert torch.equal(got["out"].view(torch.int16), want["out"].view(torch.int16))
    last = got["final_state"].to(want["final_state"].dtype)
    assert torch.equal(last.isnan(), want["final_state"].isnan())
    assert torch.equal(last.nan_to_num(), want["final_state"].nan_to_num())


# The host side.

BF16 = torch.bfloat16


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def call(batch=1, tokens=4, heads=2, **changed):
    x = {name: zeros(batch, tokens, heads, D) for name in ("q", "k", "v", "g", "out")}
    x |= {"beta": zeros(batch, tokens, heads), "A_log": zeros(heads, dtype=torch.float32)}
    x |= {"dt_bias": zeros(heads, D, dtype=torch.float32), "scale": 1.0, "lower_bound": -5.0}
    return x | changed


def offsets(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


SHIFTED = zeros(4 * 2 * D + 1)[1:].view(1, 4, 2, D)
STATE_32 = zeros(1, 2, D, D, dtype=torch.float32)
REFUSALS = {
    "q": ({"q": zeros(1, 4, 2, 64)}, r"q: got \(1, 4, 2, 64\), allowed is \[B, T, H, 128\]"),
    "q dims": ({"q": zeros(4, 2, D)}, r"q: got \(4, 2, 128\), allowed is \[B, T, H, 128\]"),
    "no heads": ({"q": zeros(1, 4, 0, D)}, r"q: got \(1, 4, 0, 128\), .* from 1 on"),
    "q kind": ({"q": None}, r"q: got NoneType, allowed"),
    "q dtype": ({"q": zeros(1, 4, 2, D, dtype=torch.float16)}, r"q: got torch.float16, allowed is torch.bfloat16"),
    "k": ({"k": zeros(1, 5, 2, D)}, r"k: got shape \(1, 5, 2, 128\), allowed is \(1, 4, 2, 128\)"),
    "v": ({"v": zeros(1, 4, 2, 256)}, r"v: got shape \(1, 4, 2, 256\), allowed is \(1, 4, 2, 128\)"),
    "v kind": ({"v": [0.0]}, r"v: got list, allowed is a tensor"),
    "g": ({"g": zeros(1, 4, 2, D, dtype=torch.float32)}, r"g: got torch.float32, allowed is torch.bfloat16"),
    "g strides": ({"g": zeros(1, 4, 2, 2 * D)[..., ::2]}, r"g: got strides \(2048, 512, 256, 2\) .* is contiguous"),
    "k transposed": ({"k": zeros(1, 2, 4, D).transpose(1, 2)}, r"k: got strides .*, allowed is contiguous"),
    "k address": ({"k": SHIFTED}, r"k: got address 0x\w+, allowed are multiples of 16 bytes"),
    "out": ({"out": zeros(1, 4, 1, D)}, r"out: got shape \(1, 4, 1, 128\), allowed is \(1, 4, 2, 128\)"),
    "beta": ({"beta": zeros(1, 4, 2, 1)}, r"beta: got shape \(1, 4, 2, 1\), allowed is \(1, 4, 2\)"),
    "beta dtype": ({"beta": zeros(1, 4, 2, dtype=torch.float32)}, r"beta: got torch.float32, allowed"),
    "A_log": ({"A_log": zeros(3, dtype=torch.float32)}, r"A_log: got shape \(3,\), allowed is \(2,\)"),
    "A_log dtype": ({"A_log": zeros(2)}, r"A_log: got torch.bfloat16, allowed is torch.float32"),
    "dt_bias": ({"dt_bias": zeros(2 * D, dtype=torch.float32)}, r"dt_bias: got shape \(256,\), allowed is \(2, 128\)"),
    "device": ({"v": zeros(1, 4, 2, D).to("meta")}, r"v: is on meta, q on cpu"),
    "initial_state": (
        {"initial_state": zeros(2, 2, D, D)},
        r"initial_state: got shape \(2, 2, 128, 128\), allowed is \(1, 2, 128, 128\)",
    ),
    "initial_state dtype": (
        {"initial_state": zeros(1, 2, D, D, dtype=torch.float16)},
        r"initial_state: got torch.float16, allowed is torch.bfloat16 or torch.float32",
    ),
    "final_state": ({"final_state": STATE_32[:, :1]}, r"final_state: got shape \(1, 1, 128, 128\), allowed"),
    "states": (
        {"initial_state": zeros(1, 2, D, D), "final_state": STATE_32},
        r"final_state: got torch.float32, initial_state is torch.bfloat16; both must have one dtype",
    ),
    "state strides": ({"initial_state": STATE_32.transpose(2, 3)}, r"initial_state: got strides .* is contiguous"),
    "offsets": ({"cu_seqlens": offsets(0)}, r"cu_seqlens: got \(1,\), allowed is \[N \+ 1\] with N from 1 on"),
    "offsets kind": ({"cu_seqlens": [0, 4]}, r"cu_seqlens: got list, allowed"),
    "offsets dtype": (
        {"cu_seqlens": offsets(0, 4).to(torch.int16)},
        r"cu_seqlens: got torch.int16, allowed is .*int64",
    ),
    "offsets device": ({"cu_seqlens": offsets(0, 4).to("meta")}, r"cu_seqlens: is on meta, q on cpu"),
    "B": (call(2, 2) | {"cu_seqlens": offsets(0, 4)}, r"q: got B = 2, allowed with cu_seqlens is 1"),
    "N": (
        {"cu_seqlens": offsets(0, 1, 4), "initial_state": STATE_32},
        r"initial_state: got shape \(1, .*, allowed is \(2, 2, 128, 128\)",
    ),
    "start": (
        {"cu_seqlens": offsets(1, 4), "check": True},
        r"cu_seqlens: goes from 1 to 4, allowed is from 0 to T = 4",
    ),
    "end": ({"cu_seqlens": offsets(0, 3), "check": True}, r"cu_seqlens: goes from 0 to 3, allowed is from 0 to T = 4"),
    "falling": (
        {"cu_seqlens": offsets(0, 3, 2, 4, dtype=torch.int32), "check": True},
        r"cu_seqlens: decreases from 3 at 1 to 2",
    ),
    "lower_bound": ({"lower_bound": -5.01}, r"lower_bound: got -5.01, allowed is a number from -5 to 5"),
    "lower_bound above": ({"lower_bound": 6}, r"lower_bound: got 6, allowed"),
    "lower_bound NaN": ({"lower_bound": float("nan")}, r"lower_bound: got nan, allowed"),
    "lower_bound kind": ({"lower_bound": None}, r"lower_bound: got None, allowed"),
    "scale": ({"scale": float("inf")}, r"scale: got inf, allowed is a number"),
    "scale kind": ({"scale": True}, r"scale: got True, allowed"),
    "workspace": ({"workspace": zeros(8)}, r"workspace: got torch.bfloat16, allowed is a tensor of torch.uint8"),
    "workspace kind": ({"workspace": 8}, r"workspace: got int, allowed"),
    "workspace strides": ({"workspace": zeros(8, dtype=torch.uint8)[::2]}, r"workspace: got strides \(2,\), allowed"),
    "workspace device": (
        {"workspace": zeros(8, dtype=torch.uint8).to("meta")},
        r"workspace: is on meta, q on cpu",
    ),
    "cluster": ({"cluster": 3}, r"cluster: got 3, allowed are None, 1, 2, 4, 8"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_argument(changed, message):
    with pytest.raises(ValueError, match=message):
        module.fwd(**call() | changed)


FLA_REFUSALS = {
    "norm": ({"use_qk_l2norm_in_kernel": False}, r"use_qk_l2norm_in_kernel: got False, allowed is True"),
    "gate": ({"safe_gate": False}, r"safe_gate: got False, allowed is True"),
    "eigenvalues": ({"allow_neg_eigval": True}, r"allow_neg_eigval: got True, allowed is False"),
    "bound": ({"lower_bound": None}, r"lower_bound: got None, allowed is a number"),
    "A_log": ({"A_log": None}, r"A_log: got None, allowed is a tensor"),
    "state": ({"initial_state": zeros(1, 2, D, D)}, r"initial_state: got torch.bfloat16, allowed is torch.float32"),
}


@pytest.mark.parametrize(("changed", "message"), FLA_REFUSALS.values(), ids=FLA_REFUSALS)
def test_the_adapter_refuses_what_the_kernel_does_not_do(changed, message):
    x = call()
    del x["out"], x["scale"]
    switches = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    with pytest.raises(ValueError, match=message):
        fla.chunk_kda(**x | dict.fromkeys(switches, True) | changed)


def test_candidates_refuse_what_they_do_not_have():
    x = {name: y for name, y in call().items() if name in module.INPUTS}
    params = {"scale": 1.0, "lower_bound": -5.0, "final_state": None}
    with pytest.raises(ValueError, match=r"schedule: got 'chunk64', allowed are chunk16"):
        module.run(x, params, "chunk64")
    with pytest.raises(ValueError, match=r"final_state: got 'fp16', allowed are None, 'bf16', 'fp32'"):
        module.run(x, params | {"final_state": "fp16"})
    with pytest.raises(ValueError, match=r"params: final_state missing"):
        module.run(x, {"scale": 1.0, "lower_bound": -5.0})


def test_no_workspace_is_needed():
    assert module.get_workspace_size(8192, 96, 6) == 0
    with pytest.raises(ValueError, match=r"H: got 1.5, allowed is a whole number"):
        module.get_workspace_size(8192, 1.5)


@pytest.mark.parametrize(("pairs", "cluster"), [(1, 4), (33, 4), (34, 2), (66, 2), (67, 1), (768, 1)])
def test_the_cluster_by_default(pairs, cluster):
    assert module.cluster_for(pairs, 132) == cluster


def test_every_cluster_is_a_variant():
    own = [name for name, _ in module.variants() if name.startswith("chunk16")]
    assert own == [f"chunk16-cluster{cluster}" for cluster in CLUSTERS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="sm_90 GPU"):
        module.fwd(**call())
