"""The tables of planted faults as Markdown and JSON, and where they stand in a document."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from goldens.files import write_text
from tools.environment import environment
from tools.faults import candidates
from tools.faults.gpu import KernelOutcome
from tools.faults.trial import CHECKS, TOLERANCE, Outcome

FORMAT = 1
HEADS = {"bits": "equal bits", "bound": "ULP bound", "tolerance": f"rtol = atol = {TOLERANCE:g}"}
END = "<!-- end -->"


def shares(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many of the faults each check noticed."""
    return {check: sum(check in x.noticed_on for x in outcomes) for check in CHECKS}


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: the shares."""
    count = len(outcomes)
    parts = [f"{HEADS[check]} {n} ({n / max(1, count):.0%})" for check, n in shares(outcomes).items()]
    alone = sum(set(x.noticed_on) == {"bits"} for x in outcomes)
    return f"{count} faults; noticed by {', by '.join(parts)}; {alone} by equal bits alone"


def models_table(outcomes: Sequence[Outcome]) -> str:
    """A section with the shares and the table."""
    rows = [
        [x.fault.id, x.fault.schedule, x.fault.what, *("yes" if c in x.noticed_on else "no" for c in CHECKS), _case(x)]
        for x in outcomes
    ]
    heads = ["fault", "schedule", "what is wrong", *HEADS.values(), "golden"]
    return "\n".join([f"{summary(outcomes)}.", "", *_rows(heads, rows)])


def fresh_table(outcomes: Sequence[Outcome]) -> str:
    """A section with the shares by room, and what no golden noticed."""
    rooms: dict[str, list[Outcome]] = {}
    for x in outcomes:
        rooms.setdefault(x.fault.id.partition("/")[0], []).append(x)
    rows = [[room, *_share(members)] for room, members in (*rooms.items(), ("all", outcomes))]
    survivors = [[x.fault.id, x.fault.schedule, x.fault.what] for x in outcomes if not x.noticed_on]
    lines = _rows(["faults in", "faults", "noticed by equal bits", "share"], rows)
    if survivors:
        lines += ["", "Not noticed:", "", *_rows(["fault", "schedule", "what is wrong"], survivors)]
    return "\n".join(lines)


def candidates_table(outcomes: Sequence[candidates.Outcome]) -> str:
    """A section with what was refused by kernel, each refusal of a right candidate, and the wrong ones not refused."""
    kernels = list(dict.fromkeys(x.fault.kernel for x in outcomes))
    rows = [[name, *_refused([x for x in outcomes if name in (x.fault.kernel, "all")])] for name in (*kernels, "all")]
    heads = [
        "kernel",
        "right",
        "refused",
        "wrong",
        "by the judge",
        "by invariance alone",
        "not refused",
        "share refused",
    ]
    lines = _rows(heads, rows)
    refusals = [
        [x.fault.id, x.fault.what, r.check, r.case, r.output, _number(r.error_over_bound), r.reason]
        for x in outcomes
        if x.right
        for r in x.refusals
    ]
    if refusals:
        heads = ["right candidate", "what it does", "refused by", "golden", "output", "error over bound", "reason"]
        lines += ["", "Right and refused:", "", *_rows(heads, refusals)]
    survivors = [[x.fault.id, x.fault.what] for x in outcomes if not x.right and not x.refused]
    if survivors:
        lines += ["", "Wrong and not refused:", "", *_rows(["wrong candidate", "what is wrong"], survivors)]
    return "\n".join(lines)


def _refused(outcomes: Sequence[candidates.Outcome]) -> list[str]:
    right, wrong = ([x for x in outcomes if x.right == which] for which in (True, False))
    refused = [x for x in wrong if x.refused]
    by = [str(sum(x.refusals[0].check == check for x in refused)) for check in candidates.CHECKS]
    share = f"{len(refused) / max(1, len(wrong)):.1%}"
    return [
        str(len(right)),
        str(sum(x.refused for x in right)),
        str(len(wrong)),
        *by,
        str(len(wrong) - len(refused)),
        share,
    ]


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def candidates_json(outcomes: Sequence[candidates.Outcome]) -> dict[str, Any]:
    """For each candidate whether it is right, and its refusals."""
    rows = [
        {
            "id": x.fault.id,
            "kernel": x.fault.kernel,
            "right": x.right,
            "what": x.fault.what,
            "edits": [{"file": e.file, "old": e.old, "new": e.new} for e in x.fault.edits],
            "refusals": [dataclasses.asdict(r) for r in x.refusals],
        }
        for x in outcomes
    ]
    return {"format": FORMAT, "environment": environment(), "candidates": rows}


def _share(outcomes: Sequence[Outcome]) -> list[str]:
    noticed = shares(outcomes)["bits"]
    return [str(len(outcomes)), str(noticed), f"{noticed / max(1, len(outcomes)):.1%}"]


def kernels_table(outcomes: Sequence[KernelOutcome], compiled: dict[str, str]) -> str:
    """A section of kernel faults. compiled: by fault's id; empty if that was not tried."""
    rows = [
        [
            x.fault.id,
            x.fault.schedule,
            x.fault.what,
            compiled.get(x.fault.id, ""),
            x.state + (f", {x.failing} elements" if x.failing else "") + (f", all of {x.place}" if x.place else ""),
            x.fault.case_id,
        ]
        for x in outcomes
    ]
    return "\n".join(_rows(["fault", "schedule", "what is wrong", "compiles", "on the GPU", "golden"], rows))


def _case(x: Outcome) -> str:
    return x.noticed_on.get("bits", "none")


def _rows(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def models_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Shares and, for each fault, by which check on which golden it was noticed first."""
    faults = [
        {
            "id": x.fault.id,
            "kernel": x.fault.kernel,
            "schedule": x.fault.schedule,
            "what": x.fault.what,
            "edits": [{"file": e.file, "old": e.old, "new": e.new} for e in x.fault.edits],
            "noticed_on": x.noticed_on,
        }
        for x in outcomes
    ]
    return {"format": FORMAT, "environment": environment(), "shares": shares(outcomes), "faults": faults}


def kernels_json(outcomes: Sequence[KernelOutcome], compiled: dict[str, str]) -> dict[str, Any]:
    """What became of each kernel's fault."""
    faults = [
        {
            "id": x.fault.id,
            "kernel": x.fault.kernel,
            "schedule": x.fault.schedule,
            "what": x.fault.what,
            "case": x.fault.case_id,
            "compiles": compiled.get(x.fault.id),
            "state": x.state,
            "failing": x.failing,
            "place": x.place,
        }
        for x in outcomes
    ]
    return {"format": FORMAT, "environment": environment(), "faults": faults}


def put(path: Path, section: str, text: str) -> None:
    """Write ``text`` as a section of a Markdown file: in place of what stood there, or at its end."""
    start = f"<!-- {section}: made by python -m tools.faults -->"
    block = f"{start}\n{text}\n{END}\n"
    content = path.read_text() if path.exists() else "# Planted faults\n"
    before, found, rest = content.partition(start)
    after = rest.partition(f"{END}\n")[2]
    write_text(path, before + block + after if found else f"{content.rstrip()}\n\n{block}")
