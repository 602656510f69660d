"""Measurement of the quality cost of rewrites: models on a text, compared with the original.

Decoders predict every token of the text except the first, in windows; encoders embed its lines. All models process the
same tokens before any continues, so that only the logits of a few tokens are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.backends.runtime import load
from weft.backends.runtime.compiled_folder import GENAI, MANIFEST, read_manifest
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.device import choose_place
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.backends.target import TARGETS
from weft.backends.weights import LAYERED, average_bits
from weft.ir.errors import WeftError
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import Record, open_regular
from weft.ir.types import dtypes
from weft.passes.fitting.calibration import CHARACTERS
from weft.passes.runner import Progress

from ....formats.weft.model_folder import GRAPH
from ....model import Model
from ..compile import compile
from ..rewrite import rewrite
from ..source.sources import load_source
from ..weights import expand_weights
from .divergence import compute_layer_errors, measure_seconds, score_embeddings, score_tokens

WINDOW = 512  # tokens per window, which starts without context, unless a model supports fewer
_WEIGHTS = (".onnx", ".data", ".onnx_data", ".safetensors")  # suffixes of files with weights
WATCHED = 64  # tokens that are compared inside the models


@dataclass(frozen=True)
class Score:
    """Scores of one model on the text; a field is None if it does not apply or a folder does not state it.

    nll: mean −ln q(token) in nats. nll_loss: nll − the original's. kl, kl_99: mean and 99 % quantile of Σ p ln(p/q) in
    nats over positions; q is this model's distribution, p the original's. agreement: share of equal most likely tokens.
    cosine: of encoders, mean over lines between the model's embedding and the original's.
    seconds: per decode step, or per token that an encoder reads. weight_bytes: of the model's files.
    bits: average bits per value of linear layers and experts, with scales and zero points. layer_bits: keyed by layer.
    cache_bytes: per token. layers: relative error of the residual stream after each layer, if requested.
    """

    name: str
    nll: float | None
    nll_loss: float | None
    kl: float | None
    kl_99: float | None
    agreement: float | None
    cosine: float | None
    seconds: float
    weight_bytes: int
    bits: float | None
    layer_bits: Mapping[str, float]
    parameters: int | None
    cache_bytes: int | None
    layers: Mapping[str, float]

    @property
    def perplexity(self) -> float | None:
        """Return exp(nll): infinite for an nll of 700 or more, None without an nll."""
        return None if self.nll is None else math.exp(self.nll) if self.nll < 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """Scores of models, the original's first, over `tokens` tokens of the file `text` in windows of `context`."""

    text: str
    tokens: int
    context: int
    scores: tuple[Score, ...]

    def json(self) -> dict[str, Any]:
        """Return all fields as plain data, with the perplexity of each score."""
        data = asdict(self)
        for plain, score in zip(data["scores"], self.scores, strict=True):
            plain["perplexity"] = score.perplexity
        return data


