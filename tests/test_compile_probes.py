"""What the assembler makes of each tensor-core form: the model of an expanded one is of its expansion."""

import re
from collections import Counter

import pytest

from cute_impl.probes import compile_mma
from cute_impl.probes_wgmma import compile_wgmma
from tools.disassemble import sass

# Per form: the tensor-core instructions, and the FADDs beside them.
EXPANSIONS = {
    "bf16": (compile_mma, {"HMMA.16816.F32.BF16": 1}, 0),
    "fp16": (compile_mma, {"HMMA.16816.F32": 1}, 0),
    "fp16_acc16": (compile_mma, {"HMMA.16816.F16": 1}, 0),
    "e4m3": (compile_mma, {"HMMA.16816.F32": 2}, 4),  # sm_90a has none: fp16 twice, and an FADD for each output
    "wgmma_bf16": (compile_wgmma, {"HGMMA.64x8x16.F32.BF16": 1}, 0),
    "wgmma_fp16": (compile_wgmma, {"HGMMA.64x8x16.F32": 1}, 0),
    "wgmma_e4m3": (compile_wgmma, {"QGMMA.64x8x32.F32.E4M3.E4M3": 1}, 0),
}


@pytest.mark.parametrize("name", EXPANSIONS)
def test_the_assembler_expands_as_modelled(name, tmp_path):
    compile_form, products, additions = EXPANSIONS[name]
    text = sass(compile_form(name, f"--keep-cubin --dump-dir={tmp_path}").__cubin__)
    found = Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.MULTILINE))
    assert {
        n: count for n, count in found.items() if "MMA" in n and n.split(".")[0] in ("HMMA", "HGMMA", "QGMMA")
    } == products
    assert found["FADD"] == additions
