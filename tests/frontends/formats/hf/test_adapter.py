"""Adapters of PEFT are merged as PEFT merges them, wherever a source is taken, and refused where they cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from weft.frontends import load_source
from weft.frontends.export.hf.checkpoint import write_folder
from weft.ir import interpret

from ....sampling import each
from ...command import done, refused
from . import peft_models as peft

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]

# A base, and what LoraConfig is given.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {"target_modules": LINEAR}),
    "llama-all-linear": ("LlamaForCausalLM", {}, {"target_modules": "all-linear"}),
    "llama-regex": ("LlamaForCausalLM", {}, {"target_modules": r".*\.1\..*_proj"}),
    "llama-rslora": ("LlamaForCausalLM", {}, {"target_modules": LINEAR, "use_rslora": True}),
    "llama-dora": ("LlamaForCausalLM", {}, {"target_modules": LINEAR, "use_dora": True}),
    "llama-dora-rslora": ("LlamaForCausalLM", {}, {"target_modules": LINEAR, "use_dora": True, "use_rslora": True}),
    "llama-patterns": (
        "LlamaForCausalLM",
        {},
        {
            "target_modules": LINEAR,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 3},
            "alpha_pattern": {"model.layers.0.self_attn.q_proj": 9, "down_proj": 1},
        },
    ),
    "llama-one-layer": (
        "LlamaForCausalLM",
        {},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "all"}),
    "llama-own-biases": (
        "LlamaForCausalLM",
        {"attention_bias": True},
        {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    ),
    "llama-lora-bias": (
        "LlamaForCausalLM",
        {"attention_bias": True},
        {"target_modules": ["q_proj", "o_proj"], "lora_bias": True},
    ),
    "llama-embedding-and-head": ("LlamaForCausalLM", {}, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "llama-dora-embedding": ("LlamaForCausalLM", {}, {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "llama-saved-modules": (
        "LlamaForCausalLM",
        {},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm", "embed_tokens"]},
    ),
    "llama-tokens": (
        "LlamaForCausalLM",
        {},
        {"target_modules": ["q_proj"], "trainable_token_indices": [60, 3, 4, *peft.IDS[:2], 0]},
    ),
    "llama-tied-tokens": (
        "LlamaForCausalLM",
        peft.TIED,
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 4, *peft.IDS[:2]]}},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}, {"target_modules": LINEAR}),
    "qwen3-dora": ("Qwen3ForCausalLM", {"head_dim": 16}, {"target_modules": LINEAR, "use_dora": True}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16}, {"target_modules": [*LINEAR, "embed_tokens", "lm_head"]}),
    "phi3": ("Phi3ForCausalLM", {}, {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}),
    "gpt2": ("GPT2LMHeadModel", peft.GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2-dora": (
        "GPT2LMHeadModel",
        peft.GPT2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "mixtral-attention": ("MixtralForCausalLM", peft.EXPERTS, {"target_modules": ["q_proj", "v_proj"]}),
    "mixtral-experts": (
        "MixtralForCausalLM",
        peft.EXPERTS,
        {"target_modules": ["q_proj", "v_proj"], "target_parameters": ALL_EXPERTS},
    ),
    "mixtral-down": (
        "MixtralForCausalLM",
        peft.EXPERTS,
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "use_rslora": True},
    ),
    "mixtral-older-names": (
        "MixtralForCausalLM",
        peft.EXPERTS,
        {"target_modules": ["q_proj", "w1", "w2", "w3", "gate"]},
    ),
    "qwen3-experts": (
        "Qwen3MoeForCausalLM",
        peft.QWEN_EXPERTS,
        {"target_modules": ["o_proj"], "target_parameters": ALL_EXPERTS},
    ),
}  # fmt: skip
# Tied models in which embedding or head change alone: what PEFT computes before it merges, which would change both.
PARTED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "both-tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


def meaning(source: Any, **options: Any) -> np.ndarray:
    """The logits of `IDS` by the float64 reference of the graph of `source`."""
    graph = load_source(source, **options).graph
    ids = np.array([peft.IDS])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(len(peft.IDS))[None]}
    found: np.ndarray = interpret(graph, {name: given[name] for name in graph.inputs})["logits"][0]
    return found


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference over the largest number of `want`."""
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", each(2, CASES))
def test_merges_as_peft_does(name: str, tmp_path: Path) -> None:
    kind, config, lora = CASES[name]
    base = peft.save_base(tmp_path / "base", kind, **config)
    model = peft.adapt(base, tmp_path / "adapter", **lora)
    want, plain = peft.merged(model), meaning(base)
    for got in (meaning(base, adapters=[tmp_path / "adapter"]), meaning(tmp_path / "adapter")):
        assert error(got, want) < 1e-5
        assert error(plain, want) > 1e-2


