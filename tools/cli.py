"""``goldens``: list, make, verify and report. Exit codes: 0 pass, 1 fail, 2 usage, 3 hardware is missing."""

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

import goldens
from goldens import store
from goldens.case import Case
from goldens.compare import against_exact
from goldens.files import write_text
from goldens.judge import Judge, failed
from goldens.regenerate import Difference
from goldens.regenerate import regenerate as make
from tools import candidates, doctor, evidence, export, faults, report, terminal, trial
from tools import cases as cases_of
from tools.coverage import NO_TRIAL, Account


class Exit(IntEnum):
    """Exit codes of every command."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    HARDWARE = 3


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
# Where the output is no terminal, no line is too long.
out = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else report.UNLIMITED)
err = Console(stderr=True, highlight=False)

KernelOption = Annotated[str | None, typer.Option("--kernel", help="Only this kernel's cases.")]
CaseOption = Annotated[list[str] | None, typer.Option("--case", help="Only this case; may be given several times.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the report as JSON to this file.")]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", help="Also write the report as Markdown to this file.")
]

HtmlFile = Annotated[Path | None, typer.Option("--html", help="Also write the report as one HTML file.")]
AgainstFile = Annotated[Path | None, typer.Option("--against", help="Also say what changed since this JSON report.")]
ScheduleOption = Annotated[
    str | None, typer.Option("--schedule", help="Only this schedule, and its bits are demanded.")
]
AllOption = Annotated[bool, typer.Option("--all", help="The on-demand cases too.")]
ShardOption = Annotated[str | None, typer.Option("--shard", help="I/N: only the I-th of N parts of the cases.")]


class Files(NamedTuple):
    """Where a report goes besides the terminal, and the older one that it is compared with."""

    json: Path | None
    markdown: Path | None
    html: Path | None
    against: Any  # its content


def fail(message: str, code: Exit) -> typer.Exit:
    """Print an error and make the exception that ends the command with ``code``."""
    err.print(f"goldens: {message}", markup=False, soft_wrap=True)
    return typer.Exit(code)


def choose(
    kernel: str | None,
    ids: list[str] | None,
    everything: bool = False,
    shard: str | None = None,
    schedule: str | None = None,
) -> list[Case]:
    """``cases.choose``; wrong usage ends the command."""
    try:
        return cases_of.choose(kernel, ids, everything, shard, schedule)
    except cases_of.UsageError as error:
        raise fail(f"--{error}", Exit.USAGE) from None


def chosen(cases: Sequence[Case], *options: object) -> list[str] | None:
    """The cases' ids if an option restricted the run to them; None if these are all there are."""
    return [case.id for case in cases] if any(options) else None


