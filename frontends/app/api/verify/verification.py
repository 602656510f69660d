"""Checks that a compiled folder computes the same as its source: logits, cached decoding, the first differing layer.

The reference is the float64 interpreter of the source's graph, or a Hugging Face folder run by transformers in float32.
Decoders are teacher-forced: the prompt goes in as two chunks, then the model's own greedy tokens one at a time, so that
caches, chunked prefill and single steps are all compared with one full pass over the same tokens. Encoder-decoders read
the prompt with their encoder, and answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.alignment.traces import compute_error
from weft.backends.runtime import load
from weft.backends.runtime.compiled_folder import MANIFEST, read_manifest
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import HIDDEN, EncoderModel
from weft.ir import interpret, ops
from weft.ir.errors import WeftError
from weft.ir.graph import Node
from weft.ir.recipes.readers import Array
from weft.ir.storage import check_contents
from weft.ir.storage.documents import Record
from weft.passes import run_passes
from weft.passes.library.cleanup.training_noise import list_noise_inputs
from weft.passes.runner import Progress

from ....model import Model
from ..source.sources import load_compiled
from ..source.stored import WeightCheck
from .error_bounds import compute_divergences, compute_tolerance
from .internals import Internals, find_layer, make_inputs, measure_depth, open_internals, to_array
from .transformers_reference import load_transformers

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
MAX_WATCHED = 16  # tokens of a decoder's prompt that are compared inside the model
# Passes of compiling itself, which verify checks; changes by other passes are applied to the reference as well.
COMPETING_ROUTERS = (ops.expert_choice, ops.limit_capacity)  # routers that compare the tokens of a call


@dataclass(frozen=True)
class Divergence:
    """The first difference from the reference: a layer, its first wrong value (None if unknown), relative errors."""

    layer: str
    error: float
    value: str | None = None
    value_error: float | None = None


@dataclass(frozen=True)
class Verification:
    """Errors of a compiled model against its reference, over all compared `positions`.

    max_absolute, max_relative: largest over all outputs; relative to the largest magnitude of the reference.
    argmax_agreement, kl_mean, kl_max: None for encoders; KL is Σ p ln(p/q) in nats, with p of the reference.
    layers, outputs: relative errors keyed by layer, and by head output. weights: check of quantized weights.
    without: parts of the source that the folder lacks.
    """

    folder: Path
    reference: str
    dtype: str
    positions: int
    max_absolute: float
    max_relative: float
    tolerance: float
    argmax_agreement: float | None
    kl_mean: float | None
    kl_max: float | None
    layers: Mapping[str, float]
    divergence: Divergence | None
    weights: WeightCheck | None = None
    without: tuple[str, ...] = ()
    outputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether the relative error is within the tolerance (a NaN never is), and the weights are correct."""
        return self.max_relative <= self.tolerance and (self.weights is None or self.weights.passed)


@dataclass(frozen=True)
class _Tokens:
    """Token ids to run; the first `watched` are also compared inside the model. `source`: the encoder's ids, or []."""

    ids: list[int]
    source: list[int]
    watched: int


@dataclass(frozen=True)
class _Reference:
    """The `output` [positions, width] of a reference, values `inside` it, and all outputs [1, ...], keyed by name."""

    output: Array
    inside: Mapping[str, Array]
    others: Mapping[str, Array] = field(default_factory=dict)


