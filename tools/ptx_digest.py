"""What a compiled kernel is, as digests: of its PTX and of the host code that launches it.

Two compilations of the same source by the same compiler give the same digests, whatever the machine, folder, hash seed
and version of Python; what is not semantic is left out first: comments, line numbers, names.
"""

import hashlib
import re
from typing import Any, NamedTuple

from goldens.store import DIGEST_DIGITS

LONGEST_WORD = 12  # of an operator in quotes, such as "slt"; longer strings are names, messages and machine code
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAMED = re.compile(r"\w*cutlass_\w+")


class Digests(NamedTuple):
    """Of the normalised PTX, and of the host code that sets grid, cluster and shared memory: SHA-256's first digits."""

    ptx: str
    host: str


def digests(compiled: Any) -> Digests:
    """The digests of a kernel that was compiled with ``--keep-ptx``."""
    texts = normalised_ptx(compiled.__ptx__), normalised_host(str(compiled.ir_module))
    return Digests(*(hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS] for text in texts))


def normalised_ptx(ptx: str) -> str:
    """PTX without comments, line information and debug sections; kernels are named by their order."""
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", "", ptx, flags=re.DOTALL | re.MULTILINE)
    ptx = re.sub(r"^\s*\.(?:loc|file)\s[^\n]*", "", ptx, flags=re.MULTILINE)
    entries = list(dict.fromkeys(re.findall(r"\.entry\s+([\w$]+)", ptx)))
    for i, name in sorted(enumerate(entries), key=lambda item: -len(item[1])):
        ptx = ptx.replace(name, f"kernel{i}")
    return "\n".join(line for line in (" ".join(line.split()) for line in ptx.splitlines()) if line)


def normalised_host(ir: str) -> str:
    """The host code without the machine code that it carries, and without names and their lengths."""
    ir = _STRING.sub(lambda found: found[0] if len(found[0]) <= LONGEST_WORD else '""', ir)
    names = list(dict.fromkeys(_NAMED.findall(ir)))
    ir = _NAMED.sub(lambda found: f"name{names.index(found[0])}", ir)
    return re.sub(r"array<\d+ x i8>|^ *llvm\.mlir\.global .*$|\s*loc\(.*\)$", "", ir, flags=re.MULTILINE)


def toolkit(ptx: str) -> str:
    """The version of the CUDA compiler that wrote a PTX file, such as 13.4.59."""
    found = re.search(r"Cuda compilation tools, release [\d.]+, V([\d.]+)", ptx)
    return found[1] if found else "unknown"
