"""The scan over segments compiled for sm_90a without a GPU, and its host side."""

import re
from collections import Counter

import pytest
import torch

from cute_impl import kda as module
from cute_impl.kda import chunk16, fla, scan, step
from cute_impl.kda.chunk16 import CLUSTERS, Config
from cute_impl.kda.layout import D
from goldens import inputs as draw
from reference.numerics.ieee import fma_rn
from tests.test_compile_kda import MMA, SM_BYTES, STATE, call, expected, highest_register, instructions, machine
from tests.warps import LANES, Warps, banks_of
from tools.disassemble import sass

SCAN = "chunk16_scan64"
ALLOWED = "allowed are chunk16, chunk16_scan64, chunk16_scan416, chunk16_scan512"
PDL = ("griddepcontrol.launch_dependents", "griddepcontrol.wait")


def compiled(compile_variant, folder):
    """PTX, SASS and host code."""
    made = compile_variant(f"--keep-ptx --keep-cubin --dump-dir={folder}")
    return made.__ptx__, sass(made.__cubin__), str(made.ir_module)


@pytest.fixture(scope="module", params=[(part, c) for part in scan.PARTS for c in CLUSTERS], ids=str)
def variant(request, tmp_path_factory):
    config = Config(request.param[1], part=request.param[0])
    folder = tmp_path_factory.mktemp("scan")
    return config, *compiled(lambda options: scan.compile_segments(config, options), folder)


@pytest.fixture(scope="module")
def combine(tmp_path_factory):
    return compiled(scan.compile_combine, tmp_path_factory.mktemp("combine"))