def end_on_signals() -> None:
    """Let the signals that end a run end it as an interruption does, so that nothing is left behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)


def each(cases: list[Case], label: str, work: Callable[[Callable[[Case], None]], None]) -> None:
    """Run ``work`` under a progress bar; it calls back once a case."""
    columns = (
        TextColumn(label),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", table_column=Column(overflow="ellipsis")),  # the first to give way
    )
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=len(cases))
        work(lambda case: bar.update(task, advance=1, description=case.id))


@app.command("list")
def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of lines.")] = False,
    kernel: KernelOption = None,
) -> None:
    """All cases: id, schedules, committed or on demand."""
    cases = choose(kernel, None, everything=True)
    if as_json:
        fields = [
            {"id": c.id, "kernel": c.kernel, "schedules": list(c.schedules), "committed": c.committed} for c in cases
        ]
        typer.echo(json.dumps(fields, indent=1))
        return
    for case in cases:
        place = "committed" if case.committed else "on demand"
        typer.echo(f"{case.id:<44} {', '.join(case.schedules) or 'model only':<12} {place}")


@app.command()
def regenerate(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if anything differs.")] = False,
    kernel: KernelOption = None,
    case: CaseOption = None,
    everything: AllOption = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Compare with and write to this folder.")] = None,
    shard: ShardOption = None,
) -> None:
    """Make goldens again and say what differs from those that are here."""
    cases = choose(kernel, case, everything, shard)
    differences: list[Difference] = []
    end_on_signals()
    try:
        each(cases, "goldens", lambda done: differences.extend(make(cases, check=check, root=folder, progress=done)))
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    except ValueError as error:
        raise fail(str(error), Exit.FAIL) from None
    except KeyboardInterrupt:
        raise fail("interrupted; nothing was written", Exit.FAIL) from None
    for difference in differences:
        line = f"{difference.case}: {difference.what}" + (f"; {difference.done}" if difference.done else "")
        out.print(line, markup=False, soft_wrap=True)
    if not differences:
        out.print(f"{len(cases)} cases made again, every byte as it was")
    elif check:
        raise fail(f"differences: {len(differences)}", Exit.FAIL)
    else:
        done = Counter(difference.done for difference in differences)
        out.print(f"differences: {len(differences)}, now " + ", ".join(f"{n} {words}" for words, n in done.items()))
        if any(difference.what.startswith("changed") for difference in differences):
            out.print("a golden that changes needs its reason in CHANGELOG.md")


def judge_exact(cases: list[Case], only: str | None) -> list[report.Result]:
    """Judge the exact models, on every schedule of every case or on one."""
    results: list[report.Result] = []

    def work(done: Callable[[Case], None]) -> None:
        manifest = store.read_manifest()
        for case in cases:
            results.extend(judge_exact_case(case, manifest, only))
            done(case)

    try:
        each(cases, "judging", work)
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    return results


def judge_exact_case(case: Case, manifest: dict[str, Any], only: str | None) -> list[report.Result]:
    """One case of ``judge_exact``; a golden that cannot be read fails it."""
    kernel, results = goldens.KERNELS[case.kernel], []
    schedules = [s for s in case.schedules if only in (None, s)]
    try:
        golden = store.obtain(kernel, case, manifest)
    except store.GoldenError as error:
        verdicts = tuple(failed(str(error), "exact", "golden"))
        return [report.Result(case, s, report.EXACT_MODEL, verdicts) for s in schedules or [trial.ANY]]
    judge = Judge(kernel, case, golden)
    for schedule in schedules:
        inputs = {name: x.clone() for name, x in judge.inputs.items()}
        outputs = kernel.reference.exact(inputs, case.params, schedule)
        verdicts = tuple(judge(outputs, schedule))
        results.append(report.Result(case, schedule, report.EXACT_MODEL, verdicts, case.exact_only or ""))
    return results


def put_on_trial(
    tried: trial.Trial, cases: list[Case], manifest: dict[str, Any], invariant: bool
) -> list[trial.Run | trial.NotSupported]:
    """What a candidate did on every case."""
    found: list[trial.Run | trial.NotSupported] = []

    def work(done: Callable[[Case], None]) -> None:
        for case in cases:
            found.extend(trial.run(tried, case, manifest, invariant))
            done(case)

    with tried:
        each(cases, "trying" if invariant else "judging", work)
    return found


def read_report(path: Path | None) -> Any:
    """An older JSON report, None without one; read before anything runs, so that a bad one costs nothing."""
    if path is None:
        return None
    try:
        old = json.loads(path.read_text())
        report.against([], old)
    except (OSError, ValueError, RecursionError) as error:
        raise fail(f"--against: {path}: {error}", Exit.USAGE) from None
    return old


def files_of(json_file: Path | None, markdown: Path | None, html: Path | None, against: Path | None) -> Files:
    """Where a report goes; wrong usage ends the command before anything runs."""
    named = [path.absolute() for path in (json_file, markdown, html) if path]
    twice = next((path for path in named if named.count(path) > 1), None)
    if twice:
        raise fail(
            f"--json, --markdown, --html: {twice} is named twice, each report needs a file of its own", Exit.USAGE
        )
    return Files(json_file, markdown, html, read_report(against))


def publish(
    results: Sequence[report.Result],
    title: str,
    files: Files,
    cases: Sequence[str] | None = None,
    account: Account = NO_TRIAL,
) -> None:
    """Print the report, write its files, end with exit code 1 if anything failed, 2 if nothing or not all was judged.

    cases: ids that the run was restricted to, if it was. account: of the trial that gave the results, if it was one.
    """
    changes = None
    if files.against is not None and results:
        changes = report.against([r for r in results if r.case.id not in account.fresh], files.against, cases)
    if results:
        out.print(report.to_table(results, title))
    lines = [line for result in results for line in report.details(result)]
    refused = account.refused
    for line in [*lines, *refused, *map(str, changes or []), *account.lines]:
        out.print(line, markup=False, soft_wrap=True)
    if not results:
        why = "the candidate does none of it" if refused else "no schedule has an exact model for these cases"
        raise fail(f"nothing was judged: {why}", Exit.USAGE)
    out.print(report.summary(results) + (f"; {len(refused)} not supported or not judged" if refused else ""))
    try:
        if files.json:
            content = report.to_json(results) | account.facts
            write_text(files.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
        if files.markdown:
            write_text(files.markdown, report.to_markdown(results, title, changes) + account.markdown)
        if files.html:
            write_text(files.html, report.to_html(results, title, changes, refused, account.lines))
    except store.GoldenError as error:
        raise fail(str(error), Exit.USAGE) from None
    if not all(result.passed for result in results):
        raise typer.Exit(Exit.FAIL)
    if account.gaps:
        raise fail(f"not all was judged: {'; '.join(account.gaps)}. --partial says that this is meant", Exit.USAGE)


@app.command()
def verify(
    kernel: KernelOption = None,
    case: CaseOption = None,
    candidate: Annotated[
        str, typer.Option("--candidate", help="package.module:function, FILE.py:function, or a name of `candidates`.")
    ] = candidates.OURS,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda or cuda:N; by default the sm_90 GPU, and nothing else.")
    ] = None,
    schedule: ScheduleOption = None,
    invariance: Annotated[
        bool,
        typer.Option("--invariance", help="Try what must hold bit for bit whatever the schedule, not the goldens."),
    ] = False,
    fresh: Annotated[
        int, typer.Option("--fresh", help="So many further inputs for each case, from seeds that are in no file.")
    ] = 0,
    fresh_seed: Annotated[
        int | None, typer.Option("--fresh-seed", help="The first of these seeds; random without it, and printed.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", help="How often each call is made, every result judged.")] = 1,
    partial: Annotated[
        bool, typer.Option("--partial", help="What the candidate refuses or leaves out is meant; else exit code 2.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that a call may take; 0: no limit.")
    ] = trial.SECONDS,
    everything: AllOption = False,
    shard: ShardOption = None,
    json_file: JsonFile = None,
    markdown: MarkdownFile = None,
    html: HtmlFile = None,
    against: AgainstFile = None,
) -> None:
    """Judge our kernels, or any candidate, by the goldens.

    Exit code 0: all that was asked for was judged and passed; every run, and every output that the cases' goldens have.
    """
    try:
        cases_of.check_seconds("timeout", timeout)
        cases_of.check_repeat(repeat)
        seeds = cases_of.seeds(fresh, fresh_seed)
        kernel = cases_of.kernel_of(candidate, kernel, case)
        cases_of.check_device(candidate, device)
    except cases_of.UsageError as error:
        raise fail(f"--{error}", Exit.USAGE) from None
    cases = choose(kernel, case, everything, shard, schedule)
    files = files_of(json_file, markdown, html, against)
    end_on_signals()
    try:
        manifest = store.read_manifest()  # before the candidate, whose import may do anything to files
        tried = trial.Trial(candidate, device, timeout, schedule, seeds, repeat)
        found = put_on_trial(tried, cases, manifest, invariance)
    except KeyboardInterrupt:
        raise fail("interrupted; nothing was written", Exit.FAIL) from None
    except (candidates.HardwareMissing, candidates.Missing) as error:
        hint = "`goldens report` judges the exact models without a GPU, `--device cpu` a candidate that can run there"
        raise fail(f"{error}. {hint}.", Exit.HARDWARE) from None
    except candidates.CandidateError as error:
        raise fail(f"--candidate: {error}", Exit.USAGE) from None
    except ValueError as error:
        raise fail(f"--{error}", Exit.USAGE) from None
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    title = "Our kernels" if candidate == candidates.OURS else candidate
    title = f"{title} on the {'CPU' if device == 'cpu' else 'GPU'}"
    publish(
        [run for run in found if isinstance(run, trial.Run)],
        f"Invariance: {title}" if invariance else title,
        files,
        chosen(cases, kernel, case, shard, schedule),
        trial.account(tried, found, partial or candidate in candidates.ADAPTERS),
    )


@app.command("candidates")
def list_candidates() -> None:
    """The candidates that have a name: public kernels, ours, the exact models; whether each can be imported here."""
    for name, kernels, what, state in candidates.available():
        out.print(f"{name:<16} {kernels:<12} {what}; {state}", markup=False, overflow="fold")


@app.command("report")
def make_report(
    kernel: KernelOption = None,
    case: CaseOption = None,
    schedule: ScheduleOption = None,
    everything: AllOption = False,
    shard: ShardOption = None,
    json_file: JsonFile = None,
    markdown: MarkdownFile = None,
    html: HtmlFile = None,
    against: AgainstFile = None,
) -> None:
    """Judge the exact models as they stand by the goldens, the model and the oracle; needs no GPU."""
    cases = choose(kernel, case, everything, shard, schedule)
    files = files_of(json_file, markdown, html, against)
    results = judge_exact(cases, schedule)
    publish(results, "Exact models against model and oracle", files, cases=chosen(cases, kernel, case, shard, schedule))


app.command("evidence")(evidence.command)
app.command("faults")(faults.command)


@app.command("export")
def export_goldens(
    folder: Annotated[Path, typer.Option("--out", help="Where the files go; a new folder, or an empty one.")],
    kernel: KernelOption = None,
    case: CaseOption = None,
    everything: AllOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an older export.")] = False,
) -> None:
    """Write inputs and expected outputs as plain files, for users of other languages; their README comes with them."""
    cases = choose(kernel, case, everything)
    end_on_signals()
    try:
        each(cases, "exporting", lambda done: export.write(cases, folder, force=force, progress=done))
    except export.ExportError as error:
        raise fail(f"--out: {error}", Exit.USAGE) from None
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    except KeyboardInterrupt:
        raise fail("interrupted; nothing was written", Exit.FAIL) from None
    out.print(f"{len(cases)} cases in {folder}; {folder / 'README.md'} says how to read them", markup=False)


@app.command("doctor")
def run_doctor() -> None:
    """What is installed, which GPU is there, what will run and what will not, and how to mend it."""
    for line in doctor.examine():
        out.print(line, markup=False, soft_wrap=True)


@app.command()
def show(case: Annotated[str, typer.Argument(help="A case's id.")]) -> None:
    """What a golden holds: how it was made, each tensor's dtype, shape and range."""
    chosen = choose(None, [case])[0]
    try:
        tensors = store.obtain(goldens.KERNELS[chosen.kernel], chosen, store.read_manifest())
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    out.print(f"{chosen.id}: {json.dumps(chosen.describe())}", markup=False, soft_wrap=True)
    if chosen.exact_only:
        out.print(f"judged against exact alone: {chosen.exact_only}", markup=False, soft_wrap=True)
    for name, x in tensors.items():
        wide = x.to(torch.float64)
        finite = wide[wide.isfinite()]
        span = f"[{float(finite.min()):g}, {float(finite.max()):g}]" if finite.numel() else "no finite element"
        special = (
            f", {int(wide.isnan().sum())} NaN, {int(wide.isinf().sum())} inf" if finite.numel() < x.numel() else ""
        )
        dtype = str(x.dtype).removeprefix("torch.")
        out.print(f"  {name:<20} {dtype:<9} {list(x.shape)!s:<16} {span}{special}", markup=False, soft_wrap=True)


