"""Folders of encoder-decoders, of the zoo and random ones, loaded by transformers, against the float64 interpreter; and
used: generating, training, other sizes, back into weft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from weft.frontends.app.api.source.sources import load_source

from ....passes.zoo import TRIED, ZOO
from ....sampling import ALL, each
from .folders import (
    COMPETES,
    check_gradients,
    error,
    feeds_of,
    folder_of,
    graph_of,
    imported,
    lowered,
    model_of,
    ops_of,
    tokens_of,
    wanted,
)
from .test_folders_zoo import BOUND, attention_functions

RANDOM = 200 if ALL else 10
USED = ("preset/transformer-base", "preset/t5-base", "preset/switch-base-8", "variant/encoder-decoder", "family/bart")
NEW = 6
GREEDY: dict[str, Any] = {
    **{"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW, "decoder_start_token_id": 1},
    **{"eos_token_id": None, "forced_eos_token_id": None},
}


def both_sides() -> list[str]:
    names = [n for n in TRIED if n.startswith(("preset/", "variant/", "family/"))]
    texts = [n for n in names if "encoder_input_ids" in ZOO[n]().inputs]
    return texts + [f"both/{i}" for i in range(RANDOM)]


def test_translator_example_agrees_with_the_interpreter(tmp_path: Path) -> None:
    graph = load_source(Path(__file__).parents[4] / "examples/tiny_translator.py").graph
    feeds = feeds_of(graph, 9)
    model, ids = model_of(lowered(graph), tmp_path), torch.from_numpy(feeds["input_ids"]).long()
    with torch.no_grad():
        assert error(in_calls(model, source_of(feeds), ids), wanted(graph, feeds)["logits"]) <= BOUND


def source_of(feeds: dict[str, Any]) -> dict[str, Tensor]:
    """The source of a call, as a model for transformers is given it."""
    names = {"encoder_input_ids": "input_ids", "encoder_attention_mask": "attention_mask"}
    return {name: torch.from_numpy(feeds[k]).long() for k, name in names.items()}


@pytest.mark.halved
@pytest.mark.parametrize("name", both_sides())
def test_encoder_decoders_agree_with_the_interpreter(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    feeds = feeds_of(graph)
    want, ids, source = wanted(graph, feeds)["logits"], torch.from_numpy(feeds["input_ids"]).long(), source_of(feeds)
    made = lowered(graph)
    model = model_of(made, tmp_path)
    with torch.no_grad():
        for function in attention_functions(model, made):
            if function:
                model.set_attn_implementation(function)
            assert error(model(**source, decoder_input_ids=ids).logits, want) <= BOUND
        if COMPETES & ops_of(made):
            return
        assert error(in_calls(model, source, ids), want) <= BOUND


def in_calls(model: Any, source: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of calls of a few tokens that share a cache, and what the encoder made."""
    encoded, past, made, start = model.get_encoder()(**source), None, [], 0
    for n in (3, 1, 2, *[1] * (ids.shape[1] - 6)):
        given = {"encoder_outputs": encoded, "attention_mask": source["attention_mask"], "past_key_values": past}
        out = model(decoder_input_ids=ids[:, start : start + n], use_cache=True, **given)
        past, start = out.past_key_values, start + n
        made.append(out.logits)
    return torch.cat(made, 1)


