"""Compiles what kernels ship for an H200 that is not there, and prints as JSON what the machine code is like.

A script of its own, because Triton must be imported without TRITON_INTERPRET: `python offline.py 0 2` is the first
half. offline-VERSION.json, one for each version of Triton that kernels are for, keeps the facts of every variant with a
hash of all that decides about its machine code; a variant is compiled where its hash is another one. `python offline.py
--write` compiles them all, with the Triton that Python finds, and writes the file and the table offline.md.

Of a loop that streams weights the facts tell what issuing its instructions takes, as a share of the time in which an
H200 reads the weights: 4 instructions a clock, and 18.6 bytes (4.3 TB/s over 132 multiprocessors at 1.755 GHz).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from variants.form import Variant  # beside this script

from weft.backends.torch import kernels
from weft.backends.torch.package.source_folder import list_kernel_files

TARGET = GPUTarget("cuda", 90, 32)
HERE = Path(__file__).parent
VERSIONS = ("3.6.0", "3.9.0")  # that of torch 2.11 for CUDA 13, and that of the tests
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ISSUED, READ = 4, 18.6  # instructions and bytes per clock and multiprocessor
VECTOR_LOADS = re.compile(r"ld\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64)|cp\.async\.c[ag]\S* .*, 0x10\b|cp\.async\.bulk")


def names() -> list[str]:
    """The kernel files that ship, those that kernels share included: all that launch a kernel."""
    folder = Path(kernels.__path__[0])
    listed = {file.name for file in (HERE / "variants").glob("*.py")}
    files = [f for f in sorted(folder.rglob("[a-z]*.py")) if f.name in listed or "_kernel[" in f.read_text("utf-8")]
    return [".".join(file.relative_to(folder).with_suffix("").parts) for file in files]


def label(name: str, variant: Variant) -> str:
    """A variant as a test names it."""
    shown = " ".join(f"{key}={value}" for key, value in variant.constants.items() if value not in (None, False))
    floats = [n for n, kind in variant.types.items() if kind == "*fp8e4nv" and n.endswith(("k", "k_cache"))]
    small = " fp4" * ("*u8" in (variant.types.get("weight"), variant.types.get("codes")))
    kind = next(iter(variant.types.values()))
    return f"{name}.{variant.kernel.__name__} {kind} {shown}{' fp8 cache' * len(floats)}{small}"


def compiled(variant: Variant) -> Any:
    """The variant compiled for TARGET: Triton's CompiledKernel, whose `asm` holds PTX and cubin."""
    arguments = variant.kernel.arg_names
    given = {*variant.types, *variant.constants}
    assert set(arguments) == given, f"arguments without type or value, or unknown: {set(arguments) ^ given}"
    aligned = {name for name, kind in variant.types.items() if kind[0] == "*"} | {*variant.divisible}
    source = ASTSource(
        variant.kernel,
        {name: variant.types.get(name, "constexpr") for name in arguments},
        dict(variant.constants),
        {(arguments.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "launch_pdl": variant.pdl,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=TARGET, options=options)


def facts(variant: Variant) -> dict[str, Any]:
    """Read properties of a variant's machine code; sizes in bytes per thread or block."""
    asm = compiled(variant).asm
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _told("cuobjdump", "--dump-resource-usage", file.name)
        code = _told("nvdisasm", "-c", file.name)
    loads, wait = [found.start() for found in VECTOR_LOADS.finditer(asm["ptx"])], asm["ptx"].find("griddepcontrol.wait")
    resources = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return {
        **resources,
        "vector_loads": len(loads),
        "loads_ahead": sum(at < wait for at in loads),
        "waits": asm["ptx"].count("griddepcontrol.wait"),
        "launches_dependents": asm["ptx"].count("griddepcontrol.launch_dependents"),
        "wants": {"vectors": variant.vectors, "pdl": variant.pdl, "ahead": variant.ahead},
        **streamed(variant, instructions(code)),
    }


def _told(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def instructions(code: str) -> int:
    """Count the instructions of the longest loop in disassembled machine code."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in code.splitlines():
        if found := re.match(r"(\.L\w+):", line):
            labels[found[1]] = count
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            if (jump := re.search(r"BRA.*`\((\.L\w+)\)", found[1])) and jump[1] in labels:
                longest = max(longest, count - labels[jump[1]])
    return longest


def streamed(variant: Variant, count: int) -> dict[str, Any]:
    """The `instructions` of a step of the loop over weights, per warp, the weight `bytes` that it reads, and their
    `issue` as a share of memory time; nothing of kernels whose longest loop streams no weights."""
    c = variant.constants
    if "weight" not in variant.types or "BLOCK_K" not in c or "CHOICES" in c:
        return {}
    bits = c.get("BITS") or 8 * {"*bf16": 2, "*fp16": 2, "*fp32": 4}[variant.types["weight"]]
    read = c["BLOCK_N"] * c["BLOCK_K"] * bits // 8
    return {"instructions": count, "bytes": read, "issue": round(count * variant.warps / ISSUED * READ / read, 2)}


def shipped() -> dict[str, Variant]:
    """Collect the variants of all kernel files by label, each once; a file without variants is an error."""
    found: dict[str, Variant] = {}
    for name in names():
        listed = importlib.import_module(f"variants.{name.rpartition('.')[2]}").variants()
        assert listed, f"{name} has no variants"
        for variant in listed:
            same = found.setdefault(label(name, variant), variant)
            assert same == variant, f"two variants are called {label(name, variant)}"
    return found


def fingerprint(variant: Variant, version: str = triton.__version__) -> str:
    """Hash what the machine code of `variant` follows from: the kernel's file and all kernel files that it imports,
    without docstrings and comments on lines of their own, the variant, the target and the version of Triton."""
    module = variant.kernel.__module__.removeprefix(f"{kernels.__name__}.")
    folder = Path(kernels.__path__[0])
    code = [line for name in files_of(module) for line in code_of(folder / name)]
    chosen = [variant.kernel.__name__, sorted(variant.types.items()), sorted(map(repr, variant.constants.items()))]
    chosen += [sorted(variant.divisible), variant.warps, variant.stages, variant.pdl]
    return hashlib.sha256(repr([version, TARGET.arch, code, chosen]).encode()).hexdigest()[:16]


@cache
def files_of(module: str) -> list[str]:
    """The kernel file of a module and all that it imports."""
    return list_kernel_files([module])


@cache
def code_of(file: Path) -> list[str]:
    """The lines of a file of Python, without those of docstrings, comments and nothing."""
    text = file.read_text("utf-8")
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return [line for i, line in lines if i not in told and line.strip() and not line.lstrip().startswith("#")]


def record(version: str) -> dict[str, Any]:
    """The facts of all variants by label, with their hashes, under a version of Triton."""
    path = HERE / f"offline-{version.rpartition('.')[0]}.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def main(part: int, parts: int) -> None:
    """Print the version, label and facts of every `parts`-th variant, from `part` on; what is recorded of them; whether
    that is old.

    Under this version of Triton the first of them, and all where WEFT_TESTS is ``all``, are compiled whatever is known.
    """
    found = []
    for version in dict.fromkeys((*VERSIONS, triton.__version__)):
        records, here = record(version), version == triton.__version__
        for i, (name, variant) in enumerate(list(shipped().items())[part::parts]):
            hashed, known = records.get(name, ("", None))
            old = version in VERSIONS and hashed != fingerprint(variant, version)
            again = here and (old or known is None or i == 0 or os.environ.get("WEFT_TESTS") == "all")
            found.append((f"{name} under Triton {version}", facts(variant) if again else known, known, old))
    json.dump(found, sys.stdout, indent=1)


def write() -> None:
    """Compile every variant that is not the one of the record, and write the facts of all."""
    known, made = record(triton.__version__), {}
    for name, variant in shipped().items():
        hashed = fingerprint(variant)
        made[name] = known[name] if known.get(name, [""])[0] == hashed else [hashed, facts(variant)]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known)}" for name, known in made.items())
    path = HERE / f"offline-{triton.__version__.rpartition('.')[0]}.json"
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    (HERE / "offline.md").write_text(table(), encoding="utf-8")


def table() -> str:
    """The loops over weights of all versions as a page."""
    records = {version: record(version) for version in VERSIONS}
    head = ["kernel", "weights", "rows of x", *(f"{what}, {v}" for v in VERSIONS for what in TOLD)]
    lines = [
        "# Loops over weights",
        "",
        "What the offline check (`offline.py --write`) found for an H200, by version of Triton: registers of a thread,",
        "instructions of a warp per byte of weights, and the time in which they are issued as a share of the time in",
        "which the bytes arrive from memory; below 1, memory is the limit. Up to 8 rows of x share a kernel from 4 on,",
        "or with codes from 1 on. Counted is the longest loop, which may be that of a norm behind a product.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for name, variant in shipped().items():
        known = [records[version].get(name, ("", {}))[1] for version in VERSIONS]
        if all("issue" in facts for facts in known):
            c = variant.constants
            kind = variant.types["weight"].lstrip("*")
            coded = "fp8" if kind.startswith("fp8") else f"{c.get('BITS')} bits"
            weights = f"{coded} by {c['GROUP']}" if c.get("BITS") else kind
            tile = f"{c.get('NORM', 'none')} norm, {c['BLOCK_N']} × {c['BLOCK_K']}"
            numbers = [n for f in known for n in (f["reg"], f"{f['instructions'] / f['bytes']:.3f}", f["issue"])]
            cells = (f"{variant.kernel.__name__} ({tile})", weights, c["BLOCK_M"], *numbers)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


TOLD = ("registers", "instructions per byte", "share of memory time")

if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        main(*map(int, sys.argv[1:]))
