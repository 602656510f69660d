"""Loading of sources as graphs: a preset, an architecture file, a checkpoint, IR text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.backends.runtime.compiled_folder import MANIFEST
from weft.backends.runtime.trust import require_trust
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import RANDOM
from weft.ir.storage import Stamp, take_stamps
from weft.ir.storage.contents import hash_file
from weft.ir.storage.documents import Record, check_regular, expand_home, read_text
from weft.passes import parse_pipeline
from weft.passes.runner import Progress

from ....formats.hf.hub import HUB_ID, find_snapshot
from ....model import Model, SourceLike
from ..rewrite import rewrite

if TYPE_CHECKING:
    from .stored import WeightCheck

# Passes that change the form of a graph, not the function of its source.
FORM_PASSES = {"cast", "concat-caches", "kv-cache", "last-token-logits", "quiet-routers", "rolling-buffer"}
_TAKE_COMPILED = "`weft run`, `serve` and `eval` take the folder without its source"


def load_source(
    source: SourceLike,
    seed: int | None = None,
    adapters: Sequence[str | Path] = (),
    family: str | None = None,
    without: Sequence[str] = (),
) -> Model:
    """Return the model that `source` is or names.

    A source is a preset ("gpt2"), an architecture file ("model.py" or "model.py:Mistral"), a Hugging Face folder (or
    the id of a repository in the local hub cache), the folder of an adapter whose base is local, a model folder of
    ``weft opt``, a run folder of ``weft train``, a .gguf file, or a file of IR text; in Python also a `Decoder`, an
    `Encoder` or any object with such a ``graph`` method, a `Graph`, or a `Model`. A compiled folder is the source that
    it was compiled from, if that is not code (`load_compiled`). Without a checkpoint, parameters get their declared
    random initialization with `seed`, 0 if None. The PEFT adapters in the folders `adapters` are merged in order into
    the weights of a Hugging Face folder, or of a folder of target transformers. `family` overrides the family that the
    config of a Hugging Face folder names. `without` names parts that may be left out although the model's outputs then
    change (see `weft.frontends.models.left_out`).

    Raises:
        WeftError: if the source is missing or invalid, or `seed` is negative or has no effect.
    """
    if seed is not None and seed < 0:
        raise WeftError(f"seed is {seed}, but it must be at least 0")
    model = _load(source, seed or 0, adapters, family)
    if seed is not None and (model is source or model.module is None or not model.random_init):
        raise WeftError(f"seed is {seed}, but it has no effect: the weights of {model.description} are not random")
    return replace(model, without=tuple(without)) if without else model


def _load(source: SourceLike, seed: int, adapters: Sequence[str | Path], family: str | None) -> Model:
    if adapters or family is not None:
        from .adapters import load_with_adapters

        return load_with_adapters(source, adapters, family)
    if isinstance(source, Model):
        return source
    if isinstance(source, Graph):
        return Model(source, source.name, f"graph {source.name}", random_init=_is_random(source))
    if not isinstance(source, (str, Path)):
        kind = type(source).__name__
        if not callable(getattr(source, "graph", None)) or isinstance(source, type):
            raise WeftError(f"a {kind} is not a valid source: {_SOURCES}")
        return _build_model(source, kind.lower(), kind, f"a {kind}", seed)
    spec = str(source)
    path = expand_home(spec)
    check_regular(path)
    if (file := find_architecture_file(spec)) is not None:
        return _load_python(spec, file, spec.rpartition(".py:")[2] if ".py:" in spec else None, seed)
    if path.suffix in _NOT_SOURCES and not path.is_dir():
        raise WeftError(f"{path} is {_NOT_SOURCES[path.suffix]}")
    if path.suffix == ".gguf":
        return _load_gguf(spec, path)
    if path.is_dir():
        return _load_folder(spec, path)
    if path.is_file():
        return _load_text(spec, path)
    return _load_by_name(spec, seed)


def find_architecture_file(spec: str) -> Path | None:
    """Return the Python file that loading `spec` runs ("model.py", "model.py:Mistral"), or None for other sources."""
    match = re.fullmatch(r"(.+\.py)(?::\w+)?", spec)
    return expand_home(match[1]) if match else None


def _load_gguf(spec: str, path: Path) -> Model:
    from ....formats.gguf.load import load_gguf
    from ....formats.gguf.parts import list_parts
    from ....formats.gguf.tokenizer import has_tokenizer, write_tokenizer

    stamps_before = take_stamps(list_parts(path))
    reader, loaded = load_gguf(path)
    return Model(
        spec=spec,
        description=f"GGUF file {path.name}",
        tokenizer=partial(write_tokenizer, reader.metadata) if has_tokenizer(reader.metadata) else None,
        files=tuple(stamps_before),
        stamps=stamps_before,
        **vars(loaded),
    )


def _load_folder(spec: str, path: Path) -> Model:
    from ....formats.hf.adapter import is_adapter
    from ....formats.weft.model_folder import BEST, GRAPH, RUN, read_model
    from .adapters import load_with_adapters

    if (path / GRAPH).is_file() and not is_adapter(path):
        return read_model(spec, path)
    if (path / RUN).is_file():
        if not (path / BEST / GRAPH).is_file():
            raise WeftError(
                f"{path} is a run without a model yet: continue it with --resume {path}, or name {path / 'last'}"
            )
        return replace(read_model(spec, path / BEST), description=f"run {path.name}")
    if (path / MANIFEST).is_file():
        manifest = Record.read(path / MANIFEST)
        if code := find_architecture_file(manifest.record("source", {}).text("spec", "")):
            raise WeftError(
                f"{path} is compiled from {code}, which is code: name this file to run it. {_TAKE_COMPILED}"
            )
        try:
            model, check = load_compiled(path, manifest)
        except WeftError as error:
            raise WeftError(f"{error}. {_TAKE_COMPILED}") from error
        if check is not None and not check.passed:
            raise WeftError(f"the weights in {path} are not those of its source ({check.wrong}): compile it again")
        return model
    return load_with_adapters(spec)


def load_compiled(
    folder: Path, manifest: Record, trust: bool = False, progress: Progress = lambda stage, done, total: None
) -> tuple[Model, WeightCheck | None]:
    """Return (model, check) of a compiled `folder`: its source after the recorded passes that change outputs, with the
    folder's quantized weights, which `check` compares with the source; it is None if no pass quantizes weights.

    Raises:
        WeftError: as in `load_recorded_source`, or if the weights cannot be read.
    """
    from .stored import check_weights, has_quantization

    model, check = load_recorded_source(folder, manifest, trust), None
    pipeline = parse_pipeline(manifest.text("pipeline", ""))
    later = changing = [p for p in pipeline.passes if p.effect != "exact" and p.name not in FORM_PASSES]
    if has_quantization(pipeline):
        graph, rest, check = check_weights(folder, manifest, model, progress)
        model, later = replace(model, graph=graph, module=None), [p for p in changing if p in rest.passes]
    if later:
        model = rewrite(model, ", ".join(map(str, later)), progress=progress)
    if not changing:
        return model, check
    names = ", ".join(map(str, changing))
    return replace(model, description=f"{model.description} after {names}", pipeline=names, settings=None), check


def load_recorded_source(folder: Path, manifest: Record, trust: bool = False) -> Model:
    """Return the source that `folder` was compiled from, after a check that its files have not changed.

    An architecture file is code: it runs only with `trust`, and only if it is the file that was compiled.

    Raises:
        WeftError: if the manifest names no source, or the source cannot be read, has changed, or is not trusted.
    """
    source = manifest.record("source", {})
    spec, seed, hashes = source.text("spec", ""), source.integer("seed", 0), source.get("hashes", dict[str, str], {})
    adapters, family = source.get("adapters", list[str], []), source.text("family", "") or None
    without = source.get("without", list[str], [])
    if not spec:
        raise WeftError(f"{folder / MANIFEST} names no source that can be loaded again: the model was built in Python")
    if (code := find_architecture_file(spec)) is not None:
        require_trust(trust, f"{folder} names {spec} as its source, which is code that this would run")
        if code.is_file() and hashes.get(code.name) != hash_file(code):
            raise _make_changed_error(folder, spec, [code.name])
    try:
        model = load_source(spec, seed or None, adapters, family, without)
    except WeftError as error:
        raise WeftError(f"{folder} was compiled from {spec}, which cannot be read again: {error}") from error
    hashes_now = model.hashes()
    if changed := sorted(
        name for name in hashes.keys() | hashes_now.keys() if hashes.get(name) != hashes_now.get(name)
    ):
        raise _make_changed_error(folder, spec, changed)
    return model


def _make_changed_error(folder: Path, spec: str, names: list[str]) -> WeftError:
    return WeftError(f"{folder}: its source {spec} has changed ({', '.join(names)}): compile it again")


def load_edited(path: Path, name: str | None, code: bytes) -> Model:
    """Return the model `name` (None: the only one, or `model`) of the architecture file at `path` if its text were
    `code`. Raise WeftError as `load_source`."""
    return _load_python(f"{path}:{name}" if name else str(path), path, name, 0, code)


def _load_python(spec: str, path: Path, name: str | None, seed: int, code: bytes | None = None) -> Model:
    from .architecture import guard_user_code, run_file

    stamps_before = take_stamps([path])
    namespace = run_file(path, code)
    with guard_user_code(path):
        models = {n: v for n, v in namespace.items() if callable(getattr(v, "graph", None)) and not isinstance(v, type)}
    names = ", ".join(models) or "none"
    if name is None:
        if not models:
            raise WeftError(f"{path} defines no model: give the model a name, such as `model = Decoder(...)`")
        if "model" not in models and len(models) != 1:
            raise WeftError(f"{path}: name the model, as {path}:NAME; it defines {names}")
        name = "model" if "model" in models else next(iter(models))
    if name not in namespace:
        raise WeftError(f"{path} defines no {name!r}; its models are {names}")
    module = namespace[name]
    with guard_user_code(path):
        if name not in models and callable(module):
            module = module()
        is_model = callable(getattr(module, "graph", None))
    if not is_model:
        raise WeftError(f"{path}:{name} is not a model: name a Decoder, an Encoder, or a function that returns one")
    description, known_as = f"architecture {path.name}:{name}", _name_graph(path, name)
    with guard_user_code(path):
        return _build_model(module, known_as, spec, description, seed, stamps_before)


def _name_graph(path: Path, variable: str) -> str:
    """Return a name, valid in IR text, for the graph of `variable` in the file `path`: the file's if it is `model`."""
    name = re.sub(r"[^\w.-]+", "_", path.stem if variable == "model" else variable, flags=re.ASCII)
    return name if re.match("[A-Za-z_]", name) else f"_{name}"


