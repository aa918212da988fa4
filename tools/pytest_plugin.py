"""pytest as the judge of a candidate: ``pytest --candidate package.module:function --kernel attn_res``.

Each case and schedule is one test, its verdict the failure's text; a case that the candidate does not support is
skipped with its reason. As with `goldens verify`, the exit code is 2 if not all that was asked for was judged, unless
``--partial`` says that this is meant. ``--shard I/N`` takes one of N parts of whatever is selected, of ordinary tests
too. The checkout's conftest.py loads this; elsewhere ``-p tools.pytest_plugin`` does.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tools import shard

if TYPE_CHECKING:
    from goldens.case import Case
    from tools.trial import Trial


SEEN = "goldens-seen"  # a property of a test's report: what of a case was judged
ALONE = ("kernel", "all_cases", "case", "device", "schedule", "invariance", "fresh", "fresh_seed", "partial")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("goldens", "a candidate judged by the goldens, instead of other tests")
    group.addoption("--candidate", help="package.module:function, FILE.py:function, or a name of `goldens candidates`")
    group.addoption("--kernel", help="the kernel whose interface the candidate has")
    group.addoption("--case", action="append", help="only this case; may be given several times")
    group.addoption("--all", dest="all_cases", action="store_true", help="the on-demand cases too")
    group.addoption("--device", help="cpu, cuda or cuda:N; by default the sm_90 GPU, and nothing else")
    group.addoption("--schedule", help="only this schedule, and its bits are demanded")
    group.addoption("--invariance", action="store_true", help="try what must hold whatever the schedule instead")
    group.addoption("--fresh", type=int, default=0, help="so many further inputs for each case, from seeds in no file")
    group.addoption("--fresh-seed", type=int, help="the first of these seeds; random without it, and printed")
    group.addoption("--repeat", type=int, default=1, help="how often each call is made, every result judged")
    group.addoption("--partial", action="store_true", help="what the candidate refuses or leaves out is meant")
    group.addoption("--candidate-timeout", type=float, help="seconds that a call may take (0: no limit)")
    group.addoption("--shard", help="I/N: only the I-th of N parts of what is selected")


def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if options.shard is not None:
        try:
            shard.parse(options.shard)
        except ValueError as error:
            raise pytest.UsageError(f"--{error}") from None
    if options.candidate:
        config.args = []  # the cases are the tests
        _complete(options)
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Judged(options), "goldens-judged")
    else:
        given = [name for name in ALONE if getattr(options, name)]
        if given:
            option = given[0].removesuffix("_cases").replace("_", "-")
            raise pytest.UsageError(f"--{option}: is an option of --candidate, which is missing")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.candidate:
        items[:] = _items(session)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_take_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After every other selection."""
    kept = shard.part(items, config.option.shard)
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def pytest_unconfigure(config: pytest.Config) -> None:
    trial = config.stash.get(_TRIAL, None)
    if trial is not None:
        trial.close()


class CaseItem(pytest.Item):
    """One case of one schedule."""

    def __init__(self, *, case: "Case", schedule: str | None, **rest: Any):
        super().__init__(**rest)
        self._case, self._schedule = case, schedule

    def runtest(self) -> None:
        from tools.report import details
        from tools.trial import NotSupported, run

        config = self.config
        invariant, manifest = config.option.invariance, config.stash[_MANIFEST]
        found = run(config.stash[_TRIAL], self._case, manifest, invariant, self._schedule)
        self.user_properties += [(SEEN, json.dumps(one.seen.plain())) for one in found if one.seen]
        failures = [line for one in found if not isinstance(one, NotSupported) for line in details(one)]
        if failures:
            raise Failure("\n".join(failures))
        refused = [str(one) for one in found if isinstance(one, NotSupported)]
        if len(refused) == len(found):
            pytest.skip("; ".join(refused))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, Failure) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name


class Failure(Exception):
    """The text of failing verdicts."""


class Judged:
    """Counts what was judged, over all processes of the run, and ends it with exit code 2 if that was not all."""

    def __init__(self, options: Any):
        self._options = options
        self._seen: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from tools.coverage import Seen

        if report.when == "call":
            self._seen += [Seen(**json.loads(str(text))) for name, text in report.user_properties if name == SEEN]

    def _gaps(self) -> list[str]:
        from tools.adapters import ADAPTERS
        from tools.coverage import Coverage

        if not any(x.judged for x in self._seen):
            return ["nothing was judged"]
        meant = self._options.partial or self._options.candidate in ADAPTERS
        gaps = [] if meant else Coverage(tuple(self._seen)).gaps
        return [f"not all was judged: {gap}; --partial says that this is meant" for gap in gaps]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and not session.config.option.collectonly and self._gaps():
            session.exitstatus = pytest.ExitCode.INTERRUPTED  # 2, as `goldens verify` has it

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        from tools.coverage import Coverage

        options, trial = self._options, config.stash.get(_TRIAL, None)
        lines = [str(Coverage(tuple(self._seen))), *([f"guard: {trial.guard}"] if trial else [])]
        if options.fresh:
            lines.append(f"fresh inputs: --fresh {options.fresh} --fresh-seed {options.fresh_seed} makes them again")
        terminalreporter.section("goldens")
        for line in [*lines, *([] if options.collectonly else self._gaps())]:
            terminalreporter.write_line(line)


def _complete(options: Any) -> None:
    """Check the numbers; the random seed is drawn here, once for all processes of the run."""
    from tools import cases

    try:
        if options.candidate_timeout is not None:
            cases.check_seconds("candidate-timeout", options.candidate_timeout)
        cases.check_repeat(options.repeat)
        seeds = cases.seeds(options.fresh, options.fresh_seed)
    except cases.UsageError as error:
        raise pytest.UsageError(f"--{error}") from None
    options.fresh_seed = seeds[0] if seeds else None


_TRIAL: "pytest.StashKey[Trial]" = pytest.StashKey()
_MANIFEST: "pytest.StashKey[dict[str, Any]]" = pytest.StashKey()


def _items(session: pytest.Session) -> Iterator[CaseItem]:
    from goldens import store
    from tools import candidates
    from tools.cases import UsageError, check_device, choose, kernel_of, seeds
    from tools.trial import SECONDS, Trial

    options = session.config.option
    try:
        kernel = kernel_of(options.candidate, options.kernel, options.case)
        check_device(options.candidate, options.device)
        cases = choose(kernel, options.case, options.all_cases, schedule=options.schedule)
        seconds = SECONDS if options.candidate_timeout is None else options.candidate_timeout
        session.config.stash[_MANIFEST] = store.read_manifest()  # before the candidate is imported
        fresh = seeds(options.fresh, options.fresh_seed)
        trial = Trial(options.candidate, options.device, seconds, options.schedule, fresh, options.repeat)
    except (candidates.HardwareMissing, candidates.Missing) as error:
        pytest.exit(f"hardware missing: {error}", returncode=3)
    except candidates.CandidateError as error:
        raise pytest.UsageError(f"--candidate: {error}") from None
    except store.GoldenError as error:
        raise pytest.UsageError(str(error)) from None
    except (UsageError, ValueError) as error:
        raise pytest.UsageError(f"--{error}") from None
    session.config.stash[_TRIAL] = trial
    for case in cases:
        for schedule in trial.schedules(case):
            name = f"{case.id} {schedule or 'any'}"
            yield CaseItem.from_parent(session, name=name, nodeid=name, case=case, schedule=schedule)
