"""FMHA's speed on this GPU as a Markdown table: ``python -m tools.bench [rung[/schedule] ...] [--json FILE]``.

By default the fastest rung; without a schedule a rung's fastest, so ``k6/wgmma128 k6/wgmma176`` compares tiles.
Two widths, with and without a mask, three lengths; 2048 features (heads · d) and 16384 tokens in all, bf16. A causal
call counts half the operations, 2 · B · H · N² · d of the full 4. Each is timed by replays of a CUDA graph of some
calls, so that nobody's host side counts, in turns, so that all find the GPU equally warm. Beside ours: torch SDPA with
cuDNN's and with FlashAttention's backend, and FlashAttention-4 where ``flash_attn.cute`` can be imported. After timing
each output is compared with cuDNN's: a launch that failed must not look fast. ``--json`` keeps the figures for
``tools.plot_fmha``.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.candidates import HardwareMissing, require_hopper

FEATURES, TOKENS = 2048, 16384
LENGTHS = (1024, 4096, 16384)
CELLS = [(d, causal, n) for d in (64, 128) for causal in (False, True) for n in LENGTHS]
PEER = "SDPA cuDNN"  # whose output is the standard
SLOW_MS = 200  # of all launches of a graph together
TOLERANCE = 1e-2  # relative, in the 2-norm: both sides round weights and outputs to bf16
Call = Callable[[], Tensor]


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


def capture(call: Callable[[], object], launches: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls back to back, and how many: ``launches``, fewer of a slow one."""
    launches = max(1, min(launches, int(SLOW_MS / milliseconds(call, 1))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return graph, launches


def graph_milliseconds(call: Callable[[], object], launches: int = 10, replays: int = 7) -> float:
    """Median time of a call among ``launches`` back to back in a CUDA graph."""
    graph, launches = capture(call, launches)
    return milliseconds(graph.replay, replays) / launches


def in_turns(calls: dict[str, Call], launches: int = 10, replays: int = 7) -> dict[str, float]:
    """``graph_milliseconds`` of each, replayed in turns: a GPU that grows warm and slows down does so for all alike."""
    graphs = {name: capture(call, launches) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, (graph, count) in graphs.items():
            times[name].append(milliseconds(graph.replay, 1) / count)
    return {name: statistics.median(found) for name, found in times.items()}


def tensors(d: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v [B, N, H, d]."""
    generator = torch.Generator("cuda").manual_seed(n)
    shape = (TOKENS // n, n, FEATURES // d, d)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    return q, k, v


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention by one backend; o [B, N, H, d]."""
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal)
    return o.transpose(1, 2)


def peers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Call]:
    """The other implementations by name; ``PEER`` is the first."""
    calls: dict[str, Call] = {
        PEER: lambda: sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
        "SDPA flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
    }
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
    except ImportError:
        return calls
    return calls | {"FlashAttention-4": lambda: flash_attn_func(q, k, v, causal=causal)[0]}


def ours(rung: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """A rung, or rung/schedule, on these tensors; k2 and k3 get theirs head-folded, which is not timed."""
    from cute_impl import fmha

    rung, _, schedule = rung.partition("/")
    if rung in fmha.TENSOR_CORE:
        return lambda: fmha.attention(q, k, v, causal, rung=rung, schedule=schedule or None)
    batch, n, heads, d = q.shape
    fq, fk, fv = (x.transpose(1, 2).reshape(batch * heads, n, d) for x in (q, k, v))
    return lambda: fmha.attention(fq, fk, fv, causal, rung=rung).view(batch, heads, n, d).transpose(1, 2)


def measure(d: int, causal: bool, n: int, rungs: list[str]) -> dict[str, float]:
    """TFLOP/s by name. RuntimeError if an output is not close to cuDNN's."""
    q, k, v = tensors(d, n)
    calls = peers(q, k, v, causal) | {rung: ours(rung, q, k, v, causal) for rung in rungs}
    operations = 4 * TOKENS * FEATURES * n / (2 if causal else 1)
    speeds = {name: operations / time / 1e9 for name, time in in_turns(calls).items()}
    want = calls[PEER]().float()
    for name, call in calls.items():
        error = float((call().float() - want).norm() / want.norm())
        if not error <= TOLERANCE:
            raise RuntimeError(f"d = {d}, causal = {causal}, N = {n}: {name} differs from {PEER} by {error:.3g}")
    return speeds


def check(rungs: list[str]) -> None:
    """Exit code 2 and a sentence for a rung or schedule that does not exist."""
    from cute_impl import fmha

    try:
        for rung in rungs:
            name, _, schedule = rung.partition("/")
            fmha.resolve(name, schedule or None)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="FMHA's speed on this GPU")
    parser.add_argument("rungs", nargs="*", metavar="RUNG[/SCHEDULE]", help="by default the fastest")
    parser.add_argument("--d", type=int, choices=(64, 128), help="this width alone")
    parser.add_argument("--causal", choices=("yes", "no"), help="with or without a mask alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Print a table: TFLOP/s of each, and each rung's ratio to the fastest of the others."""
    options = arguments(words)
    require_gpu()
    from cute_impl import fmha
    from goldens.files import write_text
    from tools.environment import environment, headline

    rungs = options.rungs or [fmha.RUNGS[-1]]
    check(rungs)
    q, k, v = tensors(64, LENGTHS[0])
    names = list(peers(q, k, v, causal=False))
    print(f"{headline()}; TFLOP/s\n")
    heads = [*names, *(cell for rung in rungs for cell in (rung, "ratio"))]
    print("| d | causal | N | " + " | ".join(heads) + " |\n" + "|---" * (3 + len(heads)) + "|")
    rows = []
    for d, causal, n in CELLS:
        if options.d not in (None, d) or options.causal not in (None, "yes" if causal else "no"):
            continue
        speeds = measure(d, causal, n, rungs)
        rows.append({"d": d, "causal": causal, "n": n, "tflops": speeds})
        best = max(speeds[name] for name in names)
        cells = [f"{speeds[name]:.0f}" for name in names]
        cells += [cell for rung in rungs for cell in (f"{speeds[rung]:.3g}", f"{speeds[rung] / best:.2f}")]
        print(f"| {d} | {'yes' if causal else 'no'} | {n} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        write_text(options.json, json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
