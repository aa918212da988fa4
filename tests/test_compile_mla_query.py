"""MLA query and cache insert compiled for sm_90a without a GPU: PTX and SASS hold the roundings of the exact models.

Also the host side that needs no GPU: every refusal names its argument.
"""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from cute_impl import cache_insert as insert_module
from cute_impl import mla_query as module
from cute_impl.mla_query import checks, dcp, small, tiled
from cute_impl.mla_query.device import HEAD, NOPE, WARPS
from reference.cache_insert import eps_of
from tools.disassemble import sass

SMALL = (
    *(small.Config(8, rows) for rows in (1, 2, 3, 4, 5)),
    *(small.Config(16, rows) for rows in (1, 2, 3, 4, 5)),
    small.Config(8, 1, q_b_cp_async=False),
    small.Config(16, 5, q_b_cp_async=False),
    small.Config(8, 3, dcp=2),
    small.Config(16, 5, dcp=8),
)
TILED = (*(tiled.Config(tiles) for tiles in (1, 2, 3, 4)), tiled.Config(1, dcp=1), tiled.Config(4, dcp=8))
INSERT = "cache_insert"
CONFIGS = (*SMALL, *TILED, INSERT)
SM_BYTES, CTA_RESERVED_BYTES = 228 * 1024, 1024  # shared memory of an sm_90 SM; what the system takes of it a CTA
DIV_FFMAS = 24  # at most, of one inlined div.rn.f32 and the subroutine behind it


def name_of(config):
    if config == INSERT:
        return INSERT
    mailbox = f"-dcp{config.dcp}" if config.dcp else ""
    if isinstance(config, tiled.Config):
        return f"tiled{config.tiles}{mailbox}"
    return f"small{config.cluster}-b{config.rows}{'' if config.q_b_cp_async else '-bulk'}{mailbox}"


@pytest.fixture(scope="module", params=CONFIGS, ids=name_of)
def variant(request, tmp_path_factory):
    """(config, PTX, SASS, host code) of a variant."""
    config = request.param
    options = f"--keep-ptx --keep-cubin --dump-dir={tmp_path_factory.mktemp('mla_query')}"
    if config == INSERT:
        compiled = insert_module.compile_variant(options)
    else:
        compiled = (small if isinstance(config, small.Config) else tiled).compile_variant(config, options)
    return config, compiled.__ptx__, sass(compiled.__cubin__), str(compiled.ir_module)


def instructions(ptx):
    """PTX instructions by name, those within braces on one line too."""
    return Counter(re.findall(r"(?:^\s+(?:@!?%p\d+ )?|; )([a-z][\w.:]*)\s", ptx, re.MULTILINE))


def machine(text):
    """SASS instructions by name."""
    return Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.MULTILINE))


def fold_steps(n):
    """Shuffles, and sums, of folding n values in a warp."""
    values, steps = 1 << max(0, (n - 1).bit_length()), 0
    for _ in range(5):
        values = max(1, values // 2)
        steps += values
    return steps


# One warp inserts a row: two dot8 and the mean; x·rr, ·w, ·scale; a fold of two, the warps' sum; conversions.
INSERT_ROUNDINGS = Counter(
    {
        "fma.rn.f32": 16 + 1,
        "mul.rn.f32": 3 * 16 + 2,
        "add.rn.f32": fold_steps(2) + 1,
        "rsqrt.approx.ftz.f32": 1,
        "cvt.rn.bf16x2.f32": 8,
        "cvt.rn.satfinite.e4m3x2.f32": 9,
    }
)


def expected_small(config):
    """Roundings a thread of ``small`` makes, by the spec."""
    b, groups, share = config.rows, config.groups, NOPE // config.groups
    # R = 12: two rows a warp in one branch, one in the other.
    branches = [3] if config.q_b_rows == 24 else [2, 1]
    return Counter(
        {
            "fma.rn.f32": b * (8 + 48 * sum(branches) + share),
            "mul.rn.f32": b * 2 * 8 + 4 + 4,
            "add.rn.f32": fold_steps(b)
            + b * (5 + 1)
            + sum(n * b + fold_steps(n * b) for n in branches)
            + b
            + 4 * groups,
            "div.rn.f32": b,
            "rsqrt.approx.f32": b,
            "cvt.rn.bf16x2.f32": 4 * b + len(branches) + 2,
            "cvt.rn.satfinite.e4m3x2.f32": 4,
        }
    )


def expected_tiled(config):
    """Roundings a thread of ``tiled`` makes; the loops over rows and, but for the absorption, tiles stand once."""
    rows, tiles = tiled.ABREAST, config.tiles
    return Counter(
        {
            "fma.rn.f32": 48,
            "mul.rn.f32": 2 * 8 * rows + 4 + 4 * tiles,
            "add.rn.f32": 3 + 5 + 1 + 4 * 8,
            "div.rn.f32": 1,
            "rsqrt.approx.f32": 1,
            "cvt.rn.bf16x2.f32": 4 * rows + 2 + 2 * tiles,
            "cvt.rn.satfinite.e4m3x2.f32": 2 + 2 * tiles,
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 12 * HEAD // WARPS // 8 + NOPE // 16 * tiles,
        }
    )


def expected(config):
    if config == INSERT:
        return INSERT_ROUNDINGS
    own = expected_small(config) if isinstance(config, small.Config) else expected_tiled(config)
    return own + INSERT_ROUNDINGS


def test_ptx_spells_every_rounding(variant):
    config, ptx, *_ = variant
    found, wanted = instructions(ptx), expected(config)
    assert {name: found[name] for name in wanted} == dict(wanted)


def test_ptx_has_no_other_float_arithmetic(variant):
    config, ptx, *_ = variant
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32|e4m3)(x2)?\b", name)}
    assert floating <= {*expected(config), "selp.f32", "mov.f32"}
    assert "f32x2" not in ptx.replace("e4m3x2.f32", "").replace("bf16x2.f32", "")


