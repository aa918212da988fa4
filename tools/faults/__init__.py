"""The suite's own test: faults planted on purpose in the models and the kernels, and what notices them."""

from tools.faults.command import command

__all__ = ["command"]
