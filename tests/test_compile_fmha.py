"""Every rung compiled for sm_90a without a GPU: its PTX and SASS hold the roundings that the model assumes.

Counted in PTX, where each instruction of ``cute_impl.ptx`` stands once for each place it is unrolled to:
a rounding that is missing or one too many shows as a number.
"""

import importlib
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cute_impl import fmha, runtime
from cute_impl.fmha import config_of, k2, k3, launch, problem, ring
from cute_impl.fmha.work import Work, section_heads
from tools.disassemble import sass

VARIANTS = [(d, causal) for d in (64, 128) for causal in (False, True)]
COLUMNS = k2.TILE // k2.GROUP  # score columns a thread
UNROLL = 8


SMEM_BYTES = {("k2", 64): 32768, ("k2", 128): 49152, ("k3", 64): 40 * 1024 + 24, ("k3", 128): 64 * 1024 + 24}
OPTIONS = "--keep-ptx --keep-cubin --dump-dir="
SCALAR = {f"{name}-d{d}{'-causal' * causal}": (name, d, causal) for name in ("k2", "k3") for d, causal in VARIANTS}


@pytest.fixture(scope="module", params=SCALAR.values(), ids=SCALAR)
def variant(request, tmp_path_factory):
    """(rung, d, PTX, cubin, host code) of a variant of k2 or k3."""
    name, d, causal = request.param
    module = {"k2": k2, "k3": k3}[name]
    compiled = module.compile_variant(d, causal, f"{OPTIONS}{tmp_path_factory.mktemp(name)}")
    return name, d, compiled.__ptx__, compiled.__cubin__, str(compiled.ir_module)


def instructions(ptx):
    """PTX instructions by name."""
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)\s", ptx, re.MULTILINE))


def test_ptx_spells_every_rounding(variant):
    _, d, ptx, *_ = variant
    found = instructions(ptx)
    columns = d // k2.GROUP
    assert found["fma.rn.f32"] == UNROLL * COLUMNS + UNROLL * columns + columns + 1  # S, PV, rescale, l
    assert found["mul.rn.f32"] == COLUMNS + COLUMNS + 1 + columns  # scale, log2e of p and alpha, inv
    assert found["sub.rn.f32"] == COLUMNS + 1
    assert found["add.rn.f32"] == COLUMNS + 2
    assert found["ex2.approx.ftz.f32"] == COLUMNS + 1
    assert found["rcp.approx.ftz.f32"] == 1
    assert found["max.f32"] == COLUMNS + 2 + 1
    assert found["cvt.rn.bf16.f32"] == columns
    assert found["shfl.sync.bfly.b32"] == 4


def test_ptx_has_no_other_float_arithmetic(variant):
    _, _, ptx, *_ = variant
    allowed = {"fma.rn.f32", "mul.rn.f32", "sub.rn.f32", "add.rn.f32", "max.f32", "ex2.approx.ftz.f32"}
    allowed |= {"rcp.approx.ftz.f32", "cvt.rn.bf16.f32", "cvt.f32.bf16", "selp.f32", "setp.equ.f32", "mov.f32"}
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32)(x2)?\b", name)}
    assert floating <= allowed


def test_sass_contracts_nothing(variant):
    """As many FMUL, FADD and FFMA as PTX has products, sums and FMAs; the subtraction is an FADD.

    ptxas writes k3's weights twice: their differences, products, exponentials and sums, up to the first butterfly.
    """
    name, _, ptx, cubin, _ = variant
    found, machine = instructions(ptx), machine_instructions(cubin)
    again = {"k2": 0, "k3": COLUMNS + 1}[name]
    assert machine["FFMA"] == found["fma.rn.f32"]
    assert machine["FADD"] == found["add.rn.f32"] + found["sub.rn.f32"] + 2 * again
    assert machine["FMUL"] == found["mul.rn.f32"] + again
    assert machine["MUFU.EX2"] == found["ex2.approx.ftz.f32"] + again
    assert machine["MUFU.RCP"] == 1


def test_nothing_spills(variant):
    *_, cubin, _ = variant
    assert not re.search(r"\b(LDL|STL)\b", sass(cubin))


def test_shared_memory(variant):
    """The host code launches with what the module's docstring says."""
    name, d, _, _, host = variant
    sizes = {int(n) for n in re.findall(r"constant\((\d+) : i64\)", host)}
    assert SMEM_BYTES[name, d] in sizes
    assert not sizes & (set(SMEM_BYTES.values()) - {SMEM_BYTES[name, d]})


def test_tile_and_threads(variant):
    _, _, ptx, *_ = variant
    assert re.search(r"\.reqntid 256, 1, 1", ptx)
    assert ".target sm_90a" in ptx


def test_k3_loads_by_tma_alone(variant):
    """Q, and K and V in two places each; k2 has none."""
    name, _, ptx, *_ = variant
    loads = [n for n in instructions(ptx).elements() if n.startswith("cp.async.bulk.tensor")]
    assert len(loads) == (5 if name == "k3" else 0)
    assert bool(re.search(r"ld\.global\S*v4", ptx)) == (name == "k2")


