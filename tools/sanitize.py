"""Small calls of each kernel for ``compute-sanitizer --report-api-errors no python3 -m tools.sanitize [KERNEL ...]``.

The calls are short, for under the sanitizer a kernel runs some thousand times slower; they reach every rung of fmha, of
AttnRes both schedules with and without blocks, a written source row, ``final`` and the mailbox, of the MLA query both
schedules alone and as one of two ranks, of KDA every cluster size, also of scans. Results are checked to be finite, so
that a launch that failed does not look clean.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.bench import require_gpu

POLLS = 1 << 26  # reads of a word: they are not slowed down, those who publish it are


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """bf16 of mean 0 on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def fmha() -> list[Tensor]:
    """Both widths, with and without a mask, by k2 and the tensor-core rungs; of these also ragged and packed calls."""
    from cute_impl.fmha import TENSOR_CORE, attention

    starts = torch.tensor([0, 70, 192], dtype=torch.int32, device="cuda")
    packed: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 122}
    outputs = []
    for d in (64, 128):
        for causal in (False, True):
            q, k, v = (normal(2, 192, d) for _ in range(3))
            outputs.append(attention(q, k, v, causal, rung="k2"))
            for rung in TENSOR_CORE:
                outputs.append(attention(q, k[:, :150], v[:, :150], causal, rung=rung))
                folded = [x.transpose(0, 1) for x in (q, k, v)]
                outputs.append(attention(folded[0], folded[1], folded[2], causal, rung=rung, **packed))
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


def attn_res_mailbox() -> list[Tensor]:
    """The outputs of both schedules that poll a mailbox, filled before they are launched."""
    from cute_impl.attn_res import attn_res, mailbox
    from cute_impl.attn_res.cluster7 import SCHEDULES, D

    outputs = []
    for schedule in SCHEDULES:
        box = mailbox.empty_mailbox(7, 3, "cuda")
        mailbox.publish(normal(7, 3, D), box)
        norm, query, gamma = normal(D), normal(D, scale=0.02), normal(D)
        options: dict[str, Any] = {"nb": 2, "slots": 7, "schedule": schedule, "polls": POLLS}
        outputs.append(attn_res(box, normal(3, D), normal(3, 4, D), norm, query, gamma, **options))
    return outputs


def mla_query() -> list[Tensor]:
    """Output and cache of both schedules, alone and as rank 1 of 2 that share a context, and the insert by itself."""
    from cute_impl.cache_insert import cache_insert
    from cute_impl.mla_query import dcp
    from cute_impl.mla_query import mla_query as query
    from tools.bench_mla_query import tensors

    outputs = []
    for heads, rows, schedule, cp_async in (
        (12, 1, "small", False),
        (12, 3, "small", True),
        (6, 5, "small", True),
        (6, 20, "tiled", True),
    ):
        x: dict[str, Any] = {**tensors(heads, rows)}
        options: dict[str, Any] = {"eps": 2.0**-20, "schedule": schedule, "q_b_cp_async": cp_async}
        outputs += [query(**x, **options), x["cache"]]
        box = dcp.Mailbox([dcp.Mailbox.empty(2, heads, rows, "cuda") for _ in range(2)], 1, polls=POLLS)
        dcp.publish_others(torch.zeros(rows, 2 * heads, 576, dtype=torch.uint8, device="cuda"), box)
        outputs.append(query(**x, **options, mailbox=box))
        box.check()
    rows = x["qkv"]
    cache = torch.zeros_like(x["cache"])
    cache_insert(rows[:, 1536:2048], rows[:, 2048:2112], x["w_kva"], cache, x["slots"], x["k_scale_inv"], 2.0**-20)
    return [x.float() for x in [*outputs, cache]]


def kda() -> list[Tensor]:
    """out and final state on every cluster size: several sequences, tails, an empty one, both kinds of state; one
    sequence long enough for a scan to use every buffer again."""
    from cute_impl.kda import CLUSTERS, fwd

    several, one = [150, 0, 17, 1], [850]
    calls = [(several, 2, dtype, ("chunk16", "chunk16_scan64")) for dtype in (torch.bfloat16, torch.float32)]
    calls.append((one, 1, torch.float32, ("chunk16_scan64", "chunk16_scan416")))
    outputs = []
    for cluster in CLUSTERS:
        for lengths, heads, dtype, schedules in calls:
            offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
            q, k, v, g = (normal(1, sum(lengths), heads, 128) for _ in range(4))
            state = normal(len(lengths), heads, 128, 128).to(dtype)
            beta, a_log, bias = normal(1, sum(lengths), heads), torch.zeros(heads), torch.zeros(heads, 128)
            gate = (a_log.cuda(), bias.cuda(), -5.0)
            for schedule in schedules:
                out, final = torch.empty_like(v), torch.empty_like(state)
                options: dict[str, Any] = {"cluster": cluster, "schedule": schedule}
                fwd(q, k, v, g, beta, 128**-0.5, out, *gate, state, final, offsets, **options)
                outputs += [out, final]
    return outputs


KERNELS: dict[str, Callable[[], list[Tensor]]] = {
    "fmha": fmha,
    "attn_res": attn_res,
    "attn_res_mailbox": attn_res_mailbox,
    "mla_query": mla_query,
    "kda": kda,
}


def main(names: list[str]) -> None:
    """Run the calls of the kernels named, of all unless told otherwise."""
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        raise SystemExit(f"got {', '.join(unknown)}, allowed are {', '.join(KERNELS)}")
    require_gpu()
    for name in names or KERNELS:
        outputs = KERNELS[name]()
        if not all(bool(x.isfinite().all()) for x in outputs):
            raise RuntimeError(f"{name}: an output is not finite")
        print(f"{name}: {len(outputs)} outputs", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
