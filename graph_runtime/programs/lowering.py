"""From exported modules to a `.pte`: edge dialect, XNNPACK partitions, resizable shapes.

Where the time of a plain `to_edge_transform_and_lower` goes (about 6 s of CPU a layer), and what
stands here instead (about 1.5 s):
- it re-traces the whole graph a dozen times to decompose, functionalise and rename operators;
  the few operators of this network are renamed in the graph, and writes stay writes;
- it traces with unknown lengths, where every operator computes with symbols; methods are traced at
  their largest shapes, and tensors become resizable at the end;
- its XNNPACK backend re-traces each partition through 17 passes, of which linears need one;
- its partitioner tries 50 operator patterns. Here a layer is one partition.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from executorch.backends.xnnpack.partition import xnnpack_partitioner
from executorch.backends.xnnpack.partition.config import gemm_configs, generic_node_configs
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.passes.memory_planning_pass import MemoryPlanningPass
from executorch.exir.schema import TensorShapeDynamism
from executorch.exir.tensor import TensorSpec
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401 - llama.update_cache
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from graph_runtime.architecture import DecoderConfig
from graph_runtime.decoder import Decoder
from graph_runtime.programs.metadata import ProgramMetadata
from graph_runtime.programs.network import Head, Step

_CONFIGS = [
    gemm_configs.LinearConfig,
    generic_node_configs.AddConfig,
    generic_node_configs.BMMConfig,
    generic_node_configs.CatConfig,
    generic_node_configs.MulConfig,
    generic_node_configs.PermuteConfig,
    generic_node_configs.ReciprocalSquareRootConfig,
    generic_node_configs.SigmoidConfig,
    generic_node_configs.SoftmaxConfig,
    generic_node_configs.ViewCopyConfig,
]

_aten = torch.ops.aten
_CORE_FORMS: dict[Any, Any] = {
    _aten.item.default: _aten._local_scalar_dense.default,
    _aten.reshape.default: _aten.view_copy.default,
    _aten.select.int: _aten.select_copy.int,
    _aten.slice.Tensor: _aten.slice_copy.Tensor,
    _aten.unsqueeze.default: _aten.unsqueeze_copy.default,
    _aten.view.default: _aten.view_copy.default,
}
"""Operators of traced graphs, by the form that kernels and delegate have."""
_RENAMED = ("aten", "quantized_decomposed")
"""Namespaces whose operators have a form in the edge dialect."""


def trace(
    decoder: Decoder, config: DecoderConfig, metadata: ProgramMetadata
) -> dict[str, ExportedProgram]:
    """Return the methods `step` and `head` of a prepared decoder, traced at their largest."""
    rows, capacity = metadata.max_step_rows, metadata.max_capacity
    shape = (metadata.n_kv_heads, capacity, 1, metadata.head_dim)
    group = metadata.n_heads // metadata.n_kv_heads
    step_inputs = (
        torch.zeros(rows, dtype=torch.int64),
        torch.arange(rows),
        [torch.zeros(1, group * rows, capacity) for _ in metadata.windows],
        [torch.zeros(shape) for _ in range(metadata.n_layers)],
        [torch.zeros(shape) for _ in range(metadata.n_layers)],
    )
    head_inputs = (torch.zeros(metadata.max_head_rows, metadata.hidden_size),)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        return {
            "step": torch.export.export(Step(decoder, config), step_inputs),
            "head": torch.export.export(Head(decoder), head_inputs),
        }


def lower(
    programs: Mapping[str, ExportedProgram],
    constants: Mapping[str, Any],
    report: Callable[[str], None],
) -> bytes:
    """Return the `.pte` with one method for each of `programs` and one for each constant.

    Args:
        programs: by method name, traced at the largest shapes they will run with; what
            `write_cache` writes is the method's input itself, or a buffer, which all the methods
            that have one of its name share.
        constants: int, str, bool or list of int by constant method name.
        report: called with the name of each phase as it starts.
    """
    logging.getLogger(xnnpack_partitioner.__name__).setLevel(logging.ERROR)
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        report("partition and lower")
        edge = EdgeProgramManager(
            {name: _to_edge(program, config) for name, program in programs.items()},
            dict(constants),
            config,
        ).to_backend(_partitioner())
        report("plan memory and write")
        for name in programs:
            _write_in_place(edge.exported_program(name))
        signatures = [edge.exported_program(name).graph_signature for name in programs]
        plan = _BoundedPlanning(
            alloc_graph_input=False,
            alloc_graph_output=True,
            share_mutable_buffers=any(signature.buffers_to_mutate for signature in signatures),
        )
        settings = ExecutorchBackendConfig(
            memory_planning_pass=plan,
            do_quant_fusion_and_const_prop=False,
            # A view of another tensor may not be marked as resizable after it.
            remove_view_copy=False,
        )
        return edge.to_executorch(settings).buffer


def _to_edge(program: ExportedProgram, config: EdgeCompileConfig) -> ExportedProgram:
    """Return `program` in the edge dialect, rewritten in place."""
    graph = program.graph
    signature = _with_written_buffers(program)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _rewrite(graph, node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[EXIREdgeDialectVerifier(edge_compile_config=config, class_only=True)],
    )


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    """Give one node its edge form; drop run-time assertions, which the engine makes itself."""
    target = node.target
    if target in (_aten._assert_scalar.default, _aten.sym_constrain_range_for_size.default):
        graph.erase_node(node)
        return
    if target == _aten.silu.default:
        with graph.inserting_before(node):
            gate = graph.call_function(_aten.sigmoid.default, node.args)
        gate.meta = dict(node.meta)
        _rewrite(graph, gate)
        node.target, node.args = _aten.mul.Tensor, (node.args[0], gate)
    elif target == _aten.softmax.int:
        node.target, node.args, node.kwargs = _aten._softmax.default, (*node.args[:2], False), {}
    else:
        node.target = _CORE_FORMS.get(target, target)
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _RENAMED:
        space, name = node.target._schema.name.split("::")
        packet = getattr(getattr(exir_ops.edge, space), name)
        if node.target != _aten._local_scalar_dense.default:
            node.target = getattr(packet, node.target._overloadname)


def _with_written_buffers(program: ExportedProgram) -> ExportGraphSignature:
    """Return the signature in which the buffers that `write_cache` writes are mutable.

    A mutable buffer's last value is an output of the graph, before those that a caller sees.
    """
    last: dict[str, fx.Node] = {}  # by the placeholder's name
    roots: dict[fx.Node, fx.Node] = {}
    buffers = program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        if node.target == torch.ops.splitspec.write_cache.default:
            roots[node] = roots.get(node.args[1], node.args[1])
            if roots[node].name in buffers:
                last[roots[node].name] = node
    (outputs,) = program.graph.output_node().args
    program.graph.output_node().args = ((*last.values(), *outputs),)
    written = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node.name), buffers[placeholder])
        for placeholder, node in last.items()
    ]
    signature = program.graph_signature
    return ExportGraphSignature(signature.input_specs, [*written, *signature.output_specs])


def _write_in_place(program: ExportedProgram) -> None:
    """Turn `write_cache` into `llama.update_cache`, which writes its input: no cache is copied.

    Later readers read the input. They stand after the write, because they depended on it until now.
    """
    for node in program.graph.nodes:
        if node.target == torch.ops.splitspec.write_cache.default:
            cache = node.args[1]
            node.replace_all_uses_with(cache)
            node.target = torch.ops.llama.update_cache.default
    program.graph_module.recompile()


class _BoundedPlanning(MemoryPlanningPass):
    """Plan memory with every shape as an upper bound, and let tensors shrink below it."""

    def run(
        self, graph_module: fx.GraphModule, graph_signature: ExportGraphSignature | None = None
    ) -> PassResult:
        """Mark all tensors but constants, then plan."""
        for node in graph_module.graph.nodes:
            for spec in pytree.tree_leaves(node.meta.get("spec")):
                if isinstance(spec, TensorSpec) and not spec.const:
                    spec.shape_dynamism = TensorShapeDynamism.DYNAMIC_BOUND
        return super().run(graph_module, graph_signature)


def _partitioner() -> xnnpack_partitioner.XnnpackPartitioner:
    partitioner = xnnpack_partitioner.XnnpackPartitioner(configs=_CONFIGS)
    # This specification makes the backend run the one pass that linears need instead of 17.
    partitioner.delegation_spec = DelegationSpec(
        "XnnpackBackend", [CompileSpec("dqlinear_partitioner", b"")]
    )
    return partitioner