RUNGS = {
    f"{rung}-{schedule}-d{d}{'-causal' * causal}{'-packed' * packed}": (rung, schedule, d, causal, packed)
    for rung in fmha.TENSOR_CORE
    for schedule in ("wgmma128", "wgmma176")
    for d in (64, 128)
    for causal, packed in ((False, False), (True, False), (True, True))
}


@pytest.fixture(scope="module", params=RUNGS.values(), ids=RUNGS)
def rung(request, tmp_path_factory):
    """(configuration, PTX, cubin, host code, rung) of a tensor-core variant."""
    name, schedule, d, causal, packed = request.param
    config = config_of(name, schedule, d, causal, packed)
    options = f"{OPTIONS}{tmp_path_factory.mktemp(name)}"
    compiled = launch.compile_variant(fmha.TENSOR_CORE[name], config, options)
    return config, compiled.__ptx__, compiled.__cubin__, str(compiled.ir_module), name


def machine_instructions(cubin):
    """SASS instructions by name."""
    return Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", sass(cubin), re.MULTILINE))


def steps_of(name, config):
    """Places where a tile's softmax stands in the code; k6 has one for the first, one with and one without a mask."""
    return 1 if name != "k6" else 3 if config.causal else 2


def test_rung_ptx_spells_every_rounding(rung):
    """A lane has keys / 2 scores and d / 2 outputs; the numbers beside them are those of its two rows."""
    config, ptx, _, _, name = rung
    found, steps = instructions(ptx), steps_of(name, config)
    scores, outputs = config.keys // 2, config.d // 2
    rescales = steps - (name == "k6")  # not before the first tile
    exchanges = 0 if name == "k4" else config.d // 4  # k4 stores 4 bytes a lane, the others 16
    assert found["ex2.approx.ftz.f32"] == steps * (scores + 2)
    assert found["fma.rn.f32"] == steps * (scores + 2) + 2  # exponents and l; lse
    assert found["add.rn.f32"] == steps * scores + 4  # sums; two butterflies a row at the end
    assert found["sub.rn.f32"] == steps * 2
    assert found["mul.rn.f32"] == rescales * outputs + steps * 4 + outputs + 2  # O · α; α, m · c; O / l; m · scale
    assert found["max.f32"] == steps * (scores - 2 + 2 * 3)
    assert found["cvt.rn.bf16x2.f32"] == steps * scores // 2 + outputs // 2
    assert found["rcp.approx.ftz.f32"] == 2
    assert found["lg2.approx.ftz.f32"] == 2
    assert found["shfl.sync.bfly.b32"] == steps * 4 + 4 + exchanges


def test_rung_ptx_has_no_other_float_arithmetic(rung):
    _, ptx, *_ = rung
    allowed = {"fma.rn.f32", "mul.rn.f32", "sub.rn.f32", "add.rn.f32", "max.f32", "ex2.approx.ftz.f32"}
    allowed |= {"rcp.approx.ftz.f32", "lg2.approx.ftz.f32", "cvt.rn.bf16x2.f32", "neg.f32", "selp.f32", "mov.f32"}
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32)(x2)?\b", name)}
    floating = {name for name in floating if not name.startswith(("wgmma.", "setp."))}
    assert floating <= allowed


def test_rung_sass_contracts_nothing(rung):
    _, ptx, cubin, *_ = rung
    found, machine = instructions(ptx), machine_instructions(cubin)
    assert machine["FFMA"] == found["fma.rn.f32"]
    assert machine["FADD"] == found["add.rn.f32"] + found["sub.rn.f32"]
    assert machine["FMUL"] == found["mul.rn.f32"]
    assert machine["MUFU.EX2"] == found["ex2.approx.ftz.f32"]
    assert machine["MUFU.RCP"] - machine["I2F.RP"] == 2  # an integer division takes one of each
    assert machine["MUFU.LG2"] == 2


def test_rung_multiplies_on_the_tensor_cores(rung):
    """d / 16 products of Q · Kᵀ and keys / 16 of P · V a tile, no HMMA; operands come by TMA."""
    config, _, cubin, _, name = rung
    machine = machine_instructions(cubin)
    counts: Counter = Counter()
    counts[f"HGMMA.64x{config.keys}x16.F32.BF16"] += steps_of(name, config) * config.d // 16
    counts[f"HGMMA.64x{config.d}x16.F32.BF16"] += steps_of(name, config) * config.keys // 16
    assert {k: n for k, n in machine.items() if "MMA" in k} == counts
    assert machine["UTMALDG.4D"] >= 3 * config.d // 64
    assert not any(k.startswith(("LDG.E.128", "LDSM")) for k in machine)


def test_rung_does_not_spill(rung):
    _, _, cubin, *_ = rung
    assert not re.search(r"\b(LDL|STL)\b", sass(cubin))


def test_rung_products_are_not_serialised(rung):
    """One fence and one wait a chain of products: ptxas adds more where it sees registers used too early."""
    config, _, cubin, _, name = rung
    machine, chains = machine_instructions(cubin), 2 * steps_of(name, config)
    assert machine["WARPGROUP.ARRIVE"] == machine["WARPGROUP.DEPBAR.LE"] == chains


