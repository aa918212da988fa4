"""The committed goldens are what regeneration makes, byte for byte, on every machine.

Equality is tried with one and two threads, another string hash and torch's code without vector
instructions. What cannot be tried here is excluded: every stored computation runs under a dispatch mode
that refuses all but a written list of operators whose results IEEE 754 or integer arithmetic fix.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import goldens
from goldens import store
from goldens.case import Kernel
from goldens.regenerate import all_cases, regenerate
from reference.numerics.formats import BF16, E4M3, FP16, FP32_NAN
from reference.numerics.ulp import bits

COMMITTED = [case for case in all_cases() if case.committed]
REPOSITORY = Path(__file__).parent.parent
KERNELS = pytest.mark.parametrize("kernel", goldens.KERNELS.values(), ids=goldens.KERNELS)

# Operators by what makes them portable; an in-place or out= form counts as its plain one.
FACTORIES = "arange empty empty_like empty_strided full full_like ones ones_like scalar_tensor zeros zeros_like"
VIEWS = (
    "_reshape_alias _unsafe_view alias as_strided detach diagonal expand lift_fresh movedim permute select slice split "
    "split_with_sizes squeeze t transpose unbind unfold unsqueeze view"
)
COPIES = (
    "_local_scalar_dense _to_copy cat clone constant_pad_nd copy fill flip gather index index_copy index_put "
    "index_select masked_fill nonzero repeat roll scatter slice_scatter stack tril triu where zero"
)
ROUNDED_ONCE = "abs add ceil clamp clamp_max clamp_min div floor frexp mul neg round rsub sign sqrt sub trunc"
ORDER_FREE = "all amax amin any max maximum min minimum"
COMPARISONS = "eq equal ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne signbit"
PORTABLE = set(" ".join((FACTORIES, VIEWS, COPIES, ROUNDED_ONCE, ORDER_FREE, COMPARISONS)).split())
INTEGER = (
    "__and__ __lshift__ __or__ __rshift__ __xor__ argsort bincount bitwise_and bitwise_left_shift bitwise_not "
    "bitwise_or bitwise_right_shift bitwise_xor cumsum floor_divide prod remainder sort sum"
)
PORTABLE_ON_INTEGERS = set(INTEGER.split())
NARROW = (BF16.dtype, FP16.dtype, E4M3.dtype)


class NotPortable(Exception):
    """A stored value went through an operator whose last bits depend on library or machine."""


def objection(function: Any, args: tuple, kwargs: dict) -> str:
    """Why a call is not portable; empty if it is."""
    name = function._schema.name.removeprefix("aten::")
    plain = name if name.startswith("__") else name.rstrip("_")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    floating = [x.dtype for x in tensors if x.dtype.is_floating_point]
    if plain not in PORTABLE and plain not in PORTABLE_ON_INTEGERS:
        return "is not in the list"
    if plain in PORTABLE_ON_INTEGERS and floating:
        return f"takes integers alone, got {floating[0]}"
    if kwargs.get("alpha", 1) != 1:
        return "with alpha contracts a product and a sum"
    if plain == "sqrt" and floating[0] != torch.float64:
        return f"of {floating[0]} is not rounded as IEEE 754 has it; ieee.sqrt_rn is"
    if plain == "div" and floating and not isinstance(args[1], Tensor):
        return "by a number multiplies by its reciprocal on CUDA"
    if plain in ("add", "sub", "mul", "div") and any(dtype in NARROW for dtype in floating):
        return f"rounds to {floating[0]} as the library likes"
    target = kwargs.get("dtype") if plain == "_to_copy" else args[0].dtype if plain == "copy" else None
    if target in NARROW and floating and floating[-1] != target:
        return f"narrows {floating[-1]} to {target}; that goes through numerics.formats"
    return ""


class PortableOnly(TorchDispatchMode):
    """Refuses every operator that is not portable, by name."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        why = objection(function, args, kwargs)
        if why:
            raise NotPortable(f"{function} {why}")
        return function(*args, **kwargs)


