"""SmolLM2-135M in fewer bits: what a text loses, what a folder weighs, how fast it decodes; weft beside its peers.

Everything starts from the same numbers: the GGUF for weft, the same weights as a Hugging Face folder for the model
builder of onnxruntime-genai. The file itself is Q4_1, so its weights lie on a grid of 4 bits, which flatters whoever
rounds them as they are; weft's `int4` rotates them first, which leaves that grid.

Quality: negative log-likelihood and KL divergence from the f32 model on texts/held_out.txt, which is no part of what
weft calibrates on, in windows of 256 tokens, each folder run by ONNX Runtime as its user would run it. Speed: prefill
of 512 tokens and decode of 128, contenders in turns as `turns` says.

    python benchmarks/bench_quantized.py [--tokens 6144] [--sets 4] [--rounds 2] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_speed import child
from machine import facts, save
from smollm2 import GGUF, ROOT, builder_command, hugging_face_folder
from turns import DECODE, PROMPT, compared, one_set

HELD_OUT = ROOT / "benchmarks" / "texts" / "held_out.txt"
WINDOW = 256
OURS = {
    "weft_int4": "int4",
    "weft_int4_64": "int4{group=64}",
    "weft_int4_rtn": "int4{method=rtn}",
    "weft_int8": "int8",
}
BUILDER = {"builder_int4": (), "builder_k_quant": ("algo_config=k_quant_mixed",)}


def prepare(work: Path) -> tuple[dict[str, Path], dict[str, Path], dict[str, float]]:
    """The folders that are scored (with logits of all positions) and those that are timed, and the seconds that making
    each took."""
    import weft
    from weft.frontends.api.rewriting import rewrite
    from weft.frontends.api.source.sources import load_source
    from weft.frontends.api.weights import weights_pipeline

    scored, timed, seconds = {}, {}, {}
    source = hugging_face_folder(GGUF, work / "hf")
    for name, weights in OURS.items():
        start = time.perf_counter()
        model = load_source(GGUF)
        quantized = rewrite(model, weights_pipeline(model.graph, weights))
        timed[name], scored[name] = work / name, work / f"{name}_all"
        weft.compile(quantized, timed[name], max_length=2048)
        seconds[name] = time.perf_counter() - start
        weft.compile(quantized, scored[name], max_length=2048, passes="default,-last-token-logits")
    for name, options in BUILDER.items():
        start = time.perf_counter()
        timed[name] = scored[name] = work / name
        command = builder_command(source, timed[name], *options)
        command[command.index("fp32")] = "int4"
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        seconds[name] = time.perf_counter() - start
    return scored, timed, seconds


def quality(folders: dict[str, Path], tokens: int) -> dict[str, Any]:
    """Scores by contender; the f32 model's under its own name."""
    import weft

    found = weft.evaluate(
        [str(folder) for folder in folders.values()],
        against=str(GGUF),
        text=HELD_OUT,
        tokens=tokens,
        context=WINDOW,
        device="cpu",
    )
    exact, *scores = found.scores
    assert exact.nll is not None
    rows: dict[str, Any] = {"f32": {"nll": round(exact.nll, 4), "bytes": exact.weight_bytes}}
    for name, score in zip(folders, scores, strict=True):
        assert score.nll is not None and score.kl is not None and score.kl_99 is not None
        rows[name] = {
            "loss": round(score.nll - exact.nll, 4),
            "kl": round(score.kl, 4),
            "kl_99": round(score.kl_99, 3),
            "agreement": round(score.agreement or 0, 4),
            "bytes": score.weight_bytes,
        }
    return {"tokens": found.tokens, "window": found.context, "scores": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--sets", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, folder, prompt_folder = args.child
        child(name, Path(folder), Path(prompt_folder), args.threads)
        return
    with tempfile.TemporaryDirectory() as work:
        scored, timed, seconds = prepare(Path(work))
        scores = quality(scored, args.tokens)
        print(scores, file=sys.stderr)
        runs = {name: str(folder) for name, folder in timed.items()}
        first = next(iter(OURS))
        results = [one_set(__file__, runs, args.rounds, args.threads, seed, first) for seed in range(args.sets)]
    speed = compared(results, list(OURS))
    machine = facts("onnxruntime", "onnxruntime-genai", "numpy")
    what = f"SmolLM2-135M, prompt {PROMPT}, decode {DECODE}, {args.threads} threads"
    save(
        "quantized",
        {
            "what": what,
            "machine": machine,
            "seconds": {name: round(s, 1) for name, s in seconds.items()},
            **scores,
            **speed,
        },
    )


if __name__ == "__main__":
    main()