@app.command()
def diff(first: Path, second: Path) -> None:
    """Compare two golden files tensor by tensor, in bits and ULPs."""
    try:
        a, b = store.read_whole(first), store.read_whole(second)
    except store.GoldenError as error:
        raise fail(str(error), Exit.USAGE) from None
    equal = True
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            words = f"only in {first if name in a else second}"
        else:
            verdict = against_exact(name, b[name], a[name])
            words = "equal" if verdict.passed else f"{verdict.reason}, by up to {verdict.max_ulps:g} ULPs"
        equal = equal and words == "equal"
        out.print(f"{name:<24} {words}", markup=False, soft_wrap=True)
    if not equal:
        raise typer.Exit(Exit.FAIL)


@app.command()
def measure(file: Annotated[Path, typer.Argument(help="Where the measurements go, some 230 MB.")]) -> None:
    """Measure the GPU's special-function unit: what `goldens fit` finds its coefficients from."""
    from tools import mufu

    try:
        candidates.require_hopper()
        mufu.measure(file)
    except candidates.HardwareMissing as error:
        raise fail(str(error), Exit.HARDWARE) from None
    except store.GoldenError as error:
        raise fail(str(error), Exit.USAGE) from None
    out.print(f"{file}: measured; `goldens fit {file}` finds the coefficients", markup=False, soft_wrap=True)


@app.command()
def fit(
    file: Annotated[Path, typer.Argument(help="What `goldens measure` wrote.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if anything differs.")] = False,
) -> None:
    """Find the coefficients of reference.numerics.mufu from measurements, and write them."""
    from reference.numerics.mufu import coefficients
    from tools import mufu

    try:
        found = mufu.fit(file)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise fail(f"{file}: no measurements of `goldens measure`, or none that fit ({error})", Exit.USAGE) from None
    names = [name for name in found if found[name] != coefficients().get(name)]
    out.print(f"differs: {', '.join(names)}" if names else "every coefficient as it was", markup=False)
    if not check:
        mufu.write(found)
    elif names:
        raise typer.Exit(Exit.FAIL)


def main() -> None:
    """The console script."""
    terminal.prepare()
    app()


if __name__ == "__main__":
    main()
