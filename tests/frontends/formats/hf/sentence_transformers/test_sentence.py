"""Folders of sentence-transformers: the interpreter's vectors against formulas in numpy, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import save_file

import weft
from weft.frontends import load_source
from weft.frontends.formats.hf.sentence_transformers.sentence import HIDDEN, STATIC, build_table_config
from weft.frontends.models.families import build
from weft.ir import MemoryReader, WeftError
from weft.ir.interpreter import interpret

from .....e2e.images import PAIRS

ROWS = np.array([[5, 9, 7, 3, 4], [8, 6, 0, 0, 0], [2, 3, 4, 0, 0]])
WIDTH = 32
Array = np.ndarray[Any, Any]

# One text's states [tokens, 32] → its vector.
MODES: dict[str, Callable[[Array], Array]] = {
    "cls": lambda h: h[0],
    "max": lambda h: h.max(0),
    "mean": lambda h: h.mean(0),
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / math.sqrt(len(h)),
    "weightedmean": lambda h: np.arange(1, len(h) + 1) @ h / np.arange(1, len(h) + 1).sum(),
    "lasttoken": lambda h: h[-1],
}
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.ReLU": lambda x: np.maximum(x, 0),
    "torch.nn.modules.activation.GELU": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "torch.nn.modules.activation.Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "torch.nn.modules.activation.SiLU": lambda x: x / (1 + np.exp(-x)),
    "torch.nn.modules.activation.ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
}


@pytest.fixture
def bert(save: Any) -> Path:
    return Path(save("bert", "AutoModel", add_pooling_layer=False)[1])


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def chain(folder: Path, *modules: tuple[str, dict[str, Any]], old: bool = False) -> list[dict[str, Array]]:
    """Make `folder` one of sentence-transformers with those modules after its transformer; their random tensors."""
    where = "sentence_transformers.models" if old else "sentence_transformers.sentence_transformer.modules.x"
    kinds = ["Transformer", *(kind for kind, _ in modules)]
    paths = ["", *(f"{i + 1}_{kind}" for i, (kind, _) in enumerate(modules))]
    listed = [{"idx": i, "path": paths[i], "type": f"{where}.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    rng, made = np.random.default_rng(3), list[dict[str, Array]]()
    for path, (kind, config) in zip(paths[1:], modules, strict=True):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        shapes = {}
        if kind == "Dense":
            shapes = {"linear.weight": (config["out_features"], config["in_features"])}
            shapes |= {"linear.bias": (config["out_features"],)} if config.get("bias", True) else {}
            shapes |= {"residual.weight": shapes["linear.weight"]} if config.get("use_residual") else {}
        if kind == "LayerNorm":
            shapes = {"norm.weight": (config["dimension"],), "norm.bias": (config["dimension"],)}
        if kind == "WeightedLayerPooling":
            shapes = {"layer_weights": (3,)}
        made.append({key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()})
        if shapes:
            safetensors.numpy.save_file(made[-1], folder / path / "model.safetensors")
    return made


def vectors(folder: Path, mask: Array | None = None, rows: Array = ROWS) -> tuple[Array, list[Array]]:
    """The graph's sentence embeddings, and the states of each text's tokens, in float64."""
    graph = load_source(folder).graph
    mask = (rows > 0).astype(np.int64) if mask is None else mask
    every = {"input_ids": rows, "attention_mask": mask, "token_type_ids": np.zeros_like(rows)}
    found = interpret(graph, {name: every[name] for name in graph.inputs})
    states = [h[m != 0] for h, m in zip(found["last_hidden_state"], mask, strict=True)]
    return found["sentence_embedding"], states


def test_several_poolings_are_concatenated_in_the_order_of_the_list(bert: Path) -> None:
    chain(bert, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": list(MODES)[::-1]}))
    found, states = vectors(bert)
    wanted = [np.concatenate([mode(h) for mode in list(MODES.values())[::-1]]) for h in states]
    assert np.abs(found - np.stack(wanted)).max() < 1e-12


def test_pooling_flags_of_older_configs_have_a_fixed_order(bert: Path) -> None:
    flags = {f"pooling_mode_{name}": True for name in ("weightedmean_tokens", "mean_tokens", "cls_token", "lasttoken")}
    chain(bert, ("Pooling", {"word_embedding_dimension": WIDTH, **flags, "pooling_mode_max_tokens": False}), old=True)
    found, states = vectors(bert)
    order = [MODES[name] for name in ("cls", "mean", "weightedmean", "lasttoken")]
    assert np.abs(found - np.stack([np.concatenate([mode(h) for mode in order]) for h in states])).max() < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_padding_may_be_on_the_left(mode: str, bert: Path) -> None:
    chain(bert, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": mode}))
    shifted = np.stack([np.roll(row, (row == 0).sum()) for row in ROWS])
    found, states = vectors(bert, rows=shifted)
    assert [len(h) for h in states] == [5, 2, 3]
    assert np.abs(found - np.stack([MODES[mode](h) for h in states])).max() < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_prompts_may_be_left_out_of_the_pooling(mode: str, bert: Path) -> None:
    chain(bert, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": mode, "include_prompt": False}))
    mask = (ROWS > 0) * np.array([2, 1, 1, 1, 1])  # one token of a prompt
    found, states = vectors(bert, mask)
    wanted = [MODES[mode](h[1:]) for h in states]
    if mode == "weightedmean":  # the other tokens keep their weights
        wanted = [np.arange(2, len(h) + 1) @ h[1:] / np.arange(2, len(h) + 1).sum() for h in states]
    assert np.abs(found - np.stack(wanted)).max() < 1e-12


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_layers_after_a_normalization(activation: str, bert: Path) -> None:
    *_, dense, residual = chain(
        bert,
        ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "mean"}),
        ("Normalize", {}),
        ("Dropout", {"dropout": 0.5}),
        ("Dense", {"in_features": WIDTH, "out_features": 12, "bias": False, "activation_function": activation}),
        ("Dense", {"in_features": 12, "out_features": 6, "use_residual": True}),
    )
    found, states = vectors(bert)
    x = unit(np.stack([h.mean(0) for h in states]))
    x = ACTIVATIONS[activation](x @ dense["linear.weight"].T.astype(np.float64))
    y = np.tanh(x @ residual["linear.weight"].T.astype(np.float64) + residual["linear.bias"])
    assert np.abs(found - y - x @ residual["residual.weight"].T.astype(np.float64)).max() < 1e-12


def test_modules_read_and_write_by_name(bert: Path) -> None:
    """Two Dense by way of a name of their own, and a Normalize whose result nothing reads."""
    tokens, _, norm, first, second, _ = chain(
        bert,
        ("Dense", {"in_features": WIDTH, "out_features": 8, "module_input_name": "token_embeddings"}),
        ("Pooling", {"embedding_dimension": 8, "pooling_mode": "max"}),
        ("LayerNorm", {"dimension": 8}),
        ("Dense", {"in_features": 8, "out_features": 5, "module_output_name": "x"}),
        (
            "Dense",
            {"in_features": 5, "out_features": 3, "module_input_name": "x", "module_output_name": "sentence_embedding"},
        ),
        ("Normalize", {"module_output_name": "other"}),
    )

    def dense(x: Array, tensors: dict[str, Array]) -> Array:
        return np.tanh(x @ tensors["linear.weight"].T.astype(np.float64) + tensors["linear.bias"])

    found, states = vectors(bert)
    x = np.stack([dense(h, tokens).max(0) for h in states])
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    x = x * norm["norm.weight"] + norm["norm.bias"]
    assert np.abs(found - dense(dense(x, first), second)).max() < 1e-12


def test_decoders_are_encoders_with_a_pooling(save: Any) -> None:
    folder = Path(save("qwen3", "AutoModel", head_dim=8, num_key_value_heads=2)[1])
    chain(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken"}), ("Normalize", {}))
    graph = load_source(folder).graph
    assert (graph.meta["kind"], graph.meta["pooling"], graph.meta["normalize"]) == ("encoder", "last", True)
    found, states = vectors(folder)
    assert np.abs(found - unit(np.stack([h[-1] for h in states]))).max() < 1e-12
    longer = np.concatenate([ROWS, np.full((3, 1), 9)], 1)
    _, after = vectors(folder, rows=longer[:1])
    assert np.abs(after[0][:-1] - states[0]).max() < 1e-12  # tokens see earlier ones only


def test_transformer_in_a_subfolder_is_read(bert: Path) -> None:
    chain(bert, ("Pooling", {"word_embedding_dimension": WIDTH}), old=True)
    expected, _ = vectors(bert)
    inside = bert / "0_Transformer"
    inside.mkdir()
    for file in [path for path in bert.iterdir() if path.is_file() and path.name != "modules.json"]:
        file.rename(inside / file.name)
    listed = json.loads((bert / "modules.json").read_text())
    (bert / "modules.json").write_text(json.dumps([{**listed[0], "path": "0_Transformer"}, *listed[1:]]))
    found, _ = vectors(bert)
    assert np.array_equal(found, expected)


def test_prompts_and_limits_are_recorded_in_the_manifest(bert: Path, tmp_path: Path) -> None:
    chain(bert, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "mean"}), ("Normalize", {}))
    said = {"prompts": {"query": "find: ", "passage": None}, "default_prompt_name": "query", "truncate_dim": 7}
    (bert / "config_sentence_transformers.json").write_text(json.dumps({**said, "similarity_fn_name": "dot"}))
    (bert / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6, "do_lower_case": True}))
    weft.compile(bert, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert manifest["max_length"] == 6
    assert manifest["sentence"]["prompts"] == {"query": "find: ", "passage": ""}
    wanted = {"default_prompt_name": "query", "truncate_dim": 7, "similarity_fn_name": "dot", "do_lower_case": True}
    assert wanted.items() <= manifest["sentence"].items()
    hashed = manifest["source"]["hashes"]
    assert {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"} <= hashed.keys()
    model = weft.load(tmp_path / "out")
    assert model.encode([[5, 6, 7]]).shape == (1, 7)
    assert model.encode([[5, 6, 7]], truncate_dim=9).shape == (1, 9)
    cut = model.encode([[5, 6, 7]], truncate_dim=9, normalize=True)
    assert np.abs(cut - unit(model.encode([[5, 6, 7]], truncate_dim=9))).max() < 1e-6
    for options, message in (
        ({"truncate_dim": 33}, "truncate_dim is 33, but the vectors have 32 features"),
        ({"prompt_name": "nix"}, "no prompt 'nix'; its prompts are query, document, passage"),
        ({"prompt_name": "query"}, "a prompt cannot be put before token ids"),
    ):
        with pytest.raises(WeftError, match=message):
            model.encode([[5, 6, 7]], **options)


POOLING = ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "mean"})
DENSE = {"in_features": WIDTH, "out_features": 4}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("CLIPModel", {})], r"modules\.json: module 1, \S+\.CLIPModel, is not supported"),
        ([POOLING, ("LSTM", {})], r"module 2, \S+\.LSTM, is not supported"),
        ([("WeightedLayerPooling", {}), POOLING], "reads all_layer_embeddings: set output_hidden_states"),
        ([], "a Pooling module is missing, which computes sentence_embedding from the Transformer's token_embeddings"),
        (
            [("WordWeights", {"vocab": ["a", "b"], "word_weights": {}}), POOLING],
            r"modules\.json: WordWeights has 2 words, but needs one for each of the model's \d+ tokens",
        ),
        (
            [("WordWeights", {"vocab": ["a"], "word_weights": {"a": "much"}}), POOLING],
            r"1_WordWeights/config\.json: word_weights",
        ),
        ([("Dense", {**DENSE, "module_output_name": "x"}), POOLING][:1], "a Pooling module is missing"),
        ([("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "sum"})], "pooling_mode is 'sum', but it must be"),
        ([("Pooling", {})], r"1_Pooling/config\.json: the key 'word_embedding_dimension' is missing"),
        (
            [POOLING, ("Dense", {**DENSE, "activation_function": "torch.nn.Mish"})],
            "activation_function is 'torch.nn.Mish'",
        ),
        ([POOLING, ("Dense", {**DENSE, "activation_function": "mine.Tanh"})], "activation_function is 'mine.Tanh'"),
        ([POOLING, ("Dense", {**DENSE, "in_features": 9})], r"2_Dense:linear\.weight \[4, 9\] does not fit"),
    ],
)
def test_unsupported_modules_are_refused(modules: list[Any], message: str, bert: Path) -> None:
    chain(bert, *modules)
    refused(bert, message)


@pytest.mark.parametrize(
    ("file", "said", "message"),
    [
        ("modules.json", {}, "a JSON array was expected"),
        ("modules.json", [], "lists no modules"),
        ("modules.json", [{"type": "custom_st.Transformer", "path": ""}], r"module 0, custom_st\.Transformer, is not"),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.StaticEmbedding"}],
            r"lacks the matrix 'embedding\.weight', which a StaticEmbedding needs",
        ),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name is 'x'"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "without a chat template"),
        ("sentence_bert_config.json", {"module_output_name": "sentence_embedding"}, "a Pooling module is missing"),
        (
            "sentence_bert_config.json",
            {"module_output_name": "sentence_embedding", "modality_config": {"text": HIDDEN}},
            "modality_config is .* only pooler_output of get_text_features without",
        ),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
        ("sentence_bert_config.json", {"processor_kwargs": {"truncation_side": "left"}}, "not support truncation_side"),
    ],
)
def test_invalid_files_are_refused(file: str, said: Any, message: str, bert: Path) -> None:
    chain(bert, POOLING)
    (bert / file).write_text(json.dumps(said))
    refused(bert, message)


def test_unsupported_transformers_are_refused(save: Any) -> None:
    folder = Path(save("bart", "AutoModel", d_model=WIDTH, encoder_layers=1, decoder_layers=1)[1])
    chain(folder, POOLING)
    refused(folder, "bart models are not supported as Transformer")


def test_unsupported_features_are_refused(bert: Path, tmp_path: Path) -> None:
    """Models without features, those whose features a batch changes, and images before modules."""
    clip, siglip = (PAIRS[name].save(tmp_path / name) and tmp_path / name for name in ("clip", "siglip"))
    for folder in (bert, clip, siglip):
        chain(folder, ("Normalize", {}))
        listed = json.loads((folder / "modules.json").read_text())
        listed[0]["type"] = "sentence_transformers.models.CLIPModel"
        (folder / "modules.json").write_text(json.dumps(listed))
    refused(bert, "modules after features of bert models are not supported: remove modules.json")
    refused(siglip, "modules after features of siglip_text_model models .* as they depend on the padding of a batch")
    with pytest.raises(WeftError, match="modules after features of clip_vision_model models are not supported: remove"):
        load_source(clip, family="clip_vision_model")
    (clip / "config.json").write_text(json.dumps({"model_type": "clip", "text_config": [3]}))
    refused(clip, r"config\.json: text_config=\[3\] is not a mapping")


def test_static_embedding_tables_are_read(tmp_path: Path) -> None:
    """Those of model2vec may have a weight for each token; the tokenizer may cut texts."""
    rng, path = np.random.default_rng(5), tmp_path / "model.safetensors"
    tensors = {"embeddings": rng.standard_normal((10, 6)), "weights": rng.random(10)}
    safetensors.numpy.save_file({name: value.astype(np.float32) for name, value in tensors.items()}, path)
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("StaticEmbedding", "Normalize")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"truncation": {"max_length": 5}}))
    graph = load_source(tmp_path).graph
    assert (graph.meta["context"], graph.meta["pooling"], graph.meta["normalize"]) == (5, "mean", True)
    found, _ = vectors(tmp_path)
    rows = [(tensors["embeddings"] * tensors["weights"][:, None])[row[row > 0]].mean(0) for row in ROWS]
    assert np.abs(found - unit(np.stack(rows))).max() < 1e-6
    safetensors.numpy.save_file({"embeddings": np.eye(3, dtype=np.float32), "mapping": np.arange(3)}, path)
    refused(tmp_path, r"tokens that share rows \(tensor 'mapping'\) are not supported: save the folder with")


@pytest.mark.parametrize(
    ("family", "start", "message"),
    [
        ("albert", 0, "WeightedLayerPooling is not supported for albert models"),
        (
            "bert",
            0,
            r"1_WeightedLayerPooling:layer_weights \[3\] does not fit .*layer_weights \[4\] of the config",
        ),
        ("bert", 4, "start=4 must be at most"),
    ],
)
def test_unsupported_layer_poolings_are_refused(family: str, start: int, message: str, save: Any) -> None:
    folder = Path(save(family, "AutoModel", output_hidden_states=True)[1])
    chain(folder, ("WeightedLayerPooling", {"layer_start": start}), POOLING)
    refused(folder, message)


def test_generated_code_refuses_layer_pooling_without_prompts(save: Any, tmp_path: Path) -> None:
    folder = Path(save("bert", "AutoModel", output_hidden_states=True)[1])
    chain(folder, ("WeightedLayerPooling", {"layer_start": 1}), (POOLING[0], {**POOLING[1], "include_prompt": False}))
    with pytest.raises(WeftError, match="pools prompts too: choose another target, or `weft export`"):
        weft.compile(folder, tmp_path / "out", target="transformers")


def test_adapters_with_modules_are_refused(bert: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    chain(adapter, POOLING)
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(bert), "peft_type": "LORA"})
    )
    refused(adapter, r"an adapter with its own modules\.json is not supported: save the merged")


def test_records_that_were_edited_are_refused(bert: Path, tmp_path: Path) -> None:
    """Types of modules become names of folders where a model is written."""
    chain(bert, POOLING)
    weft.compile(bert, tmp_path / "out", target="transformers")
    path = tmp_path / "out" / "model.weft"
    path.write_text(path.read_text().replace('"type": "Pooling"', '"type": "../../Pooling"'))
    refused(tmp_path / "out", "meta sentence = .* is not a record of modules: Pooling, Dense")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(WeftError, match=message) as caught:
        load_source(folder)
    assert "\n" not in str(caught.value)


def test_unread_keys_are_reported_with_their_file(bert: Path) -> None:
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    dense = {"in_features": WIDTH, "out_features": 4, "bias": True}
    chain(bert, ("Dropout", {"dropout": 0.5}), ("Pooling", pooling), ("Dense", dense))
    files = {
        "2_Pooling/config.json": pooling,
        "3_Dense/config.json": dense,
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
        "config_sentence_transformers.json": {"__version__": {"pytorch": "2.0"}, "prompts": {"query": "q: "}},
    }
    for extra in ({}, {"magic": 3}, {"magic": False}):
        for name, config in files.items():
            (bert / name).write_text(json.dumps(config | extra))
        found = {(part.kind, part.name) for part in load_source(bert).left_out}
        assert found == {("key", f"{name}:{key}") for name in files for key in extra}


TABLE = np.arange(6, dtype=np.float32).reshape(3, 2)
CONFIG = {"model_type": "static", "vocab_size": 3, "hidden_size": 2}


@pytest.mark.parametrize("name", ["embedding.weight", "embeddings"])
def test_config_has_the_sizes_of_the_table(name: str, tmp_path: Path) -> None:
    save_file({name: TABLE}, tmp_path / "model.safetensors")
    assert build_table_config(tmp_path) == CONFIG


def test_tokens_that_share_rows_and_missing_tables_are_refused(tmp_path: Path) -> None:
    save_file({"embeddings": TABLE, "mapping": np.zeros(3, np.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeftError, match="tokens that share rows"):
        build_table_config(tmp_path)
    save_file({"embeddings": TABLE[0]}, tmp_path / "model.safetensors")
    with pytest.raises(WeftError, match=r"lacks the matrix 'embedding.weight'"):
        build_table_config(tmp_path)


def test_rows_are_scaled_by_their_weights_if_stored() -> None:
    stored = {"embeddings": TABLE, "weights": np.float32([1, 2, 3])}
    for keys, wanted in ((["embeddings"], TABLE), (list(stored), TABLE * [[1], [2], [3]])):
        recipe = STATIC.recipe("embed.weight", STATIC.read(CONFIG, frozenset(keys), "c"), frozenset(keys))
        assert recipe is not None
        np.testing.assert_array_equal(recipe.evaluate(MemoryReader(stored)), wanted)


def test_the_model_is_its_table_alone() -> None:
    graph = build(STATIC.read(CONFIG, frozenset(), "c")).graph()
    assert [param for param in graph.params if not graph.params[param].recipe.is_constant] == ["embed.weight"]
