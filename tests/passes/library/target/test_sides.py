"""An encoder-decoder cut in two computes what it computed whole."""

from __future__ import annotations

import numpy as np
import pytest

from weft import Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, MoE, RoPE, Router
from weft.ir import Graph, TensorType, Value, WeftError, interpret, ops, parse, verify
from weft.ir.types import dtypes, sizes
from weft.passes import run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck
from weft.passes.library.target.sides import Package, join_encoder_decoder

from ....e2e.random_models import strong
from ...models import BATCH, SEQ, count, weight
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

DIM, HEADS, SOURCE = 12, 3, sizes.sym("source")


def attended(g: Graph, scope: str, x: Value, memory: Value, mask: Value | None, causal: bool = False) -> Value:
    """x + attention of x to `memory`."""
    with g.scope(scope):
        read = {"q": x, "k": memory, "v": memory}
        q, k, v = (ops.linear(y, weight(g, f"{n}.weight", DIM, DIM), name=n) for n, y in read.items())
        return ops.add(x, ops.attention(q, k, v, None, mask, heads=HEADS, kv_heads=HEADS, causal=causal))


def split(graph: Graph) -> tuple[Graph, Graph]:
    encoder, decoder = (run_passes(graph, side, verify=True) for side in ("encoder-side", "decoder-side"))
    return encoder, decoder


def seq2seq(*, pooled: bool = False, layers: int = 2) -> Graph:
    """A shared embedding, an encoder of one layer, a decoder; `pooled` adds the mean of the source to every token."""
    g = Graph("seq2seq")
    g.meta["kind"] = "encoder-decoder"
    source, mask = (
        g.add_input(f"encoder_{name}", TensorType(dtypes.i64, (BATCH, SOURCE)))
        for name in ("input_ids", "attention_mask")
    )
    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    table = weight(g, "embed.weight", 31, DIM)
    doubled = ops.affine(table, by=2.0, name="doubled")  # no input decides it: both parts have it
    memory = ops.embedding(source, doubled, name="encoder.embed")
    memory = attended(g, "encoder.layers.0.attn", memory, memory, mask)
    x = ops.embedding(ids, doubled, name="decoder.embed")
    if pooled:
        x = ops.add(x, ops.mean(memory, axes=(1,), keepdims=True, name="mean"))
        g.add_output("memory", memory)
    for i in range(layers):
        x = attended(g, f"decoder.layers.{i}.attn", x, x, None, causal=True)
        x = attended(g, f"decoder.layers.{i}.cross", x, memory, mask)
    g.add_output("logits", ops.linear(x, table, name="lm_head"))
    return g


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("passes", ["dce", "default", "default, cast{dtype=f16}"])
def test_encoder_and_decoder_compute_the_whole_model(passes: str, pooled: bool) -> None:
    whole = run_passes(seq2seq(pooled=pooled), passes if not pooled else passes.replace("default", "pack-qkv"))
    before = str(whole)
    encoder, decoder = split(whole)
    assert str(whole) == before
    equivalence = EquivalenceCheck()
    inputs = equivalence.make_inputs(whole)
    made = equivalence.run(encoder, {name: inputs[name] for name in encoder.inputs})
    for part in (encoder, decoder):
        verify(part, recipes=True)
    found = equivalence.run(decoder, {name: (inputs | made)[name] for name in decoder.inputs})
    found |= {name: made[name] for name in whole.outputs if name in made}
    equivalence.check_close(equivalence.run(whole, inputs), {name: found[name] for name in whole.outputs}, EXACT)


