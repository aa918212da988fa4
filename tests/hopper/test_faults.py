"""Faults planted in the kernels: each must fail its golden on the GPU, and the report say where."""

import re
from pathlib import Path

import pytest

from tools.faults import gpu
from tools.faults.patch import Fault
from tools.faults.planted import KERNELS

pytestmark = pytest.mark.hopper

[WARP_3] = [fault for fault in KERNELS if fault.name == "warp-3-drops-a-term"]


def test_without_a_fault_the_goldens_pass() -> None:
    assert gpu.sound(KERNELS) == ""


@pytest.mark.parametrize("fault", KERNELS, ids=lambda fault: fault.id)
def test_a_fault_in_a_kernel_is_caught(fault: Fault) -> None:
    found = gpu.run(fault)
    assert found.caught, found.state
    assert found.failing > 0


def test_the_report_names_the_faulty_warp(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = gpu.run(WARP_3, page)
    assert found.caught, found.state
    assert "warp 3" in found.place
    assert re.search(r"come from [^<]*\bwarp 3\b", page.read_text())
