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

from weft.backends.torch import kernels
from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.package.module import assign_weights, evaluate_weights, run_source
from weft.backends.torch.program.snippets import find_bound_names, find_names
from weft.passes.analysis.states import find_states
from weft.passes.core.equivalence import EquivalenceCheck

from ....lowered import build_module, lower
from ....passes.zoo import ZOO
from ....sampling import ALL, each
from ..generated import SEQ, accepts, assert_close, call, feeds_of, graph_of, module_of, tensors, tolerance, wanted

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


@pytest.mark.long
def test_source_is_deterministic(folder: Path) -> None:
    for i, name in enumerate(SPREAD):
        assert write_source(lower(ZOO[name]())).text == (folder / f"model_{i}.py").read_text()


def test_source_passes_linter_and_formatter(folder: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    length = ["--isolated", "--line-length", "120"]
    # E501: formatted text of one long word; B905: zip of what the generator has counted
    lint = [*ruff, "check", *length, "--select", RULES, "--ignore", "E501,B905", "--output-format", "json", str(folder)]
    found = json.loads(subprocess.run(lint, capture_output=True, text=True).stdout)
    assert [f for f in found if not re.search(r"argument: `(batch|length)`", f["message"])] == []  # of any new_cache
    done = subprocess.run([*ruff, "format", "--check", *length, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_source_imports_torch_only_and_uses_all_definitions(folder: Path) -> None:
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


@pytest.mark.halved
@pytest.mark.parametrize("name", SPREAD)
def test_modules_copy_and_pickle(name: str) -> None:
    module, given = module_of(name), tensors(feeds_of(name))
    want = call(module, given)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(call(other, given), want, strict=True))


@pytest.mark.parametrize("name", SPREAD[::4])
def test_bf16_weights_are_rounded_f32_weights(name: str) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize("name", each(3, COMPILED, 1))
def test_modules_compile_as_one_graph(name: str) -> None:
    compiled = torch.compile(module_of(name), fullgraph=True, backend="eager")
    given = {k: v for k, v in tensors(feeds_of(name)).items() if accepts(module_of(name), k)}
    with torch.no_grad():
        for got, want in zip(outputs(compiled(**given)), wanted(name).values(), strict=True):
            assert_close(got, want, tolerance(graph_of(name), torch.float32))
    torch.compiler.reset()


@pytest.mark.long
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


def test_too_small_cache_is_refused() -> None:
    module: Any = module_of("family/llama-gqa-tied")
    cache = module.new_cache(2, 5)
    ids = torch.ones(2, 4, dtype=torch.long)
    module(ids, cache=cache)
    with pytest.raises(ValueError, match=r"the cache holds 5 tokens, not 4 \+ 2: create one with a larger length"):
        module(ids[:, :2], cache=cache)


def test_decoder_without_encoder_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="no encoder output is cached: the first call needs the inputs of the encoder"):
        module_of("family/t5")(torch.ones(1, 2, dtype=torch.long))


COMMENTED = (
    *("family/llama-gqa-tied", "family/gemma3", "family/qwen3-gqa", "family/olmo2-gqa", "family/deepseek-v3"),
    *("family/mamba2", "family/t5", "family/bart", "family/bert", "variant/latent", "variant/latent, expanded"),
    *("variant/norms of q and k, each", "variant/linear attention, rope", "packed/variant grouped"),
)


CHECK = """

def _check(x, shape, line):
    assert x.dim() == len(shape), line
    assert all(want is None or have == want for have, want in zip(x.shape, shape)), (x.shape, line)
    SEEN.append(line)


SEEN = []
"""


def checked(text: str) -> str:
    """Return `text` with a check after every assignment whose comment has a shape."""
    lines = text.splitlines()
    for node in sorted((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Assign)), key=lambda n: -n.lineno):
        comment = re.search(r"# \[([^\]]*)\]$", lines[(node.end_lineno or 0) - 1])
        target = node.targets[0]
        if comment and isinstance(target, ast.Name):
            sizes = [size if size.isdigit() else "None" for size in comment[1].split(", ")]
            check = f"_check({target.id}, ({', '.join(sizes)},), {node.lineno})"
            lines.insert(node.end_lineno or 0, " " * node.col_offset + check)
    return "\n".join(lines).replace("from kernels.", f"from {kernels.__name__}.") + CHECK


@pytest.mark.parametrize("name", COMMENTED)
def test_shape_comments_are_true(name: str) -> None:
    graph = graph_of(name)
    source = write_source(lower(graph))
    made = run_source(checked(source.text))
    with torch.device("meta"):
        module = made.Model()
    assign_weights(module, evaluate_weights(source, graph.reader, torch.float32))
    with torch.inference_mode():
        call(module, tensors(feeds_of(name), torch.float32))
    assert made.SEEN


def test_roots_and_quotients_are_written_as_such() -> None:
    assert "/ 30.0).tanh() * 30.0" in write_source(lower(graph_of("family/gemma2"))).text
    assert "scale=24**-0.5" in write_source(lower(graph_of("family/gemma3"))).text
