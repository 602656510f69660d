"""Fewer key and value heads without training: what each method of mha-to-gqa costs on a text that it has not seen.

SmolLM2-135M (rotary, 3 KV heads to 1): negative log-likelihood of held-out text in windows of 96 tokens. MiniLM (no
rotary, biases, 12 heads to 6, 3 and 1): cosine between the embeddings of its lines before and after.

    python tests/weights.py SmolLM2-135M-Instruct.Q4_1.gguf .cache/weights
    python tests/weights.py all-MiniLM-L6-v2 .cache/weights
    python benchmarks/bench_heads.py [--tokens 6144]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from machine import facts, save
from smollm2 import GGUF

import weft

TEXTS = Path(__file__).parent / "texts"
METHODS = {
    "first": "method=first",
    "mean": "method=mean",
    "svd of weights": "method=svd",
    "svd on a text": f"method=svd, calibration={str(TEXTS / 'calibration.txt')!r}".replace("'", '"'),
}


def scores(model: Path, heads: tuple[int, ...], tokens: int, context: int) -> dict[str, Any]:
    """What the original and its conversions score on the held-out text, and how long converting on a text takes."""
    pipelines = {
        f"{count} KV heads, {name}": f"mha-to-gqa{{kv_heads={count}, {method}}}, default"
        for count in heads
        for name, method in METHODS.items()
    }
    start = time.perf_counter()
    weft.run_passes(weft.load_source(model).graph, list(pipelines.values())[-1])
    seconds = time.perf_counter() - start
    found = weft.evaluate(
        against=model, text=TEXTS / "held_out.txt", rewrites=pipelines, tokens=tokens, context=context
    )
    rows = {}
    for score in found.scores:
        kinds = ("nll", "kl", "agreement", "cosine")
        values = {kind: round(v, 4) for kind in kinds if (v := getattr(score, kind)) is not None}
        rows[score.name] = values | {"cache_bytes_per_token": score.cache_bytes}
    return {"tokens": found.tokens, "context": found.context, "conversion_seconds": round(seconds, 1), "scores": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6144, help="held-out tokens that are read")
    given = parser.parse_args()
    result = {
        "machine": facts("numpy", "onnxruntime"),
        "SmolLM2-135M": scores(GGUF, (1,), given.tokens, 96),
        "all-MiniLM-L6-v2": scores(GGUF.with_name("all-MiniLM-L6-v2"), (6, 3, 1), given.tokens, 96),
    }
    save("heads", result)


if __name__ == "__main__":
    main()
