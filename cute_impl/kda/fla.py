"""flash-linear-attention's ``chunk_kda`` on our kernel, for the arguments whose meaning is the same.

There the state is [N, H, K, V] unless ``state_v_first`` (facts: fla/ops/kda/chunk.py at 0395eef); normalisation, gate
and sigmoid are switches, and the gate is ours when ``lower_bound`` is given with ``safe_gate``.
"""

import torch
from torch import Tensor

from cute_impl import kda
from cute_impl.kda.layout import D


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    schedule: str = "chunk16",
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, H, 128] bf16, final state fp32 [N, H, K, V], or [N, H, V, K] if ``state_v_first``, or None).

    Forward only, HV = H. initial_state: fp32, laid out like the final state. scale: 1 / √128 unless given. dt_bias [H ·
    128], zeros unless given. schedule: as in ``fwd``. ValueError where an argument asks for what the kernel does not
    do.
    """
    switches = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "safe_gate": safe_gate,
    }
    for name, switch in switches.items():
        if switch is not True:
            raise ValueError(f"{name}: got {switch!r}, allowed is True")
    if allow_neg_eigval is not False:
        raise ValueError(f"allow_neg_eigval: got {allow_neg_eigval!r}, allowed is False")
    if lower_bound is None or A_log is None:
        name = "lower_bound" if lower_bound is None else "A_log"
        raise ValueError(f"{name}: got None, allowed is {'a number' if name == 'lower_bound' else 'a tensor'}")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise ValueError(f"initial_state: got {initial_state.dtype}, allowed is torch.float32")
    heads = q.shape[2]
    bias = torch.zeros(heads, D, device=q.device) if dt_bias is None else dt_bias.reshape(heads, D)
    if initial_state is not None and not state_v_first:
        initial_state = initial_state.transpose(-1, -2).contiguous()
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    final = torch.empty(sequences, heads, D, D, device=q.device) if output_final_state else None
    out = torch.empty_like(v)
    scale = D**-0.5 if scale is None else scale
    gate = (A_log, bias, lower_bound)
    kda.fwd(q, k, v, g, beta, scale, out, *gate, initial_state, final, cu_seqlens, schedule=schedule)
    if final is not None and not state_v_first:
        final = final.transpose(-1, -2)
    return out, final