def registers(text):
    """How many registers a piece of SASS uses."""
    return 1 + max(int(n) for n in re.findall(r"\bR(\d+)\b", text))


def test_specialised_rungs_move_registers(rung):
    """From the warpgroup that loads to those that multiply; both stay within theirs, and all fit the 64 K of an SM."""
    config, ptx, cubin, _, name = rung
    found = instructions(ptx)
    if name == "k4":
        assert not any(n.startswith("setmaxnreg") for n in found)
        return
    code = sass(cubin)
    load, multiply = code.index("USETMAXREG.DEALLOC"), code.index("USETMAXREG.TRY_ALLOC")
    assert load < multiply
    assert registers(code[load:multiply]) <= ring.LOADER_REGISTERS
    assert registers(code[multiply:]) <= ring.MULTIPLIER_REGISTERS[config.warpgroups]
    held = ring.LOADER_REGISTERS + config.warpgroups * ring.MULTIPLIER_REGISTERS[config.warpgroups]
    assert held * problem.WARPGROUP <= 65536
    assert re.search(rf"\.reqntid {(config.warpgroups + 1) * problem.WARPGROUP}, 1, 1", ptx)


def test_specialised_rungs_store_16_bytes_a_lane(rung):
    config, ptx, _, _, name = rung
    found = instructions(ptx)
    assert found["st.global.v4.b32"] == (0 if name == "k4" else config.d // 16)
    assert found["st.global.b32"] == 2 + (config.d // 4 if name == "k4" else 0)  # lse


def test_k6_exponentiates_beside_the_product(rung):
    """Between a tile's scores and the end of P · V of the one before stand its powers of two.

    At d = 64 and 128 keys a thread has 160 registers, and ptxas keeps some of them for afterwards.
    """
    config, _, cubin, _, name = rung
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])", sass(cubin))
    after = [text.count("MUFU.EX2") for wait, text in zip(waits[1::2], waits[2::2], strict=True) if wait == "0x1"]
    powers = config.keys // 2 + 2
    assert len(after) == (steps_of(name, config) - 1 if name == "k6" else 0)
    assert all(n >= (0.75 if config.warpgroups == 3 else 1) * powers for n in after)


@pytest.mark.parametrize("causal", [False, True])
def test_work_places_every_item_once(causal):
    """Sections of 4 of 18 heads, the last of 2; heavy tiles first if causal, a tile's heads next to each other."""
    operands = SimpleNamespace(config=SimpleNamespace(causal=causal), heads_q=6)
    work = Work(operands, tiles=5, sequences=3, section=4, counter=0)
    places = [work.place(item) for item in range(work.items)]
    assert set(places) == set(itertools.product(range(5), range(6), range(3)))
    assert len(places) == 90
    assert [head for _, head, _ in places[:8]] == [0, 1, 2, 3] * 2
    assert [tile for tile, _, _ in places[:20:4]] == ([4, 3, 2, 1, 0] if causal else [0, 1, 2, 3, 4])
    assert places[80:82] == [(4, 4, 2), (4, 5, 2)] if causal else [(0, 4, 2), (0, 5, 2)]


def test_sections_hold_whole_groups():
    """32 MB of keys and values: at d = 128 and 16384 keys 8 MB a KV head."""
    assert section_heads(16384, 128, 1) == 4
    assert section_heads(16384, 128, 8) == 32
    assert section_heads(1 << 20, 128, 8) == 8
    assert section_heads(0, 64, 2) >= 2


def test_rung_shared_memory(rung):
    """The host code launches with what the configuration says, within the 227 KB of an SM."""
    config, _, _, host, name = rung
    size = fmha.TENSOR_CORE[name].smem_bytes(config)
    assert size <= 227 * 1024
    assert size in {int(n) for n in re.findall(r"constant\((\d+) : i64\)", host)}


@pytest.mark.parametrize(
    ("kernel", "inputs", "message"),
    [
        ("fmha", {"q": 1}, "inputs: k, v missing; this kernel takes q, k, v"),
        ("fmha", {"q": None, "k": None, "v": None}, "q: got NoneType, allowed is a tensor"),
        ("attn_res", {}, "inputs: delta, prefix, blocks, norm, query, gamma missing"),
        ("mla_query", {}, "inputs: qkv, "),
        ("cache_insert", {}, "inputs: kv, "),
    ],
)
def test_candidates_name_what_is_missing(kernel, inputs, message):
    run = importlib.import_module(f"cute_impl.{kernel}").run
    with pytest.raises(ValueError, match=message):
        run(inputs, {})


def test_views_are_what_was_compiled_for_also_with_a_batch_of_1():
    """torch's own order of dimensions is ambiguous there."""
    for batch in (1, 2):
        view = runtime.view(torch.zeros(batch, 128, 64, dtype=torch.bfloat16).permute(1, 2, 0), {0: 64, 2: 1}, k2.ORDER)
        assert str(view).split(" o ")[1].startswith("(?{div=64},64,?):(64,1,?{i64 div=4096})")
