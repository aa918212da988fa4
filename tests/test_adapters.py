"""The adapters of public kernels: stand-ins with the public signatures, made of our models, must come out right.

So layouts, orders, signs and names are tried without the packages; the kernels themselves are tried where they are.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import store
from goldens.judge import select
from reference import attn_res, fmha, kda, mla_query
from tools import candidates
from tools.adapters import ADAPTERS
from tools.trial import NotSupported, Run, Trial, run

pytestmark = pytest.mark.usefixtures("in_process")


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A package of these functions, and its parents; adapters are imported anew."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    module = ModuleType(name)
    for key, function in functions.items():
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, name, module)
    for adapter in ADAPTERS:
        monkeypatch.delitem(sys.modules, f"tools.adapters.{adapter}", raising=False)


def bits(adapter: str, case_id: str, schedule: str) -> list[Run | NotSupported]:
    """The outcomes against the bits of a schedule."""
    with Trial(adapter, "cpu", schedule=schedule) as trial:
        return run(trial, goldens.find(case_id), store.read_manifest(), invariant=False)


def assert_right(adapter: str, case_id: str, schedule: str) -> None:
    [result] = bits(adapter, case_id, schedule)
    assert isinstance(result, Run), result
    assert result.passed, [(v.output, v.reason) for v in result.verdicts if not v.passed]


PACKED = "fmha/d64-causal-q26-k60-h2-1-normal-packed5x9.1x1.0x4.7x0.13x46"
BEYOND = "mla_query/h1-b2-p1x1-beyond-cancel"
KDA_CASES = ("kda/t20-normal", "kda/t17-from-fp32-to-fp32-normal", "kda/t3-h2-b2-lb0.1-normal", "kda/t136-tails-normal")


def chunk16(inputs: dict[str, Tensor], scale: float, lower_bound: float, state: str | None) -> dict[str, Tensor]:
    return kda.exact(inputs, {"scale": scale, "lower_bound": lower_bound, "final_state": state}, "chunk16")


def assert_kda(adapter: str) -> None:
    for case_id in KDA_CASES:
        case = goldens.find(case_id)
        if case.params["lower_bound"] > 0:
            [refused] = bits(adapter, case_id, "chunk16")
            assert isinstance(refused, NotSupported)
            assert "lower_bound 0.1" in str(refused)
        else:
            assert_right(adapter, case_id, "chunk16")


def flash_kda_into(out, final_state, inputs, scale, lower_bound):
    """What FlashKDA's ``fwd`` writes; inputs: None where there is none."""
    given = {name: x for name, x in inputs.items() if x is not None}
    state = None if final_state is None else {torch.bfloat16: "bf16", torch.float32: "fp32"}[final_state.dtype]
    outputs = chunk16(given, scale, lower_bound, state)
    out.copy_(outputs["out"])
    if final_state is not None:
        final_state.copy_(outputs["final_state"])


def test_flash_kda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None):  # fmt: skip # noqa: E501
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
        inputs |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        flash_kda_into(out, final_state, inputs, scale, lower_bound)

    install(monkeypatch, "flash_kda", fwd=fwd)
    assert_kda("flash_kda")


def install_vllm_flash_kda(monkeypatch: pytest.MonkeyPatch, fwd: Callable[..., None]) -> None:
    operators = SimpleNamespace(fwd=fwd, get_workspace_size=lambda tokens, heads, sequences: tokens + sequences)
    monkeypatch.setattr(torch.ops, "_flashkda_C", operators, raising=False)
    install(monkeypatch, "vllm._flashkda_C")