@pytest.fixture(scope="module")
def empty_caches() -> None:
    """Forget cached tables, so that their making is walked too."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] in ("reference", "goldens")]
    for cached in (x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")):
        cached.cache_clear()


@pytest.mark.usefixtures("empty_caches")
@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.id)
def test_a_golden_is_made_again_byte_for_byte_by_portable_operators(case: goldens.Case) -> None:
    with PortableOnly():
        made = store.compute(goldens.KERNELS[case.kernel], case)
    assert store.entry(case, made) == store.read_manifest()[case.id]
    assert store.to_bytes(case, made) == store.path_of(case).read_bytes()


X = torch.arange(1.0, 9.0).view(2, 4)
BF_ONES = torch.ones(4, dtype=torch.bfloat16)
REFUSED = {
    "exp": (lambda: torch.exp(X), "aten.exp.default"),
    "matmul": (lambda: X @ X.t(), "aten.mm.default"),
    "batched-matmul": (lambda: X[None] @ X[None].transpose(1, 2), "aten.bmm.default"),
    "einsum": (lambda: torch.einsum("ik,jk->ij", X, X), "aten.bmm.default"),
    "softmax": (lambda: X.softmax(-1), "aten._softmax.default"),
    "mean": (lambda: X.mean(), "aten.mean"),
    "float-sum": (lambda: X.sum(), r"aten.sum.* takes integers alone, got torch.float32"),
    "fp64-sum": (lambda: X.double().sum(-1), r"aten.sum.* got torch.float64"),
    "float-cumsum": (lambda: X.cumsum(-1), r"aten.cumsum.* got torch.float32"),
    "float-prod": (lambda: X.prod(), r"aten.prod.* got torch.float32"),
    "variance": (lambda: X.var(), "aten.var"),
    "norm": (lambda: X.norm(), "aten.linalg_vector_norm"),
    "logsumexp": (lambda: X.logsumexp(-1), "is not in the list"),
    "pow": (lambda: X**0.3, "aten.pow"),
    "rsqrt": (lambda: X.rsqrt(), "aten.rsqrt"),
    "square-root-in-fp32": (lambda: X.sqrt(), "ieee.sqrt_rn is"),
    "sigmoid": (lambda: X.sigmoid(), "aten.sigmoid"),
    "tanh": (lambda: X.tanh(), "aten.tanh"),
    "randn": (lambda: torch.randn(2), "aten.randn"),
    "uniform": (lambda: torch.empty(2).uniform_(), "aten.uniform_"),
    "addcmul": (lambda: torch.addcmul(X, X, X), "aten.addcmul"),
    "lerp": (lambda: torch.lerp(X, X, 0.5), "aten.lerp"),
    "alpha": (lambda: torch.add(X, X, alpha=3), "contracts a product and a sum"),
    "divide-by-number": (lambda: X / 3.0, "reciprocal on CUDA"),
    "library-to-bf16": (lambda: X.to(torch.bfloat16), r"narrows torch.float32 to torch.bfloat16"),
    "library-to-e4m3": (lambda: X.to(torch.float8_e4m3fn), r"narrows torch.float32 to torch.float8_e4m3fn"),
    "copy-to-bf16": (lambda: torch.empty(2, 4, dtype=torch.bfloat16).copy_(X), r"narrows torch.float32"),
    "bf16-sum": (lambda: BF_ONES + BF_ONES, r"aten.add.* rounds to torch.bfloat16"),
}


@pytest.mark.parametrize(("compute", "message"), REFUSED.values(), ids=REFUSED)
def test_an_operator_that_is_not_portable_is_refused(compute: Callable[[], Tensor], message: str) -> None:
    with PortableOnly(), pytest.raises(NotPortable, match=message):
        compute()


def int_sums() -> Tensor:
    counts = X.to(torch.int64)
    return counts.sum(-1) + counts.cumsum(-1)[:, -1] + (counts % 3).prod(-1)


ALLOWED = {
    "integer-sums": int_sums,
    "count": lambda: (X > 2).sum(),
    "widen": lambda: BF_ONES.to(torch.float64),
    "fp64-to-fp32": lambda: X.double().to(torch.float32),
    "divide-by-tensor": lambda: X / torch.tensor(3.0),
    "square-root-in-fp64": lambda: X.double().sqrt(),
    "maximum": lambda: X.amax(-1),
    "bf16-negation": lambda: -BF_ONES,
}


@pytest.mark.parametrize("compute", ALLOWED.values(), ids=ALLOWED)
def test_a_portable_operator_is_allowed(compute: Callable[[], Tensor]) -> None:
    with PortableOnly():
        compute()


PLANTED = {
    "exp": ("exp", torch.exp, r"aten.exp.default is not in the list"),
    "matmul": ("matmul", lambda a, b, keep=None: a @ b, r"aten.mm.default is not in the list"),
    "sum": ("total", lambda x, dim: x.sum(dim), r"aten.sum.dim_IntList takes integers alone, got torch.float32"),
}


@pytest.mark.parametrize(("name", "function", "message"), PLANTED.values(), ids=PLANTED)
def test_a_library_function_planted_in_a_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable, message: str
) -> None:
    kernel = goldens.KERNELS["fmha"]
    monkeypatch.setattr(kernel.reference.portable, name, function)
    with PortableOnly(), pytest.raises(NotPortable, match=message):
        store.compute(kernel, goldens.find("fmha/d64-causal-q17-k80-normal"))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
@KERNELS
def test_two_threads_make_the_same_bytes(kernel: Kernel) -> None:
    cases = [case for case in kernel.cases if case.committed]
    assert cases
    assert regenerate(cases, check=True) == []


ENVIRONMENTS = {
    "another-string-hash": {"PYTHONHASHSEED": "7"},
    "no-vector-instructions": {"PYTHONHASHSEED": "8", "ATEN_CPU_CAPABILITY": "default"},
}


@pytest.mark.parametrize("variables", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_another_process_makes_the_same_bytes(variables: dict[str, str]) -> None:
    """One case of every recipe of values, the one with the fewest numbers."""
    sizes = {case.id: sum(x.numel() for x in goldens.KERNELS[case.kernel].inputs(case).values()) for case in COMMITTED}
    largest_first = sorted(COMMITTED, key=lambda case: -sizes[case.id])
    by_recipe = {(case.kernel, case.recipe.partition("@")[0]): case.id for case in largest_first}
    options = [word for case_id in by_recipe.values() for word in ("--case", case_id)]
    run = subprocess.run(
        [sys.executable, "-m", "tools.cli", "regenerate", "--check", *options],
        cwd=REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, f"{len(by_recipe)} cases made again, every byte as it was\n")


CANONICAL = {torch.float32: FP32_NAN, **{form.dtype: form.nan for form in (BF16, FP16, E4M3)}}


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.id)
def test_every_stored_result_has_the_canonical_nan(case: goldens.Case) -> None:
    """A tensor that is input and output keeps the input's NaNs where it was not written."""
    golden = store.load(case, store.read_manifest())
    for name, x in golden.items():
        if x.dtype in CANONICAL and not name.startswith("in/"):
            computed, source = x.isnan(), golden.get(f"in/{name.rpartition('/')[2]}")
            if source is not None and source.dtype == x.dtype:
                computed &= bits(x) != bits(source)
            assert set(bits(x)[computed].tolist()) <= {CANONICAL[x.dtype]}, name


def test_the_committed_files_stay_small() -> None:
    """The checkout's budget is 8 MiB, half of it goldens; no single file may eat a kernel's share."""
    sizes = [path.stat().st_size for path in store.DATA.rglob("*") if path.is_file()]
    assert sum(sizes) <= 4 * 2**20
    assert max(sizes) < 2**19
