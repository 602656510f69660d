"""Likelihoods, divergences and inner errors of models on the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from weft import evaluate, load_source
from weft.frontends.app.api.verify import divergence as scoring
from weft.ir import interpret
from weft.ir.storage.documents import Record

from ...llamas import TEXT, WORDS

EXPERTS = """
from weft import Attention, Block, Decoder, MoE, RMSNorm, RoPE, Router

experts = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), MoE(4, 48, k=1, router=Router(choice="expert")), RMSNorm())
choosy = Decoder(vocab=29, dim=32, layers=2, block=experts)
"""


def test_tally_holds_means_over_all_chunks() -> None:
    tally = scoring.Tally()
    tally.add(np.array([1.0, 2.0]), np.array([0.0, 0.5]), np.array([True, False]))
    tally.add(np.array([6.0]), np.array([1.0]), np.array([True]))
    assert (tally.tokens, tally.nll, tally.kl) == (3, pytest.approx(3.0), pytest.approx(0.5))
    assert tally.agreement == pytest.approx(2 / 3) and tally.kl_99 == pytest.approx(0.99)  # between 0.5 and 1


def test_layer_errors_equal_those_of_transformers_hidden_states(llamas: tuple[Path, Path], prose: Path) -> None:
    ids = torch.tensor([Tokenizer.from_file(str(llamas[0] / "tokenizer.json")).encode(TEXT).ids[:24]])
    hidden = []
    for folder in llamas:
        net = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        last: list[torch.Tensor] = []
        net.model.norm.register_forward_pre_hook(lambda _, given, last=last: last.append(given[0]))
        with torch.no_grad():
            states = net(ids, output_hidden_states=True).hidden_states[1:-1]
        hidden.append([*states, *last])  # the last hidden state is normed already
    want = [(torch.linalg.norm(b - a) / torch.linalg.norm(a)).item() for a, b in zip(*hidden, strict=True)]
    rewrites = {"two": "prune-layers{layers=1}"}
    found = evaluate(
        [llamas[1]], against=llamas[0], text=prose, rewrites=rewrites, context=24, layers=True, device="cpu"
    )
    assert found.scores[0].layers == {f"layers.{i}": 0.0 for i in range(3)}
    np.testing.assert_allclose(list(found.scores[1].layers.values()), want, rtol=1e-5)
    # Without the second layer, the first is as before, and the last is aligned with the last.
    assert list(found.scores[2].layers) == ["layers.0", "layers.2"] and found.scores[2].layers["layers.0"] == 0
    assert found.scores[2].parameters < found.scores[0].parameters


def test_expert_choice_reads_whole_windows(
    llamas: tuple[Path, Path], prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts choose among the tokens of a call: chunks of 7 tokens would be given to other experts than all 20."""
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 7 * len(WORDS))
    source = tmp_path / "tiny.py"
    source.write_text(EXPERTS)
    choosy = tmp_path / "choosy.weft"
    choosy.write_text(str(load_source(f"{source}:choosy").graph).replace("std=0.02", "std=0.5"))
    found = evaluate([choosy], against=llamas[0], text=prose, context=20, tokens=40, device="cpu")
    ids = np.array(Tokenizer.from_file(str(llamas[0] / "tokenizer.json")).encode(TEXT).ids[:41])
    graph = load_source(choosy).graph
    at = np.arange(20)[None]
    rows = [interpret(graph, {"input_ids": ids[at + s], "position_ids": at})["logits"][0] for s in (0, 20)]
    loss = torch.nn.functional.cross_entropy(torch.tensor(np.concatenate(rows)), torch.tensor(ids[1:]))
    assert found.scores[1].nll == pytest.approx(loss.item(), abs=1e-5)
    monkeypatch.setattr(
        "weft.frontends.app.api.verify.evaluation.read_manifest", lambda folder: Record(folder, {"kind": "decoder"})
    )  # not told of it
    apart = evaluate([choosy], against=llamas[0], text=prose, context=20, tokens=40, device="cpu")
    assert abs(apart.scores[1].nll - loss.item()) > 1e-3
