"""Readability of generated modules: comments are true, values and classes have the names of the architecture."""

from __future__ import annotations

import ast
import re

import pytest
import torch

from weft.backends.torch import kernels
from weft.backends.torch.codegen.method_writer import write_periodic_list
from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.codegen.value_names import unparse
from weft.backends.torch.package.module import assign_weights, evaluate_weights, run_source
from weft.ir.graph import Graph

from ...lowered import lower
from ...passes.zoo import ZOO
from .generated import call, feeds_of, graph_of, tensors

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
    """`text` with a check behind every assignment whose comment tells the shape of what it makes."""
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
def test_comments_tell_the_shape_of_what_they_stand_beside(name: str) -> None:
    graph = graph_of(name)
    source = write_source(lower(graph))
    made = run_source(checked(source.text))
    with torch.device("meta"):
        module = made.Model()
    assign_weights(module, evaluate_weights(source, graph.reader, torch.float32))
    with torch.inference_mode():
        call(module, tensors(feeds_of(name), torch.float32))
    assert made.SEEN


def classes(graph: Graph) -> dict[str, str]:
    """The classes of the modules of `graph` and their docstrings."""
    tree = ast.parse(write_source(lower(graph)).text)
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and "nn.Module" in map(ast.unparse, n.bases)]
    return {n.name: ast.get_docstring(n) or "" for n in found}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("family/llama-gqa-tied", "Attention FeedForward Block Model"),
        ("family/gemma3", "WindowAttention FeedForward WindowBlock Attention GlobalBlock Model"),
        ("family/smollm3", "Attention FeedForward Block NoPEAttention NoPEBlock Model"),
        ("family/deepseek-v3", "LatentAttention FeedForward DenseBlock Experts Shared MoE MoEBlock Model"),
        ("family/jamba", "Mamba FeedForward MambaBlock Attention Experts MoE MoEBlock AttentionBlock Model"),
        (
            "family/bart",
            "EncoderAttention EncoderFeedForward EncoderBlock Encoder "
            "DecoderAttention CrossAttention DecoderFeedForward DecoderBlock Decoder Model",
        ),
        ("family/albert", "Attention FeedForward Block BlockGroup Model"),
    ],
)
def test_classes_that_differ_are_called_after_what_they_differ_in(name: str, wanted: str) -> None:
    assert " ".join(classes(graph_of(name))) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("family/llama-gqa-tied", "A pre-norm block: Attention, then FeedForward, each added to the residual stream."),
        ("family/bert", "A post-norm block: Attention, then FeedForward, each added to the residual stream."),
        ("family/gptj", "A pre-norm block: Attention and FeedForward side by side, both added to the residual stream."),
        (
            "family/olmo2-gqa",
            "A block with a norm after each part: Attention, then FeedForward, each added to the residual stream.",
        ),
        (
            "variant/sandwich",
            "A block with norms around its parts: Attention, then FeedForward, each added to the residual stream.",
        ),
    ],
)
def test_a_block_says_how_its_parts_meet_the_residual_stream(name: str, wanted: str) -> None:
    assert classes(ZOO[name]())["Block"] == wanted


def test_the_layers_of_a_post_norm_decoder_are_alike() -> None:
    """Selecting the last token comes after the layers, not inside one."""
    text = write_source(lower(graph_of("family/bart"))).text
    assert "nn.ModuleList(DecoderBlock() for _ in range(3))" in text


@pytest.mark.parametrize("name", ["family/gpt2-tied", "family/gemma2", "family/bert", "family/opt", "family/bloom"])
def test_the_residual_stream_is_called_x(name: str) -> None:
    assert re.search(r"\n +x = run\(x, ", write_source(lower(graph_of(name))).text)


def test_numbers_that_are_roots_or_shares_are_written_as_such() -> None:
    assert "/ 30.0).tanh() * 30.0" in write_source(lower(graph_of("family/gemma2"))).text
    assert "scale=24**-0.5" in write_source(lower(graph_of("family/gemma3"))).text


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ("ab", "[a, b]"),
        ("aaaa", "[a] * 4"),
        ("ababa", "[a, b] * 2 + [a]"),
        ("aaabbbb", "[a] * 3 + [b] * 4"),
        ("aaaab", "[a] * 4 + [b]"),
        ("abcab", "[a, b, c, a, b]"),
    ],
)
def test_lists_are_written_short(texts: str, wanted: str) -> None:
    assert write_periodic_list([*texts]) == wanted
    assert eval(write_periodic_list([*texts]), {c: c for c in texts}) == [*texts]


@pytest.mark.parametrize("text", ["768 ** -0.5", "x ** -y", "-x ** 2", "2 ** (-0.5 * x)"])
def test_powers_stay_what_they_are(text: str) -> None:
    names = {"x": 3.0, "y": 0.5}
    assert eval(unparse(ast.parse(text)), dict(names)) == eval(text, dict(names))


@pytest.mark.parametrize(
    ("name", "needed"), [("family/llama-gqa-tied", "only torch. "), ("family/gemma3", "only torch and kernels/. ")]
)
def test_a_module_says_what_it_imports(name: str, needed: str) -> None:
    text = write_source(lower(graph_of(name))).text
    assert f"needs {needed}" in text
    assert ("from kernels." in text) == ("kernels" in needed)
