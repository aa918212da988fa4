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
from tests.warps import LANES, Warps
from tools.disassemble import sass

SCAN = "chunk16_scan64"
ROWS, COLUMNS = scan.COMBINED_ROWS, D


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


def test_combine_is_a_chain_of_fma(combine):
    ptx, text, _ = combine
    found = instructions(ptx)
    assert found["fma.rn.f32"] == machine(text)["FFMA"] == ROWS * D
    assert not {name for name in found if re.match(r"(mul|add|sub|fma)\.(?!rn\.f32)[\w.]*f32", name)}
    assert found["mul.rn.f32"] == found["add.rn.f32"] == found["sub.rn.f32"] == 0


def test_combine_fits(combine):
    ptx, text, _ = combine
    assert not re.search(r"\b(LDL|STL)\b", text)
    assert highest_register(text) < 255
    assert re.search(rf"\.reqntid {COLUMNS}, 1, 1", ptx)


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
    """8 rows of S through two segments' M and C in turn, by all threads of a CTA."""
    rows_bytes, m_bytes, c_bytes = 4 * ROWS * D, 4 * D * D, 4 * ROWS * D
    s, c0, c1 = (draw.normal(f"combine/{name}", (ROWS, D)) for name in ("s", "c0", "c1"))
    m0, m1 = (draw.normal(f"combine/{name}", (D, D)) for name in ("m0", "m1"))
    operators = 2 * rows_bytes
    matrices = operators + 2 * c_bytes
    warps = Warps(COLUMNS, matrices + 2 * m_bytes)
    warps.install(monkeypatch, scan)
    parts = (s, torch.zeros(ROWS, D), c0, c1, m0, m1)
    warps.memory[:] = torch.cat([x.flatten() for x in parts]).view(torch.uint8)
    column = torch.arange(COLUMNS)
    m, c = [None] * D, [None] * ROWS
    scan.load_column(m, matrices + column * 4, D)
    want = s
    for j, (c_j, m_j) in enumerate(((c0, m0), (c1, m1))):
        operator = operators + j * c_bytes + column * 4
        scan.load_column(c, operator, ROWS)
        sums = scan.multiply(j * rows_bytes, m, matrices + m_bytes + column * 4, list(c))
        scan.store_column(sums, operator, (1 - j) * rows_bytes + column * 4)
        total = c_j
        for k in range(D):
            total = fma_rn(want[:, k : k + 1], m_j[k : k + 1], total)
        want = total
        got = warps.memory[operators + j * c_bytes :][:c_bytes].view(torch.float32).view(ROWS, D)
        assert torch.equal(got, want)
        assert torch.equal(warps.memory[(1 - j) * rows_bytes :][:rows_bytes], got.view(torch.uint8).flatten())


# The host side.


def test_the_workspace_of_a_scan():
    """C and M, 64 KB each, for a head and a segment that can have a successor."""
    size = module.get_workspace_size
    assert size(65536, 4, 1, "chunk16_scan512") == 127 * 4 * 2 * 65536
    assert [size(tokens, 2, 3, SCAN) for tokens in (0, 64, 65, 129)] == [0, 0, 2 * 131072, 4 * 131072]
    assert size(8192, 96, 6) == size(8192, 96, 6, "chunk16") == 0
    with pytest.raises(ValueError, match=r"schedule: got 'scan', allowed are chunk16, chunk16_scan64, chunk16_scan512"):
        size(8192, 96, 6, "scan")


def workspace(size):
    return torch.zeros(size + 128, dtype=torch.uint8)


NEEDED = 2 * 131072
REFUSALS = {
    "schedule": (
        {"schedule": "scan64"},
        r"schedule: got 'scan64', allowed are chunk16, chunk16_scan64, chunk16_scan512",
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
