"""Folders in the layout of optimum's exports, which transformers.js and optimum open.

::

    config.json, generation_config.json     how to feed the models; the architecture is in the models
    tokenizer.json, tokenizer_config.json
    onnx/model_q4.onnx                      of a decoder or encoder; the suffix states the precision
    onnx/encoder_model_q4.onnx, onnx/decoder_model_merged_q4.onnx
    onnx/model_q4.onnx_data, …_data_1       weights, less than 2 GB in each file, as browsers require

transformers.js knows models by their model_type. It runs any decoder with caches of keys and values as a llama, any
encoder as a bert and any encoder-decoder as a bart, so these are the types that config.json states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as onnx

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.op import Growth, StateKind
from weft.ir.recipes.readers import find_switched_tensors
from weft.ir.storage.documents import read_json, write_json
from weft.passes.analysis.costs import count_parameters
from weft.passes.analysis.states import (
    SOUND,
    NamedState,
    find_state_inputs,
    make_cache_records,
    make_manifest_records,
    make_state_records,
)
from weft.passes.library.target.sides import HIDDEN, IDS, MASK

from ..options import Options
from ..runtime.text.chat import read_templates
from ..target import Backend
from . import export
from .onnx_folder import OnnxFolder

SUFFIXES = {"fp32": "", "fp16": "_fp16", "q8": "_quantized", "q4": "_q4", "q4f16": "_q4f16", "q2": "_q2"}
NAMES = {"model": "model", "encoder": "encoder_model", "decoder": "decoder_model_merged"}  # by form
TOKENIZER = "tokenizer_config.json"
TYPES = {"encoder": "bert", "decoder": "llama", "encoder-decoder": "bart"}  # model_type, by kind
FED = {"input_ids", "attention_mask", "position_ids", "token_type_ids", IDS, MASK}
MOST_BYTES = 2_000_000_000  # of a data file: browsers cannot hold 2 GiB in one buffer
TOKENS = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
ANSWER_KEYS = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def name_file(form: str, precision: str) -> str:
    """Return the path of the model of a form (model, encoder or decoder) in a folder."""
    return f"onnx/{NAMES[form]}{SUFFIXES[precision]}.onnx"


def _find_refusal(graph: Graph, states: Sequence[NamedState]) -> str | None:
    """Return why neither transformers.js nor optimum can run `graph`, with these `states`; None if they can."""
    kind, unfed = graph.meta.get("kind"), graph.inputs.keys() - FED - {name for _, name, _ in states}
    if unfed & {*SOUND}:
        return "it reads sound, which needs a processor that the folder would not have"
    if kind not in TYPES:
        return f"it holds decoders, encoders and encoder-decoders, not a model of kind {kind}"
    if unfed:
        return f"its libraries do not feed {', '.join(sorted(unfed))}"
    if kind != "encoder" and not states:
        return "its libraries generate only with caches: leave kv-cache in --passes"
    if any(spec.growth in (Growth.TEXT, Growth.WINDOW) for spec, _, _ in states):
        return "its libraries keep caches that grow, not of a fixed capacity"
    if find_switched_tensors(graph.reader) is not None:
        return "its libraries cannot select adapters: merge one with --adapter"
    return None


class HubFolder(OnnxFolder):
    """The models of a folder in this layout, in the precision of `target`; arguments as of `OnnxFolder`. Raises
    WeftError as it does, and if transformers.js cannot run the model."""

    def __init__(
        self, forms: Mapping[str, Graph], target: Backend, length: int, options: Options, notes: list[str]
    ) -> None:
        self._graph, self._length = forms[""], length
        self._states = list(find_state_inputs(self._graph))
        reason = _find_refusal(self._graph, self._states) or self.find_cache_refusal()
        if reason is not None:
            raise WeftError(f"the layout optimum does not fit {self._graph.name}: {reason}")
        super().__init__(forms, target, length, options, notes)
        for built in self._models.values():
            _rename_caches(built.model.graph)
        self.facts |= {"layout": "optimum", "precision": target.precision, "models": list(self._models)}

    def find_cache_refusal(self) -> str | None:
        """Return why the libraries that open the folder cannot keep the states of the model; None if they can."""
        layers = make_cache_records(self._states)
        if _has_other_states(self._states) or any(layer["latent"] for layer in layers):
            return "optimum keeps caches of keys and of values between calls, and no other states"
        if any("bits" in layer for layer in layers):
            return "optimum keeps caches of floats: leave out --cache-dtype"
        if len({(layer["kv_heads"], layer["head_dim"]) for layer in layers}) > 1:
            return "optimum keeps caches of one size, and its layers differ"
        return None

    def name_file(self, form: str) -> str:
        return name_file(form, self._target.precision)

    def list_omitted(self, graph: Graph) -> tuple[str, ...]:
        # transformers.js would pass the mask of the source to a decoder.
        return tuple(n for n in ("attention_mask", "position_ids") if n in graph.inputs and HIDDEN in graph.inputs)

    def list_notes(self, graph: Graph) -> list[str]:
        return []

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write the models into `folder`, and their configuration unless it has one, which then names them."""
        (folder / "onnx").mkdir(exist_ok=True)
        written = {
            file: export.write_models({file: built}, folder, step, f"{file}_data", MOST_BYTES)
            for file, built in self._models.items()
        }
        path, chunks = folder / "config.json", {Path(file).name: len(names) for file, names in written.items()}
        config = read_json(path) if path.is_file() else self._build_config()
        config["transformers.js_config"].setdefault("use_external_data_format", {}).update(chunks)
        write_json(path, config)
        sampling = {name: v for name, v in self._graph.meta.get("sampling", {}).items() if name in SAMPLING}
        write_json(folder / "generation_config.json", self._list_tokens() | sampling)
        self.complete_tokenizer(folder)

    def complete_tokenizer(self, folder: Path) -> None:
        """Put the chat template into tokenizer_config.json, where transformers.js reads it, and name a class that older
        versions of transformers know."""
        path = folder / TOKENIZER
        if path.is_file():
            config, (_, templates) = read_json(path), read_templates(folder)
            if config.get("tokenizer_class") == "TokenizersBackend":
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
            if "default" in templates:
                config["chat_template"] = templates["default"]
            write_json(path, config)

    def _build_config(self) -> dict[str, Any]:
        """Return config.json. Libraries read the sizes of caches from it, or take them from the model."""
        meta, kind = self._graph.meta, self._graph.meta["kind"]
        config = {
            "model_type": "weft" if _has_other_states(self._states) else TYPES[kind],
            "vocab_size": meta.get("vocab"),
            "max_position_embeddings": self._length,
            **self._list_tokens(),
            **(_list_sizes(self._graph) if kind != "encoder" and not _has_other_states(self._states) else {}),
        }
        if kind == "encoder-decoder":
            config["is_encoder_decoder"] = True
        if labels := meta.get("labels"):
            config["id2label"] = dict(enumerate(labels))
        if "problem_type" in meta:
            config["problem_type"] = meta["problem_type"]
        named = {name: value for name, value in config.items() if value is not None}
        return {**named, "transformers.js_config": {"dtype": self._target.precision}, "weft": self.describe()}

    def describe(self) -> dict[str, Any]:
        """Return the entry `weft` of config.json, which the page reads: a dict with the name, kind and number of
        parameters of the model, its task or pooling, and its states if transformers.js has no type for them."""
        meta, names = self._graph.meta, ("pooling", "sentence", "task", "rank")
        properties = {name: meta[name] for name in names if name in meta}
        if len(meta.get("labels", ())) == 1:
            properties["ranks"] = True  # one score per pair
        if _has_other_states(self._states):
            carried = make_manifest_records(self._graph, self._states)["carried"]
            properties["states"] = [
                {k: v for k, v in s.items() if k in ("input", "output", "initial")} for s in carried
            ]
        return {
            "name": self._graph.name,
            "kind": meta["kind"],
            "parameters": count_parameters(self._graph),
            **properties,
        }

    def _list_tokens(self) -> dict[str, Any]:
        meta, stops = self._graph.meta, self._graph.meta.get("eos_token_ids") or []
        tokens = {"eos_token_id": stops[0] if len(stops) == 1 else stops or None}
        names = (*TOKENS, *ANSWER_KEYS) if self._graph.meta["kind"] != "encoder" else TOKENS[:2]
        tokens |= {name: meta.get(name) for name in names}
        tokens["pad_token_id"] = tokens["pad_token_id"] if tokens["pad_token_id"] is not None else (stops or [None])[0]
        return {name: value for name, value in tokens.items() if value not in (None, [])}


