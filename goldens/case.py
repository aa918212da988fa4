"""What a case and a kernel are to the suite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]
Index = tuple[slice | int | Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A kernel, its dimensions and parameters, a recipe for its inputs and a seed.

    ``schedules`` are those whose exact outputs the golden holds. ``exact_only`` says why the model is no judge
    of any element of this case (None: it is one of those that have a finite bound). ``committed`` cases are in git,
    the others made on demand. ``whole``: the committed file holds inputs and the model's outputs too, and all rows of
    every output.
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
    whole: bool = False

    @property
    def id(self) -> str:
        return f"{self.kernel}/{self.name}"

    @property
    def self_contained(self) -> bool:
        """Whether the golden's file is readable without this project: ``whole`` ones, and all made on demand."""
        return self.whole or not self.committed

    def describe(self) -> dict[str, Any]:
        """What a golden's metadata and the manifest say of the case."""
        return {
            "kernel": self.kernel,
            "dims": dict(self.dims),
            "params": dict(self.params),
            "recipe": self.recipe,
            "seed": self.seed,
            "schedules": list(self.schedules),
        }


@dataclass(frozen=True)
class Part:
    """``output[mine]`` of the further call must have the bits of ``output[base]`` of the case's own."""

    output: str
    mine: Index = ()
    base: Index = ()


@dataclass(frozen=True)
class Variant:
    """One further call; no ``parts``: every output as a whole.

    inputs: tensors, or a function that makes them of the outputs of the variant before. graph: recorded in a CUDA graph
    on other numbers and replayed on these. may_refuse: a ValueError is an answer too. not_owed_by: schedules whose
    definition does not promise it. batch: the same sequence, row or token in another batch, which a candidate that
    declares itself not batch-invariant owes within the bound alone.
    """

    name: str
    inputs: Tensors | Callable[[Tensors], Tensors]
    params: Params
    parts: tuple[Part, ...] = ()
    graph: bool = False
    may_refuse: bool = False
    not_owed_by: tuple[str, ...] = ()
    batch: bool = False


@dataclass(frozen=True)
class Output:
    """An output of a kernel's interface: its dtype, and what its dimensions are called, in the singular.

    e4m3 may come as bytes too, in uint8. shared: over how many of its last dimensions the elements share intermediate
    results, whose roundings are then the same in all.
    """

    dtype: torch.dtype
    axes: tuple[str, ...]
    shared: int = 1


Property = Callable[[Case, Tensors, Params], list[Variant]]


@dataclass(frozen=True)
class Kernel:
    """One kernel's room in the suite; ``goldens.KERNELS`` lists them.

    reference: the module with ``model`` and ``exact``. inputs: case to tensors. bound: the absolute error
    (fp64, one per element of each output) that a schedule, or "model", may have against the oracle before its
    last rounding: infinite where the oracle does not decide what it gives, 0 where it copies an input; derived where
    it is written. outputs: those of the interface, by parameters. properties: what it owes bit for bit whatever the
    schedule, besides ``goldens.invariance.EVERY``. locate: which part of a schedule made an element. legal: names that
    ``bound`` has besides the schedules': what a candidate that claims none may do.
    """

    name: str
    reference: ModuleType
    cases: tuple[Case, ...]
    inputs: Callable[[Case], Tensors]
    bound: Callable[[Mapping[str, Tensor], Params, str], Tensors]
    outputs: Callable[[Params], Mapping[str, Output]]
    properties: tuple[Property, ...] = ()
    locate: Callable[[Case, str, str, tuple[int, ...]], dict[str, int]] = field(default=lambda *_: {})
    legal: tuple[str, ...] = ()
