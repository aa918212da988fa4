"""Faults in kernels: compiled without a GPU, and run on one as candidates, each from a tree of its own."""

import importlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import goldens
from tools.candidates import OURS
from tools.faults.patch import Edit, Fault, tree

NOT_RUN = "not run here"
SECONDS = 900.0
KDA_CLUSTER = 8


@dataclass(frozen=True)
class KernelOutcome:
    """What became of a kernel's fault. state: "caught", "NOT caught", or why neither is known.

    failing: elements whose bits differ. place: parts of the kernel of which a single number made them all.
    """

    fault: Fault
    state: str
    failing: int = 0
    place: str = ""

    @property
    def caught(self) -> bool:
        return self.state == "caught"


def compile_variant(fault: Fault, options: str) -> Any:
    """Compile the variant that the fault's golden runs, by the modules of cute_impl that are found now."""
    case = goldens.find(fault.case_id)

    def module(name: str) -> Any:
        return importlib.import_module(f"cute_impl.{name}")

    if fault.kernel == "fmha" and fault.schedule == "k2":
        return module("fmha.k2").compile_variant(case.dims["d"], case.params["causal"], options)
    if fault.kernel == "fmha":
        fmha = module("fmha")
        rung = fmha.RUNGS[-1]
        config = fmha.config_of(rung, fault.schedule, case.dims["d"], case.params["causal"], False)
        return module("fmha.launch").compile_variant(fmha.TENSOR_CORE[rung], config, options)
    if fault.kernel == "attn_res":
        cluster7 = module("attn_res.cluster7")
        fields = {name: case.params[name] for name in ("nb", "slots", "has_delta", "write", "final", "aux")}
        return cluster7.compile_variant(cluster7.Config(**fields, schedule=fault.schedule), options)
    if fault.schedule == "small":
        clusters = module("mla_query").CLUSTER
        small = module("mla_query.small")
        return small.compile_variant(small.Config(clusters[case.params["heads"]], case.dims["rows"]), options)
    if fault.schedule == "tiled":
        tiled = module("mla_query.tiled")
        return tiled.compile_variant(tiled.Config(1), options)
    if fault.kernel == "cache_insert":
        return module("cache_insert").compile_variant(options)
    chunk16 = module("kda.chunk16")
    return chunk16.compile_variant(chunk16.Config(KDA_CLUSTER), options)


def ptx(fault: Fault, edits: Sequence[Edit]) -> str:
    """The digest of the kernel's PTX with these edits. For a process of its own: its cute_impl stays the edited one."""
    from tools.ptx_digest import digests

    with tree(edits) as folder, tempfile.TemporaryDirectory() as dump:
        for name in [name for name in sys.modules if name.split(".")[0] == "cute_impl"]:
            del sys.modules[name]
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        found = importlib.import_module("cute_impl").__file__ or ""
        if not Path(found).is_relative_to(folder):
            raise ImportError(f"cute_impl: found {found}, wanted the copy in {folder}")
        # The dump's folder is in no name that the digest keeps.
        return digests(compile_variant(fault, f"--keep-ptx --dump-dir={dump}")).ptx


def _compiled(fault: Fault, sound: bool) -> str:
    """``ptx`` with the fault, or without; "error: " and the reason if it does not compile."""
    try:
        return ptx(fault, () if sound else fault.edits)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def compiled(faults: Sequence[Fault], jobs: int) -> dict[str, str]:
    """By fault's id "yes", or why not: no kernel compiled for sm_90a, or the same one as without the fault."""
    importlib.import_module("cutlass.cute")  # once, before the processes part
    variant = {f.id: (f.kernel, f.schedule, f.case) for f in faults}
    one_of = {variant[f.id]: f for f in faults}
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        sound = {key: pool.submit(_compiled, f, True) for key, f in one_of.items()}
        faulty = {f.id: pool.submit(_compiled, f, False) for f in faults}
        said = {}
        for f in faults:
            right, wrong = sound[variant[f.id]].result(), faulty[f.id].result()
            same = "the same PTX as without the fault" if right == wrong else "yes"
            said[f.id] = next((x for x in (wrong, right) if x.startswith("error: ")), same)
    return said


def verify(
    edits: Sequence[Edit],
    cases: Iterable[str],
    schedule: str | None,
    html: Path | None = None,
    candidate: tuple[str, ...] = ("--candidate", OURS),
) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON report and text of ``goldens verify`` of our kernels with edits, in a process of its own.

    candidate: the options that name it and where it runs.
    """
    with tree(edits) as folder:
        report = folder / "report.json"
        words = [sys.executable, "-m", "tools.cli", "verify", *candidate, "--json", str(report)]
        for option, value in (("--schedule", schedule), ("--html", html)):
            words += [option, str(value)] if value else []
        for case in cases:
            words += ["--case", case]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        made = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, made, done.stdout + done.stderr


def outcome(fault: Fault, code: int, made: dict[str, Any], text: str) -> KernelOutcome:
    """What a run of ``verify`` says of a fault. A call that failed has caught nothing."""
    verdicts = [v for result in made.get("results", []) for v in result["verdicts"]]
    failed = [v for v in verdicts if not v["passed"]]
    calls = [v["reason"] for v in failed if v["output"] == "call"]
    if code not in (0, 1) or calls or not verdicts:
        last = (text.strip().splitlines() or [""])[-1]
        return KernelOutcome(fault, f"no verdict: {calls[0] if calls else last}")
    bits = [v for v in failed if v["against"] == "exact"]
    if not bits:
        return KernelOutcome(fault, "NOT caught")
    parts = (bits[0]["kernel_map"] or {"parts": {}})["parts"]
    single = [f"{part} {next(iter(numbers))}" for part, numbers in parts.items() if len(numbers) == 1]
    return KernelOutcome(fault, "caught", sum(v["failing"] for v in bits), ", ".join(single))


def run(fault: Fault, html: Path | None = None) -> KernelOutcome:
    """The fault on its golden, on the sm_90 GPU."""
    return outcome(fault, *verify(fault.edits, [fault.case_id], fault.schedule, html))


def sound(faults: Sequence[Fault]) -> str:
    """Empty if the kernels without a fault pass the faults' goldens, else what they say."""
    code, _, text = verify((), dict.fromkeys(f.case_id for f in faults), None)
    return "" if code == 0 else text