# Of a slab of 16 rows of V: the products that make o, o itself, and the last state in bf16.
WITHOUT_OUT = Counter({MMA: 16 + 2, "cvt.rn.bf16x2.f32": 4 + STATE // 2})


def wanted(config):
    want = Counter(expected(config))
    if config.part == step.OPERATORS:
        for _ in range(config.slabs):
            want.subtract(WITHOUT_OUT)
    return want


def test_segments_have_the_roundings_of_chunk16(variant):
    config, ptx, text, _ = variant
    found, want = machine(text), wanted(config)
    assert found["HMMA.16816.F32.BF16"] == want[MMA]
    assert found["F2FP.BF16.F32.PACK_AB"] == want["cvt.rn.bf16x2.f32"]
    assert found["FMUL"] == want["mul.rn.f32"]
    assert found["FADD"] == want["add.rn.f32"] + want["sub.rn.f32"]
    assert found["FFMA"] == want["fma.rn.f32"]
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32)(x2)?\b", name)}
    assert floating <= {*want, "selp.f32", "mov.f32", "neg.f32"}


def test_segments_fit(variant):
    config, ptx, text, host = variant
    assert not re.search(r"\b(LDL|STL)\b", text)
    assert re.search(rf"\.reqntid {config.threads}, 1, 1", ptx)
    assert f"constant({config.smem_bytes} : i64)" in host
    assert config.smem_bytes <= SM_BYTES
    if config.cluster == 1:
        assert highest_register(text) < chunk16.CONSUMER_REGISTERS
        assert highest_register(text.partition("USETMAXREG.DEALLOC")[2]) < chunk16.TEAM_REGISTERS
        assert ptx.count("setmaxnreg") == 2
    else:
        assert highest_register(text) < min(255, 65536 // config.threads)


def test_operators_write_no_out(variant):
    config, ptx, *_ = variant
    found = instructions(ptx)
    outputs = config.slabs * (config.part == step.OUTPUTS)
    assert sum(n for name, n in found.items() if name.startswith("stmatrix")) == outputs
    assert found["st.global.v4.b32"] == outputs


def test_who_waits_for_whom(variant, combine):
    """Outputs wait before they load a state of the workspace, all of them before the first chunk."""
    config, ptx, *_ = variant
    assert [ptx.count(name) for name in PDL] == ([1, 0] if config.part == step.OPERATORS else [0, 1])
    assert [combine[0].count(name) for name in PDL] == [1, 1]


def test_combine_is_a_chain_of_fma(combine):
    """A thread's elements times the k of a piece; pieces are copied before the loop and in it."""
    ptx, text, _ = combine
    found = instructions(ptx)
    assert found["fma.rn.f32"] == machine(text)["FFMA"] == scan.OWNED * scan.PIECE_ROWS
    assert sum(n for name, n in found.items() if name.startswith("cp.async.bulk")) == 2 * scan.PIECES
    assert scan.PIECES * scan.PIECE_ROWS == D
    assert scan.OWNED * scan.COMBINE_THREADS == scan.COMBINED_ROWS * D
    assert not {name for name in found if re.match(r"(mul|add|sub|fma)\.(?!rn\.f32)[\w.]*f32", name)}
    assert found["mul.rn.f32"] == found["add.rn.f32"] == found["sub.rn.f32"] == 0


def test_combine_fits(combine):
    ptx, text, host = combine
    assert not re.search(r"\b(LDL|STL)\b", text)
    assert highest_register(text) < 255
    assert re.search(rf"\.reqntid {scan.COMBINE_THREADS}, 1, 1", ptx)
    assert f"constant({scan.COMBINE_BYTES} : i64)" in host
    assert scan.COMBINE_BYTES <= SM_BYTES


# Device functions on the CPU.


@pytest.mark.parametrize("slabs", [1, 2])
def test_the_identity_lies_as_a_state_does(slabs, monkeypatch):
    """Of all warps: an element of a lane's registers is 1 where its row and column are the same."""
    thread = torch.arange(LANES * D // (slabs * step.SLAB))
    Warps(len(thread), 0).install(monkeypatch, step)
    row = thread // LANES * (slabs * step.SLAB) + thread % LANES // 4
    column = thread % 4 * 2
    state = [torch.zeros(len(thread))] * (slabs * step.ELEMS)
    step.unit_rows(slabs, state, row, column)
    whole = torch.zeros(D * D)
    for slab in range(slabs):
        for pair in range(step.PAIRS):
            for c in range(2):
                at = row * D + column + step.place(slab, pair) + c
                whole[at] = state[slab * step.ELEMS + 2 * pair + c].to(torch.float32)
    assert torch.equal(whole.view(D, D), torch.eye(D))


def test_combine_has_the_bits_of_a_chain(monkeypatch):
    """16 rows of S through two segments' M and C in turn, by all threads of a CTA.

    A piece of M arrives when its barrier is waited for; until then it is NaN.
    """
    shape, threads = (scan.COMBINED_ROWS, D), scan.COMBINE_THREADS
    s, *c = (draw.normal(f"combine/{name}", shape) for name in ("s", "c0", "c1"))
    m = [draw.normal(f"combine/{name}", (D, D)) for name in ("m0", "m1")]
    size = 4 * s.numel()
    operators, slabs = 2 * scan.STATE_BYTES, 2 * scan.STATE_BYTES + 2 * size
    warps = Warps(threads, slabs + 2 * scan.SLAB_BYTES)
    warps.install(monkeypatch, scan)
    matrices = warps.memory[:operators].view(torch.float32)
    matrices.fill_(torch.nan)
    warps.memory[operators:slabs] = torch.cat(c).flatten().view(torch.uint8)

    def arrive(barrier, parity):
        j, piece = barrier // (8 * scan.PIECES), barrier // 8 % scan.PIECES
        assert parity == 0
        part = slice(piece * scan.PIECE_ROWS * D, (piece + 1) * scan.PIECE_ROWS * D)
        matrices[j * D * D :][part] = m[j].flatten()[part]

    def slab_of(j):
        groups = warps.memory[slabs + j * scan.SLAB_BYTES :][: scan.SLAB_BYTES].view(scan.GROUPS, scan.GROUP_BYTES)
        return groups[:, : scan.GROUP_ROWS * D * 4]

    monkeypatch.setattr(warps.ptx, "mbarrier_wait", arrive, raising=False)
    group, column = torch.arange(threads) % scan.GROUPS, torch.arange(threads) // scan.GROUPS * 2
    own = operators + group * (scan.GROUP_ROWS * D * 4) + column * 4
    rows = slabs + group * scan.GROUP_BYTES
    slab_of(0)[:] = s.view(torch.uint8).view(scan.GROUPS, -1)
    sums, ahead, want = [None] * scan.OWNED, [None] * scan.FETCHED, s
    for j in range(2):
        scan.load_pairs(sums, own + j * size)
        own_rows, matrix, full = rows + j * scan.SLAB_BYTES, j * scan.STATE_BYTES + column * 4, j * 8 * scan.PIECES
        arrive(full, 0)
        scan.fetch(ahead, own_rows, matrix)
        for piece in range(scan.PIECES):
            scan.multiply_piece(sums, ahead, own_rows, matrix, full, 0, piece)
        scan.store_pairs(sums, own + j * size, rows + (1 - j) * scan.SLAB_BYTES + column * 4)
        total = c[j]
        for k in range(D):
            total = fma_rn(want[:, k : k + 1], m[j][k : k + 1], total)
        want = total
        got = warps.memory[operators + j * size :][:size]
        assert torch.equal(got.view(torch.float32).view(shape), want)
        assert torch.equal(slab_of(1 - j).flatten(), got)


def test_combine_reads_without_conflicts():
    """A warp's columns of a row of M are 128 bytes; its two groups' rows of S lie in different banks."""
    lane = torch.arange(LANES)
    group, column = lane % scan.GROUPS, lane // scan.GROUPS * 2
    assert banks_of(column * 4, 8) == 1
    assert int(column.max()) * 4 + 8 == 128
    assert banks_of(group * scan.GROUP_BYTES, 16) == 1
    assert banks_of(group * scan.GROUP_BYTES + column * 4, 8) == 1


# The host side.


def test_the_workspace_of_a_scan():
    """C and M, 64 KB each, for a head and a segment that can have a successor."""
    size = module.get_workspace_size
    assert size(65536, 4, 1, "chunk16_scan512") == 127 * 4 * 2 * 65536
    assert size(2048, 12, 1, "chunk16_scan416") == 4 * 12 * 2 * 65536
    assert [size(tokens, 2, 3, SCAN) for tokens in (0, 64, 65, 129)] == [0, 0, 2 * 131072, 4 * 131072]
    assert size(8192, 96, 6) == size(8192, 96, 6, "chunk16") == 0
    with pytest.raises(ValueError, match=rf"schedule: got 'scan', {ALLOWED}"):
        size(8192, 96, 6, "scan")


def workspace(size):
    return torch.zeros(size + 128, dtype=torch.uint8)


NEEDED = 2 * 131072
REFUSALS = {
    "schedule": (
        {"schedule": "scan64"},
        rf"schedule: got 'scan64', {ALLOWED}",
    ),
    "schedule kind": ({"schedule": None}, r"schedule: got None, allowed"),
    "size": ({"workspace": workspace(0)[:100]}, rf"workspace: got 100 bytes, allowed are {NEEDED} or more"),
    "less": ({"workspace": workspace(NEEDED)[: NEEDED - 1]}, rf"got {NEEDED - 1} bytes, allowed are {NEEDED} or more"),
    "address": ({"workspace": workspace(NEEDED)[1 : NEEDED + 1]}, r"workspace: got address .* multiples of 128 bytes"),
    "kind": ({"workspace": torch.zeros(NEEDED)}, r"workspace: got torch.float32, allowed"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_argument(changed, message):
    with pytest.raises(ValueError, match=message):
        module.fwd(**call(tokens=65) | {"schedule": SCAN} | changed)


def test_chunk16_takes_any_workspace():
    with pytest.raises(RuntimeError, match="sm_90 GPU"):
        module.fwd(**call(tokens=65), workspace=workspace(0)[1:3])


def test_the_adapter_passes_the_schedule_on():
    x = call()
    del x["out"], x["scale"]
    switches = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    with pytest.raises(ValueError, match="schedule: got 'chunk64'"):
        fla.chunk_kda(**x | dict.fromkeys(switches, True), schedule="chunk64")


def test_every_part_and_cluster_is_a_variant():
    names = [name for name, _ in module.variants() if not name.startswith("chunk16")]
    assert names == [*(f"scan-{part}-cluster{c}" for part in scan.PARTS for c in CLUSTERS), "scan-combine"]
