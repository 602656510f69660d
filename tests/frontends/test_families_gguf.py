"""GGUF checkpoints as models: llama.cpp's names and row order against the same weights in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import weft
from weft.frontends import load_source
from weft.ir import WeftError, verify

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k (LlamaModel.permute)."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(folder, arch, **metadata): the weights of a tiny Hugging Face folder as a GGUF file."""

    def make(
        folder: Path, arch: str, extra: dict[str, np.ndarray] | None = None, tokenizer: bool = True, **metadata: Any
    ) -> Path:
        import gguf

        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        facts = {
            "vocab_size": 97,
            "embedding_length": 32,
            "feed_forward_length": 48,
            "block_count": 3,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "context_length": 64,
            "rope.freq_base": 10_000.0,
            "attention.layer_norm_rms_epsilon": 1e-6,
            **metadata,
        }
        for key, value in facts.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"{arch}.{key}", value)
        if tokenizer:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_list([f"t{i}" for i in range(97)])
            writer.add_token_types([1] * 97)
            writer.add_token_merges(["t 0"])
            writer.add_eos_token_id(5)
        for name, tensor in load_file(folder / "model.safetensors").items():
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            if arch == "llama" and ("attn_q." in name or "attn_k." in name):
                tensor = interleaved(tensor, 4 if "attn_q." in name else 2)
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        for name, tensor in (extra or {}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.mark.parametrize(
    ("arch", "config", "metadata"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"head_dim": 12}, {"attention.key_length": 12, "rope.dimension_count": 12}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
        ),
        ("qwen2", {}, {}),
        ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {"attention.key_length": 16}),
    ],
)
def test_gguf_equals_its_folder(
    arch: str, config: dict[str, Any], metadata: dict[str, Any], save: Any, write: Write
) -> None:
    _, folder = save(arch, num_key_value_heads=2, **config)
    ours, theirs = load_source(write(folder, arch, **metadata)), load_source(folder)
    verify(ours.graph, recipes=True)
    assert (ours.unread, ours.ignored) == ([], [])
    assert ours.graph.meta["eos_token_ids"] == [5]
    bodies = [[str(n) for n in m.graph.nodes] for m in (ours, theirs)]
    assert bodies[0] == bodies[1]
    assert [n.attrs for n in ours.graph.nodes] == [n.attrs for n in theirs.graph.nodes]
    assert set(ours.graph.params) == set(theirs.graph.params)
    for name in ours.graph.params:
        pair = [m.graph.params[name].recipe.evaluate(m.graph.archive) for m in (ours, theirs)]
        np.testing.assert_array_equal(*pair, err_msg=name)


def test_frequency_factors_are_llama3_scaling(save: Any, write: Write) -> None:
    """llama.cpp stores Llama 3's scaling as divisors of the frequencies."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _, folder = save("llama", num_key_value_heads=2, rope_parameters=rope)
    theirs = load_source(folder).graph
    wanted = theirs.params["rope.frequencies"].recipe.evaluate(theirs.archive)
    factors = (500.0 ** -(np.arange(0, 8, 2) / 8) / wanted).astype(np.float32)
    path = write(folder, "llama", {"rope_freqs.weight": factors}, **{"rope.freq_base": 500.0})
    found = load_source(path)
    assert (found.unread, found.ignored) == ([], [])
    verify(found.graph, recipes=True)
    ours = found.graph.params["rope.frequencies"].recipe.evaluate(found.graph.archive)
    np.testing.assert_allclose(ours, wanted, rtol=4 * float(np.finfo(np.float32).eps))


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("mamba", {}, "architecture 'mamba' is not known; weft imports llama, qwen2, qwen3 from GGUF"),
        ("llama", {"expert_count": 8}, "expert_count=8 is not supported for llama models"),
        ("llama", {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}, "rope.scaling.type 'odd' is not supported"),
        ("llama", {"block_count": 4}, "has no tensor 'blk.3.attn_norm.weight', which parameter layers.3.attn_norm"),
        ("llama", {"feed_forward_length": 47}, r"ffn_gate.weight \[48, 32\] does not fit .*makes \[47, 32\]"),
        (
            "llama",
            {"attention.head_count_kv": 4},
            r"blk.0.attn_k.weight \[16, 32\] does not fit layers.0.attn.k.weight",
        ),
    ],
)
def test_files_that_are_no_model(arch: str, metadata: dict[str, Any], message: str, save: Any, write: Write) -> None:
    path = write(save("llama", num_key_value_heads=2)[1], arch, **metadata)
    with pytest.raises(WeftError, match=message) as caught:
        load_source(path)
    assert str(path) in str(caught.value)


def test_a_file_without_a_tokenizer_compiles_without_one(save: Any, write: Write, tmp_path: Path) -> None:
    path = write(save("llama", num_key_value_heads=2)[1], "llama", tokenizer=False)
    model = load_source(path)
    assert model.tokenizer is None
    weft.compile(model, tmp_path / "out")
    found = weft.load(tmp_path / "out").generate([3, 1, 4], max_tokens=2)
    assert len(found[0].tokens) == 2


def test_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    found = load_source(smollm2_gguf)
    assert (found.unread, found.ignored, found.random_init) == ([], [], False)
    verify(found.graph, recipes=True)
    assert found.module.tie_embeddings
    assert found.graph.meta["context"] == 8192
    assert found.tokenizer is not None
    found.tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
