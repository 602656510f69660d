"""Measure the quality cost of rewrites: models on a text, compared with the original.

Decoders predict every token of the text but the first, in windows; encoders embed its lines. All models read the same
tokens before any goes on, so that no more logits than those of a few tokens are held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.backends.runtime import load
from weft.backends.runtime.core.generate import Generator
from weft.backends.runtime.device import place_for
from weft.backends.runtime.folder import GENAI, MANIFEST, read_manifest
from weft.backends.runtime.ort.encoder import Encoder
from weft.backends.targets import TARGETS
from weft.backends.weights import LAYERED, bits_per_weight
from weft.ir.errors import WeftError
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import Record, open_regular
from weft.ir.types import dtypes
from weft.passes.fitting.calibration import CHARACTERS
from weft.passes.runner import Progress

from ....formats.weft.model_folder import GRAPH
from ....model import Model
from ..compile import compile
from ..rewriting import rewrite
from ..source.sources import load_source
from ..weights import weights_pipeline
from .scoring import score_embeddings, score_tokens, seconds_per_token, stream_errors

WINDOW = 512  # tokens that are read with nothing before them, unless a model takes fewer
_WEIGHTS = (".onnx", ".data", ".safetensors")  # endings of files that hold weights
WATCHED = 64  # tokens that are compared inside the models


@dataclass(frozen=True)
class Score:
    """Scores of one model on the text.

    `nll` is the mean of −ln q(token), `kl` that of Σ p ln(p/q) over positions, with q this model's distribution and p
    the original's, both in nats, and `kl_99` what 99 % of the positions stay below; `agreement` is how often both hold
    the same token for the likeliest. Encoders have `cosine` instead: the mean, over lines, between the model's
    embedding and the original's. `layers` holds the relative error of the residual stream after each layer, where asked
    for.
    `seconds` are those of a decoding step, or of a token that an encoder reads. `weight_bytes` are those of the files
    that hold the model. `bits` are those of a number of the linear maps and experts on average, with its share of
    scales and zero points, and `layer_bits` the same by layer. `parameters`, `bits`, and `cache_bytes` of a token, are
    None where a folder does not tell.
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
        """exp(nll), infinite where that is beyond what a float holds."""
        return None if self.nll is None else math.exp(self.nll) if self.nll < 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """Scores side by side, the original's first, over `tokens` tokens of the file `text` in windows of `context`."""

    text: str
    tokens: int
    context: int
    scores: tuple[Score, ...]

    def json(self) -> dict[str, Any]:
        """Everything as plain data."""
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
    """Score the original `against`, `models`, and what `rewrites`, `weights` and `adapters` make of it on a `text`.

    Args:
        models: compiled folders, or whatever `load_source` takes; sources are compiled into a temporary folder.
        rewrites: pipelines, or files that hold one, by the name of what they make of the original.
        weights: of the original in fewer bits, as `compile` takes them (``int4{group=64}``), each by itself.
        adapters: folders of PEFT adapters; each is merged into the original by itself.
        tokens: the most that are predicted, or for encoders read.
        context: tokens of a window, or the most of a line that an encoder reads; 512, or what the models take, if None.
        layers: also compare what the layers hand on, over the first tokens.
        device: "auto", "cpu" or "cuda".
        trust: run the Python of compiled folders that have it (target torch).
        note: called with what is left out of a source, a sentence each; all of it is accepted.

    Raises:
        WeftError: if a model or the text cannot be read, no model has a tokenizer, or they cannot be compared.
    """
    for name, number in (("tokens", tokens), ("context", 1 if context is None else context)):
        if number < 1:
            raise WeftError(f"{name} is {number}, but it must be at least 1")
    content = _read(Path(text), CHARACTERS * (tokens + 1))
    with scratch_folder() as scratch:
        opened = _open_all(models, against, rewrites or {}, weights, adapters, scratch, device, trust, progress, note)
        window = _window(opened, context)
        runners = [c.model for c in opened]
        encode = _tokenizer(opened)
        encoders = [m for m in runners if isinstance(m, Encoder)]
        found: list[dict[str, float]]
        if encoders:
            rows = _lines(content, lambda line: encode(line, window), tokens)
            ids, read = max(rows, key=len, default=[]), sum(map(len, rows))
            if not ids:
                raise WeftError(f"{text} has no text to embed: it is empty")
            found = [{"cosine": c} for c in score_embeddings(encoders, rows, progress)]
        else:
            ids = encode(content, None)[: tokens + 1]
            read = len(ids) - 1
            if read < 1:
                raise WeftError(f"{text} has {'one token' if ids else 'no tokens'}: nothing in it can be predicted")
            decoders = [m for m in runners if isinstance(m, Generator)]
            whole = any(c.manifest.flag("compares_tokens", False) for c in opened)
            tallies = score_tokens(decoders, ids, window, whole, progress)
            found = [{"nll": t.nll, "kl": t.kl, "kl_99": t.kl_99, "agreement": t.agreement} for t in tallies]
        inside = stream_errors(runners, ids[: min(WATCHED, window)]) if layers else [{} for _ in runners]
        seconds = seconds_per_token(runners, ids[:window], progress)
    scores = (
        Score(
            name=c.name,
            **{key: f.get(key) for key in ("nll", "kl", "kl_99", "agreement", "cosine")},
            nll_loss=f["nll"] - found[0]["nll"] if "nll" in f else None,
            seconds=s,
            weight_bytes=c.weight_bytes,
            bits=c.bits,
            layer_bits=c.layer_bits,
            parameters=c.manifest.integer("parameters", None),
            cache_bytes=c.cache_bytes,
            layers=e,
        )
        for c, f, s, e in zip(opened, found, seconds, inside, strict=True)
    )
    return Evaluation(str(text), read, window, tuple(scores))


