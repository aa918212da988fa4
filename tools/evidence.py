"""What was proven on hardware, and whether it still holds: ``goldens/evidence/KERNEL.json`` against the code as it is.

``pytest -m hopper --record`` writes the evidence (tools.record). The check compiles every variant again, without a GPU,
and compares digests: a kernel is proven while its code, its compiler and its goldens are those that ran.
"""

import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import goldens
from goldens import store
from tools.environment import version
from tools.ptx_digest import digests, toolkit

FORMAT = 1
FOLDER = Path(goldens.__file__).parent / "evidence"
EXCEPTIONS = "unproven.json"  # kernel: why it may be unproven
SM_90 = re.compile(r"\bG?H(20|100|200|800)\b")  # in the name of a GPU of compute capability 9.0
LISTED = 5  # names in a sentence

Compile = Callable[[str], Any]


@dataclass(frozen=True)
class Compiled:
    """A variant as it compiles now: its digests and toolkit, and what the compile cache knows it by; or the error."""

    ptx: str = ""
    host: str = ""
    toolkit: str = ""
    key: str = ""
    error: str = ""


@dataclass(frozen=True)
class Status:
    """What the evidence for a kernel is worth now; ``reasons`` say why it is unproven."""

    kernel: str
    reasons: tuple[str, ...]
    facts: str = ""
    exception: str | None = None

    @property
    def proven(self) -> bool:
        return not self.reasons

    @property
    def lines(self) -> list[str]:
        """For people: the state, and below it reasons and exception."""
        state = "proven" if self.proven else "UNPROVEN" if self.exception is None else "unproven, allowed"
        lines = [f"{self.kernel:<13} {state}" + (f": {self.facts}" if self.facts else "")]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.exception is not None:
            lines.append(f"  {'no longer needed' if self.proven else 'allowed'}: {self.exception}")
        return lines


@lru_cache
def variants(kernel: str) -> Mapping[str, Compile] | None:
    """Name and compile function of each variant, as the kernel's room lists them; None if it lists none.

    ``cute_impl.KERNEL.variants()`` gives them; if it takes an argument, that is parameters and schedule of each golden.
    """
    try:
        room = importlib.import_module(f"cute_impl.{kernel}")
    except ModuleNotFoundError as error:
        if error.name == f"cute_impl.{kernel}":
            return None
        raise
    if not hasattr(room, "variants"):
        return None
    calls = [(case.params, schedule) for case in goldens.KERNELS[kernel].cases for schedule in case.schedules]
    takes_calls = bool(inspect.signature(room.variants).parameters)
    return dict(room.variants(calls) if takes_calls else room.variants())


def compile_variant(kernel: str, name: str) -> Compiled:
    """Compile one variant for its digests."""
    from cute_impl import runtime

    listed = variants(kernel) or {}
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir={folder}"
        try:
            compiled = listed[name](options)
        except Exception as error:
            return Compiled(error=f"{type(error).__name__}: {error}".splitlines()[0])
        key = next((repr(key[:-1]) for key in runtime.compiled_keys() if key[-1] == options), "")
        return Compiled(*digests(compiled), toolkit(compiled.__ptx__), key)


def compile_all(kernels: Iterable[str], jobs: int | None = None) -> dict[str, dict[str, Compiled]]:
    """Every variant of the kernels, in ``jobs`` fresh processes; by default as many as there are CPUs to use."""
    tasks = [(kernel, name) for kernel in kernels for name in variants(kernel) or ()]
    jobs = min(jobs or len(os.sched_getaffinity(0)), max(1, len(tasks)))
    result: dict[str, dict[str, Compiled]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for (kernel, name), found in zip(tasks, pool.map(compile_variant, *zip(*tasks, strict=True)), strict=True):
            result.setdefault(kernel, {})[name] = found
    return result


def compiler(compiled: Iterable[Compiled]) -> dict[str, str]:
    """The compiler's versions; the toolkit tells its CUDA flavour."""
    toolkits = sorted({found.toolkit for found in compiled if found.toolkit})
    return {"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl") or "none", "toolkit": ", ".join(toolkits)}


def golden_digest(entry: Mapping[str, Any]) -> str:
    """One short digest of a manifest entry's tensors."""
    return hashlib.sha256(json.dumps(entry["sha256"], sort_keys=True).encode()).hexdigest()[:16]


