"""A candidate called in the test's own process, in the place of tools.worker.Worker: quick, and it can be patched."""

from collections.abc import Mapping
from typing import Any

import torch

import goldens
from goldens.case import Tensors
from tools import candidates
from tools.sandbox.held import Held


class InProcess:
    """As Worker, without a limit of time and without a guard."""

    guard = "nothing was hidden: it was called in the process of the test"

    def __init__(self, candidate: str, device: torch.device, seconds: float):
        self._held = Held(candidate, device)
        self.claims, self.outputs = self._held.claims, self._held.outputs
        self.batch_invariant = self._held.batch_invariant
        candidates.check_claims(candidate, self.claims or ())

    def call(
        self, kernel: str, schedule: str | None, inputs: Tensors, params: Mapping[str, Any], graph: bool = False
    ) -> Tensors:
        """As Worker's."""
        written = goldens.KERNELS[kernel].written(params)
        return self._held.call(kernel, schedule, inputs, params, written, graph)

    def close(self) -> None:
        """Nothing is held."""
