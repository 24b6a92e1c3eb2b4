"""Targets and drafts as ExecuTorch programs for CPUs. The only package that imports executorch."""

from graph_runtime.programs.dflash_export import ensure_dflash_program
from graph_runtime.programs.dflash_load import load_dflash_program
from graph_runtime.programs.eagle3_export import ensure_eagle3_program
from graph_runtime.programs.eagle3_load import load_eagle3_program
from graph_runtime.programs.export import check_digest
from graph_runtime.programs.load import load_program_target
from graph_runtime.programs.metadata import DRAFT_PRECISIONS
from graph_runtime.programs.target_export import PRECISIONS, ensure_program

__all__ = [
    "DRAFT_PRECISIONS",
    "PRECISIONS",
    "check_digest",
    "ensure_dflash_program",
    "ensure_eagle3_program",
    "ensure_program",
    "load_dflash_program",
    "load_eagle3_program",
    "load_program_target",
]