@pytest.mark.parametrize("name", [*each(2, USED), *(f"both/{i}" for i in range(60 if ALL else 3))])
def test_generation_agrees_with_full_passes(name: str, tmp_path: Path) -> None:
    graph = lowered(graph_of(name))
    model, source = model_of(graph, tmp_path), {"input_ids": tokens_of(graph, 2, 5)}
    source["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    ids = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(NEW):
            best = model(**source, decoder_input_ids=ids, use_cache=False).logits[:, -1].topk(2)
            if (best.values[:, 0] - best.values[:, 1]).min() < 1e-5:  # either token will do
                break
            ids = torch.cat((ids, best.indices[:, :1]), 1)
        assert torch.equal(model.generate(**source, **GREEDY)[:, : ids.shape[1]], ids)
        if ids.shape[1] <= NEW:
            return
        if COMPETES & ops_of(graph):
            return
        static = model.generate(**source, cache_implementation="static", disable_compile=True, **GREEDY)
        assert torch.equal(static, ids)
        drawn = []
        for cached in (True, False):
            torch.manual_seed(0)
            drawn.append(model.generate(**source, use_cache=cached, **{**GREEDY, "do_sample": True}))
        assert torch.equal(*drawn)
        beams, again = (model.generate(**source, num_beams=3, use_cache=cached, **GREEDY) for cached in (True, False))
        assert torch.equal(beams, again)


@pytest.mark.parametrize("name", ["preset/t5-base", "variant/encoder-decoder", "both/1", "both/13"])
def test_gradients_agree_with_finite_differences(name: str, tmp_path: Path) -> None:
    """Those of every weight, as finite differences of the loss along a random direction say, and with activations that
    are made again; labels are what the decoder reads, moved on by one token."""
    graph = lowered(graph_of(name))
    model = model_of(graph, tmp_path).double().train()
    model.config.decoder_start_token_id = 1
    source, labels = tokens_of(graph, 2, 5), tokens_of(graph, 2, 7, seed=1)
    given = {"input_ids": source, "labels": labels, "use_cache": False}
    loss = model(**given).loss
    before = torch.cat((torch.ones(2, 1, dtype=torch.long), labels[:, :-1]), 1)
    logits = model(source, decoder_input_ids=before, use_cache=False).logits
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss >= plain - 1e-5 if "load_balance_loss" in ops_of(graph) else abs(loss - plain) < 1e-5
    check_gradients(model, lambda: loss_of(model, given, labels))


def loss_of(model: Any, given: dict[str, Any], labels: Tensor) -> Tensor:
    """The cross entropy in float64, in which no loss of transformers is computed."""
    return torch.nn.functional.cross_entropy(model(**given).logits.flatten(0, 1), labels.flatten())


def test_labels_require_a_decoder_start_token(tmp_path: Path) -> None:
    graph = lowered(graph_of("variant/encoder-decoder"))
    model, ids = model_of(graph, tmp_path), tokens_of(graph, 2, 5)
    with pytest.raises(ValueError, match="give decoder_input_ids: the config has no decoder_start_token_id"):
        model(ids, labels=ids)


def test_config_with_other_sizes_trains_a_new_model(tmp_path: Path) -> None:
    """Other numbers of layers on each side, twice as wide: such models train from scratch, and are saved and loaded."""
    graph = lowered(graph_of("preset/t5-v1.1-base"))
    folder_of(graph, tmp_path / "folder")
    module = imported(tmp_path / "folder")
    sizes = {"num_hidden_layers": 3, "encoder_layers": 1, "hidden_size": 48, "intermediate_size": 40, "vocab_size": 80}
    model = module.TinyForConditionalGeneration(module.TinyConfig(**sizes, decoder_start_token_id=0))
    assert (len(model.model.decoder.layers), len(model.model.encoder.layers)) == (3, 1)
    assert model.get_input_embeddings().weight is model.model.decoder.get_input_embeddings().weight
    ids, labels = torch.randint(1, 80, (2, 9)), torch.randint(1, 80, (2, 6))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval().save_pretrained(tmp_path / "trained")
    again = module.TinyForConditionalGeneration.from_pretrained(tmp_path / "trained").eval()
    with torch.no_grad():
        assert torch.allclose(again(ids, labels=labels).logits, model(ids, labels=labels).logits, atol=1e-5)


@pytest.mark.parametrize("name", each(2, [*USED, "both/0", "both/3", "both/11"], 1))
def test_weft_reads_the_folder_back(name: str, tmp_path: Path) -> None:
    """Its graph, and its weights as they are by now."""
    graph = lowered(graph_of(name))
    model = model_of(graph, tmp_path)
    feeds = feeds_of(graph)
    want = wanted(graph, feeds)["logits"]
    assert error(torch.from_numpy(wanted(load_source(tmp_path).graph, feeds)["logits"]), want) < 1e-6
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + 0.1 * torch.rand(p.shape))
        model.save_pretrained(tmp_path)
        ids = torch.from_numpy(feeds["input_ids"]).long()
        made = model(**source_of(feeds), decoder_input_ids=ids, use_cache=False).logits
        assert error(made, wanted(load_source(tmp_path).graph, feeds)["logits"]) < 1e-4


def test_records_hidden_states_and_attentions(tmp_path: Path) -> None:
    graph = lowered(graph_of("preset/transformer-base"))
    model, source, ids = model_of(graph, tmp_path), tokens_of(graph, 2, 5), tokens_of(graph, 2, 7)
    model.set_attn_implementation("eager")
    made = model(source, decoder_input_ids=ids, output_hidden_states=True, output_attentions=True)
    layers, below = model.config.num_hidden_layers, model.config.encoder_layers
    assert (len(made.decoder_hidden_states), len(made.encoder_hidden_states)) == (layers + 1, below + 1)
    assert [a.shape[-2:] for a in made.decoder_attentions] == [(7, 7)] * layers
    assert [a.shape[-2:] for a in made.cross_attentions] == [(7, 5)] * layers
    assert [a.shape[-2:] for a in made.encoder_attentions] == [(5, 5)] * below


@pytest.mark.usefixtures("own_code")
def test_auto_classes_load_it(tmp_path: Path) -> None:
    """And no engine takes it, which is told."""
    graph = lowered(graph_of("preset/t5-base"))
    built = folder_of(graph, tmp_path / "folder")
    assert all(reasons == ["it is an encoder-decoder"] for reasons in built.refusals.values())
    config = AutoConfig.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    assert config.is_encoder_decoder and type(config).__name__ == "TinyConfig"
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    assert type(model).__name__ == "TinyForConditionalGeneration"
    assert type(AutoModel.from_pretrained(tmp_path / "folder", trust_remote_code=True)).__name__ == "TinyModel"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT
def test_adapter_round_trips(tmp_path: Path) -> None:
    """LoRA trained by PEFT, merged by weft as by PEFT."""
    graph = lowered(graph_of("preset/transformer-base"))
    model = model_of(graph, tmp_path / "folder")
    model.config.decoder_start_token_id = 1
    config = peft.LoraConfig(r=4, target_modules=["q", "v", "down"], task_type="SEQ_2_SEQ_LM")
    tuned: Any = peft.get_peft_model(model, config)
    source, labels = tokens_of(graph, 2, 5), tokens_of(graph, 2, 7)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-2)
    for _ in range(5):
        tuned(input_ids=source, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(tmp_path / "adapter")
    feeds, merged = feeds_of(graph), tuned.merge_and_unload().eval()
    with torch.no_grad():
        made = merged(**source_of(feeds), decoder_input_ids=torch.from_numpy(feeds["input_ids"]).long()).logits
    again = load_source(tmp_path / "folder", adapters=(tmp_path / "adapter",)).graph
    assert error(made, wanted(again, feeds)["logits"]) <= 1e-5
    assert error(made, wanted(graph, feeds)["logits"]) > 1e-3
