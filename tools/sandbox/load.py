"""A candidate imported by what a user writes."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from goldens.call import Candidate, words
from tools.adapters import ADAPTERS

OURS = "ours"
BY_SCHEDULE = (OURS, "exact")  # adapters that are a candidate of each schedule, and need all of this checkout


class CandidateError(Exception):
    """A candidate that cannot be found or imported."""


@dataclass(frozen=True)
class Loaded:
    """A candidate that is ready to be called.

    make: by kernel and schedule (None: it claims none). claims: the schedules whose bits it says it has, None for all.
    outputs: those that it returns, where that is less than the interface's; by kernel, "" for any. batch_invariant:
    whether a sequence has the same bits in every batch.
    """

    make: Callable[[str, str | None], Candidate]
    claims: tuple[str, ...] | None = ()
    outputs: dict[str, tuple[str, ...]] | None = None
    batch_invariant: bool = True


def load(candidate: str) -> Loaded:
    """Import a candidate. CandidateError if that fails, Missing if an adapter's package is not installed."""
    if candidate in BY_SCHEDULE:
        return Loaded(importlib.import_module(f"tools.adapters.{candidate}").make, claims=None)
    if candidate in ADAPTERS:
        module = importlib.import_module(f"tools.adapters.{candidate}")
        outputs, batch_invariant = getattr(module, "OUTPUTS", None), getattr(module, "BATCH_INVARIANT", True)
        return Loaded(lambda kernel, schedule: module.candidate, outputs=outputs, batch_invariant=batch_invariant)
    place, _, name = candidate.rpartition(":")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise CandidateError(f"{place} has no function {name}")
    claims, outputs = (declared(function, f"{name}.{attribute}") for attribute in ("schedules", "outputs"))
    batch_invariant = getattr(function, "batch_invariant", True)
    if not isinstance(batch_invariant, bool):
        raise CandidateError(f"{name}.batch_invariant: got {batch_invariant!r}, allowed are True and False")
    returned = {"": outputs} if outputs else None
    return Loaded(lambda kernel, schedule: function, claims or (), returned, batch_invariant)


def declared(function: Callable, what: str) -> tuple[str, ...] | None:
    """The names in an attribute, such as "f.outputs", None without it. CandidateError if it is no tuple of names."""
    names = getattr(function, what.rpartition(".")[2], None)
    if names is None:
        return None
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(x, str) for x in names):
        raise CandidateError(f"{what}: got {names!r}, allowed is a tuple of names, such as ('a',)")
    return tuple(names)


def _module(place: str) -> object:
    """A module by its dotted name, found from the current folder too, or by its file."""
    try:
        if not place.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise CandidateError(f"{place}: there is no such file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except CandidateError:
        raise
    except Exception as error:
        raise CandidateError(f"{place} cannot be imported: {words(error)}") from None
