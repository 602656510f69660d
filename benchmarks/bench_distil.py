"""Measure how much of a rewrite's loss `weft distil` returns: SmolLM2-135M, rewritten in eight ways.

For each rewrite: the plain one, the one fitted to a text (where the pass can; quantization to 65,536 tokens of the
training text, others to texts/calibration.txt), and the fitted one distilled for at most --minutes. NLL and KL
divergence on READMEs of packages that no training text contains, and on a text of another domain (the manual of
Python); bytes of the cache per token, tokens per second, and the share of greedy tokens that are the original's, in
transformers, llama.cpp and ONNX Runtime. The training text is made of the READMEs of the packages installed next to
this Python (minus those of the held-out text), and the mixture that comes with weft.

    python tests/weights.py SmolLM2-135M-Instruct.Q4_1.gguf .cache/weights
    python benchmarks/bench_distil.py [REWRITE ...] [--minutes 60]
    python benchmarks/bench_distil.py --text data/ --tokens 100000000 --device cuda        on a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from machine import RESULTS, facts, save
from smollm2 import GGUF

import weft
from weft import DistilSettings, WeftError
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.source.sources import load_source
from weft.frontends.app.api.training.run_folder import RunFolder
from weft.frontends.formats.weft.model_folder import write_model
from weft.passes.fitting.calibration import MIXTURE

TEXTS = Path(__file__).parent / "texts"
HELD_OUT = {"transformers", "ml_dtypes", "tokenizers", "safetensors", "packaging"}  # packages in held_out.txt
CALIBRATION = 'calibration="texts/calibration.txt"'  # of the folder of this file
ROTATED, TEXT = "fold-norm-scale, rotate-residual, rotate-heads", 'calibration="TEXT", tokens=65536'
PIECE = 2000  # characters; pieces of both training texts alternate in what quantization is fitted to
CONTEXT, LONG = 256, 1024  # tokens of a window, and with windows of attention
REWRITES: dict[str, dict[str, str]] = {  # the pipeline without and with a fit to a text
    "1 KV head of 3": {
        "plain": "mha-to-gqa{kv_heads=1}",
        "fitted": f"mha-to-gqa{{kv_heads=1, method=svd, {CALIBRATION}}}",
    },
    "windows of 512 in 3 of 4 layers": {
        "plain": 'local-global{window=512, pattern="3:1"}',
        "fitted": 'sliding-window{size=512, keep_first=4, layers="local*3 + global"}',  # without a text
    },
    "feed-forward -25 %": {
        "plain": "prune-neurons{keep=0.75}",
        "fitted": f"prune-neurons{{keep=0.75, {CALIBRATION}}}",
    },
    "24 layers of 30": {"plain": 'prune-layers{layers="21-26"}'},
    "MLA with half the cache": {
        "plain": "compress-to-mla{rank=160, rotary=32}, mla-absorb",
        "fitted": f"compress-to-mla{{rank=160, rotary=32, {CALIBRATION}}}, mla-absorb",
    },
    "int4 without a grid": {
        "plain": "quantize{bits=4, method=rtn}",
        "fitted": f"{ROTATED}, quantize{{bits=4, {TEXT}}}",
    },
    "int3": {"plain": "quantize{bits=3, method=rtn}", "fitted": f"{ROTATED}, quantize{{bits=3, {TEXT}}}"},
    "3.3 bits per weight": {
        "plain": "quantize{budget=3.3}",  # fitted to the mixture, as in benchmarks/README.md
        "fitted": f"{ROTATED}, quantize{{budget=3.3, {TEXT}}}",
    },
}
PROMPTS = (
    "The capital of France is",
    "To install the package, run",
    "def fibonacci(n):",
    "Once upon a time there was a king who",
    "The most important property of a hash table is",
    "| name | type | default |",
    "In 1969, the first humans",
    "A neural network is",
)
NEW = 24  # greedy tokens per prompt
DECODED, ROUNDS = 128, 5  # tokens per measurement of speed, and measurements
SUMMARY = {"median": np.median, "least": np.min, "most": np.max}


def collect_readmes(out: Path) -> list[str]:
    """Write the descriptions of all installed packages except those of the held-out text; return their names."""
    texts = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"].replace("-", "_").lower()
        text = package.metadata.get_payload() or ""
        if name not in HELD_OUT and len(text) > 500:
            texts[name] = text
    out.write_text("\n\n".join(texts[name] for name in sorted(texts)), encoding="utf-8")
    return sorted(texts)


def alternate(first: str, second: str) -> str:
    """Return pieces of both texts in turn, until one ends."""
    ends = range(0, min(len(first), len(second)), PIECE)
    return "".join(text[i : i + PIECE] for i in ends for text in (first, second))


def score(variants: dict[str, Path], context: int, device: str) -> dict[str, Any]:
    """Return the scores of models against SmolLM2 on READMEs and on the manual of Python, by the name of the model."""
    with tempfile.TemporaryDirectory() as folder:
        manual = Path(folder) / "manual.txt"
        manual.write_text("\n".join(text for _, text in sorted(topics.items())), encoding="utf-8")
        found: dict[str, Any] = {name: {} for name in ("original", *variants)}
        for text in (TEXTS / "held_out.txt", manual):
            result = weft.evaluate(
                [str(path) for path in variants.values()],
                against=GGUF,
                text=text,
                tokens=6144,
                context=context,
                device=device,
            )
            for name, row in zip(found, result.scores, strict=True):
                found[name][text.stem] = {"nll": round(row.nll or 0, 4), "kl": round(row.kl or 0, 4)}
                found[name]["cache_bytes"] = row.cache_bytes
    return found


def generate_in_transformers(folder: Path) -> list[str]:
    """Return the greedy continuations of PROMPTS by the model in `folder`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", trust_remote_code=True)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=NEW, do_sample=False)
        texts.append(tokenizer.decode(made[0, ids.shape[1] :]))
    return texts


