"""Students: which scales and vectors train, what their parametrization computes, and the graph of a trained student."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.torch.distillation.student import (
    LowRank,
    ParameterChoice,
    ScaledCodes,
    Student,
    copy_as_floats,
    find_scaled_params,
    find_vector_params,
    open_student,
)
from weft.frontends.app.api.modules import build_module_graphs, simplify_trainable
from weft.frontends.app.api.modules import torch as torch_module
from weft.ir import Graph
from weft.ir.recipes.blocks import BlockRecipe, Stored
from weft.passes import run_passes

from ....passes.library.quantize.checkpoints import in_memory


@cache
def quantized(options: str = "bits=3, group=16, head=4") -> Graph:
    block = Block(Attention(4, kv_heads=2, rope=RoPE()), GatedMLP(32), RMSNorm())
    graph = in_memory(Decoder(53, 16, 1, block, context=64, tie_embeddings=True).graph())
    return run_passes(graph, f"quantize{{{options}, method=rtn}}")


def student_of(graph: Graph, choice: ParameterChoice | None = None) -> Student:
    floats = copy_as_floats(
        graph, choice or ParameterChoice(frozenset(find_scaled_params(graph)), frozenset(find_vector_params(graph)))
    )
    return open_student(graph, floats, build_module_graphs(simplify_trainable(floats.graph)), "cpu", rank=2)


def test_weight_is_codes_times_scales_and_its_gradient_that_of_the_scales() -> None:
    codes = torch.tensor([[[1, -2], [3, 0]]], dtype=torch.int8)  # [1 row, 2 groups, 2 codes]
    weight = ScaledCodes(codes, torch.tensor([[0.5, 2.0]]), 3)
    change = torch.zeros(1, 2, requires_grad=True)
    made = weight(change)
    assert made.tolist() == [[0.5, -1.0, 6.0]]  # cut to 3 columns
    made.sum().backward()
    assert change.grad is not None and change.grad.tolist() == [[0.5 * (1 - 2), 2.0 * 3]]


def test_coarse_codes_train_before_codes_of_8_bits() -> None:
    mixed, fine = quantized("bits=3, group=16"), quantized("bits=8, group=16")
    bits = {n: p.recipe.layout(mixed.reader).bits for n, p in mixed.params.items() if isinstance(p.recipe, BlockRecipe)}
    assert set(bits.values()) == {3, 8}
    assert {bits[name] for name in find_scaled_params(mixed)} == {3}
    assert find_scaled_params(fine)
    assert set(find_vector_params(mixed)) == {n for n in mixed.params if "norm" in n}


def test_rates_are_relative_to_the_size_of_a_parameter() -> None:
    student = student_of(quantized())
    named, sizes = dict(student.module.named_parameters()), student.list_sizes()
    assert sizes.keys() == {name for name, p in named.items() if p.requires_grad}
    for name, size in sizes.items():
        vector = 0.1 * float(named[name].detach().square().mean().sqrt())
        assert size == pytest.approx(0.04 if "parametrizations" in name else vector)


def set_changes(student: Student, value: float) -> None:
    for parameter in student.trainable:
        if parameter.ndim > 1:
            parameter.data.fill_(value)


def test_direct_and_low_rank_weights_are_in_the_graph_after_training() -> None:
    block = Block(Attention(4, kv_heads=2, rope=RoPE()), GatedMLP(32), RMSNorm())
    graph = in_memory(Decoder(53, 16, 2, block, context=64, tie_embeddings=True).graph())
    direct, low = "layers.0.ffn.up.weight", "layers.1.attn.q.weight"
    student = student_of(graph, ParameterChoice(direct=frozenset({direct, "embed.weight"}), low_rank=frozenset({low})))
    assert len(student.trainable) == 4
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = student.module(ids)
        for parameter in student.trainable:
            parameter.add_(0.1)
        after = student.module(ids)
    trained = student.build_graph()
    assert not torch.allclose(before, after)
    torch.testing.assert_close(torch_module(trained)(ids), after, rtol=1e-4, atol=1e-5)
    for name, param in trained.params.items():
        values = [p.recipe.evaluate(g.reader) for p, g in ((graph.params[name], graph), (param, trained))]
        assert np.array_equal(*values) == (name not in (direct, low, "embed.weight")), name
    change = trained.params[low].recipe.evaluate(trained.reader) - graph.params[low].recipe.evaluate(graph.reader)
    assert np.linalg.matrix_rank(change, tol=1e-5) <= 2


def test_a_product_of_low_rank_begins_at_zero() -> None:
    weight = torch.randn(3, 8, 5)
    part = LowRank(weight, 2)
    assert torch.equal(part(weight), weight)
    assert part.up.shape == (3, 8, 2) and part.down.shape == (3, 2, 5)


def test_graph_of_a_student_has_its_scales_and_the_same_codes() -> None:
    graph = quantized()
    student = student_of(graph)
    set_changes(student, 0.5)
    trained = student.build_graph()
    for name in student.quantized:
        before, after = graph.params[name].recipe, trained.params[name].recipe
        packed = [Stored(r, "packed").evaluate(g.reader) for r, g in ((before, graph), (after, trained))]
        np.testing.assert_array_equal(*packed)
        scales = [
            Stored(r, "steps").evaluate(g.reader).astype(np.float32) for r, g in ((before, graph), (after, trained))
        ]
        np.testing.assert_allclose(scales[1], 1.5 * scales[0], rtol=2**-10)


@pytest.mark.parametrize("options", ["bits=3, group=16, head=4", "bits=4, group=16, zeros=false", "bits=8, group=16"])
def test_the_graph_of_a_student_computes_what_its_module_does(options: str) -> None:
    student = student_of(quantized(options))
    ids, generator = torch.arange(6)[None], torch.Generator().manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(student.module(ids), torch_module(student.graph)(ids), rtol=1e-4, atol=1e-5)
        for parameter in student.trainable:
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
        expected = student.module(ids)
    # Scales are rounded to f16.
    torch.testing.assert_close(torch_module(student.build_graph())(ids), expected, rtol=2e-2, atol=5e-3)


def test_scales_are_clipped_to_the_range_of_their_dtype() -> None:
    student = student_of(quantized())
    set_changes(student, 1e7)
    healed = student.build_graph()
    for param in healed.params.values():
        if isinstance(param.recipe, BlockRecipe):
            scales = Stored(param.recipe, "steps").evaluate(healed.reader)
            assert np.isfinite(scales).all() and np.abs(scales).max() == np.finfo(np.float16).max


def test_float_copy_computes_the_quantized_graph() -> None:
    graph = quantized()
    floats = copy_as_floats(graph, ParameterChoice())
    for name, param in floats.graph.params.items():
        want = graph.params[name].recipe.evaluate(graph.reader)
        np.testing.assert_allclose(param.recipe.evaluate(floats.graph.reader), want, rtol=1e-6)
