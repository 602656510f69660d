"""quiet-routers and drop-dropout: noise that only acts in training is removed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft import Attention, Block, Decoder, GatedMLP, MoE, Router
from weft.ir import WeftError, ops, verify
from weft.passes import default_pipeline, run_passes

from ...models import Tiny
from ...rewrites import Rewrite, rewrites

MODEL = Decoder(20, 8, 2, Block(Attention(2), MoE(4, 6, 2, router=Router(noisy=True))))


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_routers_lose_their_noise() -> None:
    before = MODEL.graph()
    after = run_passes(before, "quiet-routers", verify=True)
    verify(after, recipes=True)
    assert list(before.inputs) == ["input_ids", "router_noise.0", "router_noise.1"]
    assert list(after.inputs) == ["input_ids"]
    assert not [n for n in after.params if "noise" in n]
    assert after == Decoder(20, 8, 2, Block(Attention(2), MoE(4, 6, 2))).graph()


def test_compiling_removes_router_noise(rng: np.random.Generator) -> None:
    assert default_pipeline(MODEL.graph()).passes[0].name == "quiet-routers"
    assert "quiet-routers" not in str(default_pipeline(Tiny().graph()))
    run_passes(MODEL.graph(), verify=True)


def test_there_must_be_noise() -> None:
    with pytest.raises(WeftError, match=r"quiet-routers: graph decoder has no input router_noise\.0"):
        run_passes(Decoder(20, 8, 1, Block(Attention(2))).graph(), "quiet-routers")


PLAIN = Block(Attention(2), GatedMLP(24))
DROPPING = dataclasses.replace(PLAIN, dropout=0.25)
IDS = torch.arange(12).reshape(2, 6)


def decoder(block: Block) -> Decoder:
    return Decoder(vocab=20, dim=16, layers=2, block=block, context=16)


def test_the_graph_is_that_without_dropout() -> None:
    before = decoder(DROPPING).graph()
    assert sum(node.op is ops.dropout for node in before.nodes) == 4
    assert run_passes(before, "drop-dropout", verify=True) == decoder(PLAIN).graph()


def test_compiling_removes_dropout_and_training_keeps_it() -> None:
    graph = decoder(DROPPING).graph()
    assert default_pipeline(graph).passes[0].name == "drop-dropout"
    assert "drop-dropout" not in str(default_pipeline(graph, trains=True))
    assert "drop-dropout" not in str(default_pipeline(decoder(PLAIN).graph()))


def test_a_module_drops_while_it_trains() -> None:
    net, plain = weft.torch(decoder(DROPPING)), weft.torch(decoder(PLAIN))
    assert torch.equal(net.eval()(IDS), plain(IDS))
    net.train()
    torch.manual_seed(0)
    first, again = net(IDS), net(IDS)
    assert not torch.equal(first, again)
    torch.manual_seed(0)
    assert torch.equal(net(IDS), first)


def test_the_share_that_is_dropped() -> None:
    net = weft.torch(decoder(DROPPING)).train()
    added = []
    net.layers[0].ffn.register_forward_hook(lambda module, given, made: added.append(made))
    net.layers[1].register_forward_pre_hook(lambda module, given: added.append(given[0]))
    net.layers[0].ffn_norm.register_forward_pre_hook(lambda module, given: added.append(given[0]))
    net(torch.arange(20).repeat(30)[None])
    stream, ffn, after = added
    left = (after - stream).detach()
    kept = left != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    torch.testing.assert_close(left[kept], (ffn / 0.75).detach()[kept], rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", ["onnx", "torch"])
def test_inference_folders_have_no_dropout(target: str, tmp_path: Path) -> None:
    for name, block in (("plain", PLAIN), ("dropping", DROPPING)):
        weft.compile(decoder(block), tmp_path / name, target=target)
    code = [f.name for f in (tmp_path / "plain").iterdir() if f.suffix in (".py", ".onnx")]
    assert code
    for name in code:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "dropping" / name).read_bytes(), name


def test_folders_for_transformers_train_with_it(tmp_path: Path) -> None:
    weft.compile(decoder(DROPPING), tmp_path / "out", target="transformers")
    assert "F.dropout(attn, 0.25, self.training)" in (tmp_path / "out" / "modeling_decoder.py").read_text()


def test_refusals() -> None:
    with pytest.raises(WeftError, match=r"Block: dropout=1\.0 must be at least 0 and below 1"):
        Block(Attention(2), dropout=1.0)
    graph = decoder(PLAIN).graph()
    with pytest.raises(WeftError, match=r"share=-0\.5 must be at least 0"):
        ops.dropout.emit(graph.outputs["logits"], share=-0.5)
