"""``goldens faults``: plants every fault of the registry and says which checks notice it."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer

from goldens.files import GoldenError, write_text
from tools.candidates import HardwareMissing, require_hopper
from tools.faults import candidates, gpu, report, trial
from tools.faults.fresh import FRESH
from tools.faults.patch import Fault, PatchError
from tools.faults.plain.legal import LEGAL
from tools.faults.plain.wrong import WRONG
from tools.faults.planted import KERNELS, MODELS

PASS, FAIL, USAGE, HARDWARE = 0, 1, 2, 3
T = TypeVar("T")  # an outcome
_bench: list[trial.Bench] = []  # of this process


def command(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="The faults in cute_impl, on the sm_90 GPU; exit code 3 without one.")
    ] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile", help="The faults in cute_impl, only compiled; needs no GPU.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="The faults by an author who had not seen the goldens; by equal bits alone."),
    ] = False,
    plain: Annotated[
        bool,
        typer.Option("--candidates", help="Right and wrong candidates in plain torch that claim no schedule."),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--fault", help="Only this fault; may be given several times.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = os.cpu_count() or 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Also put the table into its section of this Markdown file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="With --kernels: a folder for the report of each fault's run.")
    ] = None,
) -> None:
    """Plant faults and say which checks notice them: equal bits, the derived bound, a customary tolerance."""
    registry = (*LEGAL, *WRONG) if plain else FRESH if fresh else KERNELS if kernels or compile_only else MODELS
    faults = choose(registry, only)
    try:
        if plain:
            content, table, failed = plain_candidates(faults, jobs)
        elif fresh:
            content, table, failed = fresh_faults(faults, jobs)
        elif kernels or compile_only:
            content, table, failed = kernel_faults(faults, kernels, jobs, html)
        else:
            content, table, failed = model_faults(faults, jobs)
        if json_file:
            write_text(json_file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        if markdown:
            section = (
                "candidates" if plain else "fresh" if fresh else "kernels" if kernels or compile_only else "models"
            )
            report.put(markdown, section, table)
    except HardwareMissing as error:
        raise _end(f"{error}; `--compile` needs none", HARDWARE) from None
    except (PatchError, GoldenError) as error:
        raise _end(str(error), FAIL) from None
    if failed:
        raise _end(f"not as it should be: {', '.join(failed)}", FAIL)


def _end(message: str, code: int) -> typer.Exit:
    typer.echo(f"faults: {message}", err=True)
    return typer.Exit(code)


def choose(faults: Sequence[Fault], only: Sequence[str] | None) -> list[Fault]:
    """Those of these ids, all of none; wrong usage ends the command."""
    unknown = sorted(set(only or ()) - {f.id for f in faults})
    if unknown:
        raise _end(f"--fault: got {', '.join(unknown)}, there is none of this id here", USAGE)
    return [f for f in faults if not only or f.id in only]


def model_faults(faults: Sequence[Fault], jobs: int) -> tuple[dict, str, list[str]]:
    """JSON, table, and the ids of faults that bits did not notice."""
    outcomes = []
    for x in tried(faults, jobs, trial.run):
        typer.echo(f"{x.fault.id:<44} {', '.join(c for c in trial.CHECKS if c in x.noticed_on) or 'not noticed'}")
        outcomes.append(x)
    typer.echo(report.summary(outcomes))
    failed = [x.fault.id for x in outcomes if "bits" not in x.noticed_on]
    return report.models_json(outcomes), report.models_table(outcomes), failed


def fresh_faults(faults: Sequence[Fault], jobs: int) -> tuple[dict, str, list[str]]:
    """JSON, table, and nothing that failed: what such faults measure is no demand on each of them."""
    outcomes = []
    for x in tried(faults, jobs, trial.run_for_bits):
        typer.echo(f"{x.fault.id:<44} {x.noticed_on.get('bits', 'not noticed')}")
        outcomes.append(x)
    table = report.fresh_table(outcomes)
    typer.echo(table)
    return report.models_json(outcomes), table, []


def plain_candidates(faults: Sequence[Fault], jobs: int) -> tuple[dict, str, list[str]]:
    """JSON, table, and nothing that failed: what is refused of them is a measurement too."""
    outcomes = []
    for x in tried(faults, jobs, candidates.run):
        first = f"{x.refusals[0].check} on {x.refusals[0].case}" if x.refused else "not refused"
        typer.echo(f"{x.fault.id:<44} {'right' if x.right else 'wrong'}: {first}")
        outcomes.append(x)
    table = report.candidates_table(outcomes)
    typer.echo(table)
    return report.candidates_json(outcomes), table, []


def tried(faults: Sequence[Fault], jobs: int, run: Callable[[Fault, trial.Bench], T]) -> Iterator[T]:
    """The outcome of each fault, in order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(partial(_run, run), faults)


def _run(run: Callable[[Fault, trial.Bench], T], fault: Fault) -> T:
    if not _bench:
        _bench.append(trial.Bench())
    return run(fault, _bench[0])


def kernel_faults(faults: Sequence[Fault], on_gpu: bool, jobs: int, html: Path | None) -> tuple[dict, str, list[str]]:
    """JSON, table, and the ids of faults that were not caught, or without a GPU do not compile to other code."""
    if html:
        html.mkdir(parents=True, exist_ok=True)
    pages = [html / f"{f.kernel}-{f.name}.html" if html else None for f in faults]
    if on_gpu:
        require_hopper()
        # Each run is a process of its own, so threads are enough.
        with ThreadPoolExecutor(jobs) as pool:
            sound = pool.submit(gpu.sound, faults)
            outcomes = list(pool.map(gpu.run, faults, pages))
        if sound.result():
            raise GoldenError(f"the kernels fail without a fault:\n{sound.result()}")
    else:
        outcomes = [gpu.KernelOutcome(f, gpu.NOT_RUN) for f in faults]
    said = gpu.compiled(faults, jobs)
    for f, x in zip(faults, outcomes, strict=True):
        typer.echo(f"{f.id:<44} compiles: {said[f.id]}; {x.state}{f', all of {x.place}' if x.place else ''}")
    failed = [x.fault.id for x in outcomes if said[x.fault.id] != "yes" or (on_gpu and not x.caught)]
    return report.kernels_json(outcomes, said), report.kernels_table(outcomes, said), failed