def _has_other_states(states: Sequence[NamedState]) -> bool:
    """Return whether `states` contains a recurrent state, or the keys of a lightning index."""
    return bool(make_state_records(states)) or any(spec.kind is StateKind.INDEX for spec, _, _ in states)


def _rename_caches(graph: onnx.Graph) -> None:
    """Name the caches of a decoder that reads an encoder's output as optimum does: past_key_values.0.decoder.key."""
    if any(value.name == HIDDEN for value in graph.inputs):
        for value in (*graph.inputs, *graph.outputs):
            value.name = re.sub(r"^(past_key_values|present)(\.\d+)\.", r"\1\2.decoder.", str(value.name))


def _list_sizes(graph: Graph) -> dict[str, Any]:
    """Return the config keys of a llama (or bart) with the sizes of the caches of `graph`, not of the model."""
    layers = make_cache_records(find_state_inputs(graph))
    heads, width = layers[0]["kv_heads"], layers[0]["head_dim"]
    if graph.meta["kind"] == "decoder":
        return {
            "num_hidden_layers": len(layers),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width,
            "hidden_size": heads * width,
        }
    counts = {"layers": len(layers), "attention_heads": heads}
    sides = {f"{side}_{name}": count for side in ("encoder", "decoder") for name, count in counts.items()}
    return {**sides, "d_model": heads * width, "num_hidden_layers": len(layers)}
