"""Small calls of each kernel for ``compute-sanitizer --report-api-errors no python3 -m tools.sanitize``.

The calls are short, for under the sanitizer a kernel runs some thousand times slower; they reach every k2 variant and,
of AttnRes, both schedules with and without blocks, a written source row, and ``final``. Results are checked to be
finite, so that a launch that failed does not look clean.
"""

from typing import Any

import torch
from torch import Tensor

from tools.bench import require_gpu


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """bf16 of mean 0 on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def fmha() -> list[Tensor]:
    """The outputs of k2: both widths, with and without a mask."""
    from cute_impl.fmha import attention

    outputs = []
    for d in (64, 128):
        for causal in (False, True):
            q, k, v = (normal(2, 192, d) for _ in range(3))
            outputs.append(attention(q, k, v, causal))
    return outputs


def attn_res() -> list[Tensor]:
    """The outputs of both schedules, with a delta tensor and one further copy of the prefix."""
    from cute_impl.attn_res import attn_res
    from cute_impl.attn_res.cluster7 import SCHEDULES, D

    outputs = []
    for schedule in SCHEDULES:
        for nb, write, final in ((0, -1, False), (2, 0, False), (2, 3, True)):
            delta, prefix, copy, blocks = normal(3, D), normal(3, D), normal(3, D), normal(3, 4, D)
            norm, query, gamma = normal(D), normal(D, scale=0.02), normal(D)
            options: dict[str, Any] = {"nb": nb, "write": write, "final": final, "schedule": schedule, "aux": [copy]}
            outputs.append(attn_res(delta, prefix, blocks, norm, query, gamma, **options))
    return outputs


def main() -> None:
    """Run all calls."""
    require_gpu()
    outputs = fmha() + attn_res()
    if not all(bool(x.isfinite().all()) for x in outputs):
        raise RuntimeError("an output is not finite")
    print(f"{len(outputs)} calls")


if __name__ == "__main__":
    main()