@dataclass(frozen=True)
class _Candidate:
    """An open model, the manifest of its folder (an empty one where it has none), and the bytes of its weights."""

    name: str
    model: Generator | Encoder
    manifest: Record
    weight_bytes: int

    @property
    def longest(self) -> int:
        return self.model.max_length if isinstance(self.model, Encoder) else self.model.decoder.max_length

    @property
    def vocab(self) -> int:
        return self.model.vocab if isinstance(self.model, Encoder) else self.model.decoder.vocab

    @property
    def bits(self) -> float | None:
        """Bits of a number of its linear maps and experts on average."""
        if "weights" not in self.manifest:
            return None
        kinds = self.manifest.record("weights").record("kinds")
        parts = {kind: kinds.record(kind) for kind in LAYERED if kind in kinds}
        return bits_per_weight({k: {n: p.integer(n, least=0) for n in ("numbers", "bytes")} for k, p in parts.items()})

    @property
    def layer_bits(self) -> dict[str, float]:
        """The same by layer."""
        if "weights" not in self.manifest:
            return {}
        layers = self.manifest.record("weights").record("layers")
        return {layer: layers.get(layer, float) for layer in layers.data}

    @property
    def cache_bytes(self) -> int | None:
        """Bytes that its caches keep for a token."""
        if "cache" not in self.manifest:
            return None
        caches, dtype = self.manifest.records("cache"), self.manifest.choice("dtype", ("f32", "f16", "bf16"))
        full = dtypes.parse(dtype).bits
        total = 0
        for c in caches:
            numbers = c.integer("kv_heads", least=0) * c.integer("head_dim", least=0)
            total += numbers * (1 if c.flag("latent", False) else 2) * (c.integer("bits", None) or full)
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
    """All models, the original first; what is no compiled folder becomes one in `scratch`.

    Raises:
        WeftError: if one cannot be read, or is of another kind or vocabulary than the first, or none has a tokenizer.
    """
    candidates = [(_name(m), m if _compiled(m) else _loaded(m, note)) for m in (against, *models)]
    name, original = candidates[0]
    pipelines = dict(rewrites)
    if (rewrites or weights) and not isinstance(original, Model):
        raise WeftError(f"{name} is compiled already, and a pipeline rewrites a source: name what it was compiled from")
    if both := next((text for text in map(str.strip, weights) if text in rewrites), None):
        raise WeftError(f"the name {both!r} is given twice, to a pipeline and to weights; call the pipeline otherwise")
    if isinstance(original, Model):
        pipelines |= {text.strip(): weights_pipeline(original.graph, text) for text in weights}
    for label, pipeline in pipelines.items():
        candidates.append((label, rewrite(original, pipeline, progress=progress)))
    for adapter in adapters:
        candidates.append((f"with {adapter}", _loaded(against, lambda line: None, [adapter])))
    if not any(_reads_text(source) for _, source in candidates):  # said before gigabytes are written
        raise _no_tokenizer(name for name, _ in candidates)
    opened: list[_Candidate] = []
    for i, (name, source) in enumerate(candidates):
        folder = scratch / str(i) if isinstance(source, Model) else Path(source)
        if isinstance(source, Model):
            _check_kind(name, source.graph.meta.get("kind"))
            _compile(source, folder, device, progress)
        manifest = read_manifest(folder)
        _check_kind(name, manifest.text("kind", None))
        running = load(folder, device, trust=trust or isinstance(source, Model))
        size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in _WEIGHTS)
        opened.append(_Candidate(name, running, manifest, size))
        first, last = opened[0], opened[-1]
        if isinstance(first.model, Encoder) != isinstance(last.model, Encoder):
            raise WeftError(f"{first.name} and {name} cannot be compared: one is an encoder, the other a decoder")
        if first.vocab != last.vocab:
            raise WeftError(
                f"{first.name} and {name} cannot be compared: one has {first.vocab} tokens, the other {last.vocab}"
            )
    return opened