def evaluate(
    models: Sequence[Any] = (),
    *,
    against: Any,
    text: str | Path,
    rewrites: Mapping[str, str] | None = None,
    weights: Sequence[str] = (),
    adapters: Sequence[str | Path] = (),
    tokens: int = 4096,
    context: int | None = None,
    layers: bool = False,
    device: str = "auto",
    trust: bool = False,
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Score the original `against`, `models`, and the results of `rewrites`, `weights` and `adapters`, on a `text`.

    Args:
        models: compiled folders, or anything `load_source` accepts; sources are compiled into a temporary folder.
        rewrites: pipelines to apply to the original, or files with one, keyed by the name of the result.
        weights: forms of the original in fewer bits, as in `compile` (``int4{group=64}``), each scored separately.
        adapters: folders of PEFT adapters, each merged into the original separately.
        tokens: the maximum number of tokens to predict, or for encoders to read.
        context: tokens per window, or the maximum per line for an encoder; if None, 512, at most the models' maximum.
        layers: also compare the residual stream after each layer, over the first tokens.
        device: "auto", "cpu" or "cuda".
        trust: run the Python of compiled folders that have it (target torch).
        progress: called with (stage, done, total).
        note: called with each note on a source, and each part that it leaves out; all such parts are accepted.

    Raises:
        WeftError: if a model or the text cannot be read, no model has a tokenizer, or they cannot be compared.
    """
    for name, number in (("tokens", tokens), ("context", 1 if context is None else context)):
        if number < 1:
            raise WeftError(f"{name} is {number}, but it must be at least 1")
    content = _read_text(Path(text), CHARACTERS * (tokens + 1))
    with scratch_folder() as scratch:
        candidates = _open_all(
            models, against, rewrites or {}, weights, adapters, scratch, device, trust, progress, note
        )
        window = _choose_window(candidates, context)
        runners = [c.model for c in candidates]
        encode = _find_tokenizer(candidates)
        encoders = [m for m in runners if isinstance(m, EncoderModel)]
        results: list[dict[str, float]]
        if encoders:
            rows = _encode_lines(content, lambda line: encode(line, window), tokens)
            ids, n_read = max(rows, key=len, default=[]), sum(map(len, rows))
            if not ids:
                raise WeftError(f"{text} has no text to embed: all its lines are blank")
            results = [{"cosine": c} for c in score_embeddings(encoders, rows, progress)]
        else:
            ids = encode(content, None)[: tokens + 1]
            n_read = len(ids) - 1
            if n_read < 1:
                raise WeftError(f"{text} has {'one token' if ids else 'no tokens'}: predictions need at least two")
            decoders = [m for m in runners if isinstance(m, Generator)]
            entire_windows = any(c.manifest.flag("compares_tokens", False) for c in candidates)
            tallies = score_tokens(decoders, ids, window, entire_windows, progress)
            results = [{"nll": t.nll, "kl": t.kl, "kl_99": t.kl_99, "agreement": t.agreement} for t in tallies]
        layer_errors = compute_layer_errors(runners, ids[: min(WATCHED, window)]) if layers else [{} for _ in runners]
        seconds = measure_seconds(runners, ids[:window], progress)
    scores = (
        Score(
            name=c.name,
            **{key: f.get(key) for key in ("nll", "kl", "kl_99", "agreement", "cosine")},
            nll_loss=f["nll"] - results[0]["nll"] if "nll" in f else None,
            seconds=s,
            weight_bytes=c.weight_bytes,
            bits=c.bits,
            layer_bits=c.layer_bits,
            parameters=c.manifest.integer("parameters", None),
            cache_bytes=c.cache_bytes,
            layers=e,
        )
        for c, f, s, e in zip(candidates, results, seconds, layer_errors, strict=True)
    )
    return Evaluation(str(text), n_read, window, tuple(scores))


@dataclass(frozen=True)
class _Candidate:
    """An open model, the manifest of its folder (empty without one), and the bytes of its weights."""

    name: str
    model: Generator | EncoderModel
    manifest: Record
    weight_bytes: int

    @property
    def longest(self) -> int:
        return self.model.max_length if isinstance(self.model, EncoderModel) else self.model.decoder.max_length

    @property
    def vocab(self) -> int:
        return self.model.vocab if isinstance(self.model, EncoderModel) else self.model.decoder.vocab

    @property
    def bits(self) -> float | None:
        """Return the average bits per value of linear layers and experts; None if the manifest does not state it."""
        kinds = self.manifest.record("weights", {}).record("kinds", {})
        parts = {kind: kinds.record(kind) for kind in LAYERED if kind in kinds}
        return average_bits({k: {n: p.integer(n, least=0) for n in ("numbers", "bytes")} for k, p in parts.items()})

    @property
    def layer_bits(self) -> dict[str, float]:
        """Return the average bits per value, keyed by layer; {} if the manifest does not state them."""
        layers = self.manifest.record("weights", {}).record("layers", {})
        return {layer: layers.get(layer, float) for layer in layers.data}

    @property
    def cache_bytes(self) -> int | None:
        """Return the bytes of caches per token; None if the manifest does not state them."""
        if "cache" not in self.manifest:
            return None
        caches, dtype = self.manifest.records("cache"), self.manifest.choice("dtype", ("f32", "f16", "bf16"))
        full = dtypes.parse(dtype).bits
        total = 0
        for c in caches:
            n_values = c.integer("kv_heads", least=0) * c.integer("head_dim", least=0)
            total += n_values * (1 if c.flag("latent", False) else 2) * (c.integer("bits", None) or full)
        return total // 8


def _open_all(
    models: Sequence[Any],
    against: Any,
    rewrites: Mapping[str, str],
    weights: Sequence[str],
    adapters: Sequence[str | Path],
    scratch: Path,
    device: str,
    trust: bool,
    progress: Progress,
    note: Callable[[str], None],
) -> list[_Candidate]:
    """Open all models, the original first; sources are compiled into folders in `scratch`.

    Raise WeftError if one cannot be read, or differs in kind or vocabulary from the first, or none has a tokenizer.
    """
    candidates: list[tuple[str, Any]] = []
    for model in (against, *models):
        label = str(model) if isinstance(model, (str, Path)) else load_source(model).description
        candidates.append((label, model if _is_compiled(model) else _load_leniently(model, note)))
    name, original = candidates[0]
    pipelines = dict(rewrites)
    if (rewrites or weights) and not isinstance(original, Model):
        raise WeftError(f"{name} is compiled already; to rewrite or quantize it, name its source instead")
    if repeated := next((text for text in map(str.strip, weights) if text in rewrites), None):
        raise WeftError(f"{repeated!r} is given twice, as the name of a pipeline and as weights; rename the pipeline")
    if isinstance(original, Model):
        pipelines |= {text.strip(): expand_weights(original.graph, text) for text in weights}
    for label, pipeline in pipelines.items():
        candidates.append((label, rewrite(original, pipeline, progress=progress)))
    for adapter in adapters:
        candidates.append((f"with {adapter}", _load_leniently(against, lambda line: None, [adapter])))
    # Checked before gigabytes are written.
    if not any(s.tokenizer if isinstance(s, Model) else (Path(s) / "tokenizer.json").is_file() for _, s in candidates):
        names = ", ".join(name for name, _ in candidates)
        raise WeftError(f"no tokenizer to read the text with: none of {names} has one")
    opened: list[_Candidate] = []
    for i, (name, source) in enumerate(candidates):
        folder = scratch / str(i) if isinstance(source, Model) else Path(source)
        if isinstance(source, Model):
            _check_kind(name, source.graph.meta.get("kind"))
            _compile(source, folder, device, progress)
        manifest = read_manifest(folder)
        _check_kind(name, manifest.text("kind", None))
        runnable = load(folder, device, trust=trust or isinstance(source, Model))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in _WEIGHTS)
        opened.append(_Candidate(name, runnable, manifest, size))
        first, last = opened[0], opened[-1]
        if isinstance(first.model, EncoderModel) != isinstance(last.model, EncoderModel):
            encoder, decoder = (first.name, name) if isinstance(first.model, EncoderModel) else (name, first.name)
            raise WeftError(f"{encoder} is an encoder and {decoder} a decoder, so they cannot be compared")
        if first.vocab != last.vocab:
            raise WeftError(f"{first.name} and {name} differ in vocabulary: {first.vocab} and {last.vocab} tokens")
    return opened


def _load_leniently(source: Any, note: Callable[[str], None], adapters: Sequence[str | Path] = ()) -> Model:
    """Return the model of `source`; parts that are left out are accepted, and reported to `note`."""
    model = load_source(source, adapters=adapters)
    for line in model.notices(strict=False):
        note(f"{model.spec}: {line}")
    return replace(model, without=tuple(part.name for part in model.left_out))


def _is_compiled(model: Any) -> bool:
    """Return whether `model` names a compiled folder; folders of target transformers are sources, not compiled."""
    if not isinstance(model, (str, Path)) or (Path(model) / GRAPH).is_file():
        return False
    return any((Path(model) / name).is_file() for name in (MANIFEST, GENAI))


def _check_kind(name: str, kind: Any) -> None:
    if kind == "encoder-decoder":
        raise WeftError(f"{name} is an encoder-decoder, but weft eval scores only decoders and encoders")


def _compile(model: Model, folder: Path, device: str, progress: Progress) -> None:
    """Compile `model` into `folder`, so that it outputs the logits of all positions."""
    device_place = choose_place(device)
    default = TARGETS[device_place.target].pipeline(model.graph, "f32")
    last = any(p.name == "last-token-logits" for p in default.passes)
    compile(
        model,
        folder,
        target=device_place.target,
        dtype=device_place.dtype,
        passes="default,-last-token-logits" if last else "default",
        progress=lambda _, done, total: progress(f"compiling {model.description}", done, total),
    )


def _choose_window(candidates: Sequence[_Candidate], context: int | None) -> int:
    shortest = min(candidates, key=lambda c: c.longest)
    if shortest.longest < 2:
        raise WeftError(f"{shortest.name} supports sequences of one token only, so there is nothing to compare")
    if context is not None and context > shortest.longest:
        raise WeftError(f"context is {context}, but {shortest.name} supports at most {shortest.longest} tokens")
    return context or min(WINDOW, shortest.longest)


def _find_tokenizer(candidates: Sequence[_Candidate]) -> Callable[[str, int | None], list[int]]:
    """Return the first available tokenizer, as a function (string, maximum number of tokens or None) → token ids."""
    # One has a tokenizer: `_open_all` has checked that.
    candidate = next(c for c in candidates if c.model.folder and (c.model.folder / "tokenizer.json").is_file())
    tokenizer, vocab = candidate.model.tokenizer, candidate.vocab

    def encode(content: str, limit: int | None) -> list[int]:
        ids = tokenizer.encode(content, limit=limit)
        if invalid := [i for i in ids if i >= vocab]:
            raise WeftError(
                f"the tokenizer of {candidate.name} returns token {invalid[0]}; its model's last token is {vocab - 1}"
            )
        return ids

    return encode


def _read_text(path: Path, characters: int) -> str:
    try:
        with open(open_regular(path), encoding="utf-8") as file:
            return file.read(characters)
    except UnicodeDecodeError as error:
        raise WeftError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise WeftError(f"the text {path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _encode_lines(content: str, encode: Callable[[str], list[int]], tokens: int) -> list[list[int]]:
    """Return the token ids of every line that is not blank, until their total reaches `tokens`."""
    rows, count = list[list[int]](), 0
    for line in content.splitlines():
        if line.strip() and count < tokens:
            rows.append(encode(line))
            count += len(rows[-1])
    return rows
