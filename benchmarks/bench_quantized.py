"""Compare SmolLM2-135M in fewer bits by weft and its peers: quality on a text, size and speed.

All start from the same weights: a Hugging Face folder for weft and the model builder of onnxruntime-genai, a GGUF in
f32 for llama.cpp. They come from a Q4_1 GGUF, so they are exactly representable in 4 bits; that favours methods that
round without changes, most of all Q4_1. weft's `int4` recognizes this layout in the floats and recovers the codes of
the GGUF; contenders with a method rotate the weights first, so that they are like weights that were never quantized.

Quality: negative log-likelihood and KL divergence from the f32 model on texts/held_out.txt, which nobody calibrates on,
in windows of 256 tokens. ONNX Runtime runs ONNX folders as for users; of llama.cpp's files the weights are scored,
in f32 arithmetic. The importance matrix of llama.cpp and weft's codes are fitted to the same text, which ships with
weft. MiniLM: the mean cosine between embeddings, line by line.

Speed: prefill of 512 tokens and decode of 128, in turns (`turns`); weft's folders in weft's runtime, the builder's in
the loop of bench_speed.py, and two of weft's in that loop as well (`_graph`).

    python benchmarks/bench_quantized.py [--tokens 6144] [--sets 4] [--rounds 2] [--threads 2]
        [--llama-cpp BUILD] [--work DIR] [--only NAME,NAME]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_speed
from llamacpp import LlamaCppRun, quantize
from machine import RESULTS, facts, save
from smollm2 import GGUF, ROOT, builder_command, hugging_face_folder
from turns import DECODE, PROMPT, build_parser, compare, run_sets, serve

from weft.backends.viz.formats.chart import ChartModel, render_chart

HELD_OUT = ROOT / "benchmarks" / "texts" / "held_out.txt"
MINILM = ROOT / ".cache" / "weights" / "all-MiniLM-L6-v2"
WINDOW = 256
OURS = {
    "weft_int4_gguf": "int4",  # from the GGUF, the others from the folder
    "weft_int4": "int4",
    "weft_int4_gptq": "int4{method=gptq}",
    "weft_int4_gptq_64": "int4{method=gptq, group=64}",
    "weft_int4_rtn": "int4{method=rtn}",
    "weft_int8": "int8{method=rtn}",
    "weft_int8_scaled": "scale-channels{bits=8}, quantize{bits=8, method=rtn}",
    "weft_int8_gptq": "int8{method=gptq}",
    "weft_3.3_bits": "int4{budget=3.3}",
}
PIPELINES = {OURS["weft_int8_scaled"]}  # what `int8` does with weights that are not representable exactly
BUILDER = {"builder_int4": (), "builder_k_quant": ("algo_config=k_quant_mixed",)}
TIMED = ("weft_int4", "weft_int4_gptq", "weft_int4_gptq_64", "weft_int8")
GRAPHS = ("weft_int4", "weft_int4_gptq")  # also timed in the loop of the builder's graph


def prepare(
    work: Path, llama_cpp: str | None, only: set[str]
) -> tuple[dict[str, Path], dict[str, Path], dict[str, float]]:
    """Write the models to score (folders with logits of all positions, GGUF files) and to time; return both by
    contender, and the seconds of each. `only` names the contenders, if not all."""
    import weft
    from weft.frontends.app.api.rewrite import rewrite
    from weft.frontends.app.api.source.sources import load_source
    from weft.frontends.app.api.weights import expand_weights
    from weft.passes.fitting.calibration import MIXTURE

    scored, timed, seconds = {}, {}, {}
    source = hugging_face_folder(GGUF, work / "hf")
    for name, weights in OURS.items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        model = load_source(GGUF if name.endswith("_gguf") else source)
        passes = weights if weights in PIPELINES else expand_weights(model.graph, weights)
        rewritten = rewrite(model, passes)
        if name in TIMED:
            timed[name] = work / name
            weft.compile(rewritten, timed[name], max_length=2048)
        if name in GRAPHS:
            timed[f"{name}_graph"] = timed[name]
        scored[name] = work / f"{name}_all"
        weft.compile(rewritten, scored[name], max_length=2048, passes="default,-last-token-logits")
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {seconds[name]:.0f} s", file=sys.stderr)
    for name, more in BUILDER.items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        timed[name] = scored[name] = work / name
        command = builder_command(source, timed[name], *more)
        command[command.index("fp32")] = "int4"
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        seconds[name] = time.perf_counter() - start
    if llama_cpp is not None:
        floats = work / "f32.gguf"
        weft.export(GGUF, floats, dtype="f32", weights="float")
        files, durations = quantize(Path(llama_cpp), floats, MIXTURE, work)
        files = {name: file for name, file in files.items() if not only or name in only}
        scored |= files
        timed |= {name: file for name, file in files.items() if not name.endswith("_imatrix")}
        seconds |= durations
    return scored, timed, seconds


def score_models(models: dict[str, Path], tokens: int) -> dict[str, Any]:
    """Return the scores of all contenders and of the f32 model by name."""
    import weft

    names = [str(model) for model in models.values()]
    evaluation = weft.evaluate(names, against=str(GGUF), text=HELD_OUT, tokens=tokens, context=WINDOW, device="cpu")
    exact, *scores = evaluation.scores
    assert exact.nll is not None
    rows: dict[str, Any] = {"f32": {"nll": round(exact.nll, 4), "bytes": exact.weight_bytes}}
    for (name, model), score in zip(models.items(), scores, strict=True):
        assert score.nll_loss is not None and score.kl is not None and score.kl_99 is not None
        assert score.agreement is not None
        rows[name] = {
            "loss": round(score.nll_loss, 4),
            "kl": round(score.kl, 4),
            "kl_99": round(score.kl_99, 3),
            "agreement": round(score.agreement, 4),
            "bytes": model.stat().st_size if model.is_file() else score.weight_bytes,
            # The score of a GGUF file is that of its weights in f32.
            "bits_of_linear_maps": None if score.bits is None or model.is_file() else round(score.bits, 3),
        }
    return {"tokens": evaluation.tokens, "window": evaluation.context, "scores": rows}


def score_minilm() -> dict[str, float]:
    """Return the mean cosine between embeddings of MiniLM in f32 and in fewer bits."""
    import weft

    evaluation = weft.evaluate((), against=str(MINILM), weights=("int8", "int4"), text=HELD_OUT, device="cpu")
    return {score.name: round(score.cosine, 6) for score in evaluation.scores[1:] if score.cosine is not None}


def draw_chart(evaluation: dict[str, Any]) -> None:
    """Draw the scores as a chart of quality against size, results/quantized.svg."""
    candidates = [
        ChartModel(
            name,
            score["bytes"],
            score.get("kl"),
            {},
            {},
            f"KL {score.get('kl', 0):.4f} · NLL {score.get('loss', 0):+.4f}",
        )
        for name, score in evaluation["scores"].items()
    ]
    about = f"{evaluation['tokens']:,} tokens of {HELD_OUT.name}, in windows of {evaluation['window']}"
    measure = "KL divergence from the original, in nats"
    (RESULTS / "quantized.svg").write_bytes(
        render_chart(".svg", "SmolLM2-135M in fewer bits", about, measure, candidates)
    )


def child(name: str, model: Path, prompt_folder: Path, threads: int) -> None:
    """Run a contender's process."""
    if name.startswith("llamacpp"):
        serve(LlamaCppRun(model, threads, PROMPT + DECODE), prompt_folder)
    else:
        bench_speed.child(name, model, prompt_folder, threads)


