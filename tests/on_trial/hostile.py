"""A candidate that is out for the judge: ``params["do"]`` says how."""

import ctypes
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import torch

from goldens.judge import Unsupported

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "goldens" / "data" / "cache_insert" / "b1-p1x1-unit.safetensors"
LINE = "o\nfmha/d64-n64-normal any o against exact: 0 bits"


class Dressed(torch.Tensor):
    """A subclass whose every use fails."""

    @classmethod
    def __torch_function__(cls, *_, **__):
        raise RuntimeError("not for you")


class Endless(dict):
    """Items without an end."""

    def items(self):
        while True:
            yield "o", torch.zeros(1)


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


def garbage():
    """What is no message, on the only socket that this process has."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    sockets = [n for n in numbers if os.path.exists(f"/dev/fd/{n}") and stat.S_ISSOCK(os.fstat(n).st_mode)]
    os.write(sockets[0], b"\x80\x04garbage" * 100)
    time.sleep(30)


def imported(name):
    __import__(name)


def leak():
    """A child in a session of its own, that closes what it has and spins."""
    code = "import os; os.setsid(); os.closerange(0, 256)\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    time.sleep(0.2)
    return {"o": torch.tensor([child.pid])}


def modes():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_flush_denormal(True)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.Tensor.__eq__ = lambda *_: True
    return {"o": torch.zeros(2, device="cpu")}


def seen():
    """Whether torch is as it was at the import."""
    x = torch.tensor(2.0**-130)
    found = [x.dtype == torch.float32, x.device.type == "cpu", float(x * 1) != 0, torch.get_num_threads() != 3]
    return {"o": torch.tensor([*found, not torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()])}


def forks():
    os.fork()
    return {"o": torch.zeros(2)}


def native():
    """The golden's bytes without Python's open: by the C library."""
    libc = ctypes.CDLL(None)
    number = libc.open(os.fsencode(GOLDEN), 0)
    return {"o": torch.tensor([number >= 0])}


def elsewhere():
    """The models' source, for another interpreter, which has none of this one's hooks."""
    code = "import os, sys; sys.exit(not os.listdir('reference'))"
    return {
        "o": torch.tensor([subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=False).returncode == 0])
    }


def loud():
    print("\x1b[2J1 of 1 runs passed\n" + "noise " * 100_000)
    os.write(2, b"\xff\xfe\x00 no text\n" * 1000)
    return {"o": torch.zeros(2)}


def raises(error):
    raise error


DO = {
    "right": lambda: {"o": torch.arange(4.0).view(2, 2).T},
    "subclass": lambda: {"o": torch.zeros(2).as_subclass(Dressed)},
    "nested": lambda: {"o": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])},
    "sparse": lambda: {"o": torch.zeros(2, 2).to_sparse()},
    "csr": lambda: {"o": torch.eye(2).to_sparse_csr()},
    "meta": lambda: {"o": torch.zeros(2, device="meta")},
    "quantised": lambda: {"o": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)},
    "huge": lambda: {"o": torch.zeros(1).expand(1 << 40)},
    "many": lambda: {f"o{i}": torch.zeros(1) for i in range(100_000)},
    "endless": Endless,
    "complex": lambda: {"o": torch.zeros(2, dtype=torch.complex128).conj()},
    "bits": lambda: {"o": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)},
    "negative": lambda: {"o": torch.zeros(2, dtype=torch.complex64).conj().imag},
    "scalar": lambda: {"o": torch.tensor(1.0)},
    "empty": lambda: {"o": torch.zeros(0, 3)},
    "grad": lambda: {"o": torch.nn.Parameter(torch.zeros(2))},
    "line": lambda: {LINE: torch.zeros(1)},
    "long": lambda: {"o" * 10**6: torch.zeros(1)},
    "surrogate": lambda: {"\ud800": torch.zeros(1)},
    "right-to-left": lambda: {"\u202eo": torch.zeros(1)},
    "metadata": lambda: {"__metadata__": torch.zeros(1)},
    "key": lambda: {b"o": torch.zeros(1)},
    "refuses": lambda: raises(Unsupported("\x1b[2Jno\nfmha/d64-n64-normal any o against exact: 0 bits" * 10_000)),
    "mute": lambda: raises(Mute()),
    "base": lambda: raises(type("Odd", (BaseException,), {})("odd\x1b[31m")),
    "recursion": lambda: DO["recursion"](),
    "garbage": garbage,
    "golden": lambda: {"o": torch.tensor(list(GOLDEN.read_bytes()[:8]))},
    "listing": lambda: os.listdir(GOLDEN.parent),
    "link": lambda: (Path("/proc/self/root") / str(GOLDEN).lstrip("/")).read_bytes(),
    "models": lambda: imported("reference.cache_insert"),
    "judge": lambda: imported("goldens.compare"),
    "tools": lambda: imported("tools.trial"),
    "source": lambda: exec((ROOT / "reference" / "fmha.py").read_text(), {}),
    "writes": lambda: GOLDEN.write_bytes(b""),
    "leak": leak,
    "modes": modes,
    "seen": seen,
    "forks": forks,
    "native": native,
    "elsewhere": elsewhere,
    "loud": loud,
}


def candidate(inputs, params):
    return DO[params["do"]]()