@pytest.mark.parametrize("name", PARTED)
def test_adapter_of_a_tied_head_unties_it(name: str, tmp_path: Path) -> None:
    base = peft.save_base(tmp_path / "base", **peft.TIED)
    want = peft.logits(peft.adapt(base, tmp_path / "adapter", **PARTED[name]))
    assert error(meaning(tmp_path / "adapter"), want) < 1e-5
    assert error(meaning(base), want) > 1e-2


# Families whose logits another test would have to run: their weights are compared with those that PEFT merges.
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertModel", {}, {"target_modules": ["query", "value", "dense", "word_embeddings"]}),
    "t5": ("T5ForConditionalGeneration", peft.T5, {"target_modules": ["q", "v", "wo"], "use_dora": True}),
    "opt": ("OPTForCausalLM", peft.OPT, {"target_modules": ["q_proj", "fc1", "out_proj"], "bias": "all"}),
    "falcon": ("FalconForCausalLM", {}, {"target_modules": ["query_key_value", "dense"]}),
    "mamba": ("MambaForCausalLM", {"state_size": 4}, {"target_modules": ["in_proj", "x_proj"]}),
    "gpt_oss": (
        "GptOssForCausalLM",
        peft.EXPERTS | {"head_dim": 8, "hidden_size": 32, "intermediate_size": 32},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        peft.EXPERTS,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_merges_the_weights_of_other_families(name: str, tmp_path: Path) -> None:
    kind, config, lora = OTHERS[name]
    base = peft.save_base(tmp_path / "base", kind, **config)
    peft.save_merged(peft.adapt(base, tmp_path / "adapter", kind, **lora), tmp_path / "merged")
    got, want, plain = (load_source(tmp_path / which).graph for which in ("adapter", "merged", "base"))
    assert got.params.keys() == want.params.keys()
    changed = 0
    for key in want.params:
        values = [graph.params[key].recipe.evaluate(graph.reader) for graph in (got, want, plain)]
        assert error(values[0], values[1]) < 1e-5, key
        changed += not np.allclose(values[1], values[2])
    assert changed >= 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model ``base`` and an adapter ``adapter`` of it, both with a tokenizer, and what PEFT says."""
    folder = tmp_path_factory.mktemp("tiny")
    base = peft.save_base(folder / "base")
    peft.write_tokenizer(base)
    model = peft.adapt(base, folder / "adapter", target_modules=LINEAR)
    np.save(folder / "want.npy", peft.merged(model))
    model = peft.adapt(base, folder / "second", seed=2, target_modules=["q_proj", "down_proj"], use_dora=True)
    (folder / "notes.txt").write_text("w5 w7 w9 w3 w4 w8 w6 w10 w11 w12\n" * 3)
    return folder


def run(folder: Path) -> np.ndarray:
    """The logits of `IDS` by the compiled `folder`."""
    return np.asarray(weft.load(folder, trust=True).logits(peft.IDS))


def test_compiles_and_verifies(tiny: Path, tmp_path: Path) -> None:
    want = np.load(tiny / "want.npy")
    every = ["-p", "default,-last-token-logits"]
    told = done("compile", tiny / "base", "--adapter", tiny / "adapter", "-o", tmp_path / "a", *every).stdout
    assert "Hugging Face folder base with adapter adapter" in told
    done("compile", tiny / "adapter", "-o", tmp_path / "b", *every)
    done("compile", tiny / "adapter", "--adapter", tiny / "adapter", "-o", tmp_path / "c", *every)
    for name in "abc":
        assert error(run(tmp_path / name), want) < 1e-5
        source = json.loads((tmp_path / name / "weft.json").read_text())["source"]
        assert source["adapters"] == [str(tiny / "adapter")]
        files = ("config.json", "model.safetensors", "tokenizer.json", "adapter_config.json")
        assert {Path(label).name for label in source["hashes"]} >= {*files, "adapter_model.safetensors"}
        assert "adapter0/adapter_model.safetensors" in source["hashes"]
        assert "passed" in done("verify", tmp_path / name, "--tokens", 2).stdout
    weft.compile(tiny / "base", tmp_path / "torch", target="torch", dtype="f32", adapters=[tiny / "adapter"])
    assert error(run(tmp_path / "torch"), want) < 1e-5


def test_verify_notices_a_changed_adapter(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "adapter", tmp_path / "adapter")
    done("compile", tiny / "base", "--adapter", tmp_path / "adapter", "-o", tmp_path / "out")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    assert "adapter0/adapter_model.safetensors" in refused("verify", tmp_path / "out")
    shutil.rmtree(tmp_path / "adapter")
    assert str(tmp_path / "adapter") in refused("verify", tmp_path / "out")


def test_every_command_accepts_adapters(tiny: Path, tmp_path: Path) -> None:
    want, given = np.load(tiny / "want.npy"), ("--adapter", tiny / "adapter")
    assert "with adapter adapter" in done("inspect", tiny / "base", *given).stdout
    done("opt", tiny / "base", *given, "-p", "pack-qkv, dce", "-o", tmp_path / "text.weft")
    done("opt", tiny / "base", *given, "-o", tmp_path / "folder")
    done("export", tiny / "base", *given, "-o", tmp_path / "hf")
    for name in ("text.weft", "folder", "hf"):
        assert error(meaning(tmp_path / name), want) < 1e-5, name
    ids = ",".join(map(str, peft.IDS))
    answer = done("run", tiny / "base", *given, "--ids", ids, "--max-tokens", 1)
    assert int(answer.stdout) == want[-1].argmax()
    assert f"--adapter {tiny / 'adapter'}" in answer.stderr
    table = done("eval", "--against", tiny / "base", *given, "--text", tiny / "notes.txt", "--json").stdout
    original, adapted = json.loads(table)["scores"]
    assert adapted["kl"] > 0.01 and original["nll"] != adapted["nll"]


def test_adapters_are_merged_in_order(tiny: Path, tmp_path: Path) -> None:
    done("export", tiny / "base", "--adapter", tiny / "adapter", "-o", tmp_path / "first")
    got = meaning(tiny / "base", adapters=[tiny / "adapter", tiny / "second"])
    want = meaning(tmp_path / "first", adapters=[tiny / "second"])
    assert error(got, want) < 1e-6
    assert error(got, meaning(tiny / "base", adapters=[tiny / "second", tiny / "adapter"])) > 1e-2
    text = str(load_source(tiny / "base", adapters=[tiny / "adapter", tiny / "second"]).graph)
    (tmp_path / "both.weft").write_text(text)
    np.testing.assert_array_equal(meaning(tmp_path / "both.weft"), got)


def test_adapter_in_the_folder_of_its_base_is_merged(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "base", tmp_path / "model")
    for file in (tiny / "adapter").glob("adapter_*"):
        shutil.copy(file, tmp_path / "model")
    assert "has weights in addition to an adapter" in refused("inspect", tmp_path / "model")
    for name in (None, "", "someone/somewhere", str(tmp_path / "model")):
        peft.reconfigure(tmp_path / "model", base_model_name_or_path=name)
        assert error(meaning(tmp_path / "model"), np.load(tiny / "want.npy")) < 1e-5


def test_tokenizer_of_an_adapter_replaces_that_of_the_base(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "adapter", tmp_path / "adapter")
    shutil.copy(tiny / "base" / "tokenizer.json", tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    done("compile", tiny / "base", "--adapter", tmp_path / "adapter", "-o", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "passed" in done("verify", tmp_path / "out", "--tokens", 0).stdout


def test_merged_weights_are_not_written_into_the_folder_of_the_base(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(weft.WeftError, match="only `weft export` writes"):
        write_folder(load_source(tiny / "adapter"), tmp_path / "out")


def test_half_precision_is_merged_in_float32(tiny: Path, tmp_path: Path) -> None:
    for part, file in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        shutil.copytree(tiny / part, tmp_path / part)
        tensors = {key: value.astype(np.float16) for key, value in load_file(tiny / part / file).items()}
        save_file(tensors, tmp_path / part / file)
    graph = load_source(tmp_path / "base", adapters=[tmp_path / "adapter"]).graph
    name = "layers.0.attn.q.weight"
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    low = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    down, up = (low[key.format(x)].astype(np.float64) for x in "AB")
    want = base + 1.5 * up @ down
    np.testing.assert_allclose(graph.params[name].recipe.evaluate(graph.reader), want, atol=1e-6)


Change = Callable[[Path], Any]


def reconfigured(**changes: Any) -> Change:
    return lambda folder: peft.reconfigure(folder / "adapter", **changes)


def stored(change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "adapter" / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


HOME = "base_model.model.model.layers.0.self_attn.q_proj"
FILE = "adapter_model.safetensors"


def with_tensor(key: str, *shape: int, dtype: type = np.float32, more: str = "") -> Change:
    return stored(lambda tensors: tensors.update({name: np.ones(shape, dtype) for name in (key, more) if name}))


REFUSED: dict[str, tuple[str, Change]] = {
    "prompt tuning": ("peft_type is 'PROMPT_TUNING'", reconfigured(peft_type="PROMPT_TUNING")),
    "IA3": ("peft_type is 'IA3'", reconfigured(peft_type="IA3")),
    "aLoRA": ("alora_invocation_tokens=[1] is not supported", reconfigured(alora_invocation_tokens=[1])),
    "unknown": ("use_wonders=True is not supported: merge the adapter with PEFT", reconfigured(use_wonders=True)),
    "PiSSA": ("init_lora_weights='pissa' also changes the weights", reconfigured(init_lora_weights="pissa")),
    "rank": ("must have rank 8", reconfigured(r=8)),
    "no rank": ("r=0 is not a positive integer", reconfigured(r=0)),
    "null rank": ("r=None is not a positive integer", reconfigured(r=None)),
    "alpha": ("lora_alpha='x' is not a number", reconfigured(lora_alpha="x")),
    "rank pattern": ("must have rank 3", reconfigured(rank_pattern={"q_proj": 3})),
    "bad pattern": ("is not a regular expression", reconfigured(rank_pattern={"(": 3})),
    "slow pattern": ("is too complex", reconfigured(alpha_pattern={"(.+)+x": 3})),
    "no magnitude": ("has no magnitude, but the config sets use_dora", reconfigured(use_dora=True)),
    "saved modules": ("lacks tensor 'lm_head.weight' of a module", reconfigured(modules_to_save=["lm_head"])),
    "half": ("lora_B of ", stored(lambda tensors: tensors.pop(f"{HOME}.lora_B.weight"))),
    "unread": ("changes a weight that", with_tensor("base_model.model.score.weight", 2, 32)),
    "odd": ("is of an unknown kind", with_tensor(f"{HOME}.lora_C.weight", 2, 2)),
    "integers": ("has dtype i32, but must be floats", with_tensor(f"{HOME}.lora_A.weight", 4, 32, dtype=np.int32)),
    "shape": ("do not fit", with_tensor(f"{HOME}.lora_A.weight", 4, 31)),
    "ranks": ("must be [out, rank] and [rank, in]", with_tensor(f"{HOME}.lora_A.weight", 5, 32)),
    "resized": (
        "resizes the embedding from 61 to 63 tokens",
        with_tensor("base_model.model.model.embed_tokens.weight", 63, 32),
    ),
    "twice": ("are the same part of", with_tensor(f"{HOME}.lora_embedding_A", 4, 32)),
    "two names": (
        "has two tensors for",
        with_tensor("base_model.model.norm.weight", 32, more="base_model.model.model.norm.weight"),
    ),
    "tokens of a vector": (
        "does not fit model.norm.weight [32]",
        lambda folder: (
            reconfigured(trainable_token_indices={"norm": [1, 2]})(folder),
            with_tensor("base_model.model.model.norm.token_adapter.trainable_tokens_delta", 2, 32)(folder),
        ),
    ),
    "tokens of nobody": (
        "must list a token for each row of",
        with_tensor("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 32),
    ),
    "empty": ("has no tensors", stored(lambda tensors: tensors.clear())),
    "no weights": (f"has no {FILE}", lambda folder: (folder / "adapter" / FILE).unlink()),
    "no json": ("not valid JSON", lambda folder: (folder / "adapter" / "adapter_config.json").write_text("{")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_cannot_be_merged_are_refused(name: str, tiny: Path, tmp_path: Path) -> None:
    told, change = REFUSED[name]
    shutil.copytree(tiny / "adapter", tmp_path / "adapter")
    change(tmp_path)
    line = refused("compile", tiny / "base", "--adapter", tmp_path / "adapter", "-o", tmp_path / "out")
    assert told in line and str(tmp_path / "adapter") in line
    assert not (tmp_path / "out").exists()


def test_sources_that_accept_no_adapter_are_refused(tiny: Path, tmp_path: Path) -> None:
    given = ("--adapter", tiny / "adapter")
    assert "--adapter needs a Hugging Face folder" in refused("inspect", "gpt2", *given)
    assert "is not an adapter" in refused("inspect", tiny / "base", "--adapter", tiny / "base")
    assert "is not an adapter" in refused("inspect", tiny / "base", "--adapter", tmp_path / "nowhere")
    done("compile", tiny / "base", "-o", tmp_path / "out")
    assert "--adapter applies to uncompiled sources" in refused("run", tmp_path / "out", *given, "--ids", "3")
    shutil.copytree(tiny / "adapter", tmp_path / "adapter")
    for name, told in (
        ("else/where", "whose base 'else/where' is not available locally"),
        (None, "which does not name its base"),
    ):
        peft.reconfigure(tmp_path / "adapter", base_model_name_or_path=name)
        assert told in refused("inspect", tmp_path / "adapter")
    peft.reconfigure(tmp_path / "adapter", base_model_name_or_path=str(tiny / "second"))
    assert "save the merged model" in refused("inspect", tmp_path / "adapter")
