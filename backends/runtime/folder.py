"""What a compiled folder says about itself: weft.json, or the genai_config.json of onnxruntime-genai's builder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from ..storage import MANIFEST as MANIFEST
from ..storage import check_format

TORCH = "torch"  # the target whose model is Python
GENAI = "genai_config.json"


@dataclass(frozen=True)
class Facts:
    """What the runtime needs to know of a compiled model before it opens it."""

    folder: Path
    model: Path
    kind: str  # "decoder", "encoder" or "encoder-decoder"
    target: str  # "onnx", "ort-cpu", "ort-cuda", "torch"; "" where the folder does not say
    vocab: int
    max_length: int
    eos: frozenset[int] = frozenset()
    head_dim: int | None = None  # of the caches, where the graph leaves it open
    rolling: frozenset[int] = frozenset()  # the caches that roll
    compares: bool = False  # tokens of a call compete with each other, so that padding would too
    pooling: str = "mean"  # how an encoder makes one vector of a text
    normalize: bool = False  # and whether it has unit length
    start: int = 0  # the token with which an encoder-decoder begins its answers
    max_source: int = 0  # the longest source it takes
    forced: tuple[int | None, int | None] = (None, None)  # its first token of all, and its last at the limit
    outputs: tuple[str, ...] = ()  # of a model of PyTorch, in order

    @property
    def encoder(self) -> Path:
        """The encoder half of an encoder-decoder."""
        return self.folder / "encoder.onnx"


def read_facts(folder: str | Path) -> Facts:
    """The facts of a compiled folder.

    Raises WeftError when the folder or a file is missing, or a value is missing or of the wrong kind.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeftError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if (folder / MANIFEST).is_file():
        facts = _from_manifest(folder)
    elif (folder / GENAI).is_file():
        facts = _from_genai(folder)
    else:
        raise WeftError(f"{folder}: no {MANIFEST} in it, so it is no compiled model; `weft compile` makes one")
    halves = facts.kind == "encoder-decoder" and facts.target != TORCH
    for file in (facts.model, *([facts.encoder] if halves else [])):
        if not file.is_file():
            raise WeftError(f"{file}: no such file, though {folder} is described as a compiled model; compile again")
    return facts


def read_manifest(folder: Path) -> dict[str, Any]:
    """The weft.json in `folder`; {} where there is none. Raises WeftError when it is broken, or of a newer format."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    found = read_json(path)
    check_format(path, found)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises WeftError naming the file when it cannot be read or parsed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeftError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # covers broken UTF-8 and broken JSON
        raise WeftError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeftError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def _from_manifest(folder: Path) -> Facts:
    path = folder / MANIFEST
    data = read_manifest(folder)
    kind = _get(path, data, "kind", str)
    if kind not in ("decoder", "encoder", "encoder-decoder"):
        raise WeftError(f"{path}: kind is {kind!r}, but it must be 'decoder', 'encoder' or 'encoder-decoder'")
    more: dict[str, Any] = {}
    if kind == "encoder":
        more = {
            name: _get(path, data, name, of) for name, of in (("pooling", str), ("normalize", bool)) if name in data
        }
    if kind == "encoder-decoder":
        first, last = (_token_ids(path, data, f"forced_{name}_token_id") for name in ("bos", "eos"))
        more["start"] = _get(path, data, "decoder_start_token_id", int)
        more["max_source"] = _positive(path, data, "max_source_length")
        more["forced"] = (min(first, default=None), min(last, default=None))
    target = _get(path, data, "target", str)
    if target == TORCH:
        more["outputs"] = tuple(map(str, _get(path, data, "outputs", list)))
    caches = _get(path, data, "cache", list) if "cache" in data else []
    return Facts(
        folder=folder,
        model=folder / ("model.py" if target == TORCH else "model.onnx"),
        kind=kind,
        target=target,
        vocab=_positive(path, data, "vocab"),
        max_length=_positive(path, data, "max_length"),
        eos=_token_ids(path, data, "eos_token_ids"),
        compares="compares_tokens" in data and _get(path, data, "compares_tokens", bool),
        rolling=frozenset(i for i, cache in enumerate(caches) if cache.get("rolling")),
        **more,
    )


def _from_genai(folder: Path) -> Facts:
    path = folder / GENAI
    model = _get(path, read_json(path), "model", dict)
    decoder = _get(path, model, "decoder", dict)
    sliding = decoder.get("sliding_window") or {}
    return Facts(
        folder=folder,
        model=_inside(path, _get(path, decoder, "filename", str)),
        kind="decoder",
        target="",
        vocab=_positive(path, model, "vocab_size"),
        max_length=_positive(path, model, "context_length"),
        eos=_token_ids(path, model, "eos_token_id"),
        head_dim=_positive(path, decoder, "head_size") if "head_size" in decoder else None,
        rolling=frozenset(sliding.get("layers") or ()),
    )


def _inside(path: Path, name: str) -> Path:
    """The file `name` in the folder of the config at `path`, which may name none elsewhere."""
    if Path(name).name != name or (path.parent / name).is_symlink():
        raise WeftError(f"{path}: filename is {name!r}, but it must be that of a file in the same folder")
    return path.parent / name


def _get(path: Path, data: dict[str, Any], key: str, kind: type) -> Any:
    if key not in data:
        raise WeftError(f"{path}: the key {key!r} is missing")
    if not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
        raise WeftError(f"{path}: {key} is {data[key]!r}, but it must be of type {kind.__name__}")
    return data[key]


def _positive(path: Path, data: dict[str, Any], key: str) -> int:
    value = _get(path, data, key, int)
    if value < 1:
        raise WeftError(f"{path}: {key} is {value}, but it must be at least 1")
    return int(value)


def _token_ids(path: Path, data: dict[str, Any], key: str) -> frozenset[int]:
    value = data.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise WeftError(f"{path}: {key} is {value!r}, but it must hold token ids")
    return frozenset(ids)