def _loaded(source: Any, note: Callable[[str], None], adapters: Sequence[str | Path] = ()) -> Model:
    """The model of `source`, without what is left out of it."""
    model = load_source(source, adapters=adapters)
    for line in model.notices(strict=False):
        note(f"{model.spec}: {line}")
    return replace(model, without=tuple(part.name for part in model.left_out))


def _name(model: Any) -> str:
    return str(model) if isinstance(model, (str, Path)) else load_source(model).description


def _compiled(model: Any) -> bool:
    """Return whether `model` names a compiled folder; one with its graph beside the weights is a source."""
    if not isinstance(model, (str, Path)) or (Path(model) / GRAPH).is_file():
        return False
    return any((Path(model) / name).is_file() for name in (MANIFEST, GENAI))


def _reads_text(source: Any) -> bool:
    """Return whether a model, or a compiled folder, has a tokenizer."""
    return source.tokenizer is not None if isinstance(source, Model) else (Path(source) / "tokenizer.json").is_file()


def _no_tokenizer(names: Iterable[str]) -> WeftError:
    return WeftError(f"no tokenizer to read the text with: none of {', '.join(names)} has one")


def _check_kind(name: str, kind: Any) -> None:
    if kind == "encoder-decoder":
        raise WeftError(f"{name} is an encoder-decoder, whose answers depend on a source: eval scores the other kinds")


def _compile(model: Model, folder: Path, device: str, progress: Progress) -> None:
    """Compile `model` with the logits of all positions."""
    place = place_for(device)
    default = TARGETS[place.target].pipeline(model.graph, "f32")
    last = any(p.name == "last-token-logits" for p in default.passes)
    compile(
        model,
        folder,
        target=place.target,
        dtype=place.dtype,
        passes="default,-last-token-logits" if last else "default",
        progress=lambda _, done, total: progress(f"compiling {model.description}", done, total),
    )


def _window(opened: Sequence[_Candidate], context: int | None) -> int:
    shortest = min(opened, key=lambda c: c.longest)
    if shortest.longest < 2:
        raise WeftError(f"{shortest.name} supports texts of one token only, so there is nothing to compare")
    if context is not None and context > shortest.longest:
        raise WeftError(f"a context of {context} tokens is more than the {shortest.longest} that {shortest.name} takes")
    return context or min(WINDOW, shortest.longest)


def _tokenizer(opened: Sequence[_Candidate]) -> Callable[[str, int | None], list[int]]:
    """Return the first tokenizer available, as a function of a text and a maximum number of tokens."""
    for candidate in opened:
        folder = candidate.model.folder
        if folder is not None and (folder / "tokenizer.json").is_file():
            tokenizer, vocab = candidate.model.tokenizer, candidate.vocab
            break
    else:
        raise _no_tokenizer(c.name for c in opened)

    def encode(content: str, limit: int | None) -> list[int]:
        ids = tokenizer.encode(content, limit=limit)
        if strange := [i for i in ids if i >= vocab]:
            raise WeftError(f"the tokenizer of {candidate.name} makes token {strange[0]}, but it has only {vocab}")
        return ids

    return encode


def _read(path: Path, characters: int) -> str:
    """The first `characters` of a text file.

    Raises:
        WeftError: if there is no such file, or it is no text.
    """
    try:
        with open(open_regular(path), encoding="utf-8") as file:
            return file.read(characters)
    except UnicodeDecodeError as error:
        raise WeftError(f"{path} is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise WeftError(f"the text {path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _lines(content: str, encode: Callable[[str], list[int]], tokens: int) -> list[list[int]]:
    """The tokens of every line that is not blank, until there are `tokens`."""
    rows, count = list[list[int]](), 0
    for line in content.splitlines():
        if line.strip() and count < tokens:
            rows.append(encode(line))
            count += len(rows[-1])
    return rows
