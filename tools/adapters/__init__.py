"""Public kernels as candidates, by name; each is a module here that is imported only when it is asked for.

An adapter's ``candidate(inputs, params)`` calls the public function and names its outputs as the interface does.
``OUTPUTS``, if the module has it, lists by kernel what the function returns, where that is less than the interface's.
What it does not do it refuses with ``Unsupported``.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

from goldens.judge import Unsupported

__all__ = ["ADAPTERS", "Adapter", "Missing", "Unsupported", "need"]


class Missing(Exception):
    """What an adapter needs and this machine lacks, and how to install it."""


@dataclass(frozen=True)
class Adapter:
    """kernels: whose cases it can take. requires: the module it imports, "" if none. cpu: runs there too.

    package: the distribution whose version it is, "" for what is part of this checkout.
    """

    kernels: tuple[str, ...]
    what: str
    requires: str = ""
    install: str = ""
    cpu: bool = False
    package: str = ""


ADAPTERS: dict[str, Adapter] = {
    "ours": Adapter((), "our kernels in CuTe DSL, every schedule", "cutlass", "pip install 'nvidia-cutlass-dsl[cu13]'"),
    "exact": Adapter((), "the exact models, every schedule", cpu=True),
    "sdpa": Adapter(("fmha",), "torch scaled_dot_product_attention", cpu=True, package="torch"),
    "flash_attn_4": Adapter(
        ("fmha",),
        "FlashAttention-4 in CuTe DSL",
        "flash_attn.cute",
        "pip install 'flash-attn-4[cu13]'",
        package="flash-attn-4",
    ),
    "vllm_attn_res": Adapter(
        ("attn_res",),
        "vLLM's fused AttnRes in Triton",
        "vllm.models.kimi_k3.nvidia.ops.attn_res",
        "pip install vllm, a version with models/kimi_k3",
        package="vllm",
    ),
    "vllm_mla_query": Adapter(
        ("mla_query",),
        "vLLM's chain of norms, Q_B, absorption and fused concat with cache insert",
        "vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache",
        "pip install vllm, a version with models/kimi_k3",
        package="vllm",
    ),
    "flash_kda": Adapter(
        ("kda",),
        "FlashKDA",
        "flash_kda",
        "git clone https://github.com/MoonshotAI/FlashKDA, pip install . there",
        package="flash-kda",
    ),
    "vllm_flash_kda": Adapter(
        ("kda",),
        "FlashKDA as vLLM builds it",
        "vllm._flashkda_C",
        "pip install vllm, a version with FlashKDA",
        package="vllm",
    ),
    "fla_kda": Adapter(
        ("kda",),
        "chunk_kda of flash-linear-attention",
        "fla.ops.kda",
        "pip install fla-core",
        package="fla-core",
    ),
    "cudnn_kda": Adapter(
        ("kda",),
        "kimi_delta_attention of cuDNN's frontend",
        "cudnn.linear_attention",
        "pip install 'nvidia-cudnn-frontend[cutedsl]', a version with KDA on sm_90",
        package="nvidia-cudnn-frontend",
    ),
}


def need(name: str) -> ModuleType:
    """The module that adapter ``name`` requires; Missing says what to install."""
    adapter = ADAPTERS[name]
    try:
        return importlib.import_module(adapter.requires)
    except Exception as error:  # a package that is broken here fails in its own way
        first = (str(error).splitlines() or [""])[0]
        raise Missing(
            f"{name}: {adapter.requires} cannot be imported ({type(error).__name__}: {first}); {adapter.install}"
        ) from None
