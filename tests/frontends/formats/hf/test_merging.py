"""Adapters that were trained after tokens were added, or whose tensors have other names, are merged as PEFT does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

import weft
from weft.frontends import load_source
from weft.frontends.formats.hf.adapter import Adapter, Tokens, Update
from weft.frontends.formats.hf.merging import (
    find_transposed_keys,
    replace_rows,
    scale_by,
    stack_expert_updates,
    transpose_matrix,
)
from weft.frontends.formats.hf.safetensors import SafetensorsFile
from weft.ir import MemoryReader, WeftError, interpret
from weft.ir.recipes import Add, Permute, Source

from ...command import refused
from . import peft_models as peft

SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 62, 61]}
WRAPPERS = ("base_model.model.", "module.", "_orig_mod.", "base_model.")
# The class of a base, its rows more than before, its config, and what LoraConfig is given.
RESIZED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "saved": ("LlamaForCausalLM", 5, peft.UNTIED, SAVED),
    "saved-tied": ("LlamaForCausalLM", 5, peft.TIED, SAVED),
    "saved-embedding": ("LlamaForCausalLM", 5, peft.TIED, {**SAVED, "modules_to_save": ["embed_tokens"]}),
    "fewer": ("LlamaForCausalLM", -3, peft.UNTIED, SAVED),
    "neither-trained": ("LlamaForCausalLM", 5, peft.UNTIED, {"target_modules": ["q_proj"], "use_dora": True}),
    "both-updated": ("LlamaForCausalLM", 5, peft.TIED, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "tokens": ("LlamaForCausalLM", 5, peft.UNTIED, TOKENS),
    "tokens-tied": ("LlamaForCausalLM", 5, peft.TIED, TOKENS),
    "head-bias": ("PhiForCausalLM", 5, peft.UNTIED, SAVED),
    "gpt2": ("GPT2LMHeadModel", 5, peft.GPT2, {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        5,
        peft.UNTIED,
        {"target_modules": ["query_key_value"], "modules_to_save": ["embed_in"]},
    ),
}  # fmt: skip


def adapted(folder: Path, kind: str, more: int, config: dict[str, Any], lora: dict[str, Any]) -> torch.nn.Module:
    """Save a base and an adapter of it after resizing by `more` tokens; return PEFT's model."""
    return peft.adapt(peft.save_base(folder / "base", kind, **config), folder / "adapter", more=more, **lora)


def logits(folder: Path, ids: list[int]) -> np.ndarray:
    graph = load_source(folder / "base", adapters=[folder / "adapter"]).graph
    given = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    given["position_ids"] = np.arange(len(ids))[None]
    found: np.ndarray = interpret(graph, {name: given[name] for name in graph.inputs})["logits"][0]
    return found


@pytest.mark.parametrize("name", RESIZED)
def test_resized_adapter_changes_the_vocabulary(name: str, tmp_path: Path) -> None:
    kind, more, config, lora = RESIZED[name]
    model = adapted(tmp_path, kind, more, config, lora)
    ids = [5, 7, 11, 56, *([61, 62, 65] if more > 0 else [])]
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0].double().numpy()
    got = logits(tmp_path, ids)
    assert got.shape == want.shape == (len(ids), 61 + more)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_a_resized_model_is_compiled_with_its_tokenizer(tmp_path: Path) -> None:
    kind, more, config, lora = RESIZED["saved-tied"]
    model = adapted(tmp_path, kind, more, config, lora)
    peft.write_tokenizer(tmp_path / "adapter")
    weft.compile(
        tmp_path / "base", tmp_path / "out", adapters=[tmp_path / "adapter"], passes="default, -last-token-logits"
    )
    with torch.inference_mode():
        want = model(torch.tensor([[5, 62, 65]])).logits[0].numpy()
    got = weft.load(tmp_path / "out").logits([5, 62, 65])
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def renamed(adapter: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({change(key): value for key, value in tensors.items()}, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        *(partial(add, wrapper) for wrapper in WRAPPERS),
        lambda key: key.replace("base_model.model.", "base_model.model.module._orig_mod."),
        lambda key: key.replace(".self_attn.", "._orig_mod.self_attn."),
    ],
)  # fmt: skip
def test_wrapper_prefixes_in_adapter_tensors_are_ignored(change: Callable[[str], str], tmp_path: Path) -> None:
    base = peft.save_base(tmp_path / "base")
    peft.adapt(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["norm"])
    want = logits(tmp_path, peft.IDS)
    renamed(tmp_path / "adapter", change)
    assert np.array_equal(logits(tmp_path, peft.IDS), want)