def test_sass_contracts_nothing(variant):
    """No sum or product is missing; a division adds FFMAs, the plain rsqrt two products that scale subnormals.

    With a mailbox the assembler may keep a few sums twice, in branches of their own.
    """
    config, ptx, text, _ = variant
    found, made = instructions(ptx), machine(text)
    divisions = found["div.rn.f32"]
    assert made["FADD"] == found["add.rn.f32"] or (config.dcp and made["FADD"] > found["add.rn.f32"])
    assert made["FMUL"] == found["mul.rn.f32"] + 2 * found["rsqrt.approx.f32"]
    assert 0 <= made["FFMA"] - found["fma.rn.f32"] <= DIV_FFMAS * divisions
    assert (made["MUFU.RCP"] > 0) == (divisions > 0)
    assert made["F2FP.BF16.F32.PACK_AB"] == found["cvt.rn.bf16x2.f32"]
    assert made["HMMA.16816.F32.BF16"] == expected(config)["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]


def test_nothing_spills(variant):
    *_, text, _ = variant
    assert not re.search(r"\b(LDL|STL)\b", text)


def test_registers(variant):
    """At most 128: two CTAs of 256 threads fit an SM, so that a successor stages meanwhile. A mailbox waits anyway."""
    config, _, text, _ = variant
    highest = max(int(n) for n in re.findall(r"\bR(\d+)\b", text))
    assert highest < (128 if config == INSERT or not config.dcp else 255)


def test_shared_memory_cluster_and_threads(variant):
    config, ptx, _, host = variant
    assert re.search(r"\.reqntid 256, 1, 1", ptx)
    assert ".target sm_90a" in ptx
    if config == INSERT:
        return
    assert f"constant({config.smem_bytes} : i64)" in host
    size = config.cluster if isinstance(config, small.Config) else tiled.CTAS
    numbers = "|".join(re.findall(rf"(%\d+) = llvm\.mlir\.constant\({size} : i32\)", host))
    assert re.search(rf"llvm\.mul %\d+, (?:{numbers}) : i32", host), "the grid is a cluster a head and one more"
    assert re.search(rf"llvm\.store (?:{numbers}), %\d+ : i32", host), "the cluster's size"


@pytest.mark.parametrize("config", [c for c in (*SMALL, *TILED) if c != small.Config(8, 5)], ids=name_of)
def test_ctas_an_sm(config):
    """Two but for B = 5 with one head, which is for goldens: one is at work, the next launch's has its weights."""
    assert 2 * (config.smem_bytes + CTA_RESERVED_BYTES) <= SM_BYTES


@pytest.mark.parametrize("heads", [12, 6, 1])
def test_groups_cover_all_requests_and_leave_none_empty(heads):
    for rows in range(1, 65):
        groups, tiles = tiled.groups_for(heads, rows)
        assert (groups - 1) * tiles * tiled.TILE < rows <= groups * tiles * tiled.TILE
        assert tiles <= 4
        assert groups == 1 or (heads * groups + 1) * tiled.CTAS <= tiled.SMS


def test_weights_are_staged_before_the_wait(variant):
    """The successor may start right behind the wait; that of the insert alone at once."""
    config, ptx, text, _ = variant
    assert ptx.count("griddepcontrol.launch_dependents;") == 1
    order = re.findall(r"(PREEXIT|ACQBULK|UBLKCP|LDGSTS|STG|LDG)", text)
    if config == INSERT:
        assert order[0] == "PREEXIT"
    else:
        assert order[order.index("PREEXIT") - 1] == "ACQBULK"
    waits = 1 if config == INSERT else 2  # the insert's and the query's
    assert ptx.count("griddepcontrol.wait;") == waits
    found = instructions(ptx)
    if isinstance(config, small.Config):
        copies = found["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"]
        pieces = found["cp.async.cg.shared.global"]
        q_b = 0 if not config.q_b_cp_async else config.q_b_rows * 3072 // 16 // 256
        assert (copies, pieces) == (int(not config.q_b_cp_async), q_b + 128 * config.columns // 8 // 256)
    if isinstance(config, tiled.Config):
        before = ptx[: ptx.rindex("griddepcontrol.wait;")] if ptx.index("mma.sync") else ptx
        assert instructions(before)["ld.global.v4.b32"] >= 18


def test_polls_compare_integers(variant):
    config, ptx, *_ = variant
    if config != INSERT and config.dcp:
        found = instructions(ptx)
        assert found["ld.relaxed.sys.global.b32"] == 2
        assert found["st.relaxed.sys.global.b32"] + found["st.relaxed.sys.global.v4.b32"] == 1 + 2 * config.dcp
        assert "multimem" not in ptx


def test_the_test_kernel_compiles(tmp_path):
    ptx = dcp.compile_publish_others(f"--keep-ptx --dump-dir={tmp_path}").__ptx__
    assert instructions(ptx)["st.relaxed.sys.global.b32"] == 1


# The host side.

BF16 = torch.bfloat16


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def shifted(*shape, dtype=BF16):
    """A contiguous tensor one element behind a 16-byte boundary."""
    count = 1
    for extent in shape:
        count *= extent
    return torch.zeros(count + 8, dtype=dtype)[1 : count + 1].view(shape)


def query_inputs(rows=2, heads=1, **changed):
    x = {
        "qkv": zeros(rows, 2112),
        "w_qa": zeros(1536),
        "w_kva": zeros(512),
        "w_qb": zeros(heads * 192, 1536),
        "w_uk": zeros(heads, 128, 512),
        "cache": zeros(1, 4, 576, dtype=torch.uint8),
        "slots": torch.arange(rows),
        "q_scale_inv": torch.ones(1),
        "k_scale_inv": torch.ones(1),
    }
    return {**x, "eps": 2.0**-20, **changed}


def insert_inputs(rows=2, **changed):
    x = query_inputs(rows)
    kv, k_pe = x["qkv"][:, 1536:].split((512, 64), dim=1)
    x = {"kv": kv, "k_pe": k_pe} | {name: x[name] for name in ("w_kva", "cache", "slots", "k_scale_inv", "eps")}
    return x | changed


QUERY_REFUSALS = {
    "heads": ({"w_uk": zeros(5, 128, 512)}, r"heads: got 5 \(of w_uk\), allowed are 12, 6, 1"),
    "w_uk": ({"w_uk": zeros(1, 64, 512)}, r"w_uk: got shape \(1, 64, 512\), allowed is \[heads, 128, 512\]"),
    "w_uk dims": ({"w_uk": zeros(128, 512)}, r"w_uk: got shape \(128, 512\), allowed is \[heads, 128, 512\]"),
    "w_qb": ({"w_qb": zeros(2304, 1536)}, r"w_qb: got shape \(2304, 1536\), allowed is \[192, 1536\]"),
    "w_qa": ({"w_qa": zeros(1535)}, r"w_qa: got shape \(1535,\), allowed is \[1536\]"),
    "w_kva dtype": ({"w_kva": zeros(512, dtype=torch.float16)}, r"w_kva: got torch.float16, allowed is torch.bfloat16"),
    "width": ({"qkv": zeros(2, 2104)}, r"qkv: got W = 2104, allowed is from 2112 on"),
    "rows": ({"qkv": zeros(65, 2112), "slots": torch.arange(65)}, r"qkv: got B = 65, allowed are 1 … 64"),
    "no rows": ({"qkv": zeros(0, 2112), "slots": torch.arange(0)}, r"qkv: got shape \(0, 2112\), .* from 1 on"),
    "columns": ({"qkv": zeros(2, 4224)[:, ::2]}, r"qkv: got strides \(4224, 2\), allowed are 1 for the columns"),
    "pitch": ({"qkv": zeros(2, 2116)[:, :2112]}, r"qkv: got strides \(2116, 1\), .* multiples of 8 elements"),
    "expanded": ({"qkv": zeros(1, 2112).expand(2, -1)}, r"qkv: got strides \(0, 1\), .* from 2112 on"),
    "qkv address": ({"qkv": shifted(2, 2112)}, r"qkv: got address 0x\w+, allowed are multiples of 16 bytes"),
    "w_qb address": ({"w_qb": shifted(192, 1536)}, r"w_qb: got address 0x\w+, allowed are multiples of 16 bytes"),
    "w_uk address": ({"w_uk": shifted(1, 128, 512)}, r"w_uk: got address 0x\w+, allowed are multiples of 16 bytes"),
    "weights": ({"w_qb": zeros(1536, 192).t()}, r"w_qb: got strides \(1, 192\) .*, allowed is contiguous"),
    "cache dtype": ({"cache": zeros(1, 4, 576)}, r"cache: got torch.bfloat16, allowed is torch.uint8 or torch.float8"),
    "cache width": (
        {"cache": zeros(1, 4, 512, dtype=torch.uint8)},
        r"cache: got shape \(1, 4, 512\), allowed is .*576",
    ),
    "cache dims": (
        {"cache": zeros(4, 576, dtype=torch.uint8)},
        r"cache: got shape \(4, 576\), allowed is \[pages, page_",
    ),
    "cache strides": (
        {"cache": zeros(2, 4, 576, dtype=torch.uint8)[:, ::2]},
        r"cache: got strides \(2304, 1152, 1\) .*, allowed is contiguous",
    ),
    "cache address": ({"cache": shifted(1, 4, 576, dtype=torch.uint8)}, r"cache: got address 0x\w+, .* 16 bytes"),
    "slots": ({"slots": torch.arange(3)}, r"slots: got B = 3, qkv has 2"),
    "slots dtype": ({"slots": torch.arange(2, dtype=torch.int32)}, r"slots: got torch.int32, allowed is torch.int64"),
    "scale": ({"q_scale_inv": torch.ones(2)}, r"q_scale_inv: got shape \(2,\), allowed is \[1\]"),
    "scale dtype": ({"k_scale_inv": zeros(1)}, r"k_scale_inv: got torch.bfloat16, allowed is torch.float32"),
    "scale number": ({"k_scale_inv": torch.tensor(1.0)}, r"k_scale_inv: got shape \(\), allowed is \[1\]"),
    "device": ({"w_qa": zeros(1536).to("meta")}, r"w_qa: is on meta, qkv on cpu"),
    "w_uk device": ({"w_uk": zeros(1, 128, 512).to("meta")}, r"w_uk: is on meta, qkv on cpu"),
    "eps": ({"eps": -1.0}, r"eps: got -1.0, allowed is a finite number from 0 on"),
    "eps kind": ({"eps": True}, r"eps: got True, allowed"),
    "eps size": ({"eps": 1e39}, r"eps: got 1e\+39, allowed is a finite number of at most 3.4"),
    "schedule": ({"schedule": "large"}, r"schedule: got 'large', allowed are small, tiled"),
    "small": (
        {"qkv": zeros(6, 2112), "slots": torch.arange(6), "schedule": "small"},
        r"qkv: got B = 6, schedule small takes 1 … 5 with 1 heads",
    ),
    "q_b_cp_async": ({"q_b_cp_async": 1}, r"q_b_cp_async: got 1, allowed are True and False"),
    "weights_complete": ({"weights_complete": 0}, r"weights_complete: got 0, allowed are True and False"),
    "out": ({"out": zeros(2, 1, 512, dtype=torch.uint8)}, r"out: got shape \(2, 1, 512\), allowed is \[2, 1, 576\]"),
    "out dtype": ({"out": zeros(2, 1, 576)}, r"out: got torch.bfloat16, allowed is torch.uint8"),
    "slot twice": ({"slots": torch.tensor([7, 7]), "debug": True}, r"slots: rows 0, 1 all have slot 7, and would race"),
}

INSERT_REFUSALS = {
    "kv": ({"kv": zeros(2, 576)}, r"kv: got shape \(2, 576\), allowed is \[B, 512\]"),
    "k_pe": ({"k_pe": zeros(3, 64)}, r"k_pe: got B = 3, kv has 2"),
    "pitch": ({"kv": zeros(2, 516)[:, :512]}, r"kv: got strides \(516, 1\), .* multiples of 8 elements"),
    "k_pe address": ({"k_pe": zeros(2, 72)[:, 4:68]}, r"k_pe: got address 0x\w+, allowed are multiples of 16 bytes"),
    "cache": ({"cache": zeros(1, 4, 576, dtype=torch.int8)}, r"cache: got torch.int8, allowed is torch.uint8 or"),
    "slots": ({"slots": torch.arange(2).float()}, r"slots: got torch.float32, allowed is torch.int64"),
    "eps": ({"eps": float("nan")}, r"eps: got nan, allowed"),
    "slot twice": ({"slots": torch.tensor([3, 3]), "debug": True}, r"slots: rows 0, 1 all have slot 3, and would race"),
}


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1, 0, 1 + 2.0**-24, 2.0**-150, 3e38])
def test_eps_is_rounded_to_fp32_as_the_reference_does(eps):
    number = checks.eps_number(eps)
    assert number == eps_of({"eps": eps}) == np.float32(eps)


