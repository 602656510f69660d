"""Traces of ONNX models, by ONNX Runtime: every node as it is in the file, or after ONNX Runtime's optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from weft.backends.alignment.traces import Operation, ValueTrace
from weft.backends.runtime.ort.session import CPU, FROM_END, convert_ort_errors, import_onnxruntime
from weft.backends.viz.onnx_files.onnx_network import find_captured
from weft.ir.recipes.readers import Array

from ..verify.internals import Internals, make_inputs, to_array

FLOATS = {onnx.TensorProto.FLOAT16: "f16", onnx.TensorProto.BFLOAT16: "bf16", onnx.TensorProto.FLOAT: "f32"}


def trace_onnx(
    files: Sequence[Path], ids: Sequence[int], source: Sequence[int], head_dim: int | None = None
) -> ValueTrace:
    """Return the trace of ONNX models that run in order: each may read the outputs of earlier ones. `head_dim`: as for
    `Internals`.

    Nodes run as in the files. Labels are scopes of nodes that exporters record in their names.
    """
    trace, sizes, values = ValueTrace(), Counter[str](), dict[str, Any]()
    for file in files:
        internals = Internals(file, head_dim=head_dim)
        graph, used = internals.proto.graph, trace.values.keys() | trace.constants.keys()
        local = {*internals.names, *(tensor.name for tensor in graph.initializer)}
        names = {name: f"{file.stem}.{name}" for name in local & used}  # an earlier model has the same
        for tensor in graph.initializer:
            if tensor.name == FROM_END:  # all positions
                tensor.CopyFrom(numpy_helper.from_array(np.arange(len(ids), 0, -1)[None], FROM_END))
            load = partial(numpy_helper.to_array, tensor, str(file.parent))
            trace.constants[names.get(tensor.name, tensor.name)] = tuple(tensor.dims), load
            sizes[FLOATS.get(tensor.data_type, "")] += math.prod(tensor.dims)
        inputs = make_inputs([name for name in internals.inputs if name not in values], ids, source)
        values = internals.run(inputs | values)
        trace.values |= {names.get(name, name): to_array(value) for name, value in values.items()}
        opsets = {opset.domain: opset.version for opset in internals.proto.opset_import}
        for node in graph.node:
            attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.type != a.GRAPH}
            captured = (x for x in find_captured(node) if x in values or x in local)
            reads = (*node.input, *captured)
            run = _NodeRunner(node, reads, opsets)
            renamed = [tuple(names.get(x, x) for x in xs) for xs in (reads, node.output)]
            makes = tuple(x if x in trace.values else "" for x in renamed[1])
            trace.operations.append(Operation(node.op_type, node.name or makes[0], renamed[0], makes, attrs, run))
            if "/" in node.name:
                trace.labels[node.name.strip("/").rpartition("/")[0].replace("/", ".")] = makes[0]
        outputs = {value.name: names.get(value.name, value.name) for value in graph.output}
        trace.outputs |= {output: name for output, name in outputs.items() if name in trace.values}
    trace.labels = {label: name for label, name in trace.labels.items() if label and name}
    trace.dtype = max(FLOATS.values(), key=sizes.__getitem__)
    return trace


def optimize(files: Sequence[Path], folder: Path) -> list[Path]:
    """Write the models as ONNX Runtime's optimizer rewrites them for the CPU to `folder`; return the new files."""
    ort = import_onnxruntime()
    for file in files:
        options = ort.SessionOptions()
        options.log_severity_level, options.optimized_model_filepath = 3, str(folder / file.name)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{file.name}.data")
        with convert_ort_errors(str(file), "ONNX Runtime cannot optimize it"):
            ort.InferenceSession(str(file), options, providers=[CPU])
    return [folder / file.name for file in files]


class _NodeRunner:
    """A function that runs `node` alone, on other operands and attributes; equal attributes share a session."""

    def __init__(self, node: onnx.NodeProto, reads: Sequence[str], opsets: Mapping[str, int]) -> None:
        self.node, self.reads, self.opsets, self.sessions = node, reads, opsets, dict[str, Any]()

    def __call__(self, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> list[Array]:
        arrays = {name: x for name, x in zip(self.reads, operands, strict=True) if name and x is not None}
        key = repr((attrs, [(name, x.dtype, x.ndim) for name, x in arrays.items()]))
        if key not in self.sessions:
            self.sessions[key] = self._open(arrays, attrs)
        results = iter(self.sessions[key].run(None, arrays))
        return [next(results) if name else np.empty(0) for name in self.node.output]

    def _open(self, arrays: Mapping[str, Array], attrs: Mapping[str, Any]) -> Any:
        ort, node = import_onnxruntime(), onnx.NodeProto()
        node.CopyFrom(self.node)
        del node.attribute[:]
        node.attribute.extend(a for a in self.node.attribute if a.type == a.GRAPH)
        node.attribute.extend(helper.make_attribute(name, x) for name, x in attrs.items() if x is not None)
        kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in arrays.items()}
        values = [helper.make_tensor_value_info(n, kind, [None] * arrays[n].ndim) for n, kind in kinds.items()]
        graph = helper.make_graph([node], "node", values, [onnx.ValueInfoProto(name=n) for n in node.output if n])
        opsets = [helper.make_opsetid(domain, version) for domain, version in self.opsets.items()]
        options = ort.SessionOptions()
        options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])
