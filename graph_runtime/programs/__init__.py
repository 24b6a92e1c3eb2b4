"""The target as an ExecuTorch program for CPUs. The only package that imports executorch."""

from graph_runtime.programs.load import load_program_target
from graph_runtime.programs.target_export import PRECISIONS, ensure_program

__all__ = ["PRECISIONS", "ensure_program", "load_program_target"]