def test_inputs_and_outputs_of_both_sides() -> None:
    encoder, decoder = split(run_passes(seq2seq()))
    keys = [f"cross.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
    assert list(encoder.inputs) == ["encoder_input_ids", "encoder_attention_mask"]
    assert list(encoder.outputs) == keys
    assert {str(v.type) for v in encoder.outputs.values()} == {f"f32[batch, source, {DIM}]"}
    pasts = [name.replace("cross", "past_key_values") for name in keys]
    assert set(decoder.inputs) == {
        *("encoder_attention_mask", "input_ids", "attention_mask", "position_ids"),
        *(keys + pasts),
    }
    assert list(decoder.outputs) == ["logits", *(n.replace("past_key_values", "present") for n in pasts)]
    assert (encoder.meta["kind"], decoder.meta["kind"]) == ("encoder", "decoder")


def test_connections_have_types() -> None:
    encoder, decoder = split(seq2seq(layers=1))
    made = join_encoder_decoder(encoder, decoder, "keys").find_connections()
    assert [(c.maker, c.reader, c.name) for c in made] == [
        ("encoder", "decoder", f"cross.0.{part}") for part in ("key", "value")
    ]
    assert {c.type for c in made} == {encoder.outputs["cross.0.key"].type}
    wide = run_passes(encoder, "cast{dtype=f16}")
    with pytest.raises(WeftError, match=r"decoder reads cross.0.key as f32\[.*, but encoder returns f16"):
        join_encoder_decoder(wide, decoder, "keys").find_connections()


def test_each_side_has_the_weights_that_it_reads() -> None:
    encoder, decoder = split(seq2seq())
    assert encoder.params.keys() & decoder.params.keys() == {"embed.weight"}
    assert "decoder.layers.1.cross.k.weight" in encoder.params
    assert {p.rpartition(".")[0] for p in decoder.params if "cross" in p} == {
        f"decoder.layers.{i}.cross.q" for i in (0, 1)
    }
    assert count(encoder, "affine") == count(decoder, "affine") == 1


def test_values_other_than_the_hidden_states_keep_their_names() -> None:
    encoder, decoder = split(seq2seq(pooled=True, layers=1))
    assert list(encoder.outputs) == ["mean", "cross.0.key", "cross.0.value", "memory"]
    assert "mean" in decoder.inputs
    assert list(decoder.outputs) == ["logits"]


def test_unread_values_are_not_passed_to_the_decoder() -> None:
    g = seq2seq(pooled=True)
    (summed,) = next(n.output for n in g.nodes if n.output.name == "mean").users
    token = summed.inputs[0]
    assert token is not None
    summed.output.replace_uses(token)
    encoder, _ = split(g)
    assert "mean" not in encoder.outputs


def test_a_model_without_an_encoder_is_refused() -> None:
    g = seq2seq(layers=0)
    with pytest.raises(WeftError, match="graph seq2seq cannot be split: no value depends only on encoder inputs"):
        split(g)


def with_losses() -> Graph:
    """An encoder-decoder with experts on both sides, whose losses are added."""
    experts = MoE(4, 16, 2, router=Router(aux_loss=0.01))
    reads = Block(Attention(4, rope=RoPE()), experts)
    writes = Block(Attention(4, rope=RoPE()), experts, cross=CrossAttention(4))
    return strong(EncoderDecoder(Encoder(31, 32, 2, reads), Decoder(31, 32, 2, writes, context=20)).graph())


STATES = {name: ZOO[name] for name in ("family/t5", "family/bart", "variant/encoder-decoder")} | {"losses": with_losses}


@pytest.mark.parametrize("name", STATES)
def test_model_is_split_at_a_given_value(name: str) -> None:
    """Both sides compute their part, a loss that both add to included, and have names as models of their own."""
    whole = STATES[name]()
    encoder, decoder = (run_passes(whole, f"{kind}-side{{at=states}}", verify=True) for kind in ("encoder", "decoder"))
    assert next(iter(encoder.inputs)) == "input_ids" and "last_hidden_state" in encoder.outputs
    assert "encoder_hidden_states" in decoder.inputs and "encoder_input_ids" not in decoder.inputs
    assert {"aux_loss" in part.outputs for part in (whole, encoder, decoder)} == {name == "losses"}
    assert not any(param.startswith("encoder.") for param in encoder.params)


DOUBLE = "graph a { input %x: f32[n] %y: f32[n] = affine(%x, by=2.0) output y = %y }"
ADD = "graph b { input %h: f32[n] input %x: f32[n] %z: f32[n] = add(%h, %x) output z = %z }"


def package(second: str = ADD) -> Package:
    return Package({"double": parse(DOUBLE), "add": parse(second)}, {"add": {"h": "y"}})


def test_connection_is_an_output_read_under_its_name_in_the_model() -> None:
    (one,) = package().find_connections()
    assert (one.maker, one.reader, one.name, str(one.type)) == ("double", "add", "y", "f32[n]")
    assert Package({"double": parse(DOUBLE), "add": parse(ADD)}).find_connections() == []


def test_graphs_run_in_order_on_the_outputs_of_earlier_ones() -> None:
    x = np.array([1.0, 3.0])
    values = package().run(interpret, {"x": x})
    assert list(values) == ["x", "y", "z"]
    np.testing.assert_array_equal(values["z"], 3 * x)


def test_connection_of_two_types_names_both_graphs() -> None:
    with pytest.raises(WeftError, match=r"add reads y as f16\[n\], but double returns f32\[n\]"):
        package("graph b { input %h: f16[n] output z = %h }").find_connections()
