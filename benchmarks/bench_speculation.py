"""Compare greedy decode of SmolLM2-135M on a CPU with and without drafts by prompt lookup: tokens per second.

The contenders take turns in one process per target; ratios are computed within a round. Tokens must be equal. `code`
continues an edited copy of a Python file in the prompt, `table` a table; the others are chats: a summary of a text in
the prompt, and prose. `default` drafts as ONNX Runtime on a CPU does by default, 4 and 8 whatever it costs.

    python benchmarks/bench_speculation.py torch|ort-cpu [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import facts, save, spread
from smollm2 import GGUF, ROOT

CONTENDERS: dict[str, int | None] = {"0": 0, "default": None, "4": 4, "8": 8}  # tokens drafted at a time
TARGETS = {"torch": ("speculation_torch", "torch"), "ort-cpu": ("speculation", "onnxruntime")}  # result, package
ANSWER = 128
TEXTS = ("code", "table")  # the others are rendered as chats


def prompts() -> dict[str, str]:
    code = (ROOT / "benchmarks" / "turns.py").read_text(encoding="utf-8")
    code = code[code.index("def serve(") : code.index("    if not isinstance(run, ReadBandwidth)")]
    renamed = code.replace("prefill", "read_prompt").replace("turn(", "timed(")
    rows = [f"| item {i} | {i} | {i * i} | open |" for i in range(6)]
    header = "The same, prefill renamed to read_prompt, and turn to timed"
    return {
        "code": f"# Original\n{code}\n\n# {header}\n{renamed[:600]}",
        "table": "\n".join(["| name | number | square | state |", "|---|---|---|---|", *rows, "| item 6 | 6 |"]),
        "summary": f"Summarize this text:\n{(ROOT / 'LICENSE').read_text(encoding='utf-8')[2000:5000]}",
        "prose": "Tell me a short story about a lighthouse keeper and a storm.",
        "letter": "Write a letter to a friend about a walk in the mountains in autumn.",
        "explanation": "Explain how photosynthesis works, in plain words.",
    }


def measure(folder: Path, contenders: tuple[str, ...], rounds: int, threads: int) -> dict[str, Any]:
    """Return tokens per second of every contender in every round."""
    import weft

    model = weft.load(folder, device="cpu", threads=threads, trust=True)
    found: dict[str, Any] = {}
    for name, text in prompts().items():
        prompt = (
            model.tokenizer.encode(text) if name in TEXTS else model.chat_prompt([{"role": "user", "content": text}])
        )
        rates: dict[str, list[float]] = {count: [] for count in contenders}
        plain: list[int] = []
        for turn in range(rounds + 1):  # the first is a warm-up
            for count in contenders:
                (result,) = model.generate([prompt], max_tokens=ANSWER, prompt_lookup_num_tokens=CONTENDERS[count])
                if turn:
                    rates[count].append(result.timings.decode_rate)
                plain = plain or result.tokens
                assert result.tokens == plain, f"{name}, {count} drafted tokens: tokens differ"
                found.setdefault(name, {"prompt_tokens": len(prompt), "tokens": len(plain)})[count] = {
                    "drafted": result.timings.drafted_tokens,
                    "accepted": result.timings.accepted_tokens,
                }
        for count in contenders:
            found[name][count] |= {
                "tokens_per_second": round(statistics.median(rates[count]), 1),
                "over_none": spread([a / b for a, b in zip(rates[count], rates["0"], strict=True)]),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        contenders = tuple(name for name in CONTENDERS if args.target == "ort-cpu" or name != "default")
        print(json.dumps(measure(Path(args.child), contenders, args.rounds, args.threads)))
        return
    import weft

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / args.target
        weft.compile(GGUF, folder, target=args.target, max_length=2048)
        command = [sys.executable, __file__, args.target, "--child", str(folder), "--rounds", str(args.rounds)]
        done = subprocess.run([*command, "--threads", str(args.threads)], capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)
    for name, row in results.items():
        print(name, {c: (row[c]["tokens_per_second"], row[c]["over_none"]) for c in CONTENDERS if c in row})
    name, package = TARGETS[args.target]
    save(name, {**facts(package), "threads": args.threads, "results": results})


if __name__ == "__main__":
    main()
