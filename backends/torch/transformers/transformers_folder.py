"""The folder that target transformers writes: configuration, modeling code, weights, generation config, and their
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.streams import stream_rows
from weft.ir.storage.documents import write_json
from weft.ir.types import dtypes
from weft.passes import Report
from weft.passes.analysis.states import has_cache

from ...block_weights import is_quantized
from ...safetensors import Tensor, write_shards
from ...target import MODEL
from ...weights import StoredTensor, summarize_weights
from ..program.stateful_nodes import check_cache_writes
from ..program.statements import get_stored_dtype
from .embedding import write_embedding
from .engines.plans import make_plans
from .engines.refusals import explain_engines, find_refusals
from .lower.lower_base_and_head import lower_sides
from .lower.stacked_experts import get_experts_path, make_stack_recipes
from .modeling.base import BaseModel
from .modeling.configuration_file import TORCH_DTYPES, count_layer_states, write_configuration
from .modeling.initial import find_usual_std
from .modeling.modeling_file import (
    collect_weights,
    get_task_class,
    map_keys,
    map_tied_keys,
    write_modeling,
)

GRAPH_FILE = "model.weft"  # as in folders of graphs
ACTIVATION_MODULES = {  # of scores, as sentence-transformers names them
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}


class TransformersFolder:
    """A folder of target transformers that is not written yet; its weights have dtype `dtype`, such as "bf16".

    forms: "" → the optimized graph, MODEL → the graph legalized for the target; for an encoder-decoder also "decoder"
    and "encoder". length: longest sequence in tokens. name: class name ("": derived from the graph's name). notes: list
    to which a note is appended for each engine that cannot run the model.

    Raises:
        WeftError: if the graph has cache operands or quantized weights, does not read token ids, or has a part that
        the target does not support; or if `name` contains RESERVED_WORD.
    """

    def __init__(self, forms: Mapping[str, Graph], dtype: str, length: int, name: str, notes: list[str]) -> None:
        graph, self._legal = forms[""], forms[MODEL]
        if has_cache(graph):
            raise WeftError(
                "target transformers adds caches by itself: leave out the pass kv-cache and the passes that need it"
            )
        if any(map(is_quantized, graph.params.values())):
            raise WeftError(
                "target transformers stores weights as floats: leave out --weights and the pass quantize, or write "
                "codes that transformers reads with `weft export --weights codes`"
            )
        check_cache_writes(graph)
        if "input_ids" not in graph.inputs:
            raise WeftError(
                f"target transformers needs the input input_ids, but {graph.name} has {', '.join(graph.inputs)}: "
                "choose target torch, or export a model of transformers itself with `weft export`"
            )
        if RESERVED_WORD in name.lower():
            raise WeftError(
                f"--class-name {name} contains {RESERVED_WORD!r}, a word that transformers reserves: choose another"
            )
        self._graph, self._name, self._length = graph, name or derive_class_name(graph.name), length
        self._stem = derive_stem(self._name)
        self._sides = lower_sides(forms)
        self._head = self._sides[0].head
        self.modeling = write_modeling(self._sides, self._name, self._stem)
        self.plans, fields = make_plans(self.modeling.bases), self._list_fields()
        self._config = write_configuration(self.modeling, self._name, self._stem, self.plans.by_name, fields)
        self.refusals = find_refusals(self.modeling.bases)
        self._explained = explain_engines(self.refusals, self.base.lowered, self.plans)
        for engine in (e for e, reasons in self.refusals.items() if reasons):
            notes.append(f"{engine} cannot run it: {'; '.join(self.refusals[engine])}")
        self.texts = {"modeling": self.modeling.text, "configuration": self._config.text}
        self._dtype = dtype
        self._weights = self._make_tensors()
        self.trace: list[str] = []
        self.weight_bytes = sum(w.nbytes for w in self._weights.values())
        self.facts: dict[str, Any] = {"outputs": list(graph.outputs), "weights": summarize_weights(graph, self.tensors)}

    def explain(self, report: Report) -> list[str]:
        """Return the lines of `--explain` (see `explain_engines`); `report` is not read."""
        return self._explained

    @property
    def _prefix(self) -> str:
        """Return the prefix of the base model's keys in the folder: "model.", or "" without a head."""
        return "" if self._head is None else "model."

    @property
    def base(self) -> BaseModel:
        """Return the classes of the base model; for an encoder-decoder, the classes of its decoder."""
        return self.modeling.bases[0]

    def _list_fields(self) -> dict[str, Any]:
        """Return the config fields other than sizes of the architecture."""
        meta = self._graph.meta
        facts: dict[str, Any] = {
            "max_position_embeddings": self._length,
            "initializer_range": find_usual_std(collect_weights(self._sides).values()),
            "use_cache": bool(self._sides[0].emitter.cached),
            "tie_word_embeddings": bool(map_tied_keys(self._sides)),
            "bos_token_id": meta.get("bos_token_id"),
            "pad_token_id": meta.get("pad_token_id"),
            "eos_token_id": (meta.get("eos_token_ids") or [None])[0],
        }
        if (vector := self._graph.outputs.get("sentence_embedding")) is not None:
            facts["projection_dim"] = vector.width  # as sentence-transformers asks for it
        if (count := count_layer_states(self._sides[0])) > 1:
            facts["number_of_conv_states"] = count
        if len(self._sides) > 1:
            facts |= {"is_encoder_decoder": True, "decoder_start_token_id": meta.get("decoder_start_token_id")}
        return facts

    def _make_tensors(self) -> dict[str, Tensor]:
        """Return {key in the folder: stored weight}, widest dtype first, tied weights once; also set `tensors`."""
        tied, reader, kind = map_tied_keys(self._sides), self._graph.reader, dtypes.parse(self._dtype)
        params = {f"{self._prefix}{key}": param for key, param in collect_weights(self._sides).items()}
        if self._head is not None:
            params |= {key: param for key, param in self._head.weights.items() if key not in tied}
        tensors = {
            key: Tensor(tuple(p.type.concrete({})), get_stored_dtype(p, kind), partial(stream_rows, p.recipe, reader))
            for key, p in params.items()
        }
        self.tensors = {key: StoredTensor(params[key].recipe, t.dtype, t.shape) for key, t in tensors.items()}
        return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.bits))

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write all files into `folder`; `step` is called with the number of bytes just written."""
        for kind, text in self.texts.items():
            (folder / f"{kind}_{self._stem}.py").write_text(text, encoding="utf-8")
        (folder / GRAPH_FILE).write_text(self._write_graph(), encoding="utf-8")
        write_json(folder / "config.json", self._make_config())
        write_json(folder / "generation_config.json", self._make_generation_config())
        write_embedding(folder, self._graph, dtypes.parse(self._dtype), self._length)
        write_shards(folder, self._weights, step=step)

    def _write_graph(self) -> str:
        """Return the legalized graph as text that reads weights from this folder: weft loads it also after training."""
        recipes: dict[str, Recipe] = {name: Source(key) for name, key in map_keys(self._sides).items()}
        mixtures = {node.required_operand("up").name: node for node in self._legal.nodes if node.op is ops.moe}
        for side in self._sides:
            path = f"{self._prefix}{side.side}." if side.side else self._prefix
            for node in (n for n in side.graph.nodes if n.op is ops.moe):
                original = mixtures[side.names[node.required_operand("up").name]]
                for name, recipe in make_stack_recipes(node, f"{path}{get_experts_path(node)}").items():
                    stack = original.operand(name)
                    assert isinstance(stack, Param)
                    recipes[stack.name] = recipe
        graph = self._legal.clone(recipes)
        graph.meta.pop("source", None)
        return str(graph)

    def _make_config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        name, stem, head = self._name, self._stem, self._head
        code = f"modeling_{stem}.{name}"
        classes = {"AutoConfig": f"configuration_{stem}.{name}Config", "AutoModel": f"{code}Model"}
        writes = "ForConditionalGeneration" if len(self._sides) > 1 else "ForCausalLM"
        if head is not None and len(self._sides) > 1:
            classes |= {"AutoModelForSeq2SeqLM": f"{code}{writes}"}
        elif (task := get_task_class(self._graph.meta.get("task"))) is not None:
            writes = f"For{task[0]}"
            classes |= {f"AutoModel{writes}": f"{code}{writes}"}
        elif head is not None:
            classes |= {f"AutoModelFor{kind}": f"{code}For{kind}" for kind in ("CausalLM", "SequenceClassification")}
        return {
            "architectures": [f"{name}{writes if head is not None else 'Model'}"],
            "auto_map": classes,
            "model_type": stem,
            "dtype": TORCH_DTYPES[self._dtype],
            **{k: v for k, v in self._config.fields.items() if v is not None},
            **self._list_task_fields(),
        }

    def _list_task_fields(self) -> dict[str, Any]:
        """Return the config fields for labels, problem type and score activation of a task head; {} without them."""
        meta, facts = self._graph.meta, dict[str, Any]()
        if (names := meta.get("labels")) is not None:
            facts = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        if "problem_type" in meta:
            facts["problem_type"] = meta["problem_type"]
        if (activation := meta.get("rank", {}).get("activation")) in ACTIVATION_MODULES:
            facts["sentence_transformers"] = {"activation_fn": ACTIVATION_MODULES[activation]}
        return facts

    def _make_generation_config(self) -> dict[str, Any]:
        eos = self._graph.meta.get("eos_token_ids") or [None]
        tokens = self._graph.meta | {"eos_token_id": eos if len(eos) > 1 else eos[0]}
        keys = (f"{token}_token_id" for token in ("bos", "eos", "pad", "decoder_start"))
        return {key: tokens[key] for key in keys if tokens.get(key) is not None}


RESERVED_WORD = "mamba"  # `generate` passes caches to classes with this in their names as another argument
_SIZE = re.compile(r"a?\d+(\.\d+)?(x\d+(\.\d+)?)?[mbt]", re.IGNORECASE)  # 135M, 1.4b, 8x7b, a22b


def derive_class_name(name: str) -> str:
    """Return a CamelCase class name for the model `name` without its size ("smol-135M" → "Smol"); "Weft" if nothing or
    Model remains.

    RESERVED_WORD becomes Ssm. A name that begins with a digit gets the prefix Weft. A name that transformers or an
    engine uses gets the suffix Weft: without trust in the folder's code, they would load their own.
    """
    words = ".".join(w for w in re.split(r"[^A-Za-z0-9.]+", name) if not _SIZE.fullmatch(w)).split(".")
    joined = re.sub(RESERVED_WORD, "Ssm", "".join(w[:1].upper() + w[1:] for w in words), flags=re.IGNORECASE)
    if joined in ("", "Model"):  # else its base model would be called ModelModel
        return "Weft"
    joined = f"Weft{joined}" if joined[0].isdigit() else joined
    return f"{joined}Weft" if joined.lower() in _list_taken() else joined


def derive_stem(name: str) -> str:
    """Return the class name `name` in snake case: the end of file names and the model_type."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


@cache
def _list_taken() -> frozenset[str]:
    """Return the names that transformers and engines use, in lower case without separators."""
    return frozenset(re.sub(r"#.*|[-_]", "", Path(__file__).with_name("taken_names.txt").read_text("utf-8")).split())