@pytest.mark.parametrize(("changed", "message"), QUERY_REFUSALS.values(), ids=QUERY_REFUSALS)
def test_query_refusals_name_the_argument(changed, message):
    with pytest.raises(ValueError, match=message):
        module.mla_query(**query_inputs(**changed))


@pytest.mark.parametrize(("changed", "message"), INSERT_REFUSALS.values(), ids=INSERT_REFUSALS)
def test_insert_refusals_name_the_argument(changed, message):
    with pytest.raises(ValueError, match=message):
        insert_module.cache_insert(**insert_inputs(**changed))


def test_candidates_refuse_what_they_do_not_have():
    x = query_inputs()
    eps = x.pop("eps")
    with pytest.raises(ValueError, match=r"heads: got 12, w_uk has 1"):
        module.run(x, {"heads": 12, "eps": eps})
    with pytest.raises(ValueError, match=r"schedule: got 'small', allowed are insert"):
        insert_module.run(insert_inputs(), {"eps": eps}, "small")


@pytest.mark.parametrize(
    ("slots", "rows"), [([-2, 0], "0"), ([4, 5], "0, 1"), ([-(1 << 63), (1 << 63) - 1], "0, 1"), ([-1, 3], None)]
)
def test_the_debug_check_reports_slots_outside_the_cache(slots, rows, recwarn):
    checks.check_slots(torch.tensor(slots), zeros(2, 2, 576, dtype=torch.uint8))
    told = [str(w.message) for w in recwarn]
    assert told == ([f"slots: rows {rows} are outside the cache of 4 rows and are skipped"] if rows else [])


