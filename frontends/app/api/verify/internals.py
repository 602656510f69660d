"""Values inside a compiled ONNX model: their names, and their contents for given inputs.

Compiled values have the names of their IR values, so they can be compared with those of the interpreter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends.runtime.ort.session import Session, convert_ort_errors, import_onnxruntime, read_default_threads
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array

if TYPE_CHECKING:
    import onnx

    from weft.backends.runtime.core.generation import Generator
    from weft.backends.runtime.ort.ort_encoder import EncoderModel

_LAYER = re.compile(r"(.*?\.\d+)\.")
_PAST, _CACHES = "past_", {"past_key_values": "present", "past_index": "present_index"}


class Internals:
    """The graph of the model in `file`, without its weights; it runs on the device of `session`."""

    def __init__(self, file: Path, session: Session) -> None:
        import onnx

        self.folder, self.session = file.parent, session
        self.proto: onnx.ModelProto = onnx.load(file, load_external_data=False)

    @property
    def inputs(self) -> list[str]:
        """Return the names of the inputs that a caller provides: all except caches and states."""
        return [i.name for i in self.session.ort.get_inputs() if not i.name.startswith(_PAST)]

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

    def run(self, inputs: Mapping[str, Any], names: Iterable[str]) -> dict[str, Array]:
        """Return the values `names` in float32, keyed by name, for `inputs` (integers, or results of `run_outputs`).

        Caches start empty, with room for the input. Raise WeftError with ONNX Runtime's message if it fails.
        """
        outputs = {name: f"weft.watched.{i}" for i, name in enumerate(names)}
        if not outputs:
            return {}
        with convert_ort_errors(str(self.folder)):
            session = self._extend_session(outputs)
            binding = session.io_binding()
            # The binding stores addresses only: `owners` keeps the memory alive until the run is over.
            owners = [self._bind_cache(binding, value, inputs) for value in self.proto.graph.input]
            for name in self.inputs:
                if isinstance(inputs[name], np.ndarray):
                    binding.bind_cpu_input(name, np.ascontiguousarray(inputs[name], np.int64))
                else:
                    binding.bind_ortvalue_input(name, inputs[name])
            for output in outputs.values():
                binding.bind_output(output, "cpu")
            session.run_with_iobinding(binding)
            # In the order of binding: caches first, then the watched values.
            values = binding.get_outputs()[-len(outputs) :]
            del owners
        return {name: value.numpy() for name, value in zip(outputs, values, strict=True)}

    def run_outputs(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Return a cacheless model's outputs as ONNX Runtime values, keyed by name; raise WeftError if it fails."""
        session = self.session.ort
        with convert_ort_errors(str(self.folder)):
            binding = session.io_binding()
            for name in self.inputs:
                binding.bind_cpu_input(name, np.ascontiguousarray(inputs[name], np.int64))
            names = [value.name for value in session.get_outputs()]
            for name in names:
                binding.bind_output(name, self.session.device)
            session.run_with_iobinding(binding)
            return dict(zip(names, binding.get_outputs(), strict=True))

    def _extend_session(self, outputs: Mapping[str, str]) -> Any:
        """Return a session that also outputs values of the graph, cast to f32; `outputs` maps them to output names."""
        import onnx
        from onnx import TensorProto, helper

        extended = onnx.ModelProto()
        extended.CopyFrom(self.proto)
        for name, output in outputs.items():
            extended.graph.node.append(helper.make_node("Cast", [name], [output], to=TensorProto.FLOAT))
            extended.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, read_default_threads()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        providers = self.session.ort.get_providers()
        return ort.InferenceSession(extended.SerializeToString(), options, providers=providers)

    def _bind_cache(self, binding: Any, value: onnx.ValueInfoProto, inputs: Mapping[str, Any]) -> Any:
        """Bind an empty cache (past and present) or state (past) for the input `value`.

        Return the OrtValue whose memory is bound, to keep until the run is over; None if `value` is another input.
        """
        if not value.name.startswith(_PAST):
            return None
        from onnx import TensorProto, helper

        from weft.backends.onnx.onnx_emitter import OPTIMUM_SIZES

        ids, kind = inputs["input_ids"].shape, value.type.tensor_type
        past, _, rest = value.name.partition(".")
        cache = _CACHES.get(past)
        sizes = [d.dim_value for d in kind.shape.dim]
        appends = cache and kind.shape.dim[2].dim_param == str(OPTIMUM_SIZES["past"])
        slots = 0 if appends else ids[1]
        shape = (sizes[0] or ids[0], *sizes[1:2], *((n or slots) if cache else n for n in sizes[2:3]), *sizes[3:])
        number = kind.elem_type
        # numpy has no bfloat16; zeros have the same bits in both.
        dtype = np.uint16 if number == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(number)
        memory = import_onnxruntime().OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self.session.device, 0)
        binding.bind_input(value.name, self.session.device, 0, number, shape, memory.data_ptr())
        if cache and not appends:
            binding.bind_output(f"{cache}.{rest}", self.session.device, 0, number, shape, memory.data_ptr())
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
    match = _LAYER.match(name)
    return match[1] if match else ""
