"""What the CPU tests share: one thread, tensors from bit patterns, a copy of fmha's goldens to damage,
candidates in the test's own process."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor

import goldens
from goldens import store
from tests.in_process import InProcess
from tools import trial

# The models' first call on a thread is slow, and so are shared machines; a time limit would only add noise.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def from_codes() -> Callable[..., Tensor]:
    """``from_codes(torch.bfloat16, 0x3f80, 0xff80)``: a tensor [n] of a format's bit patterns."""

    def make(dtype: torch.dtype, *codes: int) -> Tensor:
        width = 8 * dtype.itemsize
        signed = [code - (1 << width) if width > 8 and code >> (width - 1) else code for code in codes]
        return torch.tensor(signed, dtype=INTEGER[dtype.itemsize]).view(dtype)

    return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of fmha's goldens, fmha being the only kernel."""
    for name in set(goldens.KERNELS) - {"fmha"}:
        monkeypatch.delitem(goldens.KERNELS, name)
    folder = tmp_path / "data"
    shutil.copytree(store.DATA / "fmha", folder / "fmha")
    entries = store.read_manifest()
    store.write_manifest({case_id: e for case_id, e in entries.items() if e["kernel"] == "fmha"}, folder)
    return folder


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are called in the test's own process."""
    monkeypatch.setattr(trial, "Worker", InProcess)
