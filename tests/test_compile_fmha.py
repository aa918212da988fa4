"""Every k2 variant compiled for sm_90a without a GPU: its PTX and SASS hold the roundings that the model assumes.

Counted in PTX, where each instruction of ``cute_impl.ptx`` stands once for each place it is unrolled to:
a rounding that is missing or one too many shows as a number.
"""

import importlib
import re
from collections import Counter

import pytest
import torch

from cute_impl import runtime
from cute_impl.fmha import k2
from tools.disassemble import sass

VARIANTS = [(d, causal) for d in (64, 128) for causal in (False, True)]
COLUMNS = k2.TILE // k2.GROUP  # score columns a thread
UNROLL = 8


@pytest.fixture(scope="module", params=VARIANTS, ids=["d64", "d64-causal", "d128", "d128-causal"])
def variant(request, tmp_path_factory):
    """(d, PTX, cubin, host code) of a variant."""
    d, causal = request.param
    folder = tmp_path_factory.mktemp("k2")
    compiled = k2.compile_variant(d, causal, f"--keep-ptx --keep-cubin --dump-dir={folder}")
    return d, compiled.__ptx__, compiled.__cubin__, str(compiled.ir_module)


def instructions(ptx):
    """PTX instructions by name."""
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)\s", ptx, re.MULTILINE))


def test_ptx_spells_every_rounding(variant):
    d, ptx, *_ = variant
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
    _, ptx, *_ = variant
    allowed = {"fma.rn.f32", "mul.rn.f32", "sub.rn.f32", "add.rn.f32", "max.f32", "ex2.approx.ftz.f32"}
    allowed |= {"rcp.approx.ftz.f32", "cvt.rn.bf16.f32", "cvt.f32.bf16", "selp.f32", "setp.equ.f32", "mov.f32"}
    floating = {name for name in instructions(ptx) if re.search(r"\.(f16|f32|f64|bf16|tf32)(x2)?\b", name)}
    assert floating <= allowed


def test_sass_contracts_nothing(variant):
    """As many FMUL, FADD and FFMA as PTX has products, sums and FMAs; the subtraction is an FADD."""
    _, ptx, cubin, _ = variant
    found = instructions(ptx)
    machine = Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", sass(cubin), re.MULTILINE))
    assert machine["FFMA"] == found["fma.rn.f32"]
    assert machine["FADD"] == found["add.rn.f32"] + found["sub.rn.f32"]
    assert machine["FMUL"] == found["mul.rn.f32"]
    assert machine["MUFU.EX2"] == found["ex2.approx.ftz.f32"]
    assert machine["MUFU.RCP"] == 1


def test_nothing_spills(variant):
    _, _, cubin, _ = variant
    assert not re.search(r"\b(LDL|STL)\b", sass(cubin))


def test_shared_memory(variant):
    """The host code launches with 32 KB for d = 64 and 48 KB for d = 128."""
    d, _, _, host = variant
    sizes = {int(n) for n in re.findall(r"constant\((\d+) : i64\)", host)}
    assert {64: 32768, 128: 49152}[d] in sizes
    assert not sizes & ({32768, 49152} - {{64: 32768, 128: 49152}[d]})


def test_tile_and_threads(variant):
    _, ptx, *_ = variant
    assert re.search(r"\.reqntid 256, 1, 1", ptx)
    assert ".target sm_90a" in ptx


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
