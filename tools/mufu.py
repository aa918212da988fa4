"""Measuring the special-function unit of a GPU, and finding its coefficients from what was measured.

The datapath is known (see ``reference.numerics.mufu``): segments, shift, bias, the truncated square. Each result
says that V lies in an interval of integers; over a segment these intervals determine the three coefficients:

1. Least squares on the midpoints gives a first guess of C1 and C2, good to less than their grid.
2. Of the pairs on the grid within ``SEARCH`` steps of it, those are kept for which max(low − R) ≤ C0 ≤ min(high − R)
   has a solution C0 · 2^shift + bias, with R = C1 · x + 4 · C2 · S(x): integers throughout, nothing is rounded.
3. Exactly one pair must remain, else ValueError. C0 is the largest that fits.

``measure`` needs a Hopper GPU; ``fit`` and ``write`` run anywhere, and the same file gives the same bytes.
"""

import functools
import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from goldens.files import staging, write_text
from reference.numerics import mufu
from tools.environment import driver_version

OFFSETS = 1 << mufu.OFFSET_BITS
NOT_MEASURED = -1  # as a result; the unit's only NaN is 0x7fffffff
SEARCH = 2
SPARSE = 2048  # points of a segment that a first look takes
_MANTISSA = 0x7FFFFF
_TANH_EXPONENTS = range(119, 130)


@dataclass(frozen=True)
class Structure:
    """What is known of one function. The coefficients are multiples of ``grid``: (C1's step, C2's step).

    ``bias`` is one of a few that do equally well (ex2: 24456 … 24459, rcp: 8092 … 8095, rsqrt: −2 and −1, lg2: 3348
    … 3351, tanh: 0 … 3), the lowest of which is written here.
    """

    instruction: str
    segments: int
    shift: int
    bias: int
    fraction_bits: int
    grid: tuple[int, int]
    dropped_bits: tuple[int, ...] = ()  # tanh, for the exponents of 2^-8 … 2^2
    segment_base: tuple[int, ...] = ()


STRUCTURES = {
    "ex2": Structure("ex2.approx.ftz.f32", 64, 15, 24456, 40, (4, 1)),
    "rcp": Structure("rcp.approx.ftz.f32", 128, 15, 8092, 41, (2, 1)),
    "rsqrt": Structure("rsqrt.approx.f32", 128, 15, -2, 41, (2, 2)),
    "lg2": Structure("lg2.approx.ftz.f32", 64, 14, 3348, 40, (4, 2)),
    "tanh": Structure(
        "tanh.approx.f32",
        segments=51,
        shift=14,
        bias=0,
        fraction_bits=41,
        grid=(4, 1),
        dropped_bits=(6, 6, 6, 5, 5, 4, 4, 4, 3, 2, 3),
        segment_base=(-1, 0, 1, 1, 3, 3, 7, 11, 11, 11, 35),
    ),
}


def inputs(name: str) -> np.ndarray:
    """int32 bit patterns that reach every offset of every segment: [segments, 2^17], rcp [128, 2^16], lg2 twice 64."""
    if name == "tanh":
        return np.concatenate([_tanh_inputs(exponent) for exponent in _TANH_EXPONENTS]).astype(np.int32)
    first, count = {
        "ex2": (0x3F800000, 1),  # [1, 2)
        "rcp": (0x3F800000, 1),
        "rsqrt": (0x3F800000, 2),  # [1, 4): both parities of the exponent
        "lg2": (0x3F000000, 2),  # [½, 2): negative and positive results
    }[name]
    rows = 2 * 64 if name == "lg2" else STRUCTURES[name].segments
    return np.arange(first, first + (count << 23), dtype=np.int32).reshape(rows, -1)


def _tanh_inputs(exponent: int) -> np.ndarray:
    """The inputs of one binade whose dropped bits are 0, by segment."""
    dropped = STRUCTURES["tanh"].dropped_bits[exponent - _TANH_EXPONENTS.start]
    return np.arange(exponent << 23, (exponent + 1) << 23, 1 << dropped, dtype=np.int64).reshape(-1, OFFSETS)


def measure(out: Path) -> None:
    """Run every input of ``inputs`` on the GPU and write the results, as an ``npz`` file of some 230 MB.

    RuntimeError if there is no GPU of compute capability 9.0.
    """
    from cute_impl import probes, runtime

    if not torch.cuda.is_available():
        raise RuntimeError("measuring the special-function unit needs an sm_90 GPU; torch finds no GPU")
    runtime.require_hopper(torch.device("cuda"))
    arrays: dict[str, Any] = {}
    for name in STRUCTURES:
        bits = torch.from_numpy(inputs(name)).cuda()
        result = probes.run(name, bits.view(torch.float32).view(-1))
        arrays[name] = result.view(torch.int32).view(bits.shape).cpu().numpy()
    content = io.BytesIO()
    np.savez(content, gpu=np.array(torch.cuda.get_device_name()), driver=np.array(str(driver_version())), **arrays)
    with staging() as stage:
        stage.add(out, content.getvalue())
        stage.publish()


def fit(measured: Path) -> dict:
    """The contents of ``mufu.json`` from a file of ``measure``. ValueError if a segment has no or several solutions."""
    with np.load(measured) as data:
        gpu, driver = str(data["gpu"]), str(data["driver"])
        table: dict = {
            "provenance": {
                "instructions": {name: s.instruction for name, s in STRUCTURES.items()},
                "gpu": gpu,
                "driver": driver,
                "made_by": "tools.mufu: measure on the GPU, then fit and write",
            }
        }
        for name in STRUCTURES:
            table[name] = _fit_function(name, data[name])
    return table


