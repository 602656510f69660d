"""Measure SmolLM2-135M in 4 and 8 bits in transformers.js: folders of target web, and of optimum's exporter.

The peers are quantized as transformers.js's own script does it: q4 by MatMulNBits in groups of 32, q8 by dynamic
quantization. Each folder generates in Node, and in Chromium by the page that target web writes, on two threads; folders
take turns. Ratios are computed within a round. `make test-engines` installs what this needs.

    python benchmarks/bench_web.py [--rounds 3] [--tokens 64]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from machine import facts, save, spread
from playwright.sync_api import Browser, sync_playwright
from smollm2 import GGUF, ROOT

import weft

MODULES = ROOT / "build" / "node" / "node_modules"
PROMPT = "Tell me a long story about a fox, a crow and a piece of cheese. Begin with the morning on which they met."
SCRIPT = """
const [modules, folder, tokens, prompt] = process.argv.slice(1);
const library = await import(modules + "/@huggingface/transformers/dist/transformers.node.mjs");
library.env.allowRemoteModels = false;
library.env.localModelPath = folder.replace(/[^/]*$/, "");
const name = folder.split("/").pop(), begin = performance.now();
const tokenizer = await library.AutoTokenizer.from_pretrained(name);
const options = {session_options: {intraOpNumThreads: 2}};
const model = await library.AutoModelForCausalLM.from_pretrained(name, options);
const loaded = performance.now();
const chat = [{role: "user", content: prompt}];
const inputs = tokenizer.apply_chat_template(chat, {add_generation_prompt: true, return_dict: true});
let first = 0, count = 0;
const streamer = {put() { if (count++ === 1) first = performance.now(); }, end() {}};
await model.generate({...inputs, max_new_tokens: +tokens, min_new_tokens: +tokens, do_sample: false, streamer});
const seconds = (performance.now() - first) / 1000;
console.log(JSON.stringify([(loaded - begin) / 1000, (first - loaded) / 1000, (count - 2) / seconds]));
process.exit(0);
"""


EXPORT = """
import sys
from optimum.exporters.onnx import main_export
main_export(sys.argv[1], output=sys.argv[2], task="text-generation-with-past", do_validation=False)
"""
QUANTIZE = """
import sys, importlib, onnx
tools = importlib.import_module("onnxruntime.quantization")
source, folder, precision = sys.argv[1:]
if precision == "q4":
    nbits = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, folder + "/model_q4.onnx")
else:
    tools.quantize_dynamic(source, folder + "/model_quantized.onnx", weight_type=tools.QuantType.QInt8)
"""


def run_peer(code: str, *arguments: str | Path) -> None:
    """Run Python code with optimum and its transformers."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "build" / "optimum"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, env=env, cwd=ROOT / "build", capture_output=True)


def build(folder: Path) -> dict[str, Path]:
    """Write the folders into `folder`; return them by name."""
    folders = {name: folder / name for name in ("weft_q4", "weft_q8", "optimum_q4", "optimum_q8")}
    for precision in ("q4", "q8"):
        options = {"precisions": precision, "javascript": str(MODULES)}
        weft.compile(GGUF, folders[f"weft_{precision}"], target="web", **options)
    exported, source = folder / "exported", folder / "source"
    weft.export(GGUF, source, dtype="f32", weights="float")
    run_peer(EXPORT, source, exported)
    for precision in ("q4", "q8"):
        out = folders[f"optimum_{precision}"]
        # The page and its settings are those of weft's folder.
        shutil.copytree(folders[f"weft_{precision}"], out, ignore=shutil.ignore_patterns("onnx"))
        (out / "onnx").mkdir()
        run_peer(QUANTIZE, exported / "model.onnx", out / "onnx", precision)
        config = json.loads((out / "config.json").read_text("utf-8"))
        config["transformers.js_config"] = {"dtype": precision}
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folders


class _Handler(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the files of `folder`; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def measure_node(folder: Path, tokens: int) -> list[float]:
    """Return seconds to load, seconds to the first token, and tokens per second after it."""
    command = ["node", "--input-type=module", "-e", SCRIPT, str(MODULES), str(folder), str(tokens), PROMPT]
    values: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return values


def measure_page(browser: Browser, folder: Path, tokens: int) -> list[float]:
    """Return the same of the page in WebAssembly."""
    with serve(folder) as address:
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(f"{address}?device=wasm&threads=2")
        page.wait_for_function("!document.querySelector('#text').disabled")
        load = float(page.evaluate("performance.now()")) / 1000
        page.fill("#tokens", str(tokens))
        page.fill("#text", PROMPT)
        page.keyboard.press("Enter")
        page.wait_for_function("!document.querySelector('#send').disabled")
        first, speed = re.findall(r"[\d.]+", page.inner_text("#status"))[1:3]
        page.close()
    return [load, float(first), float(speed.rstrip("."))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    results: dict[str, dict[str, list[list[float]]]] = {"node": {}, "chromium": {}}
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folders = build(Path(scratch))
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(args.rounds):
            for name, folder in folders.items():
                results["node"].setdefault(name, []).append(measure_node(folder, args.tokens))
                results["chromium"].setdefault(name, []).append(measure_page(browser, folder, args.tokens))
                print(name, {place: rows[name][-1] for place, rows in results.items()}, flush=True)
        version = browser.version
        browser.close()
        sizes = {name: sum(f.stat().st_size for f in (p / "onnx").iterdir()) for name, p in folders.items()}
    names = ("load_seconds", "first_token_seconds", "tokens_per_second")
    table = {
        place: {
            name: {key: spread([row[i] for row in rows]) for i, key in enumerate(names)} for name, rows in of.items()
        }
        for place, of in results.items()
    }
    ratios = {
        f"{place} {precision}": spread(
            [
                ours[2] / theirs[2]
                for ours, theirs in zip(of[f"weft_{precision}"], of[f"optimum_{precision}"], strict=True)
            ]
        )
        for place, of in results.items()
        for precision in ("q4", "q8")
    }
    package = json.loads((MODULES / "@huggingface/transformers/package.json").read_text("utf-8"))
    versions = {"transformers.js": package["version"], "chromium": version}
    save("web", {**facts(), **versions, "model_bytes": sizes, "speed_ratios": ratios, "measured": table})


if __name__ == "__main__":
    main()
