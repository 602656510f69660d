"""Types of `import weft` for checkers and editors: stubs that agree with the code, and no `Any`."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.ir.op import OPS

from .stubs import PACKAGE, stubs

USE = Path(__file__).parent / "typing" / "use.py"
SHOWN = {
    "weft.Attention": r"def \(heads: int, kv_heads: int \| None =, .*\) -> weft\.frontends\.dsl\.attention\.Attention",
    "weft.compile": r"def \(source: .*, out: str \| pathlib\.Path, \*, target: str =, .*\) -> .*CompileReport",
    "weft.ops.linear": r"def \(x: .*\.Value, weight: .*\.Value, bias: .*\.Value \| None =, \*, name: str \| None =\) "
    r"-> .*\.Value",
    "weft.linear": r"def \(x: .*\.Value, .*\) -> .*\.Value",
    "weft.softmax": r"def \(x: .*\.Value, \*, axis: int =, name: str \| None =\) -> .*\.Value",
    'weft.load("out").generate("Hello")': r"list\[weft\.backends\.runtime\.core\.results\.Result\]",
    'weft.inspect("gpt2").parameters': "int",
    "weft.__version__": "str",
    "best.indices": r".*\.Value",
    "state": r"tuple\[.*\.Value, .*\.Value, fallback=weft\.ops\.CausalConvResults\]",
    "ops.causal_conv(x, best.values)": r".*\.Value",
    "ops.split(x, sizes=(1, 2))": r"tuple\[.*\.Value, \.\.\.\]",
    "ops.where(x > 0, x, 0.0)": r".*\.Value",
    "1 - x * 2": r".*\.Value",
    "x <= 3": r".*\.Value",
    "SiLU(beta=2.0)": r"use\.SiLU",
    "model.graph()": r"weft\.ir\.graph\.graph\.Graph",
    "weft.inspect(model)": r"weft\.frontends\.app\.api\.inspect\.inspection\.Inspection",
    "weft.torch(model)": r"torch\.nn\.modules\.module\.Module",
}


@pytest.mark.parametrize("name", ["__init__.pyi", "ops.pyi"])
def test_stubs_equal_the_code(name: str) -> None:
    assert stubs()[name] == (PACKAGE / name).read_text(encoding="utf-8"), "the code has changed: run `make stubs`"


def test_type_checker_accepts_typed_examples(root: Path) -> None:
    """One run of mypy over the package and over a use of it, by the settings and the cache of `make lint`."""
    command = [sys.executable, "-m", "mypy", "-p", "weft", "-m", USE.stem, "--no-error-summary", "--hide-error-context"]
    environment = {**os.environ, "MYPYPATH": str(USE.parent)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    out = done.stdout
    assert not done.stderr
    lines = USE.read_text(encoding="utf-8").splitlines()
    noted, wrong, reported = {}, [], set[str]()
    for path, number, kind, message in re.findall(r"^(.+?):(\d+): (\w+): (.*)$", out, re.MULTILINE):
        line = lines[int(number) - 1] if Path(path).name == USE.name else ""
        if (revealed := re.fullmatch(r'Revealed type is "(.*)"', message)) is not None:
            noted[re.search(r"reveal_type\((.*)\)$", line)[1]] = revealed[1]  # type: ignore[index]  # it reveals
        elif kind == "error":
            code = re.search(r"\[[\w-]+\]$", message)
            expected = line.partition("# expected: ")[2]
            wrong += [] if code is not None and code[0] == expected else [f"{path}:{number}: {message}"]
            reported.add(line)
    assert not wrong
    assert [line for line in lines if "# expected" in line and line not in reported] == []
    assert noted.keys() == SHOWN.keys()
    for call, pattern in SHOWN.items():
        assert re.fullmatch(pattern, noted[call]), f"{call} is {noted[call]}"
        assert "Any" not in noted[call].replace("(*Any, **Any)", ""), f"{call} is {noted[call]}"


def test_stub_names_exist() -> None:
    names = {alias.asname for node in _nodes("__init__.pyi", ast.ImportFrom) for alias in node.names}
    names |= {node.targets[0].id for node in _nodes("__init__.pyi", ast.Assign)}
    missing = [name for name in names if name is not None and not hasattr(weft, name)]
    assert not missing
    assert names >= {*weft._HOME, *OPS, "ops", "ir"}


@pytest.mark.halved
@pytest.mark.parametrize("name", sorted(OPS))
def test_stubs_of_ops_have_their_parameters(name: str) -> None:
    """As stubtest compares them: names, order, kinds and defaults."""
    stub, *_ = (node for node in _nodes("ops.pyi", ast.FunctionDef) if node.name == name)
    a, actual = stub.args, inspect.signature(OPS[name]).parameters
    assert not a.posonlyargs
    assert [p.arg for p in a.args] == [n for n, p in actual.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert (a.vararg and a.vararg.arg) == next((n for n, p in actual.items() if p.kind is p.VAR_POSITIONAL), None)
    assert [p.arg for p in a.kwonlyargs] == [n for n, p in actual.items() if p.kind is p.KEYWORD_ONLY]
    given = [None] * (len(a.args) - len(a.defaults)) + [*a.defaults]
    for param, default in zip([*a.args, *a.kwonlyargs], [*given, *a.kw_defaults], strict=True):
        empty = actual[param.arg].default is inspect.Parameter.empty
        assert (default is None) == empty
        if default is not None and not (isinstance(default, ast.Constant) and default.value is ...):
            assert ast.literal_eval(default) == actual[param.arg].default
    assert ast.get_docstring(stub) == OPS[name].__doc__


def test_ops_are_documented_objects() -> None:
    assert weft.softmax.__doc__ == weft.ops.softmax.__doc__ and "axis" in weft.softmax.__doc__
    assert weft.ops.TopKResults._fields == ("values", "indices")
    assert "softmax" in dir(weft.ops)
    with pytest.raises(AttributeError, match="no op is called 'sofmax'; did you mean softmax"):
        _ = weft.ops.sofmax


def _nodes(name: str, kind: type[Any]) -> list[Any]:
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kind)]
