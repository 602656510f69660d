"""Folders with a page that runs their model in a browser: index.html, and worker.js for the model.

Never here: computations of a model; the layout of its files (hub_layout.py).
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.storage.documents import Record, read_json, write_json

from ...options import Options
from ...target import Backend
from ..hub_layout import TOKENIZER, HubFolder

VERSION = "4.3.2"  # of transformers.js, in which weft's tests open these folders
CDN = f"https://cdn.jsdelivr.net/npm/@huggingface/transformers@{VERSION}/dist/transformers.min.js"
LOADER, PAGE = "loader.js", ("index.html", "worker.js")
SCRIPTS = "javascript"  # the folder of copied scripts
WASM = "ort-wasm-simd-threaded.asyncify"  # ONNX Runtime with WebAssembly and WebGPU, which transformers.js loads
# Classes of tokenizers from which transformers.js returns token types; their rules are in tokenizer.json.
TYPED = r"(Bert|Albert|ConvBert|Deberta|DebertaV2|Electra|Herbert|MobileBert|RoFormer|SqueezeBert|XLM)Tokenizer(Fast)?"
# Threads need these headers. Netlify and Cloudflare Pages read them from a file of this name; others have settings.
HEADERS = "/*\n  Cross-Origin-Opener-Policy: same-origin\n  Cross-Origin-Embedder-Policy: require-corp\n"


class WebFolder(HubFolder):
    """The models and the page of a folder; without a tokenizer, no page. With the option javascript the page
    needs no other server. Raises WeftError as `HubFolder` does, and if the folder of that option lacks a script."""

    def __init__(
        self, forms: Mapping[str, Graph], target: Backend, length: int, options: Options, notes: list[str]
    ) -> None:
        self._scripts = _find_scripts(Path(text)) if (text := getattr(options, "javascript", "")) else []
        super().__init__(forms, target, length, options, notes)
        self._notes = notes

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        super().write(folder, step)
        if (folder / LOADER).is_file():  # the model in another precision wrote the rest
            return
        shutil.copyfile(Path(__file__).with_name(LOADER), folder / LOADER)
        if not (folder / "tokenizer.json").is_file():
            self._notes.append("the model has no tokenizer, so the folder has no page")
            return
        if not self._scripts:
            self._notes.append(f"the page loads transformers.js {VERSION} from cdn.jsdelivr.net; see --javascript")
        for name in PAGE:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
        (folder / "_headers").write_text(HEADERS, encoding="utf-8")
        for script in self._scripts:
            (folder / SCRIPTS).mkdir(exist_ok=True)
            copy = folder / SCRIPTS / script.name
            if script.suffix == ".wasm":  # a quarter of the size
                copy.with_name(f"{copy.name}.gz").write_bytes(gzip.compress(script.read_bytes(), mtime=0))
            else:
                shutil.copyfile(script, copy)

    def find_cache_refusal(self) -> str | None:
        return None  # transformers.js reads sizes from the model; loader.js keeps other states

    def complete_tokenizer(self, folder: Path) -> None:
        super().complete_tokenizer(folder)
        path = folder / TOKENIZER
        if path.is_file() and "token_type_ids" in self._graph.inputs:
            config = read_json(path)
            if not re.fullmatch(TYPED, str(config.get("tokenizer_class", ""))):
                rules = read_json(folder / "tokenizer.json").get("normalizer") or {}
                cases = {"do_lower_case": rules["lowercase"]} if "lowercase" in rules else {}
                write_json(path, config | {"tokenizer_class": "BertTokenizer"} | cases)

    def describe(self) -> dict[str, Any]:
        library = f"./{SCRIPTS}/{self._scripts[0].name}" if self._scripts else CDN
        return super().describe() | {"library": library, "wasm": f"{WASM}.wasm.gz" if self._scripts else None}


def _find_scripts(modules: Path) -> list[Path]:
    """Return the paths of transformers.js and ONNX Runtime's files in the node_modules folder `modules`. Raises
    WeftError if one is missing, or transformers.js has another version than the page is for."""
    package = modules / "@huggingface" / "transformers"
    advice = f"run `npm install --ignore-scripts @huggingface/transformers@{VERSION}` next to it"
    if not (package / "package.json").is_file():
        raise WeftError(f"{modules} has no @huggingface/transformers: {advice}")
    if (version := Record.read(package / "package.json").text("version")) != VERSION:
        raise WeftError(f"{package} has version {version}, but the page is for {VERSION}: {advice}")
    runtime = modules / "onnxruntime-web" / "dist"
    files = [package / "dist" / "transformers.min.js", *(runtime / f"{WASM}.{end}" for end in ("mjs", "wasm"))]
    for file in files:
        if not file.is_file():
            raise WeftError(f"{file} is missing: {advice}")
    return files