def generate(source: Path, work: Path) -> dict[str, list[str]]:
    """Return the greedy continuations of PROMPTS by ONNX Runtime, and by transformers and, if installed, llama.cpp,
    where they can have the model."""
    weft.compile(source, work / "onnx", target="ort-cpu")
    ours = weft.load(work / "onnx")
    texts = {"ort-cpu": [ours.generate(prompt, max_tokens=NEW)[0].text for prompt in PROMPTS]}
    with contextlib.suppress(WeftError):  # rotated weights in codes have no form there
        try:
            weft.export(source, work / "hf", weights="float")
        except WeftError:  # no class of transformers has this attention: with the model's code
            weft.compile(source, work / "hf", target="transformers")
        texts["transformers"] = generate_in_transformers(work / "hf")
    with contextlib.suppress(WeftError):  # no architecture of llama.cpp has this attention
        weft.export(source, work / "model.gguf")
    if importlib.util.find_spec("xllamacpp") and (work / "model.gguf").exists():
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_predict, params.warmup = str(work / "model.gguf"), 512, NEW, False
        server = xllamacpp.Server(params)
        texts["llama.cpp"] = []
        for prompt in PROMPTS:
            request = {"prompt": prompt, "temperature": 0, "max_tokens": NEW, "cache_prompt": False}
            texts["llama.cpp"].append(server.handle_completions(request)["choices"][0]["text"])
    return texts


def measure_speed(works: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return the tokens per second that ONNX Runtime decodes, for each of the models by turns: median, least, most."""
    models = {kind: weft.load(work / "onnx") for kind, work in works.items()}
    speeds: dict[str, list[float]] = {kind: [] for kind in models}
    for turn in range(ROUNDS + 1):  # the first warms up
        for kind, model in models.items():
            (answer,) = model.generate(PROMPTS[3], max_tokens=DECODED, prompt_lookup_num_tokens=0)
            if turn:
                speeds[kind].append(answer.timings.decode_rate)
    return {kind: {n: round(float(f(v)), 1) for n, f in SUMMARY.items()} for kind, v in speeds.items()}


def compute_agreement(texts: dict[str, list[str]], original: dict[str, list[str]]) -> dict[str, float]:
    """Return for each engine the share of the original's continuation that a model repeats, up to the first
    difference, in characters."""
    shares = {}
    for engine, own in texts.items():
        if engine in original:
            pairs = [(a, b) for a, b in zip(own, original[engine], strict=True) if b]
            same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b)) for a, b in pairs]
            shares[engine] = round(float(np.mean([n / len(b) for n, (_, b) in zip(same, pairs, strict=True)])), 3)
    return shares


def measure(name: str, args: argparse.Namespace, work: Path, text: Path) -> dict[str, Any]:
    """Return the scores of the variants of the rewrite `name`."""
    context = LONG if "windows" in name else CONTEXT
    folders, mixed = {}, work / "mixed.txt"
    if not mixed.exists():
        mixed.write_text(alternate(*(p.read_text(encoding="utf-8") for p in (text, MIXTURE))), encoding="utf-8")
    for kind, pipeline in REWRITES[name].items():
        folders[kind] = work / kind
        if not folders[kind].exists():
            pipeline = pipeline.replace("TEXT", str(mixed)).replace("texts/", f"{TEXTS}/")
            write_model(rewrite(load_source(GGUF), pipeline), folders[kind])
    settings = DistilSettings(
        minutes=args.minutes, tokens=args.tokens, batch=2048 // context, context=context, bf16=True
    )
    folders["distilled"], load = work / "run", os.getloadavg()[0]
    if not (folders["distilled"] / "best").exists():
        first, texts = folders.get("fitted", folders["plain"]), args.text or [text, MIXTURE]
        weft.distil(first, folders["distilled"], settings, against=GGUF, text=texts, device=args.device)
    last = RunFolder(folders["distilled"]).read_log()[-1]
    facts = {name: round(last[name]) for name in ("step", "tokens", "seconds")} | {"load": round(load, 1)}
    result = score(folders, context, args.device)
    with tempfile.TemporaryDirectory(dir=work) as engines:  # 6 GB
        works = {kind: Path(engines) / kind for kind in result}
        texts = {kind: generate(folders.get(kind, GGUF), works[kind]) for kind in result}
        for kind, speeds in measure_speed(works).items():
            result[kind]["tokens_per_second"] = speeds
            if kind in folders:
                result[kind]["agreement"] = compute_agreement(texts[kind], texts["original"])
    return {"pipelines": REWRITES[name], "context": context, "distillation": facts, "scores": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rewrites", nargs="*", default=list(REWRITES), help="rewrites to measure; results of others stay"
    )
    parser.add_argument("--minutes", type=float, default=60, help="time limit of each distillation")
    parser.add_argument("--tokens", type=int, help="tokens to train on, instead")
    parser.add_argument("--text", action="append", help="another training text; may be repeated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, help="folder for the models; those that it has are used again")
    args = parser.parse_args()
    args.minutes = None if args.tokens else args.minutes
    path = RESULTS / "distil.json"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "readmes.txt"
        packages = collect_readmes(text)
        for name in args.rewrites:
            work = (args.work or Path(folder)) / name.replace(" ", "-")
            work.mkdir(parents=True, exist_ok=True)
            result = {"machine": facts("torch", "accelerate"), "packages": len(packages)} | measure(
                name, args, work, text
            )
            previous = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            save("distil", previous | {name: result})


if __name__ == "__main__":
    main()
