"""Pytest plugin: ``pytest -m hopper --record`` writes what ran on the GPU to goldens/evidence, one file a kernel.

The tests of a kernel are those of tests/hopper/test_KERNEL*.py, in one process or several (``-n``). Its file is written
once they have all run and none failed, never after a part of them; what was not recorded is said, and the run then
fails.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

DIGITS = 1  # of seconds
OUTPUT = "goldens_records"  # what a worker of pytest-xdist sends
ANY = "any"  # the schedule of a candidate that claims none


SETS = ("collected", "deselected", "passed", "failed", "files")


@dataclass
class Record:
    """What the run says of one kernel. ``collected`` and the others hold test ids."""

    collected: set[str] = field(default_factory=set)
    deselected: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    cases: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As pytest-xdist can send it."""
        content: dict[str, Any] = {name: sorted(getattr(self, name)) for name in SETS}
        content |= {"skipped": self.skipped, "seconds": self.seconds}
        content["cases"] = [[*case, dict(counts)] for case, counts in self.cases.items()]
        return content | {"verdicts": {who: dict(counts) for who, counts in self.verdicts.items()}}

    def merge(self, other: dict[str, Any]) -> None:
        """Add what another process saw."""
        for name in SETS:
            getattr(self, name).update(other[name])
        self.skipped |= other["skipped"]
        for name, seconds in other["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        for case_id, schedule, counts in other["cases"]:
            self.cases.setdefault((case_id, schedule), Counter()).update(counts)
        for who, counts in other["verdicts"].items():
            self.verdicts.setdefault(who, Counter()).update(counts)

    def gap(self, files: Iterable[str], by_name: bool) -> str:
        """Why this is no complete and good run of the kernel's tests; empty if it is."""
        if self.failed:
            return f"{len(self.failed)} of {len(self.collected)} tests failed"
        missing = sorted(set(files) - self.files)
        if missing:
            return f"{', '.join(missing)} did not run"
        ran = len(self.passed) + len(self.skipped)
        if self.deselected or by_name:
            return f"{ran} tests were selected, by name or filter"
        return "" if ran == len(self.collected) else f"{ran} of {len(self.collected)} tests ran"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evidence")
    group.addoption("--record", action="store_true", help="write what ran on the GPU to goldens/evidence")
    group.addoption("--record-to", metavar="FOLDER", help="as --record, to this folder")
    group.addoption(
        "--commit", metavar="HASH", help="the commit under test where there is no .git; HASH-dirty: changed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not (config.getoption("--record") or config.getoption("--record-to")):
        return
    from tools import evidence

    folder = config.getoption("--record-to")
    config.pluginmanager.register(Recorder(config, Path(folder) if folder else evidence.FOLDER), "recorder")


class Recorder:
    """Listens to a run, and writes the evidence at its end."""

    def __init__(self, config: pytest.Config, folder: Path):
        import goldens
        from goldens import compare, judge
        from tools import environment

        self.folder = folder
        self.kernels = sorted(goldens.KERNELS, key=len, reverse=True)
        self.records: dict[str, Record] = {}
        self.current: Record | None = None
        self.by_name = any("::" in argument for argument in config.args)
        self.lines: list[str] = []
        self.root: Path | None = None
        self.ran: set[str] = set()  # keys of the compile cache
        self.worker = config if hasattr(config, "workerinput") else None
        commit = config.getoption("--commit")
        if commit:
            environment.os.environ[environment.COMMIT_VARIABLE] = commit
        self._patches = pytest.MonkeyPatch()
        # Before any test module imports them; judge itself goes on with those that do not listen.
        self._patches.setattr(judge, "judge", self._listening(judge.judge))
        for name in ("against_exact", "against_model"):
            self._patches.setattr(compare, name, self._listening(getattr(compare, name)))

    def _listening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self.current is not None:
                given = signature.bind(*args, **kwargs).arguments
                case = (given["case"].id, given["schedule"] or ANY) if "case" in given else None
                self._note(self.current, result if isinstance(result, list) else [result], case)
            return result

        return call

    def _note(self, record: Record, verdicts: list[Any], case: tuple[str, str] | None) -> None:
        for verdict in verdicts:
            counts = record.verdicts.setdefault(verdict.against, Counter())
            counts["passed" if verdict.passed else "failed"] += 1
            counts["elements"] += verdict.elements
            if case is not None:
                record.cases.setdefault(case, Counter())["passed" if verdict.passed else "failed"] += 1

    def _of(self, path: Path) -> Record | None:
        """The record of the kernel that a test file is about."""
        if path.parent.name != "hopper":
            return None
        self.root = path.parent
        for kernel in self.kernels:
            if re.fullmatch(rf"test_{kernel}(_\w+)?", path.stem):
                return self.records.setdefault(kernel, Record())
        return None

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        record = self._of(item.path)
        if record is not None and item.get_closest_marker("hopper"):
            record.collected.add(item.nodeid)
            record.files.add(item.path.name)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            record = self._of(item.path)
            if record is not None and item.nodeid in record.collected:
                record.deselected.add(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.current = self._of(item.path)
        try:
            return (yield)
        finally:
            self.current = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = self.current
        if record is None or report.nodeid not in record.collected:
            return
        function = _function(report.nodeid)
        record.seconds[function] = record.seconds.get(function, 0.0) + report.duration
        if report.failed:
            record.failed.add(report.nodeid)
        elif report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            record.skipped[report.nodeid] = why.removeprefix("Skipped: ")
        elif report.when == "call":
            record.passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended; one that broke down sends nothing, and its tests have not run."""
        sent = getattr(node, "workeroutput", {}).get(OUTPUT)
        if sent is None:
            return
        self.root = Path(sent["root"]) if sent["root"] else self.root
        self.ran.update(sent["ran"])
        for kernel, record in sent["records"].items():
            self.records.setdefault(kernel, Record()).merge(record)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._patches.undo()
        if "cute_impl.runtime" in sys.modules:
            from cute_impl import runtime

            self.ran.update(repr(key[:-1]) for key in runtime.compiled_keys() if key[-1] == "")
        if self.worker is not None:
            records = {kernel: record.plain() for kernel, record in self.records.items()}
            sent = {"root": str(self.root) if self.root else None, "ran": sorted(self.ran), "records": records}
            self.worker.workeroutput[OUTPUT] = sent  # type: ignore[attr-defined]
            return
        complete = {}
        for kernel, record in sorted(self.records.items()):
            if not record.passed and not record.failed:
                continue
            gap = record.gap(self._files(kernel), self.by_name)
            if gap:
                self.lines.append(f"{kernel}: not recorded: {gap}")
            else:
                complete[kernel] = record
        self.lines += [self._write(kernel, record, found) for kernel, record, found in self._compiled(complete)]
        if not self.lines:
            self.lines.append("nothing was recorded: no test of a kernel in tests/hopper ran")
        if session.exitstatus == 0 and len(self.lines) > len(complete):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _files(self, kernel: str) -> list[str]:
        """The files with tests of a kernel, those of others with longer names left out."""
        paths = sorted(self.root.glob(f"test_{kernel}*.py")) if self.root else []
        return [path.name for path in paths if self._of(path) is self.records[kernel]]

    def _compiled(self, complete: dict[str, Record]) -> list[tuple[str, Record, dict[str, Any]]]:
        from tools import evidence

        known = [kernel for kernel in complete if evidence.variants(kernel) is not None]
        found = evidence.compile_all(known) if known else {}
        return [(kernel, record, found.get(kernel, {})) for kernel, record in complete.items()]

    def _write(self, kernel: str, record: Record, compiled: dict[str, Any]) -> str:
        """Write the evidence of a kernel; what there is to say of it."""
        from goldens import store
        from goldens.files import write_text
        from tools import environment, evidence

        launched = {name: found for name, found in compiled.items() if found.key in self.ran}
        manifest = store.read_manifest()
        commit, dirty = environment.commit()
        cases: dict[str, dict[str, Any]] = {}
        for (case_id, schedule), counts in record.cases.items():
            if case_id in manifest:
                golden = {"golden": evidence.golden_digest(manifest[case_id])}
                cases.setdefault(case_id, golden)[schedule] = {n: counts[n] for n in ("passed", "failed")}
        content = {
            "format": evidence.FORMAT,
            "kernel": kernel,
            "commit": commit,
            "dirty": dirty,
            "environment": {n: v for n, v in environment.environment().items() if n != "commit"},
            "compiler": evidence.compiler(compiled.values()),
            "variants": {name: {"ptx": found.ptx, "host": found.host} for name, found in launched.items()},
            "cases": cases,
            "verdicts": {
                who: {n: c[n] for n in ("passed", "failed", "elements")} for who, c in record.verdicts.items()
            },
            "tests": _tests(record),
            "skipped": record.skipped,
        }
        write_text(self.folder / f"{kernel}.json", evidence.dump(content))
        idle = f"; did not run: {', '.join(sorted(compiled.keys() - launched.keys()))}" if launched != compiled else ""
        listed = "" if compiled else f"; cute_impl.{kernel} has no function variants(), so none is proven"
        skipped = f", {len(record.skipped)} skipped" if record.skipped else ""
        return (
            f"{kernel}: recorded: {len(record.passed)} tests passed{skipped}, {len(cases)} cases, "
            f"{len(launched)} of {len(compiled)} variants{idle}{listed}"
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("evidence")
        for line in [*self.lines, f"folder: {self.folder}"]:
            terminalreporter.write_line(line)


def _function(nodeid: str) -> str:
    """A test's file and function, without its parameters."""
    path, _, name = nodeid.partition("::")
    return f"{Path(path).name}::{name.partition('[')[0]}"


def _tests(record: Record) -> dict[str, dict[str, float]]:
    """Passed tests and seconds by function."""
    passed = Counter(_function(nodeid) for nodeid in record.passed)
    return {name: {"passed": n, "seconds": round(record.seconds[name], DIGITS)} for name, n in passed.items()}
