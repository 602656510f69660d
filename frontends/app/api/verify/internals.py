"""Values inside a compiled ONNX model: their names, and their contents for given inputs.

Compiled values have the names of their IR values, so they can be compared with those of the interpreter.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from weft.backends.alignment import layer_alignment
from weft.backends.runtime.ort.session import CPU, Session, convert_ort_errors, import_onnxruntime, read_default_threads
from weft.backends.viz.onnx_files.onnx_network import read_model
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array

if TYPE_CHECKING:
    from weft.backends.runtime.core.generation import Generator
    from weft.backends.runtime.ort.ort_encoder import EncoderModel

_PAST, _CACHES = "past_", {"past_key_values": "present", "past_index": "present_index"}


class Internals:
    """The graph of the model in `file`, without its weights; it runs on the device of `session` (None: the CPU).
    `head_dim`: the last size of its caches, if the file does not state it."""

    def __init__(self, file: Path, session: Session | None = None, head_dim: int | None = None) -> None:
        self.folder, self.session, self.head_dim = file.parent, session, head_dim or 0
        self.device = "cpu" if session is None else session.device
        self.proto = read_model(file)

    @property
    def inputs(self) -> list[str]:
        """Return the names of the inputs that a caller provides: all except caches and states."""
        weights = {tensor.name for tensor in self.proto.graph.initializer}
        names = [value.name for value in self.proto.graph.input if value.name not in weights]
        return [name for name in names if not name.startswith(_PAST)]

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the values that nodes compute, in order."""
        return [name for node in self.proto.graph.node for name in node.output if name]

    @cached_property
    def boundaries(self) -> dict[str, str]:
        """Return layer ("layers.3") → name of its last value, except outputs, that is read outside of the layer."""
        readers: dict[str, set[str]] = defaultdict(set)
        for node in self.proto.graph.node:
            layers = {find_layer(name) for name in node.output if name}
            for name in node.input:
                readers[name] |= layers
        outputs = {value.name for value in self.proto.graph.output}
        layers_of = {name: find_layer(name) for name in self.names if name not in outputs}
        return {layer: name for name, layer in layers_of.items() if layer and readers[name] - {layer}}

    @cached_property
    def streams(self) -> dict[str, tuple[str, ...]]:
        """Return layer → names of the values whose sum is the residual stream after this layer, in layer order.

        There are two if a fused norm adds them and outputs only the norm of the sum, as after the last layer; else one.
        """
        order = {name: i for i, name in enumerate(self.names)}
        fused = (
            tuple(n.input[:2]) for n in self.proto.graph.node if n.op_type.startswith("Skip") and len(n.output) < 4
        )
        sums = {max(pair, key=lambda name: order.get(name, -1)): pair for pair in fused}
        return {layer: sums.get(name, (name,)) for layer, name in self.boundaries.items()}

    @property
    def reduction(self) -> int:
        """Return an estimate of the longest sum in a matrix product: the largest of all matrices' smaller sides."""
        return max((min(t.dims) for t in self.proto.graph.initializer if len(t.dims) == 2), default=1)

    def run(self, inputs: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the values `names` as ONNX Runtime values on the CPU, by name, for `inputs` (arrays, or results of
        earlier runs). Without `names`: all inputs, and all values that nodes compute except updated caches.

        Caches start empty, with room for the input. Nodes run as in the file: ONNX Runtime only folds constants. Raise
        WeftError with its message if it fails.
        """
        ort, extended = import_onnxruntime(), onnx.ModelProto()
        extended.CopyFrom(self.proto)
        pasts = [n.partition(".") for n in (value.name for value in self.proto.graph.input) if n.startswith(_PAST)]
        updated = {f"{_CACHES[past]}.{rest}" for past, _, rest in pasts if past in _CACHES}
        wanted = [name for name in (self.names if names is None else names) if name not in updated]
        if not wanted:
            return {}
        declared = {value.name for value in self.proto.graph.output}
        extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in declared)
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, read_default_threads()
        # Without folded constants, MatMulNBits of 8-bit activations returns zeros.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        providers = [CPU] if self.session is None else self.session.ort.get_providers()
        feeds = {name: inputs[name] for name in self.inputs}
        types = {value.name: value.type.tensor_type.elem_type for value in self.proto.graph.input}
        for name, x in feeds.items():
            if isinstance(x, np.ndarray):
                dtype = helper.tensor_dtype_to_np_dtype(types[name])
                feeds[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x, dtype))
        with convert_ort_errors(str(self.folder)):
            session = ort.InferenceSession(extended.SerializeToString(), options, providers=providers)
            binding = session.io_binding()
            # The binding stores addresses only: `caches` keeps the memory alive until the run is over.
            caches = {value.name: self._bind_cache(binding, value, inputs) for value in self.proto.graph.input}
            empty = {n: ort.OrtValue.ortvalue_from_numpy(c.numpy().copy()) for n, c in caches.items() if c is not None}
            for name, value in feeds.items():
                binding.bind_ortvalue_input(name, value)
            for name in wanted:
                binding.bind_output(name, "cpu")
            session.run_with_iobinding(binding)
            # In the order of binding: caches first, then the wanted values.
            results = dict(zip(wanted, binding.get_outputs()[-len(wanted) :], strict=True))
        return results if names is not None else {**feeds, **empty, **results}

    def _bind_cache(self, binding: Any, value: onnx.ValueInfoProto, inputs: Mapping[str, Any]) -> Any:
        """Bind an empty cache (past and present) or state (past) for the input `value`.

        Return the OrtValue whose memory is bound, to keep until the run is over; None if `value` is another input.
        """
        if not value.name.startswith(_PAST):
            return None
        from weft.backends.onnx.onnx_emitter import OPTIMUM_SIZES

        ids, kind = inputs["input_ids"].shape, value.type.tensor_type
        past, _, rest = value.name.partition(".")
        cache = _CACHES.get(past)
        sizes = [d.dim_value for d in kind.shape.dim]
        appends = cache and kind.shape.dim[2].dim_param == str(OPTIMUM_SIZES["past"])
        slots = 0 if appends else ids[1]
        shape = [sizes[0] or ids[0], *sizes[1:2], *((n or slots) if cache else n for n in sizes[2:3]), *sizes[3:]]
        shape[-1] = shape[-1] or self.head_dim  # a symbol in models of onnxruntime-genai's builder
        number = kind.elem_type
        # numpy has no bfloat16; zeros have the same bits in both.
        dtype = np.uint16 if number == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(number)
        memory = import_onnxruntime().OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self.device, 0)
        binding.bind_input(value.name, self.device, 0, number, shape, memory.data_ptr())
        if cache and not appends:
            binding.bind_output(f"{cache}.{rest}", self.device, 0, number, shape, memory.data_ptr())
        return memory


def make_inputs(names: Iterable[str], ids: Sequence[int], source: Sequence[int] = ()) -> dict[str, Array]:
    """Return inputs [1, tokens] by name for the tokens `ids`; the encoder of an encoder-decoder reads `source`.

    Raise WeftError if `names` has an input that token ids do not determine.
    """
    row, source_row = (np.asarray(x, np.int64)[None] for x in (ids, source))
    values = {
        "input_ids": row,
        "attention_mask": np.ones_like(row),
        "position_ids": np.arange(row.size)[None],
        "token_type_ids": np.zeros_like(row),
        "encoder_input_ids": source_row,
        "encoder_attention_mask": np.ones_like(source_row),
    }
    names = list(names)
    if unknown := [n for n in names if n not in values]:
        message = f"the model cannot be compared on a text: it has the input {unknown[0]}"
        raise WeftError(f"{message}, and only {', '.join(values)} can be computed from token ids")
    return {name: values[name] for name in names}


def open_internals(runnable: Generator | EncoderModel) -> list[Internals]:
    """Return the ONNX models of a `runnable` from `load`, in running order; [] for a folder of PyTorch."""
    from weft.backends.runtime.compiled_folder import read_facts
    from weft.backends.runtime.ort.ort_decoder import OrtDecoder
    from weft.backends.runtime.ort.ort_encoder import OrtEncoder

    folder, model = runnable.folder, getattr(runnable, "decoder", runnable)
    if folder is None or not isinstance(model, OrtEncoder | OrtDecoder):
        return []
    sources = model.sources if isinstance(model, OrtDecoder) else None
    file, *encoder_files = read_facts(folder).files
    encoders = [] if sources is None else [Internals(encoder_files[0], sources.session)]
    return [*encoders, Internals(file, model.session)]


def measure_depth(runnable: Generator | EncoderModel) -> tuple[int, int]:
    """Return the number of layers of `runnable`, and the longest reduction of its matrix products."""
    if graphs := open_internals(runnable):
        return sum(len(g.boundaries) for g in graphs), max(g.reduction for g in graphs)
    module: Any = getattr(runnable, "decoder", runnable)
    weights: Mapping[str, Any] = module.model.state_dict()
    return len({find_layer(key) for key in weights} - {""}), max(min(w.shape) for w in weights.values() if w.ndim == 2)


def find_layer(name: str) -> str:
    """Return the layer that a value belongs to ("layers.3" of "layers.3.attn.q"), "" outside of layers."""
    return layer_alignment.find_layer(name.rpartition(".")[0])


def to_array(value: Any) -> Array:
    """Return an ONNX Runtime value on the CPU as an array; bf16, which numpy does not have, becomes f32."""
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())  # a copy: the memory is that of the value
    bits = (ctypes.c_uint16 * math.prod(value.shape())).from_address(value.data_ptr())
    return (np.array(bits, np.uint32) << 16).view(np.float32).reshape(value.shape())
