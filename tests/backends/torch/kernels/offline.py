"""Compiles what kernels ship for an H200 that is not there, and prints as JSON what the machine code is like.

A script of its own, because Triton must be imported without TRITON_INTERPRET: `python offline.py 0 2` is the first
half. offline.json keeps the facts of every variant with a hash of all that decides about its machine code; a variant
is compiled where its hash is another one. `python offline.py --write` compiles them all and writes the file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.backends.torch import kernels
from weft.backends.torch.kernels.shared.launch import Variant
from weft.backends.torch.package.export import kernel_files

TARGET = GPUTarget("cuda", 90, 32)
RECORD = Path(__file__).with_suffix(".json")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
VECTOR_LOADS = re.compile(r"ld\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64)|cp\.async\.c[ag]\S* .*, 0x10\b|cp\.async\.bulk")


def names() -> list[str]:
    """The kernel files that ship: all that list variants, those that kernels share included."""
    folder = Path(kernels.__path__[0])
    files = [file for file in sorted(folder.rglob("[a-z]*.py")) if "\ndef variants(" in file.read_text()]
    return [".".join(file.relative_to(folder).with_suffix("").parts) for file in files]


def label(name: str, variant: Variant) -> str:
    """A variant as a test names it."""
    shown = " ".join(f"{key}={value}" for key, value in variant.constants.items() if value not in (None, False))
    return f"{name}.{variant.kernel.__name__} {next(iter(variant.types.values()))} {shown}"


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
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    loads, wait = [found.start() for found in VECTOR_LOADS.finditer(asm["ptx"])], asm["ptx"].find("griddepcontrol.wait")
    resources = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return {
        **resources,
        "vector_loads": len(loads),
        "loads_ahead": sum(at < wait for at in loads),
        "waits": asm["ptx"].count("griddepcontrol.wait"),
        "launches_dependents": asm["ptx"].count("griddepcontrol.launch_dependents"),
        "wants": {"vectors": variant.vectors, "pdl": variant.pdl, "ahead": variant.ahead},
    }


def shipped() -> dict[str, Variant]:
    """Collect the variants of all kernel files by label, each once; a file without variants is an error."""
    found: dict[str, Variant] = {}
    for name in names():
        listed = importlib.import_module(f"{kernels.__name__}.{name}").variants()
        assert listed, f"{name} has no variants"
        for variant in listed:
            same = found.setdefault(label(name, variant), variant)
            assert same == variant, f"two variants are called {label(name, variant)}"
    return found


def fingerprint(variant: Variant) -> str:
    """Hash what the machine code of `variant` follows from: the kernel's file and all kernel files that it imports,
    without comments on lines of their own, the variant, the target and the version of Triton."""
    module = variant.kernel.__module__.removeprefix(f"{kernels.__name__}.")
    folder = Path(kernels.__path__[0])
    lines = (line for name in kernel_files([module]) for line in (folder / name).read_text("utf-8").splitlines())
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    chosen = [variant.kernel.__name__, sorted(variant.types.items()), sorted(map(repr, variant.constants.items()))]
    chosen += [sorted(variant.divisible), variant.warps, variant.stages, variant.pdl]
    return hashlib.sha256(repr([triton.__version__, TARGET, code, chosen]).encode()).hexdigest()[:16]


def main(part: int, parts: int) -> None:
    """Print the facts of every `parts`-th variant, from `part` on; what offline.json knows of them; whether it is old.

    The first of them, and all where WEFT_TESTS is ``all``, are compiled whatever is known of them.
    """
    record = json.loads(RECORD.read_text("utf-8"))
    found = []
    for i, (name, variant) in enumerate(list(shipped().items())[part::parts]):
        hashed, known = record["variants"].get(name, ("", None))
        if changed := hashed != fingerprint(variant):
            known = None
        again = known is None or i == 0 or os.environ.get("WEFT_TESTS") == "all"
        old = changed and record["triton"] == triton.__version__
        found.append((name, facts(variant) if again else known, known, old))
    json.dump(found, sys.stdout, indent=1)


def write() -> None:
    """Compile every variant, and write its facts to offline.json."""
    lines = [
        f"{json.dumps(name)}: {json.dumps([fingerprint(variant), facts(variant)])}"
        for name, variant in shipped().items()
    ]
    head, body = f'{{"triton": {json.dumps(triton.__version__)}, "variants": {{', ",\n".join(lines)
    RECORD.write_text(f"{head}\n{body}\n}}}}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        main(*map(int, sys.argv[1:]))