def test_refusals_name_the_tensors_of_the_adapter(tmp_path: Path) -> None:
    base = peft.save_base(tmp_path / "base")
    peft.adapt(base, tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    line = refused("inspect", base, "--adapter", tmp_path / "adapter")
    assert "q_proj.lora_B.bias' (lora_bias) cannot be added: model.layers.0.self_attn.q_proj.weight has no bias" in line
    peft.adapt(base, tmp_path / "named", target_modules=["q_proj"])
    renamed(tmp_path / "named", lambda key: key.replace("lora_A.weight", "lora_A.default.weight"))
    assert "is of an unknown kind: save the adapter with save_pretrained" in refused(
        "inspect", base, "--adapter", tmp_path / "named"
    )


def test_resized_embedding_without_a_matching_head_is_refused(tmp_path: Path) -> None:
    kind, more, config, lora = RESIZED["saved"]
    adapted(tmp_path, kind, more, config, lora)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "lm_head" not in k}, tmp_path / "adapter" / "adapter_model.safetensors"
    )
    with pytest.raises(
        WeftError, match=r"resizes the embedding from 61 to 66 tokens, but it lacks lm_head\.weight of that size"
    ):
        load_source(tmp_path / "base", adapters=[tmp_path / "adapter"])


W = Source("w")


def test_factor_one_changes_nothing() -> None:
    assert scale_by(W, 1) is W
    np.testing.assert_array_equal(scale_by(W, 2.0).evaluate(MemoryReader({"w": np.ones(3)})), [2, 2, 2])


def test_transposed_weights_are_found_below_other_steps() -> None:
    assert list(find_transposed_keys(W)) == []
    assert list(find_transposed_keys(transpose_matrix(W))) == ["w"]
    assert list(find_transposed_keys(Add((transpose_matrix(W), Source("v"))))) == ["w"]
    assert list(find_transposed_keys(Permute(transpose_matrix(W), (1, 0)))) == []


@pytest.mark.parametrize("indices", [(0, 1), (4, 2), (2, 3, 0), (0, 1, 2, 3, 4)])
def test_rows_are_replaced_in_the_order_of_their_tokens(indices: tuple[int, ...]) -> None:
    table, rows = np.zeros((5, 3)), 1 + np.arange(3.0 * len(indices)).reshape(-1, 3)
    recipe = replace_rows(Source("t"), 5, Tokens("r", indices), Source("r"))
    wanted = table.copy()
    wanted[list(indices)] = rows
    np.testing.assert_array_equal(recipe.evaluate(MemoryReader({"t": table, "r": rows})), wanted)


@pytest.mark.parametrize("transpose", [False, True])
def test_experts_are_outer_rows_of_a_and_inner_columns_of_b(transpose: bool, tmp_path: Path) -> None:
    rng, experts, rank = np.random.default_rng(0), 3, 2
    a, b = rng.standard_normal((experts * rank, 4), np.float32), rng.standard_normal((5, rank * experts), np.float32)
    save_arrays({"a": a, "b": b}, tmp_path / "adapter_model.safetensors")
    adapter = Adapter(tmp_path, 0, {}, SafetensorsFile(tmp_path / "adapter_model.safetensors"))
    recipe = stack_expert_updates(Update("a", "b", scale=0.5, rank=rank, stacked=True), adapter, transpose)
    wanted = np.stack([0.5 * b[:, e::experts] @ a[e * rank : (e + 1) * rank] for e in range(experts)])
    found = recipe.evaluate(MemoryReader({"adapter0:a": a, "adapter0:b": b}))
    np.testing.assert_allclose(found, wanted.swapaxes(1, 2) if transpose else wanted, rtol=1e-5, atol=1e-6)
