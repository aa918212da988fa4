"""pytest as the judge of a candidate: ``pytest --candidate package.module:function --kernel attn_res``.

Each case and schedule is one test, its verdict the failure's text; a case that the candidate does not support is
skipped with its reason. ``--shard I/N`` takes one of N parts of whatever is selected, of ordinary tests too. The
checkout's conftest.py loads this; elsewhere ``-p tools.pytest_plugin`` does.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tools import shard

if TYPE_CHECKING:
    from goldens.case import Case
    from tools.trial import Trial


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("goldens", "a candidate judged by the goldens, instead of other tests")
    group.addoption("--candidate", help="package.module:function, FILE.py:function, or a name of `goldens candidates`")
    group.addoption("--kernel", help="the kernel whose interface the candidate has")
    group.addoption("--case", action="append", help="only this case; may be given several times")
    group.addoption("--device", help="cpu, cuda or cuda:N; by default the sm_90 GPU, and nothing else")
    group.addoption("--schedule", help="only this schedule, and its bits are demanded")
    group.addoption("--invariance", action="store_true", help="try what must hold whatever the schedule instead")
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
    else:
        given = [name for name in ("kernel", "case", "device", "schedule", "invariance") if getattr(options, name)]
        if given:
            raise pytest.UsageError(f"--{given[0]}: is an option of --candidate, which is missing")


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
        from goldens import store
        from tools.report import details
        from tools.trial import NotSupported, run

        config = self.config
        found = run(config.stash[_TRIAL], self._case, store.read_manifest(), config.option.invariance, self._schedule)
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


_TRIAL: "pytest.StashKey[Trial]" = pytest.StashKey()


def _items(session: pytest.Session) -> Iterator[CaseItem]:
    from tools import candidates
    from tools.cases import UsageError, check_device, choose, kernel_of
    from tools.trial import SECONDS, Trial

    options = session.config.option
    try:
        kernel = kernel_of(options.candidate, options.kernel, options.case)
        check_device(options.candidate, options.device)
        cases = choose(kernel, options.case, schedule=options.schedule)
        seconds = SECONDS if options.candidate_timeout is None else options.candidate_timeout
        trial = Trial(options.candidate, options.device, seconds, options.schedule)
    except (candidates.HardwareMissing, candidates.Missing) as error:
        pytest.exit(f"hardware missing: {error}", returncode=3)
    except candidates.CandidateError as error:
        raise pytest.UsageError(f"--candidate: {error}") from None
    except (UsageError, ValueError) as error:
        raise pytest.UsageError(f"--{error}") from None
    session.config.stash[_TRIAL] = trial
    for case in cases:
        for schedule in trial.schedules(case):
            name = f"{case.id} {schedule or 'any'}"
            yield CaseItem.from_parent(session, name=name, nodeid=name, case=case, schedule=schedule)