def _load_text(spec: str, path: Path) -> Model:
    from weft.ir.text.parser import MOST_BYTES

    stamps_before = take_stamps([path])
    try:
        text = read_text(path, MOST_BYTES)
    except WeftError as e:
        raise WeftError(f"{path} is neither a checkpoint nor IR text: {e}") from e
    if path.suffix != ".weft" and not text.lstrip().startswith(("graph", "#")):
        raise WeftError(f"{path} is neither a checkpoint nor IR text; {_SOURCES}")
    graph = parse_graph(text, str(path))
    return Model(
        graph, spec, f"IR text {path.name}", files=(path,), stamps=stamps_before, random_init=_is_random(graph)
    )


def parse_graph(text: str, name: str, complete: bool = True) -> Graph:
    """Parse and verify the IR text `text`, called `name` in errors; its checkpoint is opened only if `complete`.

    Raise WeftError if it is not a graph, has impossible metadata, or its checkpoint is needed and missing.
    """
    from weft.ir.graph.verifier import verify
    from weft.ir.text.parser import parse

    from ....formats.weft.metadata import check_metadata

    graph = parse(text, name)
    check_metadata(graph, name)
    if complete:
        _open_reader(graph, name)
    verify(graph, recipes=complete)
    return graph


def _open_reader(graph: Graph, name: str) -> None:
    """Open the checkpoint that `graph`, read from the IR text `name`, reads; raise WeftError if it is missing."""
    key = next((key for p in graph.params.values() for key in p.recipe.sources()), None)
    if key is None:
        return
    origin = graph.meta.get("source")
    path = Path(origin["path"]) if isinstance(origin, dict) and isinstance(origin.get("path"), str) else None
    if path is None or not path.exists():
        fault = f"{path} does not exist" if path else 'meta source = {"path": …} is missing'
        raise WeftError(f"{name} reads the checkpoint tensor {key!r}, but its checkpoint cannot be opened: {fault}")
    assert isinstance(origin, dict)
    from ....formats.gguf import GGUFTensors
    from ....formats.hf import Folder, SafetensorsReader, join_adapters
    from ....formats.weft.model_folder import GRAPH

    if path.suffix == ".gguf":
        graph.reader = GGUFTensors(path)
        return
    base = SafetensorsReader(path) if (path / GRAPH).is_file() else Folder.open(path).open_weights()
    adapters = [Path(folder) for folder in origin.get("adapters", ())]
    graph.reader = join_adapters(base, adapters) if adapters else base


