"""``goldens``: list, make, verify and report. Exit codes: 0 pass, 1 fail, 2 usage, 3 hardware is missing."""

import json
import signal
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import goldens
from goldens import store
from goldens.case import Case
from goldens.compare import against_exact
from goldens.judge import judge, select
from goldens.regenerate import Difference, all_cases
from goldens.regenerate import regenerate as make
from tools import candidates, doctor, report


class Exit(IntEnum):
    """Exit codes of every command."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    HARDWARE = 3


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
# Where the output is no terminal, a width that cuts no cell.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True, highlight=False)

KernelOption = Annotated[str | None, typer.Option("--kernel", help="Only this kernel's cases.")]
CaseOption = Annotated[list[str] | None, typer.Option("--case", help="Only this case; may be given several times.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the report as JSON to this file.")]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", help="Also write the report as Markdown to this file.")
]


def fail(message: str, code: Exit) -> typer.Exit:
    """Print an error and make the exception that ends the command with ``code``."""
    err.print(f"goldens: {message}", markup=False, soft_wrap=True)
    return typer.Exit(code)


def choose(kernel: str | None, ids: list[str] | None, everything: bool = False) -> list[Case]:
    """The cases a command is about; on-demand cases only by id, or with ``everything``."""
    if kernel is not None and kernel not in goldens.KERNELS:
        raise fail(f"--kernel: got {kernel!r}, allowed are {', '.join(goldens.KERNELS)}", Exit.USAGE)
    try:
        cases = [goldens.find(case_id) for case_id in ids] if ids else all_cases()
    except ValueError as error:
        raise fail(f"--{error}", Exit.USAGE) from None
    cases = [case for case in cases if kernel in (None, case.kernel)]
    if not cases:
        raise fail(f"--case: none of {', '.join(ids or [])} is a case of kernel {kernel}", Exit.USAGE)
    return [case for case in cases if case.committed or ids or everything]


def each(cases: list[Case], label: str, work: Callable[[Callable[[Case], None]], None]) -> None:
    """Run ``work`` under a progress bar; it calls back once a case."""
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
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
    everything: Annotated[bool, typer.Option("--all", help="The on-demand cases too.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Compare with and write to this folder.")] = None,
) -> None:
    """Make goldens again and say what differs from those that are here."""
    cases = choose(kernel, case, everything)
    differences: list[Difference] = []
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as an interruption does, so that nothing is left behind
        signal.signal(number, signal.default_int_handler)
    try:
        each(cases, "goldens", lambda done: differences.extend(make(cases, check=check, root=folder, progress=done)))
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    except ValueError as error:
        raise fail(str(error), Exit.FAIL) from None
    except KeyboardInterrupt:
        raise fail("interrupted; nothing was written", Exit.FAIL) from None
    for difference in differences:
        out.print(f"{difference.case}: {difference.what}", markup=False, soft_wrap=True)
    if not differences:
        out.print(f"{len(cases)} cases made again, every byte as it was")
    elif check:
        raise fail(f"differences: {len(differences)}", Exit.FAIL)
    else:
        out.print(f"differences: {len(differences)}, now written")
        if any(difference.what.startswith("changed") for difference in differences):
            out.print("a golden that changes needs its reason in CHANGELOG.md")


def run_cases(
    cases: list[Case], candidate_of: Callable[[Case, str], tuple[str, candidates.Candidate]]
) -> list[report.Result]:
    """Judge a candidate on every schedule of every case."""
    results = []

    def work(done: Callable[[Case], None]) -> None:
        manifest = store.read_manifest()
        for case in cases:
            kernel = goldens.KERNELS[case.kernel]
            golden = store.obtain(kernel, case, manifest)
            for schedule in case.schedules:
                name, candidate = candidate_of(case, schedule)
                inputs = {n: x.clone() for n, x in select(golden, "in/").items()}
                verdicts = judge(kernel, case, golden, candidate(inputs, case.params), schedule)
                results.append(report.Result(case, schedule, name, tuple(verdicts), case.exact_only or ""))
            done(case)

    try:
        each(cases, "judging", work)
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
    except candidates.HardwareMissing as error:
        raise fail(str(error), Exit.HARDWARE) from None
    return results


def publish(results: list[report.Result], title: str, json_file: Path | None, markdown: Path | None) -> None:
    """Print the report, write its files, end with exit code 1 if anything failed, 2 if nothing was judged."""
    if not results:
        raise fail("nothing was judged: no schedule has an exact model for these cases", Exit.USAGE)
    out.print(report.to_table(results, title))
    for result in results:
        for line in report.details(result):
            out.print(line, markup=False, soft_wrap=True)
    out.print(report.summary(results))
    try:
        if json_file:
            store.write_text(json_file, json.dumps(report.to_json(results), indent=1, allow_nan=False) + "\n")
        if markdown:
            store.write_text(markdown, report.to_markdown(results, title))
    except store.GoldenError as error:
        raise fail(str(error), Exit.USAGE) from None
    if not all(result.passed for result in results):
        raise typer.Exit(Exit.FAIL)


@app.command()
def verify(
    kernel: KernelOption = None, case: CaseOption = None, json_file: JsonFile = None, markdown: MarkdownFile = None
) -> None:
    """Run our kernels on the GPU and judge them by the goldens."""
    cases = choose(kernel, case)
    try:
        candidates.require_hopper()
    except candidates.HardwareMissing as error:
        raise fail(f"{error}. `goldens report` judges the exact models without a GPU.", Exit.HARDWARE) from None
    results = run_cases(cases, lambda c, schedule: ("cute_impl", candidates.ours(c.kernel, schedule)))
    publish(results, "Our kernels on the GPU", json_file, markdown)


@app.command("report")
def make_report(
    kernel: KernelOption = None, case: CaseOption = None, json_file: JsonFile = None, markdown: MarkdownFile = None
) -> None:
    """Judge the exact models as they stand by the goldens, the model and the oracle; needs no GPU."""

    def exact(case: Case, schedule: str) -> tuple[str, candidates.Candidate]:
        reference = goldens.KERNELS[case.kernel].reference
        return report.EXACT_MODEL, lambda inputs, params: reference.exact(inputs, params, schedule)

    publish(run_cases(choose(kernel, case), exact), "Exact models against model and oracle", json_file, markdown)


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
        (_, a), (_, b) = store.read(first), store.read(second)
    except store.GoldenError as error:
        raise fail(str(error), Exit.FAIL) from None
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
    app()


if __name__ == "__main__":
    main()
