"""Host side shared by all kernels: compile for sm_90a, cache, view tensors, launch.

Compiling needs no GPU and no driver. Compiled kernels are kept in memory by the parameters they
were compiled for.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream

ARCH = "sm_90a"
ALIGN_BYTES = 16

_compiled: dict[tuple, object] = {}
_lock = threading.Lock()


def fake(dtype, shape: tuple, order: tuple[int, ...] | None = None):
    """A stand-in for a compact tensor to compile against.

    Open extents are ``cute.sym_int()``. ``order`` lists the modes from the slowest to the fastest, as
    ``torch.Tensor.dim_order`` does; row-major by default.
    """
    order = order or tuple(range(len(shape)))
    rank = [len(order) - 1 - order.index(mode) for mode in range(len(shape))]
    return make_fake_compact_tensor(dtype, shape, stride_order=rank, assumed_align=ALIGN_BYTES)


def compile_now(kernel, *arguments, options: str = ""):
    """Compile a kernel object for ``arguments`` and a stream."""
    return cute.compile(kernel, *arguments, make_fake_stream(), options=f"--gpu-arch={ARCH} {options}".strip())


def compile_kernel(key: tuple, make: Callable, *arguments, options: str = ""):
    """Compile ``make()`` once for each ``key``, which names every compile-time parameter; ``options`` stand last."""
    with _lock:
        if key not in _compiled:
            _compiled[key] = compile_now(make(), *arguments, options=options)
        return _compiled[key]


def compiled_keys() -> tuple[tuple, ...]:
    """The keys that ``compile_kernel`` has compiled for in this process, options last."""
    with _lock:
        return tuple(_compiled)


def require_names(what: str, given: Mapping, names: tuple[str, ...]) -> None:
    """ValueError if a name is missing from the dictionary of a candidate's inputs or parameters."""
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{what}: {', '.join(missing)} missing; this kernel takes {', '.join(names)}")


def fp32_number(name: str, value: Any) -> float:
    """The fp32 number nearest to the argument ``name``, ties to even. ValueError unless it is an int or a float that is
    at most fp32's largest in magnitude."""
    largest = torch.finfo(torch.float32).max
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= largest:
        raise ValueError(f"{name}: got {value!r}, allowed is a finite number of at most {largest} in magnitude")
    return torch.tensor(float(value), dtype=torch.float32).item()


def require_hopper(device: torch.device) -> None:
    """RuntimeError if ``device`` is no GPU of compute capability 9.0."""
    if device.type != "cuda":
        raise RuntimeError(f"tensors are on {device}; the kernels run on an sm_90 GPU (H100, H200)")
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(f"{name} has compute capability {capability[0]}.{capability[1]}; sm_90a code needs 9.0")


def stream() -> cuda.CUstream:
    """PyTorch's current stream."""
    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


def view(tensor: torch.Tensor, dynamic: dict[int, int], order: tuple[int, ...] | None = None):
    """A CuTe view of a compact torch tensor, matching ``fake`` of the same extents and order.

    ``dynamic`` maps each mode whose extent was left open at compile time to what divides it. The order is
    stated, not asked of torch: extents of 1 make it ambiguous.
    """
    order = order or tuple(range(tensor.dim()))
    result = from_dlpack(tensor.detach(), assumed_align=ALIGN_BYTES)
    for mode, divisor in dynamic.items():
        result = result.mark_compact_shape_dynamic(mode, order, divisor)
    return result
