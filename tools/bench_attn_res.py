"""AttnRes' speed on this GPU as Markdown tables: ``python -m tools.bench_attn_res``.

Time of one launch: a CUDA graph of many launches back to back, each with programmatic dependent launch, on one set of
tensors. delta is zero, so that prefix + delta is the prefix again and overlapping launches do not disturb each other,
whatever they read of it; after timing every output is compared with the exact model: a launch that failed must not
look fast.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.bench import milliseconds, require_gpu
from tools.environment import headline

LAUNCHES, REPLAYS = 200, 15
TOKENS, BLOCKS = (1, 16, 64), (0, 1, 4, 8)
# µs of an existing kernel (specs/attn_res.md), by nb, at T = 1, 16, 64
EXISTING = {0: (1.21, 1.33, 1.85), 1: (1.29, 1.50, 2.11), 4: (1.31, 1.54, 2.46), 8: (1.47, 1.76, 3.19)}
LARGE = 4096


def microseconds(launch: Callable[[], object], launches: int = LAUNCHES) -> float:
    """Median time of a launch among ``launches`` back to back in a graph."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / launches)
    return statistics.median(times[2:])


def tensors(tokens: int, nb: int) -> dict[str, Tensor]:
    """Normal inputs; delta is zero."""
    from cute_impl.attn_res.cluster7 import D

    generator = torch.Generator("cuda").manual_seed(tokens)
    shapes = {"delta": (tokens, D), "prefix": (tokens, D), "blocks": (tokens, max(nb, 1), D)}
    shapes |= dict.fromkeys(("norm", "query", "gamma"), (D,))
    x = {n: torch.randn(s, device="cuda", generator=generator).to(torch.bfloat16) for n, s in shapes.items()}
    x["delta"].zero_()
    x["query"] /= 64
    return x


def measure(tokens: int, nb: int, schedule: str, early: bool = True, launches: int = LAUNCHES) -> float:
    """µs a launch, ``early``: a programmatic dependent one. RuntimeError if the output is not the exact model's."""
    from cute_impl.attn_res import attn_res
    from reference import attn_res as reference

    x: dict[str, Any] = {**tensors(tokens, nb)}
    out = torch.empty_like(x["prefix"])
    eps = float(torch.tensor(1e-6))
    options: dict[str, Any] = {"nb": nb, "eps": eps, "out_eps": eps, "out": out, "schedule": schedule}
    options["all_but_delta_complete"] = early
    time = microseconds(lambda: attn_res(**x, **options), launches)
    params = {
        "nb": nb,
        "slots": 0,
        "has_delta": True,
        "write": -1,
        "final": False,
        "aux": 0,
        "eps": eps,
        "out_eps": eps,
    }
    want = reference.exact(x, params, schedule)["output"]
    wrong = int((out.view(torch.int16) != want.view(torch.int16)).sum())
    if wrong:
        raise RuntimeError(f"T = {tokens}, nb = {nb}, {schedule}: {wrong} of {out.numel()} outputs differ")
    return time


def copy_rate() -> float:
    """Bytes per second that a device copy of 4 GiB reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source), repeats=10))


def moved(tokens: int, nb: int) -> int:
    """Bytes that must move: sources, old and new prefix, delta, output; the weights stay in the cache."""
    from cute_impl.attn_res.cluster7 import ROW_BYTES

    return tokens * ROW_BYTES * (nb + 4)


def main() -> None:
    """Print the tables."""
    require_gpu()
    print(f"{headline()}; µs a launch\n")
    print("| nb | T | existing | cluster7 | cluster7_direct | cluster7, PDL off |\n|---|---|---|---|---|---|")
    for nb in BLOCKS:
        for tokens, existing in zip(TOKENS, EXISTING[nb], strict=True):
            times = [measure(tokens, nb, *how) for how in (("cluster7",), ("cluster7_direct",), ("cluster7", False))]
            print(f"| {nb} | {tokens} | {existing:.2f} | " + " | ".join(f"{t:.2f}" for t in times) + " |", flush=True)
    rate = copy_rate()
    print(f"\nT = {LARGE}; a device copy moves {rate / 1e12:.2f} TB/s\n")
    print("| nb | µs | TB/s | of a copy |\n|---|---|---|---|")
    for nb in BLOCKS:
        time = measure(LARGE, nb, "cluster7", launches=10)
        achieved = moved(LARGE, nb) / (1e-6 * time)
        print(f"| {nb} | {time:.1f} | {achieved / 1e12:.2f} | {achieved / rate:.0%} |", flush=True)


if __name__ == "__main__":
    main()
