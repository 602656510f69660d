"""The long run: `python -m tests.fuzz --inputs 20000 --seed 0 --out benchmarks/results/fuzz.json`.

`--only "gguf 17"` runs one input, and says what came of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from .harness import CLASSES, FORMATS, GOOD, Tally, Worker, fuzz
from .seeds import plant, write_configs

_shown: list[dict[str, object]] = []  # the bad outcomes that are printed
VERSIONS = ("numpy", "onnx", "onnxruntime", "safetensors", "gguf", "tokenizers", "click", "protobuf")


def main() -> int:
    """Return 1 if an input ended as none should."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the counts, as JSON")
    parser.add_argument("--corpus", type=Path, help="where the sound files are, or are to be kept")
    parser.add_argument("--formats", default=",".join(FORMATS), help="those to run; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--only", help="a format and a number")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-corpus-") as scratch:
        corpus = given.corpus or Path(scratch) / "corpus"
        if not corpus.exists():
            plant(corpus)
            write_configs(corpus / "configs")
        if given.only:
            with Worker(corpus, given.seed) as worker:
                kind, number = given.only.rsplit(" ", 1)
                print(json.dumps(worker.run(kind, int(number)), indent=1))
            return 0
        start = time.monotonic()
        tally = fuzz(corpus, given.seed, given.inputs, _tell, given.formats.split(","), given.jobs)
    took = time.monotonic() - start
    print(json.dumps(tally.totals()))
    if given.out is not None:
        given.out.write_text(
            json.dumps(_record(tally, given.seed, given.inputs, took), indent=1) + "\n", encoding="utf-8"
        )
    return int(any(n for name, n in tally.totals().items() if name not in GOOD))


def _tell(done: int, tally: Tally) -> None:
    for found in tally.bad[len(_shown) :]:
        print(json.dumps(found), flush=True)
        _shown.append(found)
    if done % 500 == 0:
        print(f"{done} inputs: {tally.totals()}", file=sys.stderr, flush=True)


def _record(tally: Tally, seed: int, count: int, seconds: float) -> dict[str, object]:
    return {
        "inputs": count,
        "seed": seed,
        "seconds": round(seconds),
        "slowest_seconds": round(tally.slowest, 1),
        "totals": tally.totals(),
        "by_format": {kind: {c: n[c] for c in CLASSES} for kind, n in sorted(tally.counts.items())},
        "machine": f"{platform.machine()}, {_processor()}",
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