def _load_by_name(spec: str, seed: int) -> Model:
    from ....models.presets import PRESETS

    if spec in PRESETS:
        return _build_model(PRESETS[spec].model(), spec, spec, f"preset {spec}", seed)
    if (snapshot := find_snapshot(spec)) is not None:
        return _load_folder(spec, snapshot)
    if HUB_ID.fullmatch(spec) and not Path(spec).parent.is_dir():
        raise WeftError(
            f"{spec!r} is neither a preset nor an existing file or folder; as a Hugging Face repository id, it is "
            f"not in the local cache: fetch it with `hf download {spec}`"
        )
    matches = difflib.get_close_matches(spec, PRESETS, 1)
    hint = f"; did you mean the preset {matches[0]}?" if matches else ""
    raise WeftError(f"{spec!r} is neither a preset nor an existing file or folder{hint or '; ' + _SOURCES}")


_SOURCES = (
    "a source is a preset (see `weft presets`), an architecture file model.py:NAME, a Hugging Face folder, "
    "the folder of a PEFT adapter, a model folder of `weft opt`, a .gguf file, or IR text (.weft)"
)


_NOT_SOURCES = {  # descriptions of files that are not sources, with the source to name instead
    ".safetensors": "a file of weights, without a description of the model: name the folder with its config.json",
    ".onnx": "an ONNX model, a result rather than a source: `weft viz` draws it, and `weft run` runs its folder",
    **dict.fromkeys(
        (".bin", ".pt", ".pth", ".ckpt", ".pkl"),
        "a file of pickled PyTorch weights, which run code when they are read, so weft never does: load the model with "
        "transformers, `save_pretrained` it as safetensors, and name that folder",
    ),
}


def _build_model(
    module: Any, name: str, spec: str, description: str, seed: int, stamps: Mapping[Path, Stamp] | None = None
) -> Model:
    graph: Graph = module.graph(seed=seed, name=name)
    model = Model(graph, spec, description, seed, module, random_init=_is_random(graph))
    return replace(model, files=tuple(stamps), stamps=stamps) if stamps else model


def _is_random(graph: Graph) -> bool:
    return any(p.recipe.has(*RANDOM) for p in graph.params.values())