def dump(content: Mapping[str, Any]) -> str:
    """JSON with sorted keys, one entry of each section a line, so that a diff shows what changed and no more."""
    sections = []
    for name, value in sorted(content.items()):
        if isinstance(value, Mapping) and value:
            inner = (f"  {json.dumps(key)}: {json.dumps(item, sort_keys=True)}" for key, item in sorted(value.items()))
            sections.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            sections.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def read(kernel: str, folder: Path = FOLDER) -> dict[str, Any]:
    """A kernel's evidence. ValueError, which names the file, if there is none or the file is not one."""
    path = folder / f"{kernel}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _require_form(content, kernel)
        return content
    except FileNotFoundError:
        raise ValueError(f"no evidence: {path} is not there") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no evidence of this suite ({error})") from None


def _require_form(content: Any, kernel: str) -> None:
    """ValueError unless everything that the check reads is there, and of its type."""
    _require("the file", content, {"format": int, "kernel": str})
    for name, allowed in (("format", FORMAT), ("kernel", kernel)):
        if content[name] != allowed:
            raise ValueError(f"its {name} is {content[name]!r}, allowed is {allowed!r}")
    sections = ("environment", "compiler", "variants", "cases", "verdicts", "tests")
    _require("the file", content, {"commit": str | None, "dirty": bool | None} | dict.fromkeys(sections, dict))
    _require("environment", content["environment"], {"gpu": str | None, "driver": str | None})
    _require("compiler", content["compiler"], dict.fromkeys(content["compiler"], str))
    counts = {"passed": int, "failed": int}
    for section, kinds in (
        ("variants", {"ptx": str, "host": str}),
        ("cases", {"golden": str}),
        ("verdicts", counts),
        ("tests", {"passed": int}),
    ):
        for name, entry in content[section].items():
            _require(f"{section}: {name}", entry, kinds)
    for name, case in content["cases"].items():
        for schedule in case.keys() - {"golden"}:
            _require(f"cases: {name}: {schedule}", case[schedule], counts)


def _require(where: str, entry: Any, kinds: Mapping[str, Any]) -> None:
    for key, kind in kinds.items():
        if not isinstance(entry, dict) or key not in entry or not isinstance(entry[key], kind):
            raise ValueError(f"{where} has no valid {key!r}")


def exceptions(folder: Path = FOLDER, options: Iterable[str] = ()) -> dict[str, str]:
    """Kernels that may be unproven and why: of the folder's file, and ``KERNEL=REASON`` options."""
    path = folder / EXCEPTIONS
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    form = '{"KERNEL": "REASON"}'
    if not isinstance(listed, dict):
        raise ValueError(f"{path}: got {listed!r}, allowed is {form}")
    given = {kernel: reason for kernel, _, reason in (option.partition("=") for option in options)}
    for where, entries, allowed in ((path, listed, form), ("--allow-unproven", given, "KERNEL=REASON")):
        for kernel, reason in entries.items():
            if kernel not in goldens.KERNELS:
                raise ValueError(f"{where}: got {kernel!r}, allowed are {', '.join(goldens.KERNELS)}, as {allowed}")
            if not isinstance(reason, str) or not reason.strip():
                raise ValueError(f"{where}: {kernel} has no reason, allowed is {allowed}")
    return {kernel: reason.strip() for kernel, reason in (listed | given).items()}


def status(
    kernel: str,
    evidence: Mapping[str, Any] | ValueError,
    compiled: Mapping[str, Compiled] | None,
    manifest: Mapping[str, Any],
    exception: str | None = None,
) -> Status:
    """Whether a kernel's evidence holds for its variants as they compile now, and for its goldens as they are.

    evidence: what ``read`` gave or raised.
    """
    if compiled is None:
        reason = f"its variants are not known: cute_impl.{kernel} has no function variants()"
        return Status(kernel, (reason,), "", exception)
    if isinstance(evidence, ValueError):
        return Status(kernel, (str(evidence),), "", exception)
    machine = evidence["environment"]
    facts = (
        f"{len(compiled)} variants, {len(evidence['cases'])} cases on {machine['gpu']}, driver {machine['driver']}, "
        f"compiler {' / '.join(evidence['compiler'].values())}, commit {evidence['commit'] or 'unknown'}"
    )
    facts += ", with changes" if evidence["dirty"] else ""
    reasons = [*_run_reasons(evidence), *_variant_reasons(evidence, compiled)]
    reasons += _case_reasons(kernel, evidence["cases"], manifest)
    return Status(kernel, tuple(reasons), facts, exception)


def _run_reasons(evidence: Mapping[str, Any]) -> Iterator[str]:
    gpu, verdicts, tests = evidence["environment"]["gpu"], evidence["verdicts"], evidence["tests"]
    if not SM_90.search(gpu or ""):
        yield f"it ran on {gpu or 'no GPU'}, wanted is an sm_90 GPU (H100, H200)"
    yield from _sentence("verdicts that failed, against", [who for who, counts in verdicts.items() if counts["failed"]])
    if "exact" not in verdicts or not any(verdicts["exact"][count] for count in ("passed", "failed")):
        yield "nothing was compared with exact bits"
    if not tests:
        yield "no test ran"
    bad = [name for name, counts in tests.items() if counts.get("failed") or not counts["passed"]]
    yield from _sentence("tests that did not pass", bad)


