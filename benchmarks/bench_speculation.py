"""Compare greedy decode of SmolLM2-135M on a CPU with and without drafts by prompt lookup: tokens per second.

The contenders take turns in one process per target; ratios are computed within a round. Tokens must be equal. `code`
continues an edited copy of a Python file in the prompt, `table` a table, `prose` a story.

    python benchmarks/bench_speculation.py [--rounds 5] [--threads 2]
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

TARGETS = ("torch", "ort-cpu")
COUNTS = (0, 4, 8)  # tokens drafted at a time
ANSWER = 128
CHAT = "prose"  # the others are continued without a template


def prompts() -> dict[str, str]:
    code = (ROOT / "benchmarks" / "turns.py").read_text(encoding="utf-8")
    code = code[code.index("def serve(") : code.index("    if not isinstance(run, ReadBandwidth)")]
    renamed = code.replace("prefill", "read_prompt").replace("turn(", "timed(")
    rows = [f"| item {i} | {i} | {i * i} | open |" for i in range(6)]
    header = "The same, prefill renamed to read_prompt, and turn to timed"
    return {
        "code": f"# Original\n{code}\n\n# {header}\n{renamed[:600]}",
        "table": "\n".join(["| name | number | square | state |", "|---|---|---|---|", *rows, "| item 6 | 6 |"]),
        "prose": "Tell me a short story about a lighthouse keeper and a storm.",
    }


def measure(folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Return tokens per second of every contender in every round."""
    import weft

    model = weft.load(folder, device="cpu", threads=threads, trust=True)
    found: dict[str, Any] = {}
    for name, text in prompts().items():
        prompt = (
            model.chat_prompt([{"role": "user", "content": text}]) if name == CHAT else model.tokenizer.encode(text)
        )
        rates: dict[int, list[float]] = {count: [] for count in COUNTS}
        plain: list[int] = []
        for turn in range(rounds + 1):  # the first is a warm-up
            for count in COUNTS:
                (result,) = model.generate([prompt], max_tokens=ANSWER, prompt_lookup_num_tokens=count)
                if turn:
                    rates[count].append(result.timings.decode_rate)
                plain = plain or result.tokens
                assert result.tokens == plain, f"{name}, {count} drafted tokens: tokens differ"
                found.setdefault(name, {"prompt_tokens": len(prompt), "tokens": len(plain)})[str(count)] = {
                    "drafted": result.timings.drafted_tokens,
                    "accepted": result.timings.accepted_tokens,
                }
        for count in COUNTS:
            found[name][str(count)] |= {
                "tokens_per_second": round(statistics.median(rates[count]), 1),
                "over_none": spread([a / b for a, b in zip(rates[count], rates[0], strict=True)]),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(Path(args.child), args.rounds, args.threads)))
        return
    import weft

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for target in TARGETS:
            folder = Path(scratch) / target
            passes = "default" if target == "torch" else "default,-last-token-logits"
            weft.compile(GGUF, folder, target=target, passes=passes, max_length=2048)
            command = [sys.executable, __file__, "--child", str(folder), "--rounds", str(args.rounds)]
            done = subprocess.run(
                [*command, "--threads", str(args.threads)], capture_output=True, text=True, check=True
            )
            results[target] = json.loads(done.stdout)
            for name, row in results[target].items():
                print(target, name, {c: (row[c]["tokens_per_second"], row[c]["over_none"]) for c in map(str, COUNTS)})
    save("speculation", {**facts("torch", "onnxruntime"), "threads": args.threads, "results": results})


if __name__ == "__main__":
    main()
