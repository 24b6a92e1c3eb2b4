"""Targets and drafts as ExecuTorch programs for CPUs. The only package that imports executorch."""

from graph_runtime.programs.draft_export import DRAFT_PRECISIONS, ensure_draft_program
from graph_runtime.programs.draft_load import load_program_draft
from graph_runtime.programs.export import check_digest
from graph_runtime.programs.load import load_program_target
from graph_runtime.programs.target_export import PRECISIONS, ensure_program

__all__ = [
    "DRAFT_PRECISIONS",
    "PRECISIONS",
    "check_digest",
    "ensure_draft_program",
    "ensure_program",
    "load_program_draft",
    "load_program_target",
]
