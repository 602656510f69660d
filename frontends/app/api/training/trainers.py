"""Trainers of models: the module, its parameter groups and its windows, from a model and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from weft.backends.runtime.device import choose_place
from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes.readers import Array
from weft.passes.analysis.states import has_cache
from weft.passes.fitting.calibration import find_vocabulary_size
from weft.passes.fitting.matrices import find_matrices

from ....export.peft_adapter import find_adaptable
from ....model import Model
from ..initialization import initialize, learning_rates
from ..modules import build_module_graphs, map_state_keys, simplify_trainable, with_weights
from ..modules import torch as build
from .corpus import find_mask_token, find_special_tokens, predicts_masked
from .training_settings import TrainingSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

    from weft.backends.torch.distillation.student import Student
    from weft.backends.torch.training.batches import Windows
    from weft.backends.torch.training.trainer import Trainer


def choose_device(device: str) -> str:
    """Return "cpu" or "cuda" for a `device` that may also be "auto".

    Raises:
        WeftError: if it cannot be used, or PyTorch or accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        raise WeftError("training needs the package accelerate: install weft[train]")
    return choose_place(device, "torch").device


def check_trainable(model: Model, encoders: bool = False) -> None:
    """Raise WeftError unless `model` is a decoder of token ids with logits for every token, and without caches, or an
    encoder of token ids: one that predicts masked tokens, or with `encoders` any."""
    graph, kind = model.graph, model.graph.meta.get("kind", "decoder")
    is_generative = kind == "decoder" and "logits" in graph.outputs and "task" not in graph.meta
    if not is_generative and not predicts_masked(graph) and not (encoders and kind == "encoder"):
        kind = f"{kind} without logits of tokens" if kind in ("decoder", "encoder") else kind
        article = "an" if kind.startswith("e") else "a"
        needed = "a decoder, for the next token, or an encoder with the head fill-mask, for masked tokens"
        raise WeftError(f"{model.spec} is {article} {kind}, and training here needs {needed}")
    if has_cache(graph):
        raise WeftError(f"{model.spec} has caches: train the model before the pass kv-cache, and run the pass after it")
    if graph.inputs.keys() - {"input_ids", "position_ids", "attention_mask", "token_type_ids"}:
        raise WeftError(f"{model.spec} reads {', '.join(graph.inputs)}, and training here gives it token ids only")


def initialize_by(model: Model, settings: TrainingSettings) -> tuple[Model, dict[str, float]]:
    """Return (`model` with initial weights of the settings' scheme, factors of the learning rate by parameter name).

    Raises:
        WeftError: if the scheme does not apply.
    """
    if settings.init is None:
        return model, {}
    model = initialize(model, settings.init, width=settings.width)
    return model, learning_rates(model, settings.width) if settings.init == "mup" else {}


@dataclass(frozen=True)
class Training:
    """A `trainer`, the windows for its validation, and the function that returns the graph of a state_dict of its net.

    student: of a training by matrices of low rank, else None.
    """

    trainer: Trainer
    held_out: Windows
    build_graph: Callable[[Mapping[str, Any]], Graph]
    student: Student | None = None


def open_training(
    model: Model, ids: Array, held_out: Array, settings: TrainingSettings, accelerator: Accelerator
) -> Training:
    """Return the training of `model` on `ids` [tokens], and its validation on `held_out` [tokens].

    Raises:
        WeftError: if the scheme of initialization does not apply, no weight can get matrices of low rank, or a batch
            has no equal share for every process.
    """
    import torch

    from weft.backends.torch.training.batches import Windows
    from weft.backends.torch.training.objectives import MaskedTokens, NextToken, Objective
    from weft.backends.torch.training.trainer import Trainer

    parts = accelerator.num_processes * settings.accumulate
    if settings.batch % parts:
        raise WeftError(f"a batch of {settings.batch} windows cannot be divided into {parts} equal parts")
    context = settings.context or 0
    objective: Objective = NextToken()
    windows = Windows(ids, context + 1, context, settings.seed, shift=True)
    if predicts_masked(model.graph):
        begin, end = find_special_tokens(model.graph)
        windows = replace(windows, length=context, begin=begin, end=end)
        mask, vocab = find_mask_token(model), find_vocabulary_size(model.graph)
        objective = MaskedTokens(mask, vocab, begin + end, list(model.graph.outputs).index("logits"))
    model, factors = initialize_by(model, settings)
    torch.manual_seed(settings.seed)
    if settings.lora:
        student = open_low_rank(model.graph, settings.lora, accelerator.device)
        net, decayed, build_graph = student.module, set[str](), lambda _: student.build_graph()
    else:
        student, net, keys = None, build(model), map_state_keys(model.graph)
        heads = (node.operand("weight") for node in model.graph.nodes if node.op is ops.head_linear)
        weights = {*find_matrices(model.graph), *(param for param in heads if isinstance(param, Param))}
        decayed = {keys[param.name] for param in weights if param.name in keys}
        build_graph = partial(with_weights, model.graph)
    generated: Any = net  # it has this switch
    generated.checkpointing = settings.checkpointing
    plan = settings.make_plan()
    trainer = Trainer(accelerator, net, objective, windows, plan, decayed, factors, sharded=student is None)
    if settings.compiled:
        trainer.net.compile()
    return Training(trainer, replace(windows, tokens=held_out, shift=False), build_graph, student)


def find_low_rank(graph: Graph) -> frozenset[str]:
    """Return the weights that an adapter of low rank has names for; raise WeftError if there are none."""
    if names := frozenset(find_adaptable(graph)):
        return names
    raise WeftError(f"{graph.name} has no linear weight that is a tensor of a checkpoint as it is: leave out --lora")


def open_low_rank(graph: Graph, rank: int, device: Any) -> Student:
    """Return `graph` as a module whose weights of `find_low_rank` stay, each plus a product of `rank` that trains."""
    from weft.backends.torch.distillation.student import ParameterChoice, copy_as_floats, open_student

    floats = copy_as_floats(graph, ParameterChoice(low_rank=find_low_rank(graph)))
    return open_student(graph, floats, build_module_graphs(simplify_trainable(floats.graph)), device, rank)
