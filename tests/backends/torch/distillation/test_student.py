"""Students: which scales and vectors train, what their parametrization computes, and the graph of a trained student."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.torch.distillation.student import (
    ScaledCodes,
    Student,
    copy_as_floats,
    find_scaled_params,
    find_vector_params,
    open_student,
)
from weft.frontends.app.api.modules import build_module_graphs, simplify_trainable
from weft.ir import Graph
from weft.ir.recipes.blocks import BlockRecipe, Stored
from weft.passes import run_passes

from ....passes.library.quantize.checkpoints import in_memory


@cache
def quantized(options: str = "bits=3, group=16, head=4") -> Graph:
    block = Block(Attention(4, kv_heads=2, rope=RoPE()), GatedMLP(32), RMSNorm())
    graph = in_memory(Decoder(53, 16, 1, block, context=64, tie_embeddings=True).graph())
    return run_passes(graph, f"quantize{{{options}, method=rtn}}")


def student_of(graph: Graph) -> Student:
    floats = copy_as_floats(graph)
    return open_student(graph, floats, build_module_graphs(simplify_trainable(floats.graph)), "cpu")


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


def test_state_is_restored() -> None:
    student = student_of(quantized())
    state = student.copy_state()
    for parameter in student.trainable:
        parameter.data.add_(1)
    assert not torch.equal(student.trainable[0], state[0])
    student.restore(state)
    assert all(torch.equal(a, b) for a, b in zip(student.trainable, state, strict=True))
    scales, vectors = student.count_trained()
    assert vectors == 3 * 16 and scales == sum({id(c): c.numel() for _, c in student.scales.values()}.values())


def test_graph_of_a_student_has_its_scales_and_the_same_codes() -> None:
    graph = quantized()
    student = student_of(graph)
    for _, change in student.scales.values():
        change.data.fill_(0.5)
    student.round_scales()
    assert all(not change.any() for _, change in student.scales.values())
    trained = student.build_graph()
    for name in student.scales:
        before, after = graph.params[name].recipe, trained.params[name].recipe
        packed = [Stored(r, "packed").evaluate(g.reader) for r, g in ((before, graph), (after, trained))]
        np.testing.assert_array_equal(*packed)
        scales = [
            Stored(r, "steps").evaluate(g.reader).astype(np.float32) for r, g in ((before, graph), (after, trained))
        ]
        np.testing.assert_allclose(scales[1], 1.5 * scales[0], rtol=2**-10)


def test_scales_are_clipped_to_the_range_of_their_dtype() -> None:
    student = student_of(quantized())
    for _, change in student.scales.values():
        change.data.fill_(1e7)
    healed = student.build_graph()
    for param in healed.params.values():
        if isinstance(param.recipe, BlockRecipe):
            scales = Stored(param.recipe, "steps").evaluate(healed.reader)
            assert np.isfinite(scales).all() and np.abs(scales).max() == np.finfo(np.float16).max


def test_float_copy_computes_the_quantized_graph() -> None:
    graph = quantized()
    floats = copy_as_floats(graph)
    for name, param in floats.graph.params.items():
        want = graph.params[name].recipe.evaluate(graph.reader)
        np.testing.assert_allclose(param.recipe.evaluate(floats.graph.reader), want, rtol=1e-6)
    assert floats.scaled == set(find_scaled_params(graph))
    assert copy_as_floats(graph, (), ()).vectors == set()
