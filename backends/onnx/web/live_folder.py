"""Folders with a model that a live page asks: one call reads a text, returns values inside and scales parts.

The model is the result of the passes ablate and expose, without caches. live.json describes it for the page, and
live.js runs it.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.storage.documents import Record, write_json
from weft.passes.analysis.costs import count_parameters

from ...options import Options
from ...target import Backend
from .. import export
from ..onnx_folder import OnnxFolder

# As transformers.js 4.3.2 requires them; `npm install` puts both next to it.
PACKAGES = {"onnxruntime-web": "1.31.0-dev.20260914-8d85527a0", "@huggingface/tokenizers": "0.2.0"}
RUNTIME, WASM, TOKENIZERS = (
    "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "@huggingface/tokenizers/dist/tokenizers.min.mjs",
)
WORKER, MODEL, SCRIPTS = "live.js", "model.onnx", "javascript"
MOST_BYTES = 2_000_000_000  # of a data file: browsers cannot hold 2 GiB in one buffer


class LiveFolder(OnnxFolder):
    """The model, its description and the scripts that run it; arguments as of `OnnxFolder`. Raises WeftError as it
    does, and if the folder of the option javascript lacks a package or has another version."""

    def __init__(
        self, forms: Mapping[str, Graph], target: Backend, length: int, options: Options, notes: list[str]
    ) -> None:
        self._modules = Path(text) if (text := getattr(options, "javascript", "")) else None
        if self._modules is not None:
            _check_packages(self._modules)
        self._graph, self._length = forms[""], length
        super().__init__(forms, target, length, options, notes)

    def list_notes(self, graph: Graph) -> list[str]:
        return [] if self._modules else ["the page loads onnxruntime-web from cdn.jsdelivr.net; see --javascript"]

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write the model, live.json, live.js, and the scripts that it loads if they are at hand."""
        data = export.write_models(self._models, folder, step, f"{MODEL}_data", MOST_BYTES)
        shutil.copyfile(Path(__file__).with_name(WORKER), folder / WORKER)
        runtime, wasm, tokenizers = (self._copy_script(folder, file) for file in (RUNTIME, WASM, TOKENIZERS))
        meta = self._graph.meta
        description = {
            "name": self._graph.name,
            "kind": meta.get("kind"),
            "parameters": count_parameters(self._graph),
            "vocabulary": meta.get("vocab"),
            "labels": meta.get("labels") or [],
            "stops": meta.get("eos_token_ids") or [],
            "context": min(self._length, meta.get("context") or self._length),
            "model": MODEL,
            "data": data,
            "runtime": runtime,
            "wasm": wasm,
            "tokenizers": tokenizers if (folder / "tokenizer.json").is_file() else None,
        }
        write_json(folder / "live.json", description)

    def _copy_script(self, folder: Path, file: str) -> str:
        """Copy a script into `folder`, WebAssembly compressed; return its address for the page."""
        if self._modules is None:
            package = next(name for name in PACKAGES if file.startswith(f"{name}/"))
            return f"https://cdn.jsdelivr.net/npm/{package}@{PACKAGES[package]}{file.removeprefix(package)}"
        (folder / SCRIPTS).mkdir(exist_ok=True)
        script, copy = self._modules / file, folder / SCRIPTS / Path(file).name
        if script.suffix != ".wasm":
            shutil.copyfile(script, copy)
            return f"./{SCRIPTS}/{copy.name}"
        copy.with_name(f"{copy.name}.gz").write_bytes(gzip.compress(script.read_bytes(), mtime=0))
        return f"./{SCRIPTS}/{copy.name}.gz"


def _check_packages(modules: Path) -> None:
    advice = "run `npm install --ignore-scripts @huggingface/transformers@4.3.2` next to it"
    for package, version in PACKAGES.items():
        if not (modules / package / "package.json").is_file():
            raise WeftError(f"{modules} has no {package}: {advice}")
        if (present := Record.read(modules / package / "package.json").text("version")) != version:
            raise WeftError(f"{modules / package} has version {present}, but the page is for {version}: {advice}")
