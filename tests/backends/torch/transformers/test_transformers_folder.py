"""A folder used by transformers: generating in each of its ways, packed rows, training, saving, other sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from weft import MLA, MLP, Block, Decoder, LightningIndex, RoPE, export
from weft import compile as compile_model
from weft.backends.torch.transformers.engines.refusals import BATCHES
from weft.backends.torch.transformers.transformers_folder import TransformersFolder, derive_class_name, derive_stem
from weft.frontends.app.api.source.sources import load_source
from weft.ir import Graph, WeftError

from ....lowered import forms
from ....sampling import ALL, each, others_long
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
from .test_folders_zoo import decoders

RANDOM = [f"random/{i}" for i in range(30)]
USED = (
    *("preset/smollm2-135m", "preset/gpt2", "preset/mistral-7b", "preset/mixtral-8x7b", "preset/deepseek-v3"),
    *("preset/mamba-130m", "variant/hybrid", "variant/repeated", "variant/linear attention, rope", "family/gemma2"),
    *("family/gpt-oss", *(f"random/{i}" for i in range(3))),
)
if ALL:
    USED = (*dict.fromkeys((*USED, *(n for n in decoders() if n.startswith(("preset/", "variant/"))), *RANDOM)),)
BATCHED = ("preset/mistral-7b", "preset/smollm2-135m", "preset/deepseek-v3", "preset/mixtral-8x7b", "preset/gpt2")
PACKED = (*BATCHED, "preset/gpt3-175b", "family/gemma2")
NEW = 6
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", each(2, USED))
def test_generates_with_every_cache(name: str, tmp_path: Path) -> None:
    graph = lowered(graph_of(name))
    model, ids = model_of(graph, tmp_path), tokens_of(graph, 2, 5)
    with torch.no_grad():
        want = ids
        for _ in range(NEW):
            want = torch.cat((want, model(want, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)), 1)
        competes = bool(COMPETES & ops_of(graph))
        assert torch.equal(model.generate(ids, use_cache=not competes, **GREEDY), want)
        if competes:
            return
        static = model.generate(ids, cache_implementation="static", disable_compile=True, **GREEDY)
        assert torch.equal(static, want)
        drawn = []
        for cached in (True, False):
            torch.manual_seed(0)
            drawn.append(model.generate(ids, use_cache=cached, **{**GREEDY, "do_sample": True}))
        assert torch.equal(*drawn)
        beams, again = (model.generate(ids, num_beams=3, use_cache=cached, **GREEDY) for cached in (True, False))
        assert torch.equal(beams, again)


@pytest.mark.parametrize("name", decoders() if ALL else others_long(BATCHED[2::-2]))
def test_continuous_batching_generates_greedily(name: str, tmp_path: Path) -> None:
    """Continuous batching, with keys and values in pages."""
    graph = lowered(graph_of(name))
    if name not in BATCHED and folder_of(graph, tmp_path).refusals[BATCHES]:
        return
    model, rows = model_of(graph, tmp_path), [tokens_of(graph, n, seed=n) for n in (4, 3, 5)]
    model.set_attn_implementation("sdpa")
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)  # else most of the memory
    config = GenerationConfig(**{**GREEDY, "eos_token_id": -1})
    made = model.generate_batch([row.tolist() for row in rows], config, room)
    with torch.no_grad():
        want = [model.generate(row[None], **GREEDY)[0, len(row) :].tolist() for row in rows]
    assert [answer.generated_tokens for answer in made.values()] == want


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_separated_by_positions(name: str, tmp_path: Path) -> None:
    """Tokens of several texts in one row without a mask, as training on packed rows gives them."""
    graph = lowered(graph_of(name))
    model, rows = model_of(graph, tmp_path), [tokens_of(graph, n, seed=n) for n in (4, 7, 3)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        made = model.model(torch.cat(rows)[None], position_ids=positions, use_cache=False).last_hidden_state
        alone = torch.cat([model.model(row[None], use_cache=False).last_hidden_state for row in rows], 1)
        assert error(made, alone) <= 1e-4
        assert type(model).is_backend_compatible()


@pytest.mark.parametrize("name", ["preset/smollm2-135m", "preset/mixtral-8x7b", "preset/mamba-130m", "variant/hybrid"])
def test_gradients(name: str, tmp_path: Path) -> None:
    """Those of every weight, as finite differences of the loss along a random direction say, and with activations that
    are made again."""
    graph = lowered(graph_of(name))
    model, ids = model_of(graph, tmp_path).double().train(), tokens_of(graph, 2, 7)
    check_gradients(model, lambda: loss_of(model, ids))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """As transformers computes it from labels, but in float64."""
    logits = model(ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(model(ids, labels=ids, use_cache=False).loss.item() - loss.item()) < 1e-5
    return loss


@pytest.mark.parametrize("name", ["preset/smollm2-135m", "preset/gpt3-175b", "variant/hybrid", "preset/mixtral-8x7b"])
def test_changed_config_makes_another_model(name: str, tmp_path: Path) -> None:
    """More layers and fewer, twice as wide throughout: such models train from scratch, and are saved and loaded."""
    graph = lowered(graph_of(name))
    folder_of(graph, tmp_path / "folder")
    module = imported(tmp_path / "folder")
    ids = tokens_of(graph, 2, 9)
    for layers in (1, 2, 5):
        config = module.TinyConfig(num_hidden_layers=layers)
        assert len(module.TinyForCausalLM(config).model.layers) == layers
    wide = {k: 2 * v for k, v in module.TinyConfig().to_dict().items() if k in SIZES and isinstance(v, int)}
    assert {"hidden_size", "vocab_size"} <= wide.keys()
    model = module.TinyForCausalLM(module.TinyConfig(num_hidden_layers=3, **wide))
    assert model.get_input_embeddings().weight.shape == (wide["vocab_size"], wide["hidden_size"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval().save_pretrained(tmp_path / "trained")
    again = module.TinyForCausalLM.from_pretrained(tmp_path / "trained").eval()
    assert again.config.num_hidden_layers == 3
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)


SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "mamba_intermediate_size", "state_size", "mamba_num_heads", "mamba_head_dim"),
    *("num_experts", "time_step_rank", "shared_expert_intermediate_size"),
}


@pytest.mark.parametrize("name", [*each(2, USED, 1), "preset/bert-base"])
def test_weft_reads_the_folder_back(name: str, tmp_path: Path) -> None:
    """Its graph, and its weights as they are by now: trained, and saved over those of before."""
    graph = lowered(graph_of(name))
    model = model_of(graph, tmp_path)
    feeds = feeds_of(graph)
    output = next(iter(graph.outputs.items()))[0]
    assert (
        error(torch.from_numpy(wanted(load_source(tmp_path).graph, feeds)[output]), wanted(graph, feeds)[output]) < 1e-6
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + 0.1 * torch.rand(p.shape))
        model.save_pretrained(tmp_path)
        if output == "logits":
            again = wanted(load_source(tmp_path).graph, feeds)[output]
            assert error(model(torch.from_numpy(feeds["input_ids"]).long(), use_cache=False).logits, again) < 1e-4


@pytest.mark.parametrize("name", ["preset/smollm2-135m", "variant/hybrid", "family/gemma2"])
def test_records_hidden_states_and_attentions(name: str, tmp_path: Path) -> None:
    graph = lowered(graph_of(name))
    model, ids = model_of(graph, tmp_path), tokens_of(graph, 2, 7)
    model.set_attn_implementation("eager")
    made = model(ids, output_hidden_states=True, output_attentions=True)
    layers = model.config.num_hidden_layers
    assert len(made.hidden_states) == layers + 1
    attending = sum(n.op.name == "attention" for n in graph.nodes)
    assert [a.shape[-2:] for a in made.attentions] == [(7, 7)] * attending
    assert all(torch.allclose(a.sum(-1), torch.ones(()), atol=1e-5) or "gpt" in name for a in made.attentions)


def test_inputs_embeds_replace_tokens(tmp_path: Path) -> None:
    graph = lowered(graph_of("family/gemma2"))
    model, ids = model_of(graph, tmp_path), tokens_of(graph, 2, 7)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
        assert torch.allclose(model(ids, logits_to_keep=1).logits, model(ids).logits[:, -1:], atol=1e-5)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
            model(**wrong)


def test_smollm2_source_is_golden(tmp_path: Path) -> None:
    """Everything that transformers asks of a model, and SmolLM2, in 253 lines."""
    from weft.frontends.models.presets import PRESETS

    graph = lowered(PRESETS["smollm2-135m"].model().graph(name="smollm2-135m"))
    assert "base_model_tp_plan" in (text := source_of(graph, "configuration"))
    assert len(text.splitlines()) <= 60
    text = source_of(graph, "modeling")
    assert len(text.splitlines()) <= 253 and max(map(len, text.splitlines())) <= 120
    root = Path(__file__).parents[3] / "golden" / "smollm2_transformers.py.txt"
    assert text == root.read_text(encoding="utf-8")


def source_of(graph: Graph, kind: str) -> str:
    from weft.backends.torch.transformers.transformers_folder import TransformersFolder

    built = TransformersFolder(forms(graph, "transformers"), "f32", 8192, "SmolLM2", [])
    return built.texts[kind]


@pytest.mark.long
@pytest.mark.usefixtures("own_code")
def test_the_command_writes_what_auto_classes_load(tmp_path: Path) -> None:
    """With a tokenizer, settings of generation, and code that is loaded only if it is trusted."""
    gguf = Path(__file__).parents[4] / ".cache/weights/SmolLM2-135M-Instruct.Q4_1.gguf"
    out = tmp_path / "out"
    report = compile_model(gguf, out, target="transformers", dtype="bf16")
    assert any("`weft export` writes a folder that loads as llama" in note for note in report.notes)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "weft.json", "modeling_llama_weft.py"} <= names
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert type(config).__name__ == "LlamaWeftConfig" and config.num_hidden_layers == 30
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert model.dtype == torch.bfloat16
    answer = model.generate(torch.tensor([[504, 3575, 282, 4649, 314]]), max_new_tokens=2, do_sample=False)
    assert answer[0, 5:].tolist() == [7042, 30]  # " Paris."


def test_compile_and_export_name_each_other(tmp_path: Path) -> None:
    """Architectures that transformers has, and those that it has not."""
    source = Path(__file__).parents[4] / "examples/differential.py"
    report = compile_model(source, tmp_path / "own", target="transformers")
    assert not any("weft export" in note for note in report.notes)
    with pytest.raises(WeftError, match="weft compile --target transformers` writes a folder with the model's code"):
        export(source, tmp_path / "native")


def test_reserved_word_is_refused() -> None:
    with pytest.raises(
        WeftError, match="--class-name FastMamba contains 'mamba', a word that transformers reserves: choose another"
    ):
        TransformersFolder(forms(lowered(graph_of("preset/mamba-130m")), "transformers"), "f32", 64, "FastMamba", [])


def test_lightning_index_is_refused(tmp_path: Path) -> None:
    choosing = MLA(4, 16, 8, 8, 8, RoPE(), index=LightningIndex(2, 8, top_k=5))
    with pytest.raises(WeftError, match=r"keys of a lightning index \(%layers\.0\.attn\.index\.chosen\)"):
        compile_model(Decoder(64, 32, 1, Block(choosing, MLP(48))), tmp_path / "out", target="transformers")


@pytest.mark.parametrize(
    ("name", "expected", "stem"),
    [
        ("local_global", "LocalGlobal", "local_global"),
        ("my-model-7b", "MyModel", "my_model"),
        ("llama3.1-8b", "Llama31", "llama31"),
        ("qwen3-30b-a3b", "Qwen3Weft", "qwen3_weft"),
        ("mamba-1.4b", "Ssm", "ssm"),
        ("hybrid_mamba", "HybridSsm", "hybrid_ssm"),
        ("orion", "OrionWeft", "orion_weft"),  # only engines have it
        ("2-layers", "Weft2Layers", "weft2_layers"),
        ("model", "Weft", "weft"),
    ],
)
def test_class_is_named_after_the_model(name: str, expected: str, stem: str) -> None:
    assert (derive_class_name(name), derive_stem(expected)) == (expected, stem)


def test_no_class_or_type_is_that_of_transformers() -> None:
    """Transformers loads its own code for a type that it has, unless the folder's is trusted."""
    names = [derive_class_name(kind) for kind in CONFIG_MAPPING_NAMES]
    assert not {derive_stem(name) for name in names} & CONFIG_MAPPING_NAMES.keys()
    assert not {f"{name}Config".lower() for name in names} & {kind.lower() for kind in CONFIG_MAPPING_NAMES.values()}
