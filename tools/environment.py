"""What is installed and which GPU is there."""

import importlib.metadata
import os
import platform
import re
import subprocess
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

COMMIT_VARIABLE = "GOLDENS_COMMIT"
DIRTY = "-dirty"


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


def commit() -> tuple[str | None, bool | None]:
    """The commit that this tree was checked out from, and whether anything in it has changed since; None: not known.

    Where there is no .git, the variable GOLDENS_COMMIT says it as `git describe --always --abbrev=40 --dirty` does: the
    hash, followed by "-dirty" if something has changed.
    """
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given.removesuffix(DIRTY), given.endswith(DIRTY)
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():  # of an installed package, some other repository around it means nothing
        return None, None
    head, status = (_git(root, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return (None, None) if head is None or status is None else (head, bool(status))


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment() -> dict[str, str | None]:
    """What a report records of the machine it was made on, and of which commit; "-dirty": with changes."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = {"python": platform.python_version(), "machine": platform.machine(), "gpu": gpu, "driver": driver_version()}
    head, dirty = commit()
    where = None if head is None else head + (DIRTY if dirty else "")
    return {"commit": where} | facts | {package: version(package) for package in PACKAGES[:4]}


def headline() -> str:
    """One line that a benchmark prints above its figures: GPU, driver, torch, compiler, commit."""
    facts = environment()
    names = ("driver", "torch", "nvidia-cutlass-dsl", "commit")
    return ", ".join([facts["gpu"] or "no GPU", *(f"{name} {facts[name] or 'unknown'}" for name in names)])
