"""The exact models as candidates, on the CPU or a GPU: what every other candidate of a schedule must equal."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from goldens import KERNELS
from goldens.judge import Candidate


def make(kernel: str, schedule: str | None) -> Candidate:
    """``exact`` of a schedule; the model, rounded to nothing, where there is none."""
    reference = KERNELS[kernel].reference

    def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
        return reference.exact(inputs, params, schedule) if schedule else reference.model(inputs, params)

    return candidate
