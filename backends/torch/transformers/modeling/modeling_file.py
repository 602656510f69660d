"""The source of modeling_*.py: snippets, then the classes of layers, base models and heads."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Param

from ...codegen.docstrings import write_model_doc
from ...codegen.model_source import format_source, load_template
from ...codegen.structure import group_statements
from ...program import snippets
from ...program.snippets import find_names, read_library, select_snippets, write_imports
from ...program.statements import Program
from .. import lib as own_snippets
from ..lower.lower_base_and_head import LoweredModel
from ..lower.model_emitter import FULL, STANDARD_MASKS
from .base import (
    BaseModel,
    finish_classes,
    get_output_class,
    write_base_model,
    write_capabilities,
    write_init_weights,
    write_recorders,
)
from .initial import find_usual_std
from .model_classes import HFClassWriter, read_config

MODULES = {  # module: names that a generated source may import from it
    "transformers": "AutoModel Cache DynamicCache EncoderDecoderCache GenerationMixin PreTrainedModel",
    "transformers.generation.continuous_batching": "PagedAttentionCache",
    "transformers.integrations": "use_experts_implementation",
    "transformers.masking_utils": " ".join(STANDARD_MASKS.values()),
    "transformers.modeling_layers": "GradientCheckpointingLayer GenericForSequenceClassification",
    "transformers.modeling_outputs": "BaseModelOutput BaseModelOutputWithPast BaseModelOutputWithPooling "
    "BaseModelOutputWithPastAndCrossAttentions CausalLMOutputWithPast MoeCausalLMOutputWithPast Seq2SeqLMOutput "
    "Seq2SeqModelOutput SequenceClassifierOutput TokenClassifierOutput QuestionAnsweringModelOutput MaskedLMOutput "
    "MultipleChoiceModelOutput NextSentencePredictorOutput",
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.utils": "can_return_tuple",
    "transformers.utils.generic": "merge_with_config_defaults",
}
CAPTURING = ("OutputRecorder", "capture_outputs")  # imported together
IMPORTS = snippets.IMPORTS | {
    **{name: f"from {module} import {name}" for module, names in MODULES.items() for name in names.split()},
    **dict.fromkeys(CAPTURING, f"from transformers.utils.output_capturing import {', '.join(CAPTURING)}"),
    "dataclass": "from dataclasses import dataclass",
    "init": "from transformers import initialization as init",
}


@dataclass
class ModelingFile:
    """A generated modeling file: its source, and its base models: [model], or [decoder, encoder]."""

    text: str
    bases: list[BaseModel]


def write_modeling(sides: Sequence[LoweredModel], name: str, stem: str) -> ModelingFile:
    """Return the modeling file of `sides`: [lowered model], or [lowered decoder, lowered encoder]. name: the beginning
    of all class names. stem: the end of the file's name."""
    config, bases = f"{name}Config", list[BaseModel]()
    usual = find_usual_std([p for side in sides for p in side.base.weights.values()])
    for side in sides:
        bases.append(write_base_model(side, name, config, usual, bases))
    head = _write_head(sides[0], config, bases[0])
    in_order, tied_base = bases[::-1], map_tied_keys(sides, head=False)  # an encoder before its decoder
    fields: dict[str, Any] = {
        "stem": stem,
        "config": config,
        "name": name,
        "classes": [*(c for base in in_order for c in base.classes), *(head["classes"] if head else [])],
        "bases": in_order,
        "blocks": {kind for base in bases for kind in base.blocks},
        "indexed": {k for b in bases for k, m in b.inner_methods.items() if b.writer.is_indexed(m)},
        "taking": {k for b in bases for k, m in b.inner_methods.items() if b.writer.takes_cache(m)},
        "facts": write_capabilities(in_order),
        "own_facts": {base.name: write_recorders(base) for base in bases},
        "initial": [line for base in in_order for line in write_init_weights(base, usual)],
        "constants": any(base.main_class.constants for base in bases),
        "losses": [base for base in bases if "aux_loss" in base.lowered.base.outputs],
        "plain": {base.name: get_output_class(base.lowered) for base in bases},
        "head": head,
        "task": get_task_class(sides[0].graph.meta.get("task")),
        "tied": map_tied_keys(sides),
        "tied_base": tied_base,
        "shares_embedding": f"decoder.{sides[0].emitter.embedding}.weight" in tied_base,
        "generate_masks": _choose_masks_function(bases[0]),
        "forgets": bool(sides[0].emitter.cross_attentions) and {*bases[0].kinds} != {FULL},  # such as windows
    }
    for base in bases:
        finish_classes(base)
    functions = [text for base in in_order for text in base.lowered.base.functions.values()]
    functions_and_masks = [*functions, *(base.lowered.masks for base in in_order if base.lowered.masks)]
    page = load_template("modeling.py.j2", Path(__file__).parent)
    snippets_by_name = {name: part for name, part in read_library().items() if name not in IMPORTS}
    snippets_by_name |= read_library(own_snippets.__name__)  # override snippets of target torch
    used = find_names(ast.parse(page.render(about=[], imports=[], parts=functions_and_masks, **fields)))
    parts = select_snippets(used, snippets_by_name)
    used = used.union({"torch"}, *(p.uses for p in parts))
    program = Program(sides[0].base.name, weights=collect_weights(sides))
    title, *_ = write_model_doc(sides[0].full_graph, program, False)
    about = [title, "", "Generated by weft; needs only torch and transformers."]
    sources = [*(p.source for p in parts), *functions_and_masks]
    text = page.render(about=about, imports=write_imports(used, table=IMPORTS), parts=sources, **fields)
    return ModelingFile(format_source(text), bases)


