"""FMHA's speed beside torch SDPA on this GPU, as a Markdown table: ``python -m tools.bench [N ...]``.

The shapes of the public FlashAttention-3 worklog: 2048 features (heads · d) and 16384 tokens in all,
bf16. A causal call counts half the operations, 2 · B · H · N² · d of the full 4. Median of CUDA-event
times; SDPA chooses its own backend. The kernel's output is compared with SDPA's after timing: a launch that
failed must not look fast.
"""

import math
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tools.candidates import HardwareMissing, require_hopper

FEATURES, TOKENS = 2048, 16384
LENGTHS = (512, 1024, 4096, 16384)


def require_gpu() -> None:
    """Exit code 3 and a sentence without an sm_90 GPU."""
    try:
        require_hopper()
    except HardwareMissing as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from None


def milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median time of a call on the current stream, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure(d: int, causal: bool, n: int) -> tuple[float, float]:
    """TFLOP/s of schedule k2 and of SDPA. RuntimeError if their outputs are not close."""
    from cute_impl import fmha

    shape = (TOKENS // n * FEATURES // d, n, d)
    generator = torch.Generator("cuda").manual_seed(n)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    ours = milliseconds(lambda: fmha.attention(q, k, v, causal), repeats=3)
    peer = milliseconds(lambda: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal))
    got = fmha.attention(q, k, v, causal).float()
    want = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0].float()
    if not math.isclose(float((got - want).norm() / want.norm()), 0.0, abs_tol=1e-2):
        raise RuntimeError(f"d = {d}, causal = {causal}, N = {n}: the outputs differ")
    operations = 4 * shape[0] * n * n * d / (2 if causal else 1)
    return operations / ours / 1e9, operations / peer / 1e9


def main(lengths: list[int]) -> None:
    """Print the table."""
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; TFLOP/s, k2 / SDPA\n")
    print("| d, causal | " + " | ".join(f"N = {n}" for n in lengths) + " |")
    print("|---|" + "---|" * len(lengths))
    for d in (64, 128):
        for causal in (False, True):
            cells = [" / ".join(f"{x:.1f}" for x in measure(d, causal, n)) for n in lengths]
            print(f"| {d}, {'yes' if causal else 'no'} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or list(LENGTHS))
