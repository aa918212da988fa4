"""Tests that run kernels. Asked for without an sm_90 GPU they end the run with exit code 3: a skip proves nothing."""

import pytest

from tools.candidates import HardwareMissing, require_hopper


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The sm_90 GPU; every test in this folder has it."""
    try:
        return require_hopper()
    except HardwareMissing as error:
        pytest.exit(f"hardware missing: {error}", returncode=3)
