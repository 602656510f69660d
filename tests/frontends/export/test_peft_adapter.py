"""Adapters of a training by matrices of low rank: PEFT computes with them what the merged model computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

import weft
from weft import TrainingSettings
from weft.frontends.export.peft_adapter import find_adaptable


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT
def test_peft_reads_the_adapter_of_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    base = tmp_path / "base"
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    np.save(tmp_path / "ids.npy", np.arange(2000) % 13 * 7)
    settings = TrainingSettings(steps=20, batch=4, context=16, lora=3, rate=0.02)
    run = weft.train(str(base), tmp_path / "ids.npy", tmp_path / "run", settings)
    assert run.best < run.before
    net = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(net, tmp_path / "run" / "adapter")
    ids = torch.tensor([[5, 7, 11, 13, 2]])
    with torch.inference_mode():
        expected = adapted(ids).logits
        before = transformers.AutoModelForCausalLM.from_pretrained(base)(ids).logits
        torch.testing.assert_close(weft.torch(run.folder)(ids), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)
    merged = weft.load_source(str(base), adapters=[tmp_path / "run" / "adapter"]).graph
    trained = weft.load_source(run.folder).graph
    names = find_adaptable(weft.load_source(str(base)).graph)
    assert len(names) == 14
    for name in names:
        values = (graph.params[name].recipe.evaluate(graph.reader) for graph in (merged, trained))
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)
