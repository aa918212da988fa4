"""SASS of a cubin, by nvdisasm from the package nvidia-cuda-nvdisasm or the CUDA toolkit."""

import functools
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path


def nvdisasm() -> Path | None:
    """The disassembler's path, or None."""
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(root).glob("*/bin/nvdisasm")):
            return path
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


@functools.lru_cache(maxsize=4)
def sass(cubin: bytes) -> str:
    """The disassembly of a cubin. RuntimeError if there is no nvdisasm or it fails."""
    tool = nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm is missing; pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout
