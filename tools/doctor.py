"""What this machine can and cannot do, and how to mend what it cannot."""

import importlib

import torch

from goldens import store
from goldens.regenerate import all_cases
from reference.numerics.ieee import require_subnormals
from tools.candidates import HardwareMissing, require_hopper
from tools.environment import PACKAGES, environment, version

DSL_VERSION = "4.8.1"


def examine() -> list[str]:
    """Lines for a person: what is there, then one line for each thing one may want to do."""
    facts = environment()
    lines = [f"python {facts['python']} on {facts['machine']}"]
    lines += [f"{package} {version(package) or 'not installed'}" for package in PACKAGES]
    lines.append(f"GPU: {facts['gpu'] or 'none'}; driver: {facts['driver'] or 'none'}")
    lines += [
        "",
        *(
            f"{'yes' if problem is None else 'no '}  {what}{f': {problem}' if problem else ''}"
            for what, problem in _abilities()
        ),
    ]
    return lines


def _abilities() -> list[tuple[str, str | None]]:
    """(what one may want to do, why it will not work or None)."""
    return [
        ("make goldens (goldens regenerate) and report", _cpu_problem()),
        ("read the committed goldens", _store_problem()),
        ("compile the kernels for sm_90a (pytest)", _compiler_problem()),
        ("disassemble them (the SASS tests)", _disassembler_problem()),
        ("run the kernels (goldens verify, pytest -m hopper)", _gpu_problem()),
    ]


def _cpu_problem() -> str | None:
    try:
        require_subnormals()
    except RuntimeError as error:
        return str(error)
    return None


def _store_problem() -> str | None:
    try:
        manifest = store.read_manifest()
        for case in all_cases():
            if case.committed:
                store.load(case, manifest)
    except store.GoldenError as error:
        return str(error)
    return None


def _compiler_problem() -> str | None:
    try:
        importlib.import_module("cutlass")
    except ImportError as error:
        return f"the CuTe DSL cannot be imported ({error}); pip install 'nvidia-cutlass-dsl[cu13]=={DSL_VERSION}'"
    found = version("nvidia-cutlass-dsl")
    if found not in (None, DSL_VERSION):
        return f"nvidia-cutlass-dsl is {found}, the goldens were proven with {DSL_VERSION}; install that"
    return None


def _disassembler_problem() -> str | None:
    from tools.disassemble import nvdisasm

    return None if nvdisasm() else "nvdisasm is missing; pip install nvidia-cuda-nvdisasm"


def _gpu_problem() -> str | None:
    try:
        require_hopper()
    except HardwareMissing as error:
        return f"{error}; torch {torch.__version__} was built for CUDA {torch.version.cuda or '(none)'}"
    return _compiler_problem()
