"""What a case and a kernel are to the suite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A kernel, its dimensions and parameters, a recipe for its inputs and a seed.

    ``schedules`` are those whose exact outputs the golden holds. ``exact_only`` says why the model is no judge
    of this case (None: it is one). ``committed`` cases are in git, the others made on demand. ``regenerated`` names
    inputs that the golden's file leaves out: large ones, made again by the recipe on reading, their digests checked.
    """

    kernel: str
    name: str
    dims: Mapping[str, int]
    params: Mapping[str, Any]
    recipe: str
    seed: int
    schedules: tuple[str, ...]
    committed: bool = True
    exact_only: str | None = None
    regenerated: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.kernel}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """What a golden's metadata and the manifest say of the case."""
        return {
            "kernel": self.kernel,
            "dims": dict(self.dims),
            "params": dict(self.params),
            "recipe": self.recipe,
            "seed": self.seed,
            "schedules": list(self.schedules),
            **({"regenerated": list(self.regenerated)} if self.regenerated else {}),
        }


@dataclass(frozen=True)
class Kernel:
    """One kernel's room in the suite; ``goldens.KERNELS`` lists them.

    reference: the module with ``model`` and ``exact``. inputs: case to tensors. bound: the absolute error
    (fp64, one per element of each output) that a schedule, or "model", may have against the oracle before its
    last rounding; derived where it is written. locate: which part of a schedule made an element. formats: the type
    whose bytes an output of dtype uint8 holds, by the output's name; its model has values.
    """

    name: str
    reference: ModuleType
    cases: tuple[Case, ...]
    inputs: Callable[[Case], Tensors]
    bound: Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Tensors]
    locate: Callable[[Case, str, str, tuple[int, ...]], dict[str, int]] = field(default=lambda *_: {})
    formats: Mapping[str, torch.dtype] = field(default_factory=dict)
