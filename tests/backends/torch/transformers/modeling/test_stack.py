"""The list of layers of a model, and numbers and kinds of their caches."""

from __future__ import annotations

from weft.backends.torch.codegen.structure import Loop, group_statements
from weft.backends.torch.program.statements import CacheSlot, Statement, Var
from weft.backends.torch.transformers.modeling.stack import (
    CacheNumbers,
    find_stack,
    has_cache_slot,
    list_attentions,
    list_block_kinds,
    list_cache_kinds,
    list_outer_kinds,
    loop_single_layers,
    number_caches,
)

from ..tiny import base_of, lower_model


def test_layers_are_the_longest_loop() -> None:
    base = base_of("windows")
    assert base.stack is not None
    assert (base.stack.path, len(base.stack), base.stack.caches) == ("layers", 3, 1)
    assert find_stack(base.method, base.lowered.emitter) == base.stack
    assert list_outer_kinds(base.method, base.lowered.emitter, base.stack) == ([], [])


def test_single_layer_becomes_a_loop() -> None:
    lowered = lower_model("single")
    top = group_statements(lowered.base)
    assert not any(isinstance(item, Loop) for item in top.items)
    loop_single_layers(top, lowered.base)
    (loop,) = (item for item in top.items if isinstance(item, Loop))
    assert [call.path for call in loop.calls] == ["layers.0"]


def test_caches_are_numbered_in_order() -> None:
    base = base_of("windows")
    e = base.lowered.emitter
    numbers = number_caches(base.method, e, base.stack)
    assert (numbers.count, numbers.self_count, numbers.cross_count, sorted(numbers.first.values())) == (
        3,
        3,
        3,
        [0, 1, 2],
    )
    blocks = {c.path: c.callee for c in base.stack.calls} if base.stack else {}
    assert list_block_kinds(blocks["layers.2"], e) == ["full_attention"]
    assert list_cache_kinds(base.method, e, base.stack) == ["sliding_attention"] * 2 + ["full_attention"]


def test_states_of_one_recurrence_share_a_number() -> None:
    base = base_of("mamba")
    assert number_caches(base.method, base.lowered.emitter, base.stack).count == 2
    assert list_cache_kinds(base.method, base.lowered.emitter, base.stack) == ["linear_attention"] * 2


def test_layers_without_a_cache_have_a_number() -> None:
    base = base_of("encoder")
    assert base.stack is not None
    assert list_block_kinds(base.stack.calls[0].callee, base.lowered.emitter) == ["moe"]


def test_self_and_cross_attention_caches_share_their_numbers() -> None:
    numbers = CacheNumbers()
    for item, own, source in (("self", 1, 0), ("cross", 0, 1), ("layer", 2, 2), ("last", 1, 0)):
        numbers.add(item, own, source)
    assert numbers.first == {"self": 0, "cross": 0, "layer": 1, "last": 3}
    assert (numbers.self_count, numbers.cross_count, numbers.count) == (4, 3, 4)


def test_attentions_belong_to_the_method_that_computes_them() -> None:
    base = base_of("dense")
    found = {name: len(list_attentions(m, base.lowered.emitter)) for name, m in base.writer.methods.items()}
    assert found == {"Attention": 1, "FeedForward": 0, "Block": 0, "TinyModel": 0}


def test_statements_with_a_slot_and_results_have_a_cache() -> None:
    slot = CacheSlot("cache", "", "Cache")
    assert has_cache_slot(Statement("{0}", (slot,), (Var("x"),), ""))
    assert not has_cache_slot(Statement("{0}", (slot,), (), "")) and not has_cache_slot(
        Statement("1", (), (Var("x"),), "")
    )
