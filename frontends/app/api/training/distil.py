"""`weft.distil`: a rewritten model, trained to predict as its original does."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.backends.block_weights import is_quantized
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.readers import SpilledTensors
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import expand_home
from weft.passes.analysis.costs import find_learned_params
from weft.passes.fitting.calibration import MIXTURE, find_vocabulary_size
from weft.passes.fitting.matrices import find_matrices

from ....formats.weft.manifest import make_absolute
from ....model import Model, SourceLike
from ..modules import build_module_graphs, simplify_trainable
from ..modules import torch as build
from ..source.sources import load_source
from .corpus import Corpus, Progress, find_special_tokens
from .run_folder import Run, RunFolder, RunState
from .runs import Hooks, begin_run, check_resumed, identify, run_phases
from .trainers import check_trainable, choose_device
from .training_settings import DistilSettings

if TYPE_CHECKING:
    from weft.backends.torch.distillation.student import ParameterChoice

_SUBLAYER = re.compile(r"(.*\.\d+\.[^.]+)\.")
WORDS = ("scales", "norms", "biases", "changed", "all", "lora")  # names of groups of parameters
LAYERS = 0.2
HELD_OUT = 4096  # tokens of a validation, which runs both models, but 4 to 16 windows
RATE = 5e-3  # relative to the size of a parameter (`Student.list_sizes`)
# Below this divergence the rate of floats falls with it: the noise of steps of 5e-3 raised 0.02 nats to 0.4.
FAR = 0.25
DIVERGENCE = "KL divergence from the original on held-out text, in nats per token"
ERROR = "error of the outputs on held-out text, relative to their size"


def distil(
    model: SourceLike,
    out: str | Path,
    settings: DistilSettings = DistilSettings(),  # noqa: B008 (it is frozen)
    *,
    against: SourceLike,
    text: str | Path | Sequence[str | Path] = (),
    field: str = "text",
    device: str = "auto",
    tensorboard: bool = False,
    resumes: bool = False,
    report: Callable[[RunState], None] = lambda state: None,
    progress: Progress = lambda stage, done, total: None,
) -> Run:
    """Train `model` to predict the next token as its original `against` does (decoders), or to return the same outputs
    (encoders). Write the run folder `out`, which is a source, and return its losses.

    An architecture without weights, such as one with linear attention, begins with the original's parameters of the
    same names and shapes. First each layer is trained alone, to compute the original's layer
    (`DistilSettings.layers`). Then all are trained together to minimize KL(original ‖ model) (Hinton 2015, arXiv
    1503.02531), or the error of an encoder's outputs. The best state on the last twentieth of the text is written, with
    scales in their stored dtype and matrices of low rank added to their weights.

    Args:
        text: files of plain text, JSON lines or token ids, or folders of the library datasets; by default a mixture of
            prose, code and languages that comes with weft.
        resumes: continue the run in `out` from its last checkpoint; all other arguments must be as at its beginning.
        report: called after every step.

    Raises:
        WeftError: if the two are not decoders or encoders of the same outputs without caches, nothing can be trained,
            `out` exists (or with `resumes` is not a run), a text cannot be read or is too short, the loss is not
            finite, or no state is closer to the original than `model` was.
    """
    folder, hooks, place = RunFolder(expand_home(out)), Hooks(report, progress, tensorboard), choose_device(device)
    record = folder.read() if resumes else None
    if record is None:
        folder.check_new()
    original, rewritten = load_source(against), load_source(model)
    _check_pair(rewritten, original)
    is_encoder = original.graph.meta.get("kind") == "encoder"
    if is_encoder and (settings.labels or settings.hidden or settings.top != DistilSettings.top):
        raise WeftError(f"labels, hidden and top are for decoders: {rewritten.description} is an encoder")
    rewritten = replace(rewritten, tokenizer=rewritten.tokenizer or original.tokenizer)
    if rewritten.random_init:
        rewritten = replace(rewritten, graph=inherit_weights(rewritten.graph, original.graph), random_init=False)
    choice = choose_parameters(rewritten.graph, original.graph, settings.train)
    falls = settings.rate is None and not choice.scales and not is_encoder
    layers = (0.0 if choice.scales else LAYERS) if settings.layers is None else settings.layers
    settings = replace(settings, layers=layers, rate=settings.rate or RATE).resolve(rewritten)
    paths = [text] if isinstance(text, str | Path) else text or [MIXTURE]
    corpora = [Corpus(expand_home(path), field) for path in paths]
    specs = {"source": make_absolute(rewritten.spec), "against": make_absolute(original.spec)}
    facts = identify(rewritten, original) | specs
    if record is not None:
        check_resumed(record, facts, settings, corpora if text else [])

    import torch

    from weft.backends.torch.distillation.losses import Layers, OutputErrors, Predictions, Teacher, align_layers
    from weft.backends.torch.distillation.student import copy_as_floats, open_student
    from weft.backends.torch.training.batches import Windows
    from weft.backends.torch.training.objectives import Objective
    from weft.backends.torch.training.trainer import Trainer, open_accelerator

    accelerator = open_accelerator(place, settings.bf16, settings.accumulate)
    torch.manual_seed(settings.seed)
    original_net = build(original, device=accelerator.device)
    floats = copy_as_floats(rewritten.graph, choice)
    forms = build_module_graphs(simplify_trainable(floats.graph))
    student = open_student(rewritten.graph, floats, forms, accelerator.device, settings.rank)
    if not student.trainable:
        raise WeftError(f"{rewritten.description} has no parameters that can be trained")
    segments = align_layers(student.module, original_net) if layers or settings.hidden else []
    context = settings.context or 0
    pipeline = "; ".join(text for text in (rewritten.pipeline, "distil") if text)

    def build_model(_: object) -> Model:
        return replace(rewritten, graph=student.build_graph(), module=None, pipeline=pipeline, settings=None)

    with scratch_folder() as scratch, folder.remove_on_error() if record is None else nullcontext():
        if record is None:
            begin_run(folder, rewritten, corpora, [], settings, facts, accelerator, progress)
        ids, held_out = folder.open_tokens(rewritten.graph, context)
        begin, end = find_special_tokens(rewritten.graph) if is_encoder else ((), ())
        data = Windows(ids, context, context, settings.seed, begin=begin, end=end)
        top = 0 if is_encoder or settings.top >= find_vocabulary_size(rewritten.graph) else settings.top
        teacher = Teacher(original_net, len(data), context, top, scratch)
        objectives: dict[str, Objective] = {"layers": Layers(teacher, segments)} if layers else {}
        if is_encoder:
            objectives["outputs"] = OutputErrors(teacher)
        else:
            objectives["predictions"] = Predictions(teacher, settings.labels, settings.hidden, segments)
        phases, sizes = dict[str, Trainer](), student.list_sizes()
        for name, objective in objectives.items():
            plan = settings.make_plan(layers if name == "layers" else 1 - layers)
            if phases:  # the rest of the run
                plan = replace(plan, steps=max(1, (settings.steps or 0) - phases["layers"].plan.steps))
            phases[name] = Trainer(accelerator, student.module, objective, data, plan, (), sizes, sharded=False)
        validation = replace(data, tokens=held_out)
        run = run_phases(
            folder,
            phases,
            validation,
            settings.validate_every,
            build_model,
            hooks,
            limit=min(max(HELD_OUT // context, 4), 16),
            must_improve=True,
            scale_rate=lambda loss: min(1.0, loss / FAR) if falls else 1.0,
        )
    run = replace(run, measure=ERROR if is_encoder else DIVERGENCE)
    if not run.best < run.before:
        raise WeftError(
            f"{run.steps:,} steps brought {rewritten.description} no closer to {original.description} "
            f"({run.measure}: {run.before:.3g}): try a smaller --rate, more --tokens or another --text"
        )
    return run


heal = distil  # its earlier name, for one version


def choose_parameters(graph: Graph, original: Graph, words: Sequence[str] | None = None) -> ParameterChoice:
    """Return which parameters of `graph` train, for the groups and patterns `words` (`DistilSettings.train`).

    Raises:
        WeftError: if a word is neither a group nor a pattern that matches a parameter.
    """
    from weft.backends.torch.distillation.student import ParameterChoice, find_scaled_params, find_vector_params

    scales, vectors = find_scaled_params(graph), find_vector_params(graph)
    floats = [p.name for p in find_learned_params(graph) if p.uses and not is_quantized(p)]
    if words is None:
        words = ("scales", "norms", "biases") if scales else ("changed",)
    direct, low_rank, scaled = set[str](), set[str](), set[str]()
    for word in words:
        if word == "scales":
            scaled.update(scales)
        elif word == "norms":
            direct.update(name for name in vectors if not name.endswith("bias"))
        elif word == "biases":
            direct.update(name for name in vectors if name.endswith("bias"))
        elif word == "changed":
            changed = _find_changed(graph, original, floats)
            direct.update(changed or floats)
        elif word == "all":
            direct.update(floats)
        elif word == "lora":
            low_rank.update(param.name for param in find_matrices(graph) if param.name in floats)
        elif matched := fnmatch.filter(graph.params, word):
            direct.update(name for name in matched if name in floats)
            scaled.update(name for name in matched if name in scales)
        else:
            raise WeftError(f"--train {word}: no parameter has such a name; groups are {', '.join(WORDS)}")
    return ParameterChoice(frozenset(scaled), frozenset(direct), frozenset(low_rank - direct))


def inherit_weights(graph: Graph, original: Graph) -> Graph:
    """Return a copy of `graph` with the values of `original` in all parameters of the same name and shape."""
    reader, recipes = SpilledTensors(graph.reader), dict[str, Recipe]()
    for name, param in graph.params.items():
        source = original.params.get(name)
        if source is not None and source.shape == param.shape and not param.recipe.is_constant:
            key = reader.unique_key(name)
            reader.put(key, source.recipe.evaluate(original.reader))
            recipes[name] = Source(key)
    inherited = graph.clone(recipes)
    inherited.reader = reader
    return inherited


def _find_changed(graph: Graph, original: Graph, names: Sequence[str]) -> list[str]:
    """Return the `names` in sublayers (``layers.3.attn``) whose operations or parameters are not the original's."""

    def has_changed(name: str) -> bool:
        param, before = graph.params[name], original.params.get(name)
        if before is None or before.type.shape != param.type.shape:
            return True
        a, b = param.recipe.evaluate(graph.reader), before.recipe.evaluate(original.reader)
        return bool(np.linalg.norm(a - b) > 1e-3 * np.linalg.norm(b))

    homes = {name: match[1] if (match := _SUBLAYER.match(name)) else name for name in names}
    ours, theirs = _list_operations(graph), _list_operations(original)
    changed = {homes[name] for name in names if has_changed(name)}
    changed |= {home for home in ours if ours[home] != theirs.get(home)}
    return [name for name in names if homes[name] in changed]


def _list_operations(graph: Graph) -> dict[str, list[str]]:
    """Return the operations of each sublayer, with their attributes, in order."""
    operations = defaultdict[str, list[str]](list)
    for node in graph.nodes:
        if match := _SUBLAYER.match(f"{node.scope}."):
            operations[match[1]].append(f"{node.op.name}{sorted(node.attrs.items())}")
    return operations


def _check_pair(model: Model, original: Model) -> None:
    """Raise WeftError unless both are decoders or both encoders that can be trained, with the same outputs."""
    for each in (model, original):
        check_trainable(each, encoders=True)
    first, second = (
        ", ".join(f"{name} [{value.shape[-1]}]" for name, value in each.graph.outputs.items() if value.shape)
        for each in (model, original)
    )
    if first != second:
        raise WeftError(f"{model.description} returns {first}, --against {original.description} {second}: they differ")
