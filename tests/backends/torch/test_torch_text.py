"""The text of generated modules: always the same, clean to a linter, free of weft; modules that copy, pickle, compile
and export."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.program.snippets import find_bound_names, find_names
from weft.passes.analysis.states import find_states
from weft.passes.core.equivalence import EquivalenceCheck

from ...lowered import build_module, lower
from ...passes.zoo import ZOO
from ...sampling import ALL, each
from .generated import SEQ, accepts, assert_close, call, feeds_of, graph_of, module_of, tensors, tolerance, wanted

SPREAD = (
    *("family/llama-gqa-tied", "family/gemma3", "family/gpt2-tied", "family/gpt_neox", "family/bloom", "family/t5"),
    *("family/bart", "family/deepseek-v3", "family/mixtral", "family/gpt-oss", "family/mamba", "family/mamba2"),
    *("family/jamba", "family/bert", "family/albert", "family/switch", "variant/relative", "variant/linear attention"),
    *("variant/repeated", "variant/strided", "packed/variant hybrid", "cached/variant hybrid", "quantized/mxfp4"),
)
RULES = "F,E,W,ARG,B,UP,PIE,RET504,I"
COMPILED = (
    *("family/llama-gqa-tied", "family/gemma3", "family/gpt2-tied", "family/bloom", "family/t5", "family/mamba2"),
    *("family/bert", "family/deepseek-v2-lite", "variant/linear attention", "variant/window"),
)
EXPORTED = (*COMPILED, "variant/linear attention, rope", "family/bamba") if ALL else COMPILED[::4]


def outputs(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts of `SPREAD` as files."""
    place = tmp_path_factory.mktemp("generated")
    for i, name in enumerate(SPREAD):
        (place / f"model_{i}.py").write_text(write_source(lower(graph_of(name))).text)
    return place


def test_the_text_is_always_the_same(folder: Path) -> None:
    for i, name in enumerate(SPREAD):
        assert write_source(lower(ZOO[name]())).text == (folder / f"model_{i}.py").read_text()


def test_a_linter_and_a_formatter_find_nothing(folder: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    length = ["--isolated", "--line-length", "120"]
    # E501: formatted text of one long word; B905: zip of what the generator has counted
    lint = [*ruff, "check", *length, "--select", RULES, "--ignore", "E501,B905", "--output-format", "json", str(folder)]
    found = json.loads(subprocess.run(lint, capture_output=True, text=True).stdout)
    assert [f for f in found if not re.search(r"argument: `(batch|length)`", f["message"])] == []  # of any new_cache
    done = subprocess.run([*ruff, "format", "--check", *length, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_only_torch_is_imported_and_everything_defined_is_used(folder: Path) -> None:
    for path in folder.iterdir():
        tree = ast.parse(path.read_text())
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        roots = {str(m).partition(".")[0] for m in modules}
        allowed = {"__future__", "collections", "functools", "kernels", "math", "torch", "typing"}
        assert roots <= allowed, f"{path}: {roots}"
        defined = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))} - {"Model"}
        read = set().union(*(find_names(n) - find_bound_names(n) for n in tree.body))
        assert defined <= read, f"{path}: {sorted(defined - read)}"


@pytest.mark.parametrize("name", SPREAD)
def test_modules_copy_and_pickle(name: str) -> None:
    module, given = module_of(name), tensors(feeds_of(name))
    want = call(module, given)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(call(other, given), want, strict=True))


@pytest.mark.parametrize("name", SPREAD[::4])
def test_weights_of_narrow_modules_are_those_of_wide_ones_rounded(name: str) -> None:
    want = copy.deepcopy(module_of(name)).to(torch.bfloat16).state_dict()
    got = build_module(graph_of(name), dtype=torch.bfloat16).state_dict()
    assert {key: t.dtype for key, t in got.items()} == {key: t.dtype for key, t in want.items()}
    assert all(torch.equal(t, want[key]) for key, t in got.items())


@pytest.mark.parametrize("name", SPREAD)
def test_tables_keep_their_dtype_when_weights_are_cast(name: str) -> None:
    module = copy.deepcopy(module_of(name))
    before = {key: b.clone() for key, b in module.named_buffers()}
    module.half().float()
    assert {key: b.dtype for key, b in module.named_buffers()} == {key: b.dtype for key, b in before.items()}
    assert all(torch.equal(b, before[key]) for key, b in module.named_buffers())


@pytest.mark.parametrize("name", each(3, COMPILED, 1))
def test_modules_compile_as_one_graph(name: str) -> None:
    compiled = torch.compile(module_of(name), fullgraph=True, backend="eager")
    given = {k: v for k, v in tensors(feeds_of(name)).items() if accepts(module_of(name), k)}
    with torch.no_grad():
        for got, want in zip(outputs(compiled(**given)), wanted(name).values(), strict=True):
            assert_close(got, want, tolerance(graph_of(name), torch.float32))
    torch.compiler.reset()


@pytest.mark.parametrize("name", EXPORTED)
def test_modules_export_for_any_length(name: str) -> None:
    """The full pass, exported from one length, runs at others: a token, and around the chunks of recurrences."""
    module, inputs = module_of(name), EquivalenceCheck(0).make_inputs
    recurrent = any(find_states(n) for n in graph_of(name).nodes)
    given = {k: v for k, v in tensors(feeds_of(name)).items() if accepts(module, k)}
    axes = {"encoder_input_ids": "source", "encoder_attention_mask": "source"}
    dims = {n: torch.export.Dim(n, min=1) for n in ("batch", "seq", "source")}
    shapes = {k: {0: dims["batch"], 1: dims[axes.get(k, "seq")]} for k in given}
    with torch.no_grad():
        exported = torch.export.export(module, (), given, dynamic_shapes=shapes, strict=False).module()
        for seq in (1, SEQ - 2, *((63, 64, 65) if recurrent else ())):
            shorter = {k: v[:2] for k, v in tensors(inputs(graph_of(name), seq=seq)).items() if k in given}
            for got, want in zip(outputs(exported(**shorter)), call(module, shorter), strict=True):
                assert_close(got, want.double().numpy(), tolerance(graph_of(name), torch.float32))


def test_a_cache_that_is_too_small_says_so() -> None:
    module: Any = module_of("family/llama-gqa-tied")
    cache = module.new_cache(2, 5)
    ids = torch.ones(2, 4, dtype=torch.long)
    module(ids, cache=cache)
    with pytest.raises(ValueError, match=r"the cache holds 5 tokens, not 4 \+ 2: make one with a larger length"):
        module(ids[:, :2], cache=cache)


def test_a_decoder_without_an_encoded_text_says_so() -> None:
    with pytest.raises(ValueError, match="there is no encoded text: the first call needs the inputs of the encoder"):
        module_of("family/t5")(torch.ones(1, 2, dtype=torch.long))
