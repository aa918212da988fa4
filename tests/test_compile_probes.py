"""What the assembler makes of each tensor-core form: the model of an expanded one is of its expansion. And the late
writer: its successor may start before it waits, and it writes after that."""

import re
from collections import Counter

import pytest
import torch

from cute_impl.probes import compile_mma
from cute_impl.probes_launch import compile_write_late, write_late
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


def test_the_late_writer_lets_its_successor_start_first(tmp_path):
    text = sass(compile_write_late(f"--keep-cubin --dump-dir={tmp_path}").__cubin__)
    order = re.findall(r"(PREEXIT|NANOSLEEP|STG\.E|ACQBULK)", text)
    assert set(order) == {"PREEXIT", "NANOSLEEP", "STG.E"}
    assert order[0] == "PREEXIT"


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        (torch.zeros(4, 2).t(), torch.zeros(2, 4), r"target: got strides \(1, 2\) for shape \(2, 4\)"),
        (torch.zeros(4), torch.zeros(4, 2)[:, 0], r"source: got strides \(2,\)"),
        (torch.zeros(4), torch.zeros(3), "target: got 16 bytes for 12"),
        (torch.zeros(3, dtype=torch.int16), torch.zeros(3, dtype=torch.int16), "target: got 6 bytes for 6, .* of 4"),
    ],
)
def test_the_late_writer_refuses_what_it_cannot_copy(target, source, message):
    with pytest.raises(ValueError, match=message):
        write_late(target, source)