def collect_weights(sides: Sequence[LoweredModel]) -> dict[str, Param]:
    """Return key → parameter of the base models of all `sides`; tied weights once, constant tables under every key."""
    tied = map_tied_keys(sides, head=False)
    return {key: param for key, param, _ in _list_weights(sides) if key not in tied}


def map_keys(sides: Sequence[LoweredModel]) -> dict[str, str]:
    """Map the names of the full graph's parameters to their keys in the model with its head; if tied, to the first."""
    head, keys = sides[0].head, dict[str, str]()
    for key, _, name in _list_weights(sides):
        keys.setdefault(name, f"model.{key}" if head is not None else key)
    for key, param in {} if head is None else head.weights.items():
        keys.setdefault(sides[0].names[param.name], key)
    return keys


def map_tied_keys(sides: Sequence[LoweredModel], head: bool = True) -> dict[str, str]:
    """Map the key of each tied weight to the key that stores its tensor: keys of the model with its head or, if `head`
    is False, of the base model, without weights of the head."""
    above = sides[0].head
    keys, prefix = map_keys(sides), "" if above is None else "model."
    trained = [(f"{prefix}{key}", name) for key, param, name in _list_weights(sides) if not is_table(param)]
    tied = {key: keys[name] for key, name in trained if keys[name] != key}
    if not head:
        return {key.removeprefix(prefix): target.removeprefix(prefix) for key, target in tied.items()}
    named = {} if above is None else {key: keys[sides[0].names[param.name]] for key, param in above.weights.items()}
    return tied | {key: target for key, target in named.items() if key != target}


def is_table(param: Param) -> bool:
    """Return whether `param` is a buffer instead of a weight: it is constant or has integers."""
    return param.recipe.is_constant or not param.type.dtype.is_float


def _list_weights(sides: Sequence[LoweredModel]) -> Iterator[tuple[str, Param, str]]:
    """Yield (key, parameter, name in the full graph) of each weight of the base models, the encoder's first."""
    for side in reversed(sides):
        for key, param in side.base.weights.items():
            in_graph = side.graph.params.get(param.name) is param
            name = side.names[param.name] if in_graph else f"{side.side} {param.name}"  # concatenated from several
            yield f"{side.side}.{key}" if side.side else key, param, name


def _choose_masks_function(base: BaseModel) -> str:
    """Return the name of the function that `generate` calls for masks before a compiled forward; "" for the default,
    which computes a mask for each kind in the config. `given_mask` leaves a single mask to the model."""
    return base.lowered.emitter.masks_name if base.lowered.masks else "given_mask" if base.needs_kinds else ""


def _write_head(lowered: LoweredModel, config: str, base: BaseModel) -> dict[str, Any] | None:
    """Return the template variables of the head; None without a head. init, lines: lines of its constructor and
    forward. classes: classes of its modules. inputs: names of its inputs, which are outputs of the base model."""
    if lowered.head is None:
        return None
    method = group_statements(lowered.head)
    writer = HFClassWriter(lowered.head, lowered.emitter, "TopOfHead", config, "", None)
    writer.has_caches, writer.other_classes = False, base.writer.other_classes | base.writer.own_classes
    name = writer.write(method)
    head = writer.classes.pop(name)
    read_config(lines := [*head.lines], head.init, top=True)
    names = ", ".join(lowered.head.outputs)
    lines[-1] = lines[-1].replace("return ", f"{names} = ", 1)
    inner = [c for key, c in writer.classes.items() if key not in writer.reused]
    for part in inner:
        read_config(part.lines, part.init)
    lines = [line for line in lines if line != f"{names} = {names}"]
    return {"init": head.init, "lines": lines, "classes": inner, "inputs": [v.name for v in lowered.head.inputs]}


TASKS = {  # task: (end of its class name, class of its outputs, label arguments)
    "text-classification": ("SequenceClassification", "SequenceClassifierOutput", ("labels",)),
    "token-classification": ("TokenClassification", "TokenClassifierOutput", ("labels",)),
    "question-answering": ("QuestionAnswering", "QuestionAnsweringModelOutput", ("start_positions", "end_positions")),
    "fill-mask": ("MaskedLM", "MaskedLMOutput", ("labels",)),
    "multiple-choice": ("MultipleChoice", "MultipleChoiceModelOutput", ("labels",)),
    "next-sentence-prediction": ("NextSentencePrediction", "NextSentencePredictorOutput", ("labels",)),
}


def get_task_class(task: str | None) -> tuple[str, str, tuple[str, ...]] | None:
    """Return the entry of `task` in `TASKS`; None if `task` is None. Raise WeftError if `TASKS` has no entry for it."""
    if task is not None and task not in TASKS:
        raise WeftError(
            f"target transformers has no class for the task {task}: use target torch, or {', '.join(TASKS)}"
        )
    return None if task is None else TASKS[task]
