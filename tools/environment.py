"""What is installed and which GPU is there."""

import importlib.metadata
import platform
import re
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "nvidia-cutlass-dsl",
    "nvidia-cuda-nvdisasm",
    "pytest",
    "hypothesis",
    "ml_dtypes",
)


def version(package: str) -> str | None:
    """The installed version of a package, or None; also finds the DSL where it is only unpacked on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The NVIDIA kernel driver's version, or None without one."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[0] if found else None


def environment() -> dict[str, str | None]:
    """What a report records of the machine it was made on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = {"python": platform.python_version(), "machine": platform.machine(), "gpu": gpu, "driver": driver_version()}
    return facts | {package: version(package) for package in PACKAGES[:4]}
