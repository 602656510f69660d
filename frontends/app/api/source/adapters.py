"""Folders with weights as sources, and the PEFT adapters to merge into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage import Stamp, take_stamps
from weft.ir.storage.documents import expand_home, read_json

from ....formats.hf import load_folder
from ....formats.hf.adapter import ADAPTER_CONFIG, Adapter, is_adapter
from ....formats.hf.hub import find_snapshot
from ....formats.hf.safetensors import list_weight_files
from ....formats.hf.sentence_transformers.sentence import MODULES
from ....formats.hf.tokens.files import copy_tokenizer, list_tokenizer_files
from ....formats.weft.graph_adapters import merge_adapters
from ....formats.weft.model_folder import GRAPH, read_model, read_provenance
from ....model import Model


def load_with_adapters(source: Any, adapters: Sequence[str | Path] = (), family: str | None = None) -> Model:
    """Return the model of the folder `source`, or of the base of the adapter in it, with `adapters` merged.

    The folder is a Hugging Face folder of a known family, or a folder of target transformers; an adapter in it is
    merged first. `family` overrides the family that its config names. The tokenizer is that of the last adapter that
    has one, since adapters may add tokens or a chat template, else the base's.

    Raises:
        WeftError: if `source` is not such a folder, the base of an adapter is not local, or an adapter does not fit.
    """
    path = _find_folder(source) if isinstance(source, (str, Path)) else None
    if path is None or (adapters and not ((path / "config.json").is_file() or is_adapter(path))):
        spec = source if isinstance(source, (str, Path)) else f"a {type(source).__name__}"
        if not adapters:
            raise WeftError(f"--as needs a Hugging Face folder, and {spec} is not one: leave it out")
        raise WeftError(f"--adapter needs a Hugging Face folder (for its weight names), and {spec} is not one")
    adapter_folders = [_find_adapter(folder) for folder in adapters]
    base = path
    if is_adapter(path):
        base = _find_base(path)
        if base != path and (path / MODULES).is_file():
            raise WeftError(f"{path}: an adapter with its own {MODULES} is not supported: save the merged model")
        if not any(folder.samefile(path) for folder in adapter_folders):
            adapter_folders = [path, *adapter_folders]
    stamps_before = take_stamps(
        file for home in (base, *adapter_folders) for file in (*home.iterdir(), *home.glob("*/*"))
    )
    if (base / GRAPH).is_file():
        if family is not None:
            raise WeftError(f"{source}: {GRAPH} defines the architecture, so --as has no effect: leave it out")
        return _load_model_folder(str(source), base, adapter_folders, stamps_before)
    folder, loaded, merged = load_folder(base, adapter_folders, family)
    names = ", ".join(adapter.path.name for adapter in merged)
    types = "token_type_ids" in loaded.graph.inputs
    lower = folder.sentence is not None and folder.sentence.meta["do_lower_case"]
    plain = folder.sentence is not None and folder.sentence.static
    home, files = _select_files(folder.path, folder.files, adapter_folders, merged)
    has_words = loaded.graph.meta["kind"] != "image-encoder" and bool(list_tokenizer_files(home))
    return Model(
        spec=str(source),
        description=f"Hugging Face folder {base.name}" + (f" with adapter {names}" if names else ""),
        tokenizer=partial(copy_tokenizer, home, types=types, lower=lower, plain=plain) if has_words else None,
        files=files,
        stamps={file: stamps_before[file] for file in files if file in stamps_before},
        notes=folder.notes,
        adapters=tuple(adapter.path for adapter in merged),
        family=family,
        provenance=read_provenance(base),
        **vars(loaded),
    )


def _load_model_folder(spec: str, base: Path, adapters: Sequence[Path], before: Mapping[Path, Stamp]) -> Model:
    """Return the model in `base` (target transformers) with `adapters` merged; `before`: stamps before reading."""
    model = read_model(spec, base)
    merged = merge_adapters(model.graph, str(base / GRAPH), adapters)
    model.graph.meta["source"] = {
        "format": "weft",
        "path": str(base),
        "adapters": [str(adapter.path.absolute()) for adapter in merged],
    }
    home, files = _select_files(base, model.files, adapters, merged)
    copy = partial(copy_tokenizer, home, types="token_type_ids" in model.graph.inputs)
    return replace(
        model,
        description=f"{model.description} with adapter {', '.join(adapter.path.name for adapter in merged)}",
        tokenizer=copy if list_tokenizer_files(home) else None,
        files=files,
        stamps={file: before[file] for file in files if file in before},
        adapters=tuple(adapter.path for adapter in merged),
    )


def _select_files(
    base: Path, files: Sequence[Path], adapters: Sequence[Path], merged: Sequence[Adapter]
) -> tuple[Path, tuple[Path, ...]]:
    """Return the tokenizer's folder (the last of `adapters` with a tokenizer, else `base`), and all files of a model.

    The files are the base's `files`, with its tokenizer replaced by the adapter's, and the `merged` adapters' files.
    """
    home = next((folder for folder in reversed(adapters) if (folder / "tokenizer.json").is_file()), base)
    if home != base:
        replaced = list_tokenizer_files(base)
        files = [*(file for file in files if file not in replaced), *list_tokenizer_files(home)]
    return home, (*files, *(file for adapter in merged for file in adapter.files))


def _find_folder(source: str | Path) -> Path | None:
    path = expand_home(source)
    return path if path.is_dir() else find_snapshot(str(source))


def _find_adapter(source: str | Path) -> Path:
    path = _find_folder(source)
    if path is None or not is_adapter(path):
        raise WeftError(f"{source} is not an adapter: no folder of that name contains {ADAPTER_CONFIG}")
    return path


def _find_base(adapter: Path) -> Path:
    """Return the local folder of an adapter's base model; raise WeftError if it is missing, ambiguous or unsuitable."""
    config = read_json(adapter / ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path") or ""
    if not isinstance(name, str):
        raise WeftError(f"{adapter / ADAPTER_CONFIG}: base_model_name_or_path={name!r} is not a string")
    has_weights = (adapter / "config.json").is_file() and bool(list_weight_files(adapter))
    base = (_find_folder(name) or _find_folder(adapter / name)) if name else None
    if has_weights and base is not None and not base.samefile(adapter):
        raise WeftError(
            f"{adapter} has weights in addition to an adapter whose base is {base}: give the intended base "
            "as SOURCE, and the adapter by --adapter"
        )
    if has_weights:
        return adapter
    if base is None:
        fault = f"whose base {name!r} is not available locally" if name else "which does not name its base"
        raise WeftError(f"{adapter} is an adapter {fault}: give the base as SOURCE, and --adapter {adapter}")
    if base != expand_home(name) and config.get("revision"):
        raise WeftError(
            f"{adapter / ADAPTER_CONFIG} requires revision={config['revision']!r} of its base: give the folder of that "
            f"revision as SOURCE, and --adapter {adapter}"
        )
    if not (base / "config.json").is_file() or is_adapter(base):
        raise WeftError(
            f"{adapter} is an adapter whose base {base} is not a Hugging Face model folder: save the merged model"
        )
    return base
