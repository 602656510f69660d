"""Compare the methods of mha-to-gqa, which reduces key and value heads without training, on held-out text.

SmolLM2-135M (rotary, 3 KV heads to 1): negative log-likelihood of held-out text in windows of 96 tokens. MiniLM (no
rotary, biases, 12 heads to 6 and 1): cosine between the embeddings of its lines before and after.

    python tests/weights.py SmolLM2-135M-Instruct.Q4_1.gguf .cache/weights
    python tests/weights.py all-MiniLM-L6-v2 .cache/weights
    python benchmarks/bench_heads.py [MODEL ...] [--tokens 4096]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import RESULTS, facts, save
from smollm2 import GGUF

import weft
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.source.sources import load_source

CALIBRATION, HELD_OUT = (Path(__file__).parent / "texts" / f"{name}.txt" for name in ("calibration", "held_out"))
HEADS = {GGUF.name: (1,), "all-MiniLM-L6-v2": (6, 1)}  # remaining KV heads
CONTEXT = 96  # tokens of a window, at most of a line
METHODS = {
    "first": "method=first",
    "mean": "method=mean",
    "svd of weights": "method=svd",
    "svd on a text": f"method=svd, calibration={json.dumps(str(CALIBRATION))}",
}


def score(model: Path, heads: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """Return scores of the original and its conversions on the held-out text, and seconds per conversion."""
    original, conversions, seconds = load_source(model), [], {}
    for count in heads:
        for name, method in METHODS.items():
            start = time.perf_counter()
            converted = rewrite(original, f"mha-to-gqa{{kv_heads={count}, {method}}}")
            conversions.append(replace(converted, description=f"{count} KV head{'s' * (count > 1)}, {name}"))
            seconds[conversions[-1].description] = round(time.perf_counter() - start, 1)
    result = weft.evaluate(
        conversions, against=replace(original, description="original"), text=HELD_OUT, tokens=tokens, context=CONTEXT
    )
    rows = {}
    for row in result.scores:
        kinds = ("nll", "kl", "agreement", "cosine")
        values = {kind: round(v, 4) for kind in kinds if (v := getattr(row, kind)) is not None}
        rows[row.name] = values | {"cache_bytes_per_token": row.cache_bytes, "seconds": seconds.get(row.name)}
    return {"tokens": result.tokens, "context": result.context, "scores": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(HEADS), help="models to measure; results of others stay")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens to read")
    args = parser.parse_args()
    for model in args.models:
        result = {"machine": facts("numpy", "onnxruntime")} | score(GGUF.with_name(model), HEADS[model], args.tokens)
        path = RESULTS / "heads.json"
        previous = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        save("heads", previous | {model: result})


if __name__ == "__main__":
    main()