def verify_folder(
    folder: str | Path,
    *,
    against: str | Path | None = None,
    prompt: str | None = None,
    tokens: int = 16,
    device: str = "auto",
    trust: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Verification:
    """Return the errors of the compiled model in `folder` against its source, or the Hugging Face folder `against`.

    The checksums of the folder's files are checked first. `prompt` is a string (by default a stock sentence, or random
    tokens without a tokenizer). A decoder continues it by `tokens` greedy tokens, unless its experts choose among the
    tokens of a forward pass: then it only reads the prompt, at once. `trust` allows code to run: the model.py of a
    folder of PyTorch, and the architecture file that the manifest names as the source.

    Raises:
        WeftError: if the folder or its source cannot be read, the folder is damaged or reads sound, the source has
            changed, `prompt` is empty or too long, outputs differ in shape, or code would run without `trust`.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if "files" in manifest:
        check_contents(folder)
    runnable = load(folder, device, trust=trust)
    if not isinstance(runnable, EncoderModel) and runnable.decoder.sound is not None:
        raise WeftError(f"{folder} takes sound, but weft verify supports models that take tokens only")
    if not manifest.data:
        raise WeftError(f"{folder} has no {MANIFEST}, so its source is unknown: compile the model again")
    dtype = manifest.choice("dtype", ("f32", "f16", "bf16"))
    model, weights = (None, None) if against is not None else _load_source(folder, manifest, trust, progress)
    graphs, head_outputs = open_internals(runnable), dict[str, Array]()
    task = runnable.task if isinstance(runnable, EncoderModel) else None
    ids, source = _encode_prompt(runnable, prompt, manifest.integer("vocab", least=1)), list[int]()
    encoder = isinstance(runnable, EncoderModel)
    if isinstance(runnable, EncoderModel):
        actual, positions = runnable.hidden_states([ids])[0], list(range(len(ids)))
        names = [name for name in runnable.outputs if name != HIDDEN]
        if names:  # ONNX Runtime returns all outputs if none is named
            head_outputs = dict(zip(names, runnable.run([ids], None, names), strict=True))
        sequence = _Tokens(ids, source, len(ids))
    else:
        if runnable.decoder.start is not None:
            ids, source = list(runnable.decoder.start), ids
        watched = min(len(ids) if not source else tokens + 1, MAX_WATCHED)  # tokens that see only earlier ones
        calls = 2
        if model is not None and _has_competing_tokens(model, len(ids) + tokens):
            watched, tokens, calls = len(ids), 0, 1  # results depend on the other tokens of a call
        actual, positions = _teacher_force(runnable, ids, source, tokens, calls, progress)
        sequence = _Tokens(ids, source, watched)
    if model is not None:
        reference, name = _run_interpreter(model, sequence, progress), f"the float64 reference of {model.description}"
    else:
        reference = _run_transformers(Path(str(against)), sequence, encoder, graphs, task.name if task else None)
        name = f"transformers on {against}"
    expected = reference.output[positions]
    if expected.shape != actual.shape:
        raise WeftError(f"{folder} has outputs of width {actual.shape[-1]}, but {name} of width {expected.shape[-1]}")
    depth, reduction = measure_depth(runnable)
    rounded = manifest.choice("arithmetic", ("", "int8"), "")
    bits = [bits for c in manifest.records("cache", []) if (bits := c.integer("bits", None)) is not None]
    tolerance = compute_tolerance(dtype, depth, reduction, rounded == "int8", min(bits, default=None))
    layers, divergence = _compare_layers(graphs, sequence, reference.inside, tolerance)
    outputs = _compare_outputs(head_outputs, reference.others)
    if task is not None and not outputs:
        raise WeftError(f"{folder} has the outputs {', '.join(head_outputs)}, but {name} has none of them")
    kl = None if encoder else compute_divergences(expected, actual)
    return Verification(
        folder=folder,
        reference=name,
        dtype=f"{dtype}, activations rounded to {rounded}" if rounded else dtype,
        positions=len(positions),
        max_absolute=float(np.abs(actual - expected).max()),
        max_relative=float(np.max([compute_error(actual, expected), *outputs.values()])),
        tolerance=tolerance,
        argmax_agreement=float((actual.argmax(-1) == expected.argmax(-1)).mean()) if not encoder else None,
        kl_mean=None if kl is None else float(kl.mean()),
        kl_max=None if kl is None else float(kl.max()),
        layers=layers,
        divergence=divergence,
        weights=weights,
        without=tuple(part.text("name") for part in manifest.records("left_out", [])),
        outputs=outputs,
    )


def _compare_outputs(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
    """Return the relative error of each output that both have, keyed by name; raise WeftError if shapes differ."""
    errors: dict[str, float] = {}
    for name in (name for name in actual if name in expected):
        shape, reference = list(actual[name].shape), list(expected[name].shape)
        if shape != reference:
            raise WeftError(f"the output {name} has the shape {shape}, but {reference} in the reference")
        errors[name] = compute_error(actual[name], expected[name])
    return errors


def _has_competing_tokens(model: Model, tokens: int) -> bool:
    """Return whether experts choose among the `tokens` tokens of a forward pass, or may have a capacity below that."""
    routers = (node for node in model.graph.nodes if node.op in COMPETING_ROUTERS)
    return any(n.op is ops.expert_choice or (n.attrs["capacity"] or 0) < tokens for n in routers)


def _load_source(folder: Path, manifest: Record, trust: bool, progress: Progress) -> tuple[Model, WeightCheck | None]:
    """Return the model and the check of `load_compiled`, without the noise of routers, which compiling leaves out."""
    model, weights = load_compiled(folder, manifest, trust, progress)
    if list_noise_inputs(model.graph):
        model = replace(model, graph=run_passes(model.graph, "quiet-routers"))
    return model, weights


def _encode_prompt(runnable: Generator | EncoderModel, prompt: str | None, vocab: int) -> list[int]:
    folder = runnable.folder
    if prompt is not None or (folder is not None and (folder / "tokenizer.json").is_file()):
        ids = runnable.tokenizer.encode(PROMPT if prompt is None else prompt)
    else:
        ids = np.random.default_rng(0).integers(0, vocab, MAX_WATCHED).tolist()
    longest = runnable.max_length if isinstance(runnable, EncoderModel) else runnable.decoder.max_prompt
    if not ids:
        raise WeftError("the prompt has no tokens, and at least one is needed: give another --prompt")
    if prompt is not None and len(ids) > longest:
        raise WeftError(f"a prompt of {len(ids)} tokens is longer than the maximum of {longest} tokens; shorten it")
    return ids[:longest]


def _teacher_force(
    runnable: Generator, ids: list[int], source: list[int], tokens: int, calls: int, progress: Progress
) -> tuple[Array, list[int]]:
    """Run the prompt in one or two `calls`, then greedy steps that extend `ids`; return logits and their positions."""
    decoder = runnable.decoder
    steps = min(tokens, decoder.max_length - len(ids))
    logits: list[Array] = []
    positions: list[int] = []
    with decoder.context(1, len(ids) + steps) as context:
        if source:
            logits.append(context.prefill([source]).copy())
            positions.append(len(ids) - 1)
        else:
            context.reset()
        half = len(ids) // 2 if calls == 2 else 0
        for first, last in ((0, half), (half, len(ids))) if not source else ():
            if first < last:
                rows = context.extend(ids[first:last])
                if decoder.rounds:  # the tolerance is that of a few positions
                    rows = rows[-1:]
                logits.append(rows)
                positions += range(last - len(rows), last)
        for i in range(steps):
            ids.append(int(logits[-1][-1].argmax()))
            logits.append(context.step(np.array(ids[-1:])).copy())
            positions.append(len(ids) - 1)
            progress("decoding", i + 1, steps)
    return np.concatenate(logits), positions


def _run_interpreter(model: Model, sequence: _Tokens, progress: Progress) -> _Reference:
    """Return the outputs of the source's graph, interpreted once over all tokens in float64."""
    graph, inner_values, done = model.graph, dict[str, Array](), 0
    n_watched, lengths = max(sequence.watched, len(sequence.source)), (len(sequence.ids), len(sequence.source))
    output = "logits" if "logits" in graph.outputs and "task" not in graph.meta else "last_hidden_state"
    if output not in graph.outputs:
        raise WeftError(f"{model.description} has no output to compare: neither logits nor last_hidden_state")

    def watch(node: Node, results: tuple[Array, ...]) -> None:
        nonlocal done
        done += 1
        for value, array in zip(node.outputs, results, strict=True):
            if find_layer(value.name) and array.ndim == 3 and array.shape[1] in lengths:
                inner_values[value.name] = array[:, :n_watched].astype(np.float32)
        progress("interpreting", done, len(graph))

    results = interpret(graph, make_inputs(graph.inputs, sequence.ids, sequence.source), watch=watch)
    return _Reference(results[output][0], inner_values, results)


def _run_transformers(
    folder: Path, sequence: _Tokens, encoder: bool, graphs: Sequence[Internals], task: str | None
) -> _Reference:
    """Return transformers' outputs of all tokens, in float32 on the CPU; with a `task`, by the config's first class."""
    kind = "AutoModel" if encoder else "AutoModelForCausalLM"
    net = load_transformers(folder, "AutoModelForSeq2SeqLM" if sequence.source else kind, "--against", task is not None)
    import torch

    arguments = {"input_ids": torch.tensor([sequence.ids])}
    if sequence.source:
        arguments = {"input_ids": torch.tensor([sequence.source]), "decoder_input_ids": torch.tensor([sequence.ids])}
    if task == "multiple-choice":  # one choice
        arguments = {name: ids[:, None] for name, ids in arguments.items()}
    forward = getattr(net, "get_text_features", net)  # the text encoder of a pair
    with torch.no_grad():
        outputs = forward(**arguments, output_hidden_states=True)
        base = outputs if task is None else net.base_model(torch.tensor([sequence.ids]), output_hidden_states=True)
    by_graph = [base.get("hidden_states", ())]
    if sequence.source:
        by_graph = [outputs.encoder_hidden_states, outputs.decoder_hidden_states]
    inner_values: dict[str, Array] = {}
    for graph, hidden in zip(graphs, by_graph, strict=bool(graphs)):
        # Boundaries beyond the layers: an encoder's keys and values of cross-attention.
        layers = list(graph.boundaries.values())[: len(hidden) - 1]
        # the first hidden state is the embedding; the last follows the final norm, if there is one
        if len(hidden) == len(layers) + 1:
            inner_values |= dict(zip(layers, (h.numpy() for h in hidden[1:-1]), strict=False))
    if not encoder:
        return _Reference(outputs.logits[0].double().numpy(), inner_values)
    head_outputs = {name: v.numpy() for name, v in {**base, **outputs}.items() if isinstance(v, torch.Tensor)}
    if forward is not net:
        head_outputs["sentence_embedding"] = head_outputs["pooler_output"]
    return _Reference(base.last_hidden_state[0].double().numpy(), inner_values, head_outputs)


def _compare_layers(
    graphs: Sequence[Internals], sequence: _Tokens, inside: Mapping[str, Array], tolerance: float
) -> tuple[dict[str, float], Divergence | None]:
    """Return relative errors of layer outputs, keyed by layer, and the first divergence (None within `tolerance`)."""
    layers: dict[str, float] = {}
    values: dict[str, Any] = {}
    for graph in graphs:
        length = sequence.watched if graph is graphs[-1] else None
        names = [name for name in graph.inputs if name not in values]
        inputs = make_inputs(names, sequence.ids[: sequence.watched], sequence.source) | values
        expected = {name: array[:, :length] for name, array in inside.items()}
        shared = [name for name in graph.names if name in expected]
        values = graph.run(inputs, [*shared, *(o.name for o in graph.proto.graph.output if graph is not graphs[-1])])
        arrays = {name: to_array(values[name]) for name in shared}
        errors = {n: compute_error(x, expected[n]) for n, x in arrays.items() if x.shape == expected[n].shape}
        layers |= {layer: errors[name] for layer, name in graph.boundaries.items() if name in errors}
        # Not `error > tolerance`: a NaN also counts as a divergence.
        first = next((layer for layer, error in layers.items() if not error <= tolerance), None)
        if first is not None:
            wrong = (n for n, error in errors.items() if find_layer(n) == first and not error <= tolerance)
            value = next(wrong, None)
            return layers, Divergence(first, layers[first], value, errors.get(value or ""))
    return layers, None