@pytest.mark.parametrize(
    ("heads", "rows", "schedule"),
    [(12, 3, "small"), (12, 4, "tiled"), (6, 5, "small"), (6, 6, "tiled"), (1, 5, "small"), (1, 64, "tiled")],
)
def test_the_switch(heads, rows, schedule):
    assert module.schedule_for(heads, rows) == schedule


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="sm_90 GPU"):
        module.mla_query(**query_inputs())
    with pytest.raises(RuntimeError, match="sm_90 GPU"):
        insert_module.cache_insert(**insert_inputs())


def boxes(ranks=2, heads=1, capacity=4):
    return [dcp.Mailbox.empty(ranks, heads, capacity, "cpu") for _ in range(ranks)]


MAILBOX_REFUSALS = {
    "ranks": (lambda: dcp.Mailbox(boxes(9), 0), r"buffers: got 9 ranks, allowed are 1 … 8"),
    "rank": (lambda: dcp.Mailbox(boxes(), 2), r"rank: got 2, allowed are 0 … 1"),
    "polls": (lambda: dcp.Mailbox(boxes(), 0, -1), r"polls: got -1, allowed are 0 \(no bound\)"),
    "form": (lambda: dcp.Mailbox([zeros(4, 2, 576)], 0), r"buffers\[0\]: got torch.bfloat16 \(4, 2, 576\), allowed is"),
    "shapes": (
        lambda: dcp.Mailbox([boxes()[0], boxes(heads=2)[1]], 0),
        r"buffers\[1\]: got shape .*, buffers\[0\] has",
    ),
    "heads": (lambda: dcp.Mailbox([boxes(3)[0]] * 2, 0), r"buffers: got 3 heads in all, allowed are multiples of 2"),
    "weights": (
        lambda: module.mla_query(**query_inputs(), mailbox=dcp.Mailbox(boxes(heads=6), 0)),
        r"mailbox: got 6 heads a rank, the weights have 1",
    ),
    "capacity": (
        lambda: module.mla_query(**query_inputs(), mailbox=dcp.Mailbox(boxes(capacity=1), 0)),
        r"mailbox: got a capacity of 1 rows, qkv has 2",
    ),
}


@pytest.mark.parametrize(("call", "message"), MAILBOX_REFUSALS.values(), ids=MAILBOX_REFUSALS)
def test_mailbox_refusals_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
