"""Tests that run kernels. Asked for without an sm_90 GPU they end the run with exit code 3: a skip proves nothing.

Under pytest-xdist each worker has one GPU of those that are visible, by its number.
"""

import os

import pytest
import torch

from tools.candidates import HardwareMissing, require_hopper


def one_gpu(worker: str | None, visible: str | None, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for an xdist worker such as "gw3"; None where it stays as it is."""
    if worker is None or not worker.removeprefix("gw").isdigit() or count < 2:
        return None
    gpus = visible.split(",") if visible else [str(i) for i in range(count)]
    return gpus[int(worker.removeprefix("gw")) % len(gpus)]


# Before anything asks CUDA for its devices.
_own = one_gpu(os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
if _own is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = _own


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The sm_90 GPU; every test in this folder has it."""
    try:
        return require_hopper()
    except HardwareMissing as error:
        pytest.exit(f"hardware missing: {error}", returncode=3)
