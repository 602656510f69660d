"""Kill commands at random moments: `python -m tests.fuzz.kills --kills 240 --out benchmarks/results/kills.json`.

After each SIGKILL the result must be the older or the new one, whole by its checksums, and the next run must say what
was left behind and remove it. Then a process reads a folder again and again while it is replaced: it never misses it.
Commands run in forked children of a process that has everything imported, so that the kills fall on the work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from weft.frontends.app.cli import cli
from weft.ir.storage import check_contents
from weft.ir.storage.contents import MANIFESTS, hash_file
from weft.ir.storage.partials import PARTIAL, SCRATCH

MODEL = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP({hidden}), RMSNorm())
model = Decoder(vocab=4000, dim=64, layers=4, block=block, context=64)
"""
COMMANDS: dict[str, tuple[str, Sequence[str]]] = {  # what is written, and the command between source and -o
    "compile": ("out", ["compile", "{source}"]),
    "compile torch": ("torch", ["compile", "{source}", "--target", "torch"]),
    "opt": ("opt", ["opt", "{source}", "-p", "pack-qkv"]),
    "export hf": ("hf", ["export", "{source}"]),
    "export gguf": ("model.gguf", ["export", "{source}", "--format", "gguf"]),
    "viz": ("page.html", ["viz", "{source}"]),
    "gallery": ("gallery.html", ["gallery", "{source}"]),
}


class Broken(Exception):
    """Violation of a guarantee."""


class Workplace:
    """A folder with two versions of a model, and the results of every command on both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        self.whole: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        for version in range(2):
            (folder / f"model{version}.py").write_text(MODEL.format(hidden=128 + 64 * version), encoding="utf-8")
        for name in COMMANDS:
            run(self.arguments(name, 0))  # here, so that children find everything imported
            self.whole[name] = []
            for version in range(2):
                start = time.monotonic()
                if status := self.finish(self.start(name, version)):
                    raise Broken(f"{name} ends with status {status}: {self.log()}")
                self.seconds[name] = time.monotonic() - start
                self.whole[name].append(self.state(name))

    def arguments(self, name: str, version: int) -> list[str]:
        out, command = COMMANDS[name]
        return [*(a.format(source=self.folder / f"model{version}.py") for a in command), "-o", str(self.folder / out)]

    def start(self, name: str, version: int) -> int:
        """Run a command in a child, its output in a file."""
        child = os.fork()
        if child:
            return child
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(run(self.arguments(name, version)))

    def finish(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    def state(self, name: str) -> str:
        """Tell one result of a command from another; that of a folder by its manifest, after its checksums."""
        out = self.folder / COMMANDS[name][0]
        if not out.is_dir():
            return hash_file(out)
        check_contents(out)
        manifest = next(out / name for name in MANIFESTS if (out / name).is_file())
        return str(json.loads(manifest.read_text(encoding="utf-8"))["files"])

    def left(self) -> set[str]:
        return {p.name for p in self.folder.iterdir() if p.name.startswith((PARTIAL, SCRATCH))}


def run(arguments: Sequence[str]) -> int:
    """Run a command as the shell does; return its status."""
    try:
        cli.main(list(arguments), prog_name="weft")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def kill(place: Workplace, count: int, seed: int) -> Counter[str]:
    """Kill `count` commands; return how often the older result was there, the new one, and something was left behind
    (and how many commands ended before their kill, which do not count).

    Raises:
        Broken: naming the first command after which something was not whole.
    """
    rng, found, i = random.Random(seed), Counter[str](), 0
    while found["older"] + found["new"] < count:
        i += 1
        name, version = list(COMMANDS)[i % len(COMMANDS)], i // len(COMMANDS) % 2
        child = place.start(name, version)
        late = rng.random() < 0.4  # where results are put in their places
        time.sleep(place.seconds[name] * (rng.uniform(0.7, 1.1) if late else rng.uniform(0, 1)))
        os.kill(child, signal.SIGKILL)
        killed = place.finish(child) == -signal.SIGKILL
        state = place.state(name)
        if state not in place.whole[name]:
            raise Broken(f"kill {i}, of {name}: what is there is neither the older result nor the new one")
        left, start = place.left(), time.monotonic()
        if status := place.finish(place.start(name, version)):
            raise Broken(f"after kill {i}, of {name}: the next run ends with {status}: {place.log()}")
        place.seconds[name] = min(time.monotonic() - start, 1.1 * place.seconds[name])  # machines change their pace
        if untold := [path for path in left if path.startswith(PARTIAL) and path not in place.log()]:
            raise Broken(f"after kill {i}, of {name}: the next run did not tell of {untold}: {place.log()}")
        if still := {path for path in place.left() if path.startswith(PARTIAL)}:
            raise Broken(f"after kill {i}, of {name}: the next run left {still}")
        if place.state(name) != place.whole[name][version]:
            raise Broken(f"after kill {i}, of {name}: the next run made something else")
        found["ended before" if not killed else "new" if state == place.whole[name][version] else "older"] += 1
        found["left something"] += bool(left)
    return found


def poll(place: Workplace, replacements: int, reads: int) -> Counter[str]:
    """Read a folder in another process, at least `reads` times, while it is replaced; return what that process saw."""
    out, stop = place.folder / "out", place.folder / "stop"
    child = os.fork()
    if not child:
        seen = Counter[str]()
        while seen["reads"] < reads or not stop.exists():
            seen["reads"] += 1
            try:
                json.loads((out / "weft.json").read_text(encoding="utf-8"))
                with (out / "model.onnx").open("rb") as file:
                    file.read(1)
            except (OSError, ValueError):
                seen["missed"] += 1
        stop.write_text(json.dumps(seen))
        os._exit(0)
    for i in range(replacements):
        if status := place.finish(place.start("compile", i % 2)):
            raise Broken(f"replacement {i} ends with {status}: {place.log()}")
    stop.touch()
    place.finish(child)
    return Counter(json.loads(stop.read_text())) + Counter(replacements=replacements)


def main() -> int:
    """Return 1 if something was not whole, or a read missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=240)
    parser.add_argument("--replacements", type=int, default=100)
    parser.add_argument("--reads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the counts, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        place = Workplace(Path(scratch))
        try:
            killed, polled = kill(place, given.kills, given.seed), poll(place, given.replacements, given.reads)
        except Broken as broken:
            print(broken, file=sys.stderr)
            return 1
    record = {
        "kills": {"all": given.kills, "seed": given.seed, "broken": 0, **killed},
        "polling": {"missed": 0, **polled},
        "commands": list(COMMANDS),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    print(json.dumps(record))
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(polled["missed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