def test_vllm_flash_kda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators take the workspace and the outputs from the caller."""

    def fwd(q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None):  # fmt: skip # noqa: E501
        sequences = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
        assert (workspace.numel(), workspace.dtype) == (q.shape[0] * q.shape[1] + sequences, torch.uint8)
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
        inputs |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        flash_kda_into(out, final_state, inputs, scale, lower_bound)

    install_vllm_flash_kda(monkeypatch, fwd)
    assert_kda("vllm_flash_kda")


def test_flash_kda_takes_contiguous_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator would refuse by a RuntimeError, a failure, is not supported."""

    def fwd(q, out, **others):
        assert q.is_contiguous()
        out.copy_(q)

    install_vllm_flash_kda(monkeypatch, fwd)
    with Trial("vllm_flash_kda", "cpu") as trial:
        refused, result = run(trial, goldens.find("kda/t2-h2-from-bf16-normal"), store.read_manifest(), True, None)
    assert isinstance(result, Run)
    assert result.passed
    assert str(refused).endswith("not supported: strides: it takes contiguous tensors")


def test_fla_kda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is K before V; for a graph the chunks of packed sequences are listed on the device."""
    graphs: list[bool] = []

    def chunk_kda(q, k, v, g, beta, *, scale, lower_bound, A_log, dt_bias, output_final_state, initial_state=None, cu_seqlens=None, **flags):  # fmt: skip # noqa: E501
        graphs.append(flags.pop("use_graph", False))
        assert set(flags) == {f"use_{x}_in_kernel" for x in ("gate", "qk_l2norm", "beta_sigmoid")} | {"safe_gate"}
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias.view(-1, 128)}
        if initial_state is not None:
            inputs["initial_state"] = initial_state.transpose(2, 3).contiguous()
        if cu_seqlens is not None:
            inputs["cu_seqlens"] = cu_seqlens
        outputs = chunk16(inputs, scale, lower_bound, "fp32" if output_final_state else None)
        state = outputs["final_state"].transpose(2, 3).contiguous() if output_final_state else None
        return outputs["out"], state

    install(monkeypatch, "fla.ops.kda", chunk_kda=chunk_kda)
    assert_kda("fla_kda")
    assert not any(graphs)
    recorded = candidates.load("fla_kda").make("kda", None).capturable
    for case_id, on_device in (("kda/t20-normal", False), ("kda/t136-tails-normal", True)):
        case = goldens.find(case_id)
        golden = store.obtain(goldens.KERNELS["kda"], case, store.read_manifest())
        outputs = recorded(select(golden, "in/"), case.params)
        assert torch.equal(outputs["out"], golden["exact/chunk16/out"])
        assert graphs.pop() is on_device


def test_cudnn_kda(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes packed tokens alone."""

    def kimi_delta_attention(q, k, v, g, beta, cu_seqlens, scale, initial_state, output_final_state, gate_lower_bound, a_log, dt_bias, **flags):  # fmt: skip # noqa: E501
        assert all(flags.values())
        inputs = {"q": q, "k": k, "v": v, "g": g.to(torch.bfloat16), "beta": beta}
        inputs = {name: x[None] for name, x in inputs.items()} | {"A_log": a_log, "dt_bias": dt_bias}
        inputs["cu_seqlens"] = cu_seqlens
        if initial_state is not None:
            inputs["initial_state"] = initial_state
        outputs = chunk16(inputs, scale, gate_lower_bound, "fp32" if output_final_state else None)
        return outputs["out"][0], outputs.get("final_state")

    install(monkeypatch, "cudnn.linear_attention", kimi_delta_attention=kimi_delta_attention)
    assert_kda("cudnn_kda")