def _variant_reasons(evidence: Mapping[str, Any], compiled: Mapping[str, Compiled]) -> Iterator[str]:
    now, then = compiler(compiled.values()), evidence["compiler"]
    if now != then:
        yield f"the compiler is {' / '.join(now.values())}, proven was {' / '.join(then.values())}"
    known = evidence["variants"]
    errors = {name: found.error for name, found in compiled.items() if found.error}
    if errors:
        name, error = next(iter(errors.items()))
        yield f"do not compile: {_some(errors)}; {name}: {error}"
    rest = compiled.keys() - errors.keys()
    yield from _sentence("never ran on hardware", [name for name in rest if name not in known])
    both = [name for name in rest if name in known]
    yield from _sentence("other PTX than what ran", [n for n in both if known[n]["ptx"] != compiled[n].ptx])
    same = [n for n in both if known[n]["ptx"] == compiled[n].ptx]
    yield from _sentence("other launch code than what ran", [n for n in same if known[n]["host"] != compiled[n].host])


def _case_reasons(kernel: str, known: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[str]:
    entries = {case_id: entry for case_id, entry in manifest.items() if entry["kernel"] == kernel}
    wanted = [i for i, entry in entries.items() if entry["committed"] and entry["schedules"] and i not in known]
    yield from _sentence("committed goldens never judged on hardware", wanted)
    changed = [i for i in known if i in entries and known[i]["golden"] != golden_digest(entries[i])]
    yield from _sentence("goldens that are others than those judged", changed)
    judged = {f"{i} by {s}": counts for i, case in known.items() for s, counts in case.items() if s != "golden"}
    failed = [name for name, counts in judged.items() if counts["failed"]]
    yield from _sentence("goldens that failed", failed)
    both = known.keys() & {i for i, entry in entries.items() if entry["committed"]}
    names = judged.keys() | {f"{i} by {schedule}" for i in both for schedule in entries[i]["schedules"]}
    passed = [name for name, counts in judged.items() if counts["passed"]]
    yield from _sentence("exact schedules without a verdict", [*names - {*passed, *failed}])


def _sentence(what: str, names: list[str]) -> Iterator[str]:
    if names:
        yield f"{what}: {_some(names)}"


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def examine(
    kernels: Iterable[str], allowed: Mapping[str, str], folder: Path = FOLDER, jobs: int | None = None
) -> list[Status]:
    """The status of each kernel; compiles every variant of those that have evidence.

    A missing or damaged file costs its own kernel and no other.
    """
    kernels = list(kernels)
    evidence: dict[str, Mapping[str, Any] | ValueError] = {}
    for kernel in kernels:
        try:
            evidence[kernel] = read(kernel, folder)
        except ValueError as error:
            evidence[kernel] = error
    compiled = compile_all([kernel for kernel in kernels if not isinstance(evidence[kernel], ValueError)], jobs)
    manifest = store.read_manifest()
    return [
        status(
            kernel,
            evidence[kernel],
            None if variants(kernel) is None else compiled.get(kernel, {}),
            manifest,
            allowed.get(kernel),
        )
        for kernel in kernels
    ]


def command(
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 if a kernel is unproven and not allowed to be.")
    ] = False,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Only this kernel.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-unproven", help="KERNEL=REASON: this kernel may be unproven; may be given several times."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that compile; by default one a CPU.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where the evidence lies.")] = FOLDER,
) -> None:
    """Which kernels are proven on hardware as they stand: recompiles every variant and compares digests."""
    out, err = (Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False) for stderr in (False, True))
    if kernel is not None and kernel not in goldens.KERNELS:
        err.print(f"goldens: --kernel: got {kernel!r}, allowed are {', '.join(goldens.KERNELS)}")
        raise typer.Exit(2)
    start = time.monotonic()
    try:
        found = examine([kernel] if kernel else goldens.KERNELS, exceptions(folder, allow or ()), folder, jobs)
    except ValueError as error:
        err.print(f"goldens: {error}")
        raise typer.Exit(2) from None
    for line in (line for each in found for line in each.lines):
        out.print(line)
    failing = [each.kernel for each in found if not each.proven and each.exception is None]
    proven = sum(each.proven for each in found)
    out.print(f"{proven} of {len(found)} kernels proven as they stand; {time.monotonic() - start:.0f} s")
    if check and failing:
        err.print(f"goldens: unproven: {', '.join(failing)}; renew the evidence: pytest -m hopper --record")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