def write(coefficients: dict, path: Path = mufu.DATA) -> None:
    """Write ``mufu.json``: one line a function."""
    lines = [f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in coefficients.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _fit_function(name: str, results: np.ndarray) -> dict:
    """One function's entry of ``mufu.json``."""
    structure = STRUCTURES[name]
    argument = inputs(name)
    found = []
    for segment in range(structure.segments):
        rows = range(segment, len(results), structure.segments)  # lg2: one in each binade
        points = np.concatenate([_points(name, argument[row], results[row]) for row in rows], axis=1)
        try:
            found.append(_fit_segment(structure, points))
        except ValueError as error:
            raise ValueError(f"{name}, segment {segment}: {error}") from None
    c0, c1, c2 = (list(column) for column in zip(*found, strict=True))
    entry: dict = {"shift": structure.shift, "bias": structure.bias, "fraction_bits": structure.fraction_bits}
    if structure.dropped_bits:
        entry |= {"dropped_bits": list(structure.dropped_bits), "segment_base": list(structure.segment_base)}
    return entry | {"c0": c0, "c1": c1, "c2": c2}


def _points(name: str, argument: np.ndarray, results: np.ndarray) -> np.ndarray:
    """What one row of ``inputs`` says: int64 [4, n] of the offset x, 4 · S(x), the least and the greatest V."""
    offset = np.arange(0, OFFSETS, OFFSETS // len(argument))
    doubled = name == "ex2"  # on [1, 2) the result is 2 · V
    low, high = (
        _lg2_interval(results) if name == "lg2" else _interval(results, STRUCTURES[name].fraction_bits - doubled)
    )
    known = results != NOT_MEASURED
    if name in ("rsqrt", "lg2"):
        known &= argument != 0x3F800000  # 1 is a case of its own: its result does not come from V
    return np.stack([x[known] for x in (offset, 4 * _squares()[offset], low, high)])


def _interval(results: np.ndarray, fraction_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and greatest V, in units of 2^-fraction_bits, that are cut to each positive fp32 result."""
    exponent = results.astype(np.int64) >> 23
    width = np.int64(1) << np.clip(exponent - 150 + fraction_bits, 0, 40)
    low = ((results & _MANTISSA) + np.int64(0x800000)) * width
    return low, low + width - 1


def _lg2_interval(results: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and greatest V, in units of 2^-40, of results on [½, 1) (negative) or [1, 2).

    The result is W = ⌊(V − 2^40 · [x < 1]) / 16⌋, by one's complement if negative, cut to 24 bits.
    """
    magnitude = results.astype(np.int64) & 0x7FFFFFFF
    shift = (magnitude >> 23) - 150 + 36
    significand = (magnitude & _MANTISSA) + 0x800000
    low = (significand << np.maximum(shift, 0)) >> np.maximum(-shift, 0)
    high = low + (np.int64(1) << np.maximum(shift, 0)) - 1
    below_one = results < 0
    low, high = np.where(below_one, ~high + (1 << 36), low), np.where(below_one, ~low + (1 << 36), high)
    return low << 4, (high << 4) + 15


def _fit_segment(structure: Structure, points: np.ndarray) -> tuple[int, int, int]:
    """The one (C0, C1, C2) with low ≤ V(x) ≤ high at every one of ``_points``."""
    sparse = points[:, :: max(1, points.shape[1] // SPARSE)]  # spares most pairs the full pass
    guess1, guess2 = _least_squares(sparse)
    near = itertools.product(_grid(guess1, structure.grid[0]), _grid(guess2, structure.grid[1]))
    likely = [pair for pair in near if _c0(structure, sparse, *pair) is not None]
    feasible = [(c0, *pair) for pair in likely if (c0 := _c0(structure, points, *pair)) is not None]
    if len(feasible) != 1:
        raise ValueError(
            f"{len(feasible)} solutions near C1 = {guess1:.1f}, C2 = {guess2:.1f}, need one: {feasible[:4]}"
        )
    return feasible[0]


def _grid(guess: float, step: int) -> range:
    """The multiples of ``step`` within ``SEARCH`` steps of a guess."""
    nearest = step * round(guess / step)
    return range(nearest - SEARCH * step, nearest + SEARCH * step + 1, step)


def _c0(structure: Structure, points: np.ndarray, c1: int, c2: int) -> int | None:
    """The largest C0 that fits a pair at all points, None if none does."""
    x, squares, low, high = points
    rest = c1 * x + c2 * squares
    c0 = (int((high - rest).min()) - structure.bias) >> structure.shift
    return c0 if (c0 << structure.shift) + structure.bias >= int((low - rest).max()) else None


@functools.cache
def _squares() -> np.ndarray:
    """S(x) for all offsets."""
    return mufu.square(torch.arange(OFFSETS)).numpy()


def _least_squares(points: np.ndarray) -> tuple[float, float]:
    """C1 and C2 of the best fit to the intervals' midpoints; only its rounding to the grid is used."""
    x, squares, low, high = points / float(OFFSETS)
    columns = np.stack([np.ones_like(x), x, squares], axis=1)
    middle = (low + high) / 2
    solution = np.linalg.lstsq(columns, middle - middle.mean(), rcond=None)[0]
    return solution[1], solution[2]
