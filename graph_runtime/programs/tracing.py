"""Trace the methods of a draft: one network, of whose weights each method stores its own alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


class DraftHead(nn.Module):
    """The `head` method of any draft."""

    def __init__(self, network: nn.Module) -> None:
        """Wrap a prepared network, whose `head` it is."""
        super().__init__()
        self.network: Any = network

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, Vd] of what the network's layers end with, [M, H]; not capped."""
        return self.network.head(hidden)


def trace_methods(
    methods: Mapping[str, tuple[nn.Module, tuple[Any, ...]]],
) -> dict[str, ExportedProgram]:
    """Return the methods, by name, of modules and their largest inputs."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        return {
            name: _own_weights_only(torch.export.export(module, inputs))
            for name, (module, inputs) in methods.items()
        }


def _own_weights_only(program: ExportedProgram) -> ExportedProgram:
    """Drop the weights of the other methods, in place: each would store them all."""
    signature, graph = program.graph_signature, program.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in list(signature.input_specs):
        node = placeholders[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT or node.users:
            continue
        graph.erase_node(node)
        signature.input_specs.remove(spec)
        program.state_dict.pop(spec.target, None)
        program.constants.pop(spec.target, None)
    program.graph_module.recompile()
    return program
