"""weft inspect by parts: sums are the whole, and the whole is what other counts say."""

from __future__ import annotations

import pytest

from weft import Attention, Block, Decoder, GatedMLP, Mamba, RMSNorm, RoPE, load_source
from weft.frontends.app.api.inspect.breakdown import PartCost, compute_part_costs
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.app.api.rewrite import rewrite

DIM, HEADS, KV, HEAD, FFN, VOCAB = 32, 4, 2, 8, 48, 50
ATTENTION = DIM * (HEADS + 2 * KV) * HEAD + HEADS * HEAD * DIM  # weights of its four products
PUBLISHED = {"gpt2": 124_439_808, "llama3.1-8b": 8_030_261_248, "bert-base": 109_482_240, "t5-base": 222_903_552}


def costs(model: object, tokens: int, item: int) -> dict[str, PartCost]:
    return {cost.path: cost for cost in compute_part_costs(load_source(model).graph, tokens, item)}


def test_a_layer_is_counted_by_hand() -> None:
    local = Block(Attention(HEADS, KV, rope=RoPE(), window=16), GatedMLP(FFN), RMSNorm())
    found = costs(Decoder(VOCAB, DIM, [local] * 3, context=64), 40, 2)
    attn, layers = found["layers.0.attn"], found["layers.0-2"]
    assert (attn.times, layers.times) == (3, 3)
    assert attn.parameters == ATTENTION
    assert layers.parameters == 3 * (ATTENTION + 3 * DIM * FFN + 2 * DIM)
    scores = 40 * 16 * HEADS * (2 * 2 * HEAD + 5)  # two products and the softmax, of 16 keys for every token
    turned = 40 * (HEADS + KV) * HEAD * 3
    assert attn.flops == 2 * 40 * ATTENTION + scores + turned
    assert attn.step_flops == attn.flops // 40
    assert attn.cache == 16 * 2 * KV * HEAD * 2 and layers.cache == 3 * attn.cache
    ffn = found["layers.0.ffn"]
    hidden, numbers = 40 * FFN, 3 * DIM * FFN
    assert ffn.read == 2 * (numbers + 2 * 40 * DIM + 3 * hidden)  # x twice, both halves, what goes down
    assert ffn.written == 2 * (3 * hidden + 40 * DIM)
    assert ffn.step_read == 2 * (numbers + 2 * DIM + 3 * FFN)


@pytest.mark.parametrize("preset", ["gpt2", "llama3.1-8b", "bert-base", "t5-base", "mamba-130m"])
def test_costs_of_parts_sum_to_those_of_the_model(preset: str) -> None:
    model = rewrite(load_source(preset), "fold-constants")  # what is made of weights alone costs no token anything
    told, found = inspect(model, 100), costs(model, 100, 2)
    whole = found.pop("")
    assert whole.parameters == told.parameters == PUBLISHED.get(preset, told.parameters)
    assert whole.flops == told.flops_prefill
    assert (whole.step_flops is None) == (told.kind == "encoder")
    top = [c for c in found.values() if "." not in c.path or c.path in ("layers.0-11", "layers.0-31", "layers.0-23")]
    assert sum(c.parameters for c in top) == whole.parameters
    assert sum(c.flops for c in top) == whole.flops
    if told.kind == "decoder":
        assert whole.step_flops == told.flops_per_token
        assert whole.cache == 100 * (told.cache_per_token or 0) * 2
        assert told.state_bytes is not None and whole.state == told.state_bytes["f16"]


def test_states_are_kept_in_their_own_dtypes() -> None:
    found = costs(Decoder(VOCAB, DIM, [Block(Mamba(48, state=5, conv=4), norm=RMSNorm())]), 10, 2)[""]
    assert found.state == 4 * 48 * 5 + 2 * 48 * 3
    assert found.cache == 0 and found.step_flops