def main() -> None:
    parser = build_parser(__doc__, sets=4)
    parser.add_argument("--tokens", type=int, default=6144, help="of text to score; 0: no scores")
    parser.add_argument("--work", help="a folder for models and scores, from which another run continues")
    parser.add_argument("--only", default="", help="names of contenders, separated by commas")
    parser.add_argument("--llama-cpp", help="the folder of a build of llama.cpp with its tools and library")
    args = parser.parse_args()
    if args.child:
        name, model, prompt_folder = args.child
        child(name, Path(model), Path(prompt_folder), args.threads)
        return
    if args.llama_cpp:
        os.environ["LLAMA_CPP_LIB_PATH"] = args.llama_cpp
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(args.work or scratch)
        done = work / "measured.json"
        if not done.exists():
            work.mkdir(parents=True, exist_ok=True)
            only = {name.strip() for name in args.only.split(",") if name.strip()}
            scored, timed, seconds = prepare(work, args.llama_cpp, only)
            if unknown := only - scored.keys():
                parser.error(f"--only: no contender {', '.join(sorted(unknown))}")
            measured: dict[str, Any] = {"seconds": {name: round(s, 1) for name, s in seconds.items()}}
            if args.tokens:
                measured |= {**score_models(scored, args.tokens), "minilm_cosine": score_minilm()}
            done.write_text(json.dumps([measured, {name: str(model) for name, model in timed.items()}]))
        measured, runs = json.loads(done.read_text())
        print(json.dumps(measured, indent=2), file=sys.stderr)
        if not args.sets:
            return
        results = run_sets(__file__, runs, args, prompts=next(name for name in TIMED if name in runs))
    if args.tokens and not args.only:
        draw_chart(measured)
    packages = ["onnxruntime", "onnxruntime-genai", "numpy", *(["llama-cpp-python"] if args.llama_cpp else [])]
    what = f"SmolLM2-135M, prompt {PROMPT}, decode {DECODE}, {args.threads} threads"
    save(
        "quantized",
        {
            "what": what,
            "machine": facts(*packages),
            **measured,
            **compare(results, [name for name in (*TIMED, *(f"{name}_graph" for name in GRAPHS)) if name in runs]),
        },
    )


if __name__ == "__main__":
    main()
