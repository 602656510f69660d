"""Imported Hugging Face models against their own classes, in float64, with every parameter randomized."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from weft.frontends import load_source
from weft.ir import interpret, parse, print_graph, verify

EPS = float(np.finfo(np.float64).eps)
TOLERANCE = 1e4 * EPS  # of the largest logit: three layers of sums up to 97 terms, conditioned by random weights

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 16},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 100.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {}),
    "llama-gqa-tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 12, "hidden_act": "gelu"}),
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral-window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
    "mistral-full": ("mistral", {"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4, "sliding_window": 8}),
    "qwen2-window-tied": (
        "qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3-window-biases": (
        "qwen3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-gqa-tied": ("olmo2", {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"}),
    "gpt2-scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu"}),
}


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_equals_its_class(name: str, save: Any, exactly: Any, ids: np.ndarray) -> None:
    model_type, config = DECODERS[name]
    model, folder = save(model_type, **config)
    found = load_source(str(folder))
    verify(found.graph, recipes=True)
    assert (found.unread, found.ignored, found.random_init) == ([], [], False)
    assert found.graph.meta["kind"] == "decoder"
    assert found.graph.meta["model_type"] == model_type

    theirs = exactly(model, input_ids=ids)
    inputs = {"input_ids": ids, "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape)}
    given = {}
    for key, frequencies in theirs.items():
        if key.endswith("inv_freq"):  # computed in float32 there; take their rounding out of the comparison of the rest
            given["rope.frequencies"] = frequencies
            ours = found.graph.params["rope.frequencies"].recipe.evaluate(found.graph.reader)
            np.testing.assert_allclose(ours, frequencies, rtol=16 * float(np.finfo(np.float32).eps))
    logits = interpret(found.graph, inputs, params=given)["logits"]
    close(logits, theirs["logits"])


@pytest.mark.parametrize(("kind", "pooler"), [("AutoModel", True), ("AutoModelForMaskedLM", False)])
def test_bert_equals_its_class(kind: str, pooler: bool, save: Any, exactly: Any, ids: np.ndarray) -> None:
    model, folder = save("bert", kind, type_vocab_size=3)
    found = load_source(folder)
    verify(found.graph, recipes=True)
    assert found.unread == []
    assert found.ignored == []
    mask = (np.arange(ids.shape[1]) < [[24], [17]]).astype(np.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 3}
    theirs = exactly(getattr(model, "bert", model), **inputs)
    ours = interpret(found.graph, inputs)
    assert set(ours) == {"last_hidden_state", "pooler_output" if pooler else "logits"}
    close(ours["last_hidden_state"][mask > 0], theirs["last_hidden_state"][mask > 0])
    if pooler:
        close(ours["pooler_output"], theirs["pooler_output"])


@pytest.mark.parametrize(("model_type", "prefix"), [("llama", "model."), ("gpt2", "transformer.")])
def test_shards_and_bare_names_give_the_same_model(model_type: str, prefix: str, save: Any, ids: np.ndarray) -> None:
    from safetensors.numpy import load_file, save_file

    _, folder = save(model_type, shard="20KB", tie_word_embeddings=True)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    whole = load_source(folder)
    tensors = {k.removeprefix(prefix): v for shard in shards for k, v in load_file(shard).items()}
    assert all(k.startswith(prefix) for shard in shards for k in load_file(shard))
    for shard in [*shards, folder / "model.safetensors.index.json"]:
        shard.unlink()
    extra = {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)} if model_type == "gpt2" else {}
    save_file({**tensors, **extra, "mystery.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    bare = load_source(folder)
    assert (bare.unread, bare.ignored) == (["mystery.weight"], list(extra))
    for name, param in bare.graph.params.items():
        other = whole.graph.params[name]
        np.testing.assert_array_equal(
            param.recipe.evaluate(bare.graph.reader), other.recipe.evaluate(whole.graph.reader)
        )


def test_old_configs_give_the_same_model(save: Any) -> None:
    """rope_theta and rope_scaling beside each other, {"type": …}, absent defaults."""
    _, folder = save("llama", rope_parameters={"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0})
    new = load_source(folder).graph
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["head_dim"], config["num_key_value_heads"], config["attention_bias"]
    config |= {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_source(folder).graph == new


def test_old_bert_parameter_names_are_read(save: Any) -> None:
    """Checkpoints converted from TensorFlow call LayerNorm's parameters gamma and beta."""
    from safetensors.numpy import load_file, save_file

    _, folder = save("bert", "AutoModel")
    tensors = load_file(folder / "model.safetensors")
    renamed = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
               for k, v in tensors.items()}  # fmt: skip
    before = load_source(folder)
    save_file(renamed, folder / "model.safetensors")
    after = load_source(folder)
    assert after.unread == []
    name = "layers.1.attn_norm.weight"
    np.testing.assert_array_equal(*(m.graph.params[name].recipe.evaluate(m.graph.reader) for m in (before, after)))


def test_facts_for_generation_and_tokenizer(save: Any, tmp_path: Any) -> None:
    _, folder = save("llama", bos_token_id=3, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8], "pad_token_id": 9}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b")
    found = load_source(folder)
    meta = found.graph.meta
    assert (meta["eos_token_ids"], meta["bos_token_id"], meta["pad_token_id"]) == ([7, 8], 3, 9)
    assert (meta["vocab"], meta["context"]) == (97, 64)
    assert found.tokenizer is not None
    (tmp_path / "out").mkdir()
    found.tokenizer(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *("merges.txt", "tokenizer.json", "tokenizer_config.json")
    ]
    hashes = found.hashes()
    assert set(hashes) == {"config.json", "generation_config.json", "tokenizer.json", "merges.txt", "model.safetensors"}
    assert all(len(h) == 64 for h in hashes.values())


def test_graph_text_reopens_its_checkpoint(save: Any, tmp_path: Any) -> None:
    _, folder = save("gpt2")
    graph = load_source(folder).graph
    text = tmp_path / "model.weft"
    text.write_text(print_graph(graph))
    again = load_source(text).graph
    assert again == graph == parse(str(graph))
    name = "layers.1.attn.k.weight"
    np.testing.assert_array_equal(*(g.params[name].recipe.evaluate(g.reader) for g in (graph, again)))


def test_minilm_equals_transformers(minilm_folder: Any) -> None:
    found = load_source(minilm_folder)
    verify(found.graph, recipes=True)
    assert (found.unread, found.ignored) == ([], ["embeddings.position_ids"])
    assert "pooler_output" in found.graph.outputs
