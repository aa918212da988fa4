"""FMHA's speed against sequence length as an SVG: ``python -m tools.plot_fmha OUT.svg FILE.json ...``.

The files are those of ``python -m tools.bench RUNG ... --json FILE``; together they hold each cell of a panel once.
"""

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt

from goldens.files import write_text

SOLID = "k"  # rungs have names like k4, peers others


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of all files. ValueError if one is not of tools.bench, or two have the same cell."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            rows += json.loads(path.read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no figures of tools.bench ({error})") from None
    cells = [(row["d"], row["causal"], row["n"]) for row in rows]
    if not cells or len(set(cells)) != len(cells):
        raise ValueError(f"files: got cells {cells}, allowed is each (d, causal, N) once, and at least one")
    return rows


def plot(rows: list[dict[str, Any]]) -> str:
    """A panel for each width and mask, a line for each implementation: ours solid, others dashed."""
    panels = sorted({(row["d"], row["causal"]) for row in rows})
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "fmha", "font.size": 9, "font.sans-serif": "DejaVu Sans"}
    ):
        figure, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.6), sharey=True, squeeze=False)
        for axis, (d, causal) in zip(axes[0], panels, strict=True):
            own = sorted((row for row in rows if (row["d"], row["causal"]) == (d, causal)), key=lambda row: row["n"])
            for name in names:
                points = [(row["n"], row["tflops"][name]) for row in own if name in row["tflops"]]
                style = "-" if name.startswith(SOLID) else "--"
                x, y = zip(*points, strict=True) if points else ((), ())
                axis.plot(x, y, style, color=colours[name], label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks([row["n"] for row in own], [str(row["n"]) for row in own])
            axis.set_title(f"d = {d}, {'causal' if causal else 'no mask'}")
            axis.set_xlabel("N")
        axes[0][0].set_ylabel("TFLOP/s")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
        figure.tight_layout(rect=(0, 0.13, 1, 1))
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        plt.close(figure)
    return content.getvalue()


def main(words: list[str]) -> None:
    """Write the picture."""
    if len(words) < 2:
        print("usage: python -m tools.plot_fmha OUT.svg FILE.json ...", file=sys.stderr)
        raise SystemExit(2)
    try:
        write_text(Path(words[0]), plot(read(map(Path, words[1:]))))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
