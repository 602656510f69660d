"""Rules for the project as a whole: quick imports, linked folders, pinned dependencies, docstrings, sources."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import weft
from weft.frontends import dsl

from .test_requirements import locked

FOLDERS = ("ir", "passes", "backends", "frontends")
HEAVY = {"torch", "onnx", "onnxruntime", "transformers", "gguf", "tokenizers", "pydantic"}


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, check=False)


def seconds_over_bare_python(args: Sequence[str], cwd: Path, rounds: int = 7) -> float:
    """The least processor time of `python *args` less that of `python -c pass`, measured in turn."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    best = {}
    for command in (("-c", "pass"), tuple(args)) * rounds:
        start = spent()
        done = python(*command, cwd=cwd)
        best[command] = min(best.get(command, float("inf")), spent() - start)
        assert done.returncode == 0, done.stderr
    return best[tuple(args)] - best["-c", "pass"]


def test_import_is_quick(tmp_path: Path) -> None:
    assert seconds_over_bare_python(["-c", "import weft"], tmp_path) <= 0.15


def test_help_is_quick(tmp_path: Path) -> None:
    assert seconds_over_bare_python(["-m", "weft", "--help"], tmp_path) <= 0.4


@pytest.mark.parametrize("module", ["weft", *(f"weft.{name}" for name in FOLDERS), "weft.frontends.app.cli"])
def test_heavy_libraries_are_imported_on_use(module: str, tmp_path: Path) -> None:
    done = python("-c", f"import sys, json, {module}; print(json.dumps(list(sys.modules)))", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stdout))


@pytest.mark.parametrize("name", sorted({*weft.__all__, *weft._HOME}))
def test_public_names_resolve(name: str) -> None:
    assert getattr(weft, name) is not None
    assert name in dir(weft)


def test_star_import_does_not_replace_builtins(tmp_path: Path) -> None:
    """Neither a builtin, nor a module of Python or of what is installed: files begin with imports of both.

    Tools of `make test-engines` are left out: Hugging Face's evaluate is one.
    """
    tools = locked("engines").keys() - locked("test").keys()
    installed = {m for m, of in metadata.packages_distributions().items() if {*map(canonicalize_name, of)} - tools}
    modules = sys.stdlib_module_names | installed
    assert sorted(set(weft.__all__) & (modules | set(dir(builtins)))) == []
    lines = ("import inspect, numpy, torch", "from weft import *", "assert compile('1', '', 'eval')")
    checks = ("assert inspect.getsource and torch.Tensor and numpy.ndarray", "assert Decoder and load and evaluate")
    done = python("-c", "\n".join((*lines, *checks)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = "import sys; sys.modules['torch'] = None; from weft import *; assert Decoder and load and evaluate"
    assert python("-c", missing, cwd=tmp_path).returncode == 0
    for name in ("compile", "inspect", "torch"):  # as before
        assert name in dir(weft) and getattr(weft, name) is not getattr(builtins, name, None)


def test_the_declarative_language_is_public() -> None:
    public = weft._PUBLIC["weft.frontends.dsl"]
    assert [*public] == sorted(dsl.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = weft.nothing


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_links_and_refuse_their_bare_name(name: str, root: Path) -> None:
    assert (root / "src/weft" / name).readlink() == Path("../..", name)
    done = python("-c", f"import {name}", cwd=root)
    assert f"ImportError: import weft.{name}, not {name}" in done.stderr


def test_direct_dependencies_are_pinned_within_their_bounds(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pinned = (Requirement(line) for line in (root / "constraints.txt").read_text().splitlines() if line[:1] != "#")
    versions = {pin.name.lower().replace("_", "-"): next(iter(pin.specifier)).version for pin in pinned}
    extras = project["optional-dependencies"]
    for extra in ("cpu", "hf", "torch", "serve", "dev"):  # `gpu` cannot be installed beside `cpu`
        for line in [*project["dependencies"], *extras[extra]]:
            wanted = Requirement(line)
            assert versions[wanted.name.lower().replace("_", "-")] in wanted.specifier


@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_keep_the_house_rules(folder: str, root: Path) -> None:
    unexplained = re.compile(r"# (type: ignore(\[[\w, -]*\])?|noqa(: [A-Z0-9, ]+)?)\s*(?!.*[a-z]{3})")
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    wrong = []
    for path in sorted((root / folder).rglob("*.py")):
        lines = path.read_text().splitlines()
        wrong += [f"{path}: {len(lines)} lines"] if len(lines) > 500 else []
        wrong += [
            f"{path}:{i}" for i, line in enumerate(lines, 1) if unexplained.search(line) or unfinished.search(line)
        ]
    assert not wrong


@pytest.mark.parametrize("folder", [*FOLDERS, "src/weft", "tests"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str, root: Path) -> None:
    """A summary says what a thing is or does; one that begins with a question word leaves the reader to guess."""
    words = r"(What|Whether|Which|How|Where|Why)\b"
    riddle, begun, wrong = re.compile(words), re.compile(rf"[\"']\s*{words}"), []
    paths = root.joinpath(folder).glob("*.py") if folder == "src/weft" else root.joinpath(folder).rglob("*.py")
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8")
        if not begun.search(text):  # no string of the file begins so: parsing all takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node) or ""
                wrong += [f"{path}:{node.body[0].lineno}: {doc.splitlines()[0]}"] if riddle.match(doc) else []
    assert not wrong


# Files of weft's own, pipes between its processes, and what is copied into folders that need nothing of weft.
OWN_JSON = {
    "ir/storage/documents.py",
    "backends/runtime/text/chat.py",
    "backends/runtime/text/chat_worker.py",
    "backends/torch/package/shipped/load.py",
    "backends/viz/web/plain.py",
    "backends/viz/web/diff.py",
    "backends/viz/layout/font.py",
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_foreign_files_have_one_reader(folder: str, root: Path) -> None:
    """JSON and home folders go through `ir.storage.documents`, whose limits hold for every file that weft reads."""
    for path in sorted((root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        found = re.findall(r"json\.loads?\(|raw_decode\(|\.expanduser\(", path.read_text(encoding="utf-8"))
        assert not found or name in OWN_JSON, f"{name}: {found}: use weft.ir.storage.documents"


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_scripts_import_existing_names(folder: str, root: Path) -> None:
    """Scripts that no test runs import what there is in weft."""
    missing = []
    for path in sorted((root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == "weft":
                module = importlib.import_module(node.module or "")
                for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                    if importlib.util.find_spec(f"{node.module}.{name}") is None:
                        missing.append(f"{path.relative_to(root)}:{node.lineno}: {node.module}.{name}")
    assert not missing
