"""What the CPU tests share: one thread, tensors from bit patterns, a copy of the committed goldens to damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from goldens import store

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
def folder(tmp_path: Path) -> Path:
    """A copy of goldens/data."""
    return Path(shutil.copytree(store.DATA, tmp_path / "data"))
