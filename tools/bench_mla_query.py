"""The MLA query's speed on this GPU as a Markdown table: ``python -m tools.bench_mla_query``.

Time of one launch, query and cache insert together: a CUDA graph of many launches back to back on one set of tensors,
weights in the L2 cache. With programmatic dependent launch a kernel stages its weights while its predecessor runs;
without it, it starts when that has ended. After timing, output and cache are compared with the exact model: a launch
that failed must not look fast.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from tools.bench import require_gpu
from tools.bench_attn_res import microseconds
from tools.environment import headline

HEADS, ROWS = (12, 6), (1, 2, 3, 4, 8, 16, 32, 64)
# µs of an existing kernel (specs/mla_query.md), by heads and B; none runs on Hopper for B ≥ 4
EXISTING = {(12, 1): 3.75, (12, 2): 5.94, (12, 3): 5.06, (6, 1): 3.01, (6, 2): 3.79, (6, 3): 4.03}
PAGES, PAGE_SIZE = 64, 64
RATIO = 1.5  # the aim: ``tiled`` at B = 64 over the existing kernel at B = 3


def tensors(heads: int, rows: int) -> dict[str, Tensor]:
    """Normal inputs whose query bytes use the range of e4m3."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda", generator=generator) * scale).to(torch.bfloat16)

    return {
        "qkv": normal(rows, 2112),
        "w_qa": normal(1536),
        "w_kva": normal(512),
        "w_qb": normal(heads * 192, 1536, scale=1 / 40),
        "w_uk": normal(heads, 128, 512, scale=1 / 12),
        "cache": torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.uint8, device="cuda"),
        "slots": torch.randperm(PAGES * PAGE_SIZE, device="cuda", generator=generator)[:rows],
        "q_scale_inv": torch.full((1,), 30.0, device="cuda"),
        "k_scale_inv": torch.full((1,), 20.0, device="cuda"),
    }


def measure(heads: int, rows: int, schedule: str, weights_complete: bool = True, **options: Any) -> float:
    """µs a launch. RuntimeError if output or cache are not the exact model's."""
    from cute_impl.mla_query import mla_query
    from reference import mla_query as reference

    x: dict[str, Any] = {**tensors(heads, rows)}
    eps = float(torch.tensor(1e-6))
    want = reference.exact(x, {"heads": heads, "eps": eps}, schedule)
    out = torch.empty(rows, heads, 576, dtype=torch.uint8, device="cuda")
    options |= {"out": out, "weights_complete": weights_complete}
    time = microseconds(lambda: mla_query(**x, eps=eps, schedule=schedule, **options))
    for name, got in (("output", out), ("cache", x["cache"])):
        wrong = int((got != want[name]).sum())
        if wrong:
            raise RuntimeError(
                f"{heads} heads, B = {rows}, {schedule}: {wrong} of {got.numel()} bytes of {name} differ"
            )
    return time


def main(kinds: list[str]) -> None:
    """Print the table; ``staging`` adds both ways to stage Q_B."""
    require_gpu()
    from cute_impl.mla_query import SMALL_B, schedule_for

    print(f"{headline()}; µs a launch\n")
    print("| heads | B | existing | schedule | ours | PDL off | tiled |\n|---|---|---|---|---|---|---|")
    times = {}
    for heads in HEADS:
        for rows in ROWS:
            schedule = schedule_for(heads, rows)
            ours = times[heads, rows] = measure(heads, rows, schedule)
            cells = [f"{ours:.2f}", f"{measure(heads, rows, schedule, weights_complete=False):.2f}"]
            cells.append(f"{measure(heads, rows, 'tiled'):.2f}" if schedule == "small" else "")
            existing = f"{EXISTING[heads, rows]:.2f}" if (heads, rows) in EXISTING else "none"
            print(f"| {heads} | {rows} | {existing} | {schedule} | " + " | ".join(cells) + " |", flush=True)
    for heads in HEADS:
        most, peer, own = times[heads, 64], EXISTING[heads, 3], times[heads, 3]
        print(
            f"\n{heads} heads: B = 64 takes {most / peer:.2f} times as long as the existing kernel at B = 3; "
            f"the aim is at most {RATIO}. It is {most / own:.2f} times ours at B = 3"
        )
    if "staging" in kinds:
        print("\n| heads | B | bulk copy | cp.async |\n|---|---|---|---|")
        for heads in HEADS:
            for rows in range(1, SMALL_B[heads] + 1):
                both = [f"{measure(heads, rows, 'small', q_b_cp_async=way):.2f}" for way in (False, True)]
                print(f"| {heads} | {rows} | " + " | ".join(both) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