def test_flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, N, H, d] and log-sum-exp [B, H, N]; packed [ΣN, H, d] and [H, ΣN]."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, return_lse=False):
        assert return_lse
        inputs = {"q": q[0].transpose(0, 1), "k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
        outputs = fmha.exact(inputs, {"causal": causal, "scale": softmax_scale}, "wgmma128")
        return outputs["o"].transpose(0, 1)[None], outputs["lse"][None]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_lse=False):
        assert return_lse
        inputs = {name: x.transpose(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
        inputs |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        outputs = fmha.exact(inputs, {"causal": causal, "scale": softmax_scale}, "wgmma128")
        return outputs["o"].transpose(0, 1), outputs["lse"]

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    install(monkeypatch, "flash_attn.cute", **functions)
    for case_id in ("fmha/d64-causal-q70-k134-normal", "fmha/d64-causal-q6-k33-h4-2-scale0.3-normal", PACKED):
        assert_right("flash_attn_4", case_id, "wgmma128")


def test_vllm_attn_res(monkeypatch: pytest.MonkeyPatch) -> None:
    """prefix and a row of blocks are written in place; without a delta the prefix stays as it is."""

    def function(prefix, delta, blocks, norm, query, gamma, num_blocks, block_write_idx, eps, output_norm_eps):
        params = {"nb": num_blocks, "slots": 0, "has_delta": delta is not None, "write": block_write_idx}
        params |= {"final": False, "eps": eps, "out_eps": output_norm_eps, "aux": 0}
        inputs = {"delta": prefix if delta is None else delta, "prefix": prefix, "blocks": blocks}
        outputs = attn_res.exact(inputs | {"norm": norm, "query": query, "gamma": gamma}, params, "cluster7")
        prefix.copy_(outputs["prefix"])
        blocks.copy_(outputs["blocks"])
        return outputs["output"]

    install(monkeypatch, "vllm.models.kimi_k3.nvidia.ops.attn_res", attn_res=function)
    supported, refused = [], []
    for case in (case for case in goldens.KERNELS["attn_res"].cases if case.committed):
        [outcome] = bits("vllm_attn_res", case.id, "cluster7") if "cluster7" in case.schedules else [None]
        if isinstance(outcome, NotSupported):
            refused.append(str(outcome))
        elif outcome is not None:
            assert outcome.passed, (case.id, [(v.output, v.reason) for v in outcome.verdicts if not v.passed])
            supported.append(case.id)
    assert len(supported) >= 3
    assert any("mailbox" in words for words in refused)
    assert any("final" in words for words in refused)


def test_vllm_mla_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain's products are torch's, so its bits are no schedule's: the model judges it."""

    def fused_q_kv_rmsnorm(query, kv, w_qa, w_kva, eps):
        norms = [mla_query.norm(x.float(), w.float(), eps).bfloat16() for x, w in ((query, w_qa), (kv, w_kva))]
        return tuple(norms)

    def insert(ql_nope, q_pe, kv_c_normed, k_pe, kv_cache, slot_mapping, *, q_scale_inv, cache_scale_inv):
        def e4m3(x: Tensor, scale: Tensor) -> Tensor:
            return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)

        rows = e4m3(torch.cat([kv_c_normed, k_pe], 1), cache_scale_inv)
        flat = kv_cache.view(torch.uint8).view(-1, 576)
        for slot, row in zip(slot_mapping.tolist(), rows.view(torch.uint8), strict=True):
            if 0 <= slot < len(flat):
                flat[slot] = row
        return e4m3(torch.cat([ql_nope, q_pe], -1), q_scale_inv)

    install(monkeypatch, "vllm.models.common.ops", fused_q_kv_rmsnorm=fused_q_kv_rmsnorm)
    name = "vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache"
    install(monkeypatch, name, fused_mla_decode_q_concat_kv_cache_insert=insert)
    with Trial("vllm_mla_query", "cpu") as trial:
        for case_id in ("mla_query/h1-b1-normal", "mla_query/h1-b4-p2x3-alternate-padded"):
            [result] = run(trial, goldens.find(case_id), store.read_manifest(), invariant=False)
            assert result.passed, [(v.output, v.reason) for v in result.verdicts if not v.passed]
            assert {v.output for v in result.verdicts} == {"output", "cache"}
        [refused] = run(trial, goldens.find(BEYOND), store.read_manifest(), invariant=False)
        assert isinstance(refused, NotSupported)
        assert "a slot beyond the cache" in str(refused)
