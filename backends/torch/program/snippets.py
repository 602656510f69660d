"""Snippets, the functions and classes copied into generated sources, and the imports and kernels that they need."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import lib as parts

IMPORTS = {  # the import line of each name in a generated source
    "Callable": "from collections.abc import Callable",
    "math": "import math",
    "Any": "from typing import Any",
    "Self": "from typing import Self",
    "partial": "from functools import partial",
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "Tensor": "from torch import Tensor, nn",
    "nn": "from torch import Tensor, nn",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "lru_cache": "from functools import lru_cache",
    "causal_lower_right": "from torch.nn.attention.bias import causal_lower_right",
    **dict.fromkeys(
        ("AuxRequest", "create_block_mask", "flex_attention"),
        "from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention",
    ),
}
RESERVED = {  # names that generated methods use
    *("self", "cache", "state", "layer", "run", "args", "batch", "length"),
    *("len", "range", "zip", "min", "max"),
    *IMPORTS,
}
KERNELS = {  # functions of kernels that snippets call, and their files
    **dict.fromkeys(("as_bytes", "from_bytes"), "shared.float8"),
    **dict.fromkeys(("Codes", "dequantize"), "shared.quantized_gemv"),
    **{"refusal": "shared.launch", "requires_grad": "shared.operands", "shared_memory": "shared.online_softmax"},
    **{"choose_tokens": "choose_tokens", "norm_linear": "norm_linear", "packed_linear": "cpu.packed"},
    **dict.fromkeys(("can_dequantize", "dequantize_weights"), "prefill.dequantize_weights"),
    **dict.fromkeys(("has_mamba_scan", "mamba_scan"), "prefill.mamba_scan"),
    **dict.fromkeys(("has_mamba2_scan", "mamba2_scan"), "prefill.mamba2_scan"),
    **dict.fromkeys(("has_window_kernel", "window_attention"), "prefill.window_attention"),
    "quantize_float8": "prefill.quantize_float8",
}


@dataclass(frozen=True)
class Snippet:
    """A function, class or constant that generated sources contain a copy of; `uses`: global names that it reads."""

    name: str
    source: str
    uses: frozenset[str]


@functools.cache
def read_library(package: str = parts.__name__) -> dict[str, Snippet]:
    """Return the snippets of a package by name, in the order of its files. The files are parsed, not imported."""
    snippets = {}
    (folder,) = importlib.import_module(package).__path__
    for path in sorted(Path(folder).glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
                target = node.targets[0] if isinstance(node, ast.Assign) else None
                name = target.id if isinstance(target, ast.Name) else getattr(node, "name", "")
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                source = "\n".join(lines[first - 1 : node.end_lineno])
                snippets[name] = Snippet(name, source, find_names(node) - find_bound_names(node))
    return snippets


def find_names(tree: ast.AST) -> frozenset[str]:
    """Return all variable names in `tree`, and all strings that are identifiers, because annotations may be strings."""
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return frozenset({n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {*filter(str.isidentifier, strings)})


def find_bound_names(tree: ast.AST) -> frozenset[str]:
    """Return the names of arguments and assigned variables in `tree`."""
    arguments = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    variables = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return frozenset(arguments | variables)


def select_snippets(wanted: Iterable[str], known: Mapping[str, Snippet] | None = None) -> list[Snippet]:
    """Return the snippets named in `wanted` and all that they use, in the order of `known` (default: the library's)."""
    snippets = read_library() if known is None else known
    needed: set[str] = set()
    queue = [n for n in wanted if n in snippets]
    while queue:
        name = queue.pop()
        if name not in needed:
            needed.add(name)
            queue += [n for n in snippets[name].uses if n in snippets]
    return [part for name, part in snippets.items() if name in needed]


def write_imports(used: Iterable[str], package: str = "", table: Mapping[str, str] = IMPORTS) -> list[str]:
    """Return the import lines for the names `used`, standard library first; names not in `table` are ignored. Kernels
    are imported from the package `package`; with "" they are not imported."""
    wanted = {*used}
    needed = {table[n] for n in wanted if n in table}
    if package:
        needed |= {f"from {package}.{KERNELS[n]} import {n}" for n in wanted & KERNELS.keys()}
    lines = [line for line in needed if not line.startswith("from")]
    modules: dict[str, set[str]] = {}
    for line in needed.difference(lines):
        module, _, names = line.removeprefix("from ").partition(" import ")
        modules.setdefault(module, set()).update(names.split(", "))
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in modules.items()]
    ordered = sorted(lines, key=lambda s: (s.startswith("from"), s))
    standard = [line for line in ordered if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    external = [line for line in ordered if line not in standard]
    return [*standard, *([""] if standard and external else []), *external]


def list_kernel_modules(used: Iterable[str]) -> list[str]:
    """Return the sorted module names of the kernels among the names `used`, such as ``shared.quantized_gemv``."""
    return sorted({KERNELS[n] for n in used if n in KERNELS})
