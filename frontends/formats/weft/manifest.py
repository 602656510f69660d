"""Build manifests: weft.json of compiled folders, provenance.json of model folders and exports."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.backends.target import Backend
from weft.ir import ops
from weft.ir.graph import Graph
from weft.ir.op import Trait
from weft.ir.storage import PROVENANCE, replace_folder, write_manifest
from weft.ir.storage.documents import expand_home
from weft.passes.analysis.costs import count_parameters
from weft.passes.analysis.states import SOUND, find_state_inputs, limit_source, make_manifest_records

from ...model import Model
from .record_tables import CARD, render_card

ANSWER_KEYS = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")  # of generative models
# Of encoders, and of models with a task head.
OUTPUT_KEYS = ("pooling", "normalize", "padding", "sentence", "sampling", "task", "labels", "problem_type", "rank")


def build_manifest(
    graph: Graph, target: Backend, dtype: str, length: int, pipeline: str, model: Model, hashes: dict[str, str]
) -> dict[str, Any]:
    """Return the manifest weft.json of `graph`, which the passes `pipeline` rewrote, compiled for `target` in `dtype`.
    model: the source of the graph. hashes: file name → SHA-256. length: longest sequence in tokens."""
    from weft import __version__

    meta = graph.meta
    logits = graph.outputs.get("logits")
    return {
        "weft": __version__,
        "kind": meta.get("kind", "decoder"),
        "target": target.name,
        "dtype": dtype,
        "vocab": meta.get("vocab"),
        "parameters": count_parameters(graph),
        "max_length": length,
        "logits": None if logits is None or "task" in meta else "last" if logits.shape[1] == 1 else "all",
        "eos_token_ids": meta.get("eos_token_ids", []),
        "bos_token_id": meta.get("bos_token_id"),
        "pad_token_id": meta.get("pad_token_id"),
        **{name: meta[name] for name in ANSWER_KEYS if meta.get(name) not in (None, [])},
        **(_list_encoder(graph, length) if meta.get("kind") == "encoder-decoder" else {}),
        **{name: meta[name] for name in OUTPUT_KEYS if name in meta},
        **make_manifest_records(graph, find_state_inputs(graph)),
        **_list_padding(graph),
        "pipeline": pipeline,
        "left_out": [part.record() for part in model.left_out],
        "source": _origin(model, hashes),
        "versions": list_versions(*target.libraries),
    }


def _list_padding(graph: Graph) -> dict[str, Any]:
    """Return entries about the effect of padding on a sequence's outputs. compares_tokens: an op compares tokens of all
    batch rows, or is block-sparse attention. compares_above, if only the latter: length of the longest sequence that
    it treats as dense."""
    compete = any(Trait.COMPARES in node.op.traits for node in graph.nodes)
    dense = [node.attrs["dense"] for node in graph.nodes if node.op is ops.block_sparse_attention]
    above = {"compares_above": min(dense)} if dense and not compete else {}
    return {"compares_tokens": compete or bool(dense), **above}


def list_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the installed `packages`, by name."""
    return {name: metadata.version(name) for name in packages}


def build_provenance(model: Model, hashes: dict[str, str]) -> dict[str, Any]:
    """Return provenance.json of `model`: its source with `hashes` (file name → SHA-256), passes, and parts left out."""
    from weft import __version__

    return {
        "weft": __version__,
        "pipeline": model.pipeline,
        "passes": [*model.passes],
        "left_out": [part.record() for part in model.left_out],
        "source": _origin(model, hashes),
        "versions": list_versions("numpy", "safetensors"),
    }


def _origin(model: Model, hashes: dict[str, str]) -> dict[str, Any]:
    return {
        "spec": make_absolute(model.spec),
        "description": model.description,
        "seed": model.seed,
        "hashes": hashes,
        **model.graph.meta.get("source", {}),
        **({"family": model.family} if model.family else {}),
        **({"without": list(model.without)} if model.without else {}),
        **({"trained": dict(model.trained)} if model.trained else {}),
        **({"provenance": model.provenance} if model.provenance else {}),
    }


def _list_encoder(graph: Graph, length: int) -> dict[str, Any]:
    """Return the entries of an encoder-decoder with sequences up to `length`: limits of its source, first and last
    tokens of answers. An answer begins with the token of decoder_start, else of bos, else of pad, else with token 0."""
    begin = graph.meta.get("begin_tokens")
    starts = (graph.meta.get(f"{name}_token_id") for name in ("decoder_start", "bos", "pad"))
    return {
        "max_source_length": limit_source(graph, length),
        **_list_sound(graph),
        "decoder_start_token_id": next((token for token in starts if token is not None), 0),
        **{name: graph.meta.get(name) for name in ("forced_bos_token_id", "forced_eos_token_id")},
        **({"begin_tokens": [{"any_of": tokens} for tokens in begin]} if begin else {}),
    }


def _list_sound(graph: Graph) -> dict[str, Any]:
    """Return the entry `sound`: name, bins and length (None if variable) of the graph's audio input; {} without one."""
    for name in SOUND:
        if name in graph.inputs:
            *bins, length = (n if isinstance(n, int) else None for n in graph.inputs[name].shape[1:])
            return {"sound": {"input": name, "bins": bins[0] if bins else None, "length": length}}
    return {}


def make_absolute(spec: str) -> str:
    """Return `spec`, PATH or FILE.py:NAME, with an absolute path if the path exists, else `spec`; links stay links."""
    file, colon, name = spec.rpartition(":")  # model.py:NAME
    path = expand_home(file if file.endswith(".py") else spec)
    if not path.exists():
        return spec
    return f"{path.absolute()}{colon}{name}" if file.endswith(".py") else str(path.absolute())


@contextlib.contextmanager
def hash_files(model: Model) -> Iterator[Callable[[], dict[str, str]]]:
    """Hash the files of `model` in a thread while the block runs; leaving the block stops the thread.

    Yield a function that waits for the hashes and returns them by file name. It raises WeftError if a file has changed
    since the model was read.
    """

    def result() -> dict[str, str]:
        hashes = task.result()
        model.check_unchanged()
        return hashes

    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(model.hashes, done.is_set)
        try:
            yield result
        finally:
            done.set()


@contextlib.contextmanager
def replace_with_provenance(model: Model, out: str | Path, card: bool = False) -> Iterator[Path]:
    """Yield a folder that replaces `out` when the block ends, with the tokenizer and provenance.json of `model`, and
    with `card` a README.md of it."""
    with replace_folder(Path(out), model.files) as folder, hash_files(model) as hashes:
        yield folder
        if model.tokenizer is not None:
            model.tokenizer(folder)
        record = build_provenance(model, hashes())
        if card:
            (folder / CARD).write_text(render_card(record), encoding="utf-8")
        write_manifest(folder, PROVENANCE, record)
