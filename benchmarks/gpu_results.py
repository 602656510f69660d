"""Result files of gpu.py: one per stage in the folder --out, written anew whenever a work begins or ends."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_pool import Found, Work
from machine import facts

Results = dict[str, dict[str, Found]]  # stage -> work -> what was found
SHARES = {"gb_per_s": ("read", "copy"), "tflop_per_s": ("product",)}  # rates, and the limits that they are a share of


def load(path: Path) -> dict[str, Any]:
    """The contents of a result file.

    Raises:
        SystemExit: if it is none.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["results"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SystemExit(f"{path} is no result file of gpu.py ({type(error).__name__}): remove it") from None
    return found


def read(folders: Iterable[Path]) -> Results:
    """What the files in all folders hold; of two results of one work that of the later folder."""
    results: Results = {}
    for path in [path for folder in folders for path in sorted(folder.glob("gpu_*.json"))]:
        for name, found in load(path)["results"].items():
            known = results.setdefault(path.stem[4:], {})
            if name not in known or "not_reached" not in found:
                known[name] = found
    return results


def gpu_state() -> dict[str, str]:
    """Clocks, memory, temperature, power and why clocks are held, as nvidia-smi reads them; nothing is changed."""
    names = (
        "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    )
    query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}
    values = [value.strip() for value in found.splitlines()[0].split(",")]
    return dict(zip(names.split(","), values, strict=True))


class Book:
    """The results of this run, in the files of its folder; with --again those of earlier runs stay in them."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        triton = ("triton",) if find_spec("triton") else ()
        self.head = {**facts("numpy", "torch", "transformers", *triton), "device": args.device}
        if args.device == "cuda":
            self.head["gpu"] = gpu_state()
        self.known = read([*args.results, self.out]) if args.again else {}
        self.new: Results = {}  # of works that this run has begun or left out
        self.lines: dict[str, dict[str, str]] = {}

    def memory(self) -> float:
        """GiB of the device that works may share; without a device as much as there is."""
        if self.args.device != "cuda":
            return float("inf")
        total = self.head["gpu"].get("memory.total", "").split()
        return 0.9 * (float(total[0]) / 1024 if total else 80)

    def missing(self, work: Work) -> bool:
        """Return whether no run has found anything of a work, or this is not to go on where one stopped."""
        stage, _, name = work.name.partition("/")
        found = self.known.get(stage, {}).get(name, {"running": True})
        return "not_reached" in found or "running" in found

    def note(self, work: Work, found: Found | None) -> None:
        """Print and record that a work begins, or what it has `found`."""
        stage, _, name = work.name.partition("/")
        if found is None:
            print(f"{work.name} …", flush=True)
            found = {"running": True}
        else:
            found = {"ok": "error" not in found, **found, **self.shares(found)} if "not_reached" not in found else found
            told = {key: value for key, value in found.items() if key not in ("trace", "printed")}
            print(f"{work.name}: {json.dumps(told)}", *(found[k] for k in ("trace", "printed") if found.get(k)))
        self.new.setdefault(stage, {})[name] = found
        if stage not in self.lines:
            before = load(path)["results"] if self.args.again and (path := self.path(stage)).exists() else {}
            self.lines[stage] = {key: _line(key, value) for key, value in before.items()}
        self.lines[stage][name] = _line(name, found)
        if stage in self.args.stages:  # limits that others begin with are in the files of those
            self.write(stage)

    def shares(self, found: Found) -> Found:
        """The rates of a result as shares of the limits of this run, and the time that reading its bytes would take."""
        limits, shares = self.new.get("limits", {}), {}
        for rate, names in SHARES.items():
            for name in names if isinstance(found.get(rate), float) else ():
                if limit := limits.get(name, {}).get(rate, {}).get("median"):
                    shares[f"of_{name}"] = round(found[rate] / limit, 3)
        read = limits.get("read", {}).get("gb_per_s", {}).get("median")
        if read and found.get("bytes"):
            shares["floor_us"] = round(found["bytes"] / read / 1e3, 2)
        return shares

    def path(self, stage: str) -> Path:
        return Path(self.out) / f"gpu_{stage}.json"

    def write(self, stage: str) -> None:
        """Write the file of a stage, whole or not at all; every work is a line."""
        limits = {"limits": self.new.get("limits", {})} if stage != "limits" else {}
        head = json.dumps({**self.head, **limits}, indent=2)
        part = self.path(stage).with_suffix(".part")
        lines = ",\n".join(self.lines[stage].values())
        part.write_text(f'{head[:-2]},\n  "results": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
        part.replace(self.path(stage))


def _line(name: str, found: Found) -> str:
    return f"    {json.dumps(name)}: {json.dumps(found)}"
