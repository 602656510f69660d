"""sentence-transformers loads folders of encoders; its embeddings are weft's, whatever modules a folder has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import transformer
from sentence_transformers.sentence_transformer import modules as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import weft

from ...e2e.images import PAIRS
from ..compiled import loaded

TEXTS = [
    "A cat sits on the mat.",
    "The feline rests upon the rug, which is to say: somebody's carpet, bought years ago in a small shop by the sea.",
    "x",
]


def test_embeddings_of_a_folder(minilm_folder: Path, tmp_path: Path) -> None:
    """With the pooling and the length that the folder's source names; `AutoModel` returns them, too."""
    weft.compile(minilm_folder, tmp_path / "folder", target="transformers", dtype="f32")
    found = SentenceTransformer(str(tmp_path / "folder"), device="cpu", trust_remote_code=True)
    assert [type(module).__name__ for module in found] == ["Transformer", "Pooling", "Normalize"]
    assert type(found[0].model).__module__.startswith("transformers_modules")
    embeddings = found.encode(TEXTS, batch_size=3)
    weft.compile(tmp_path / "folder", tmp_path / "onnx")
    assert np.abs(embeddings - weft.load(tmp_path / "onnx").encode(TEXTS)).max() <= 1e-5
    original = SentenceTransformer(str(minilm_folder), device="cpu")
    assert np.abs(embeddings - original.encode(TEXTS, batch_size=3)).max() <= 1e-5
    given = found[0].tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        made = loaded(tmp_path / "folder", "AutoModel")(**given)
    assert [*made] == ["last_hidden_state", "pooler_output", "sentence_embedding"]
    assert np.abs(made.sentence_embedding.numpy() - embeddings).max() <= 1e-5
    assert np.abs(np.linalg.norm(embeddings, axis=1) - 1).max() <= 1e-5


# -- chains of modules, each on all targets

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 1}
T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 1}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "use_bidirectional_attention": True}
WORDS = ["a b c d e", "b", "C d a b e f g h a a B c d e f g h i j", "a z d"]  # the third is cut
act = torch.nn


def dense(width: int, out: int, activation: Any = None, **more: Any) -> st.Dense:
    return st.Dense(width, out, activation_function=activation or act.Tanh(), **more)


def pooled(*modes: str, **more: Any) -> st.Pooling:
    return st.Pooling(32, modes if len(modes) > 1 else modes[0], **more)


def layers(*weights: float, start: int = 0) -> st.WeightedLayerPooling:
    weight = torch.nn.Parameter(torch.tensor(weights))
    return st.WeightedLayerPooling(32, num_hidden_layers=2, layer_start=start, layer_weights=weight)


def words() -> st.WordWeights:
    vocab = [f"<{i}>" for i in range(4)] + [chr(65 + i) for i in range(36)]
    return st.WordWeights(vocab, {"a": 2.0, "B": 0.5, "b": 3.0, "c": 0.0, "d": 0.25}, unknown_word_weight=0.3)


CHAINS: dict[str, tuple[str, dict[str, Any], Callable[[], list[Any]]]] = {
    "means": ("Bert", {}, lambda: [pooled("mean")]),
    "six poolings": ("Bert", {}, lambda: [pooled(*st.Pooling.POOLING_MODES)]),
    "roots": ("Roberta", {"max_position_embeddings": 66}, lambda: [pooled("mean_sqrt_len_tokens"), st.Normalize()]),
    "norm first": ("MPNet", {}, lambda: [pooled("cls"), st.Normalize(), dense(32, 12, act.ReLU())]),
    "two dense": ("Bert", {}, lambda: [pooled("mean"), dense(32, 20, act.GELU(), bias=False), dense(20, 6)]),
    "tokens": (
        "ModernBert",
        {},
        lambda: [dense(32, 32, act.SiLU(), module_input_name="token_embeddings"), pooled("max", "mean")],
    ),
    "layer norm": (
        "DistilBert",
        {"dim": 32, "n_heads": 4, "hidden_dim": 48},
        lambda: [pooled("max"), st.LayerNorm(32)],
    ),
    "residual": ("Bert", {}, lambda: [pooled("mean"), dense(32, 8, act.Sigmoid(), use_residual=True), st.Dropout()]),
    "without prompt": ("T5Encoder", T5, lambda: [pooled("mean", include_prompt=False), dense(32, 9), st.Normalize()]),
    "last token": ("Qwen3", {"head_dim": 8}, lambda: [pooled("lasttoken"), st.Normalize()]),
    "window": ("Mistral", {"sliding_window": 4}, lambda: [pooled("lasttoken"), st.Normalize()]),
    "both sides": ("Qwen2", {"is_causal": False}, lambda: [pooled("mean"), st.Normalize()]),
    "gemma": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, **GEMMA},
        lambda: [pooled("mean"), dense(32, 64, act.Identity()), dense(64, 32, act.Identity()), st.Normalize()],
    ),
    "layers": ("ModernBert", {"output_hidden_states": True}, lambda: [layers(0.5, 2.0, 1.5), pooled("mean", "max")]),
    "later layers": ("Bert", {"output_hidden_states": True}, lambda: [layers(-0.5, 2.0, start=1), pooled("mean")]),
    "words": ("Bert", {}, lambda: [words(), pooled("mean", "max", "mean_sqrt_len_tokens"), st.Normalize()]),
    "words by place": ("MPNet", {}, lambda: [words(), pooled("weightedmean"), st.Normalize()]),
    "weighted": ("Llama", {}, lambda: [pooled("weightedmean")]),
}


def saved(name: str, folder: Path) -> SentenceTransformer:
    """The chain `name` with a random transformer, as sentence-transformers opens it from `folder`."""
    family, config, modules = CHAINS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}Model")
    sizes = config if family == "T5Encoder" else {**SIZES, **config}
    model = kind(kind.config_class(**sizes)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.3 + float(p.ndim == 1 and key.endswith("weight")))
    model.save_pretrained(folder / "base")
    save_tokenizer(folder / "base", padding_side="left" if name == "last token" else "right")
    lower = name in ("means", "last token")
    first = st.Transformer(str(folder / "base"), max_seq_length=12, do_lower_case=lower)
    prompts = {"query": "z : ", "none": ""}
    made = SentenceTransformer(modules=[first, *modules()], device="cpu", prompts=prompts, default_prompt_name="none")
    made.save(str(folder / "st"))
    return SentenceTransformer(str(folder / "st"), device="cpu")


def tokenizer_of_words() -> Tokenizer:
    vocab = {"<unk>": 0, "<pad>": 1, "</s>": 2, ":": 3, **{chr(97 + i): 4 + i for i in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def save_tokenizer(folder: Path, **more: Any) -> None:
    """Save the tokenizer of words into `folder`."""
    named = {"pad_token": "<pad>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_words(), **named, **more).save_pretrained(folder)


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_modules(name: str, tmp_path: Path) -> None:
    original = saved(name, tmp_path)
    calls: list[dict[str, Any]] = [{}, {"prompt_name": "query"}, {"prompt": "y "}, {"truncate_dim": 4}]
    wanted = [original.encode(WORDS, **call) for call in calls]
    unit = original.encode(WORDS, truncate_dim=5, normalize_embeddings=True)
    for target in ("onnx", "ort-cpu", "torch"):
        weft.compile(tmp_path / "st", tmp_path / target, target=target)
        model = weft.load(tmp_path / target, trust=True)
        for call, want in zip(calls, wanted, strict=True):
            assert np.abs(model.encode(WORDS, truncate=True, **call) - want).max() <= 1e-5, (target, call)
        assert np.abs(model.encode(WORDS, truncate=True, truncate_dim=5, normalize=True) - unit).max() <= 1e-5
    weft.compile(tmp_path / "st", tmp_path / "code", target="transformers", dtype="f32")
    weft.export(tmp_path / "st", tmp_path / "export")
    for folder in ("code", "export"):
        found = SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=folder == "code")
        assert found.get_embedding_dimension() == wanted[0].shape[1]
        assert (found.prompts, found.default_prompt_name, found.max_seq_length) == (original.prompts, "none", 12)
        for call, want in zip(calls, wanted, strict=True):
            assert np.abs(found.encode(WORDS, **call) - want).max() <= 1e-5, (folder, call)
    tokens = original.preprocess(WORDS)
    given = {key: tokens[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in tokens}
    code = transformers.AutoModel.from_pretrained(tmp_path / "code", trust_remote_code=True)
    with torch.no_grad():
        vectors = code(**given).sentence_embedding.numpy()
    assert np.abs(vectors - wanted[0]).max() <= 1e-5


# -- transformers that make the vectors themselves


def table() -> st.StaticEmbedding:
    torch.manual_seed(0)
    tokenizer = tokenizer_of_words()
    tokenizer.add_special_tokens(["<pad>"])
    return st.StaticEmbedding(tokenizer, embedding_weights=torch.randn(30, 20))


OWN: dict[str, Callable[[str], list[Any]]] = {  # of a folder with CLIP
    "clip": lambda clip: [st.CLIPModel(clip)],
    "clip dense": lambda clip: [st.Transformer(clip), dense(20, 12, act.ReLU()), st.Normalize()],
    "static": lambda clip: [table()],
    "static dense": lambda clip: [table(), dense(20, 12), st.Normalize()],
}


@pytest.mark.parametrize("name", OWN)
def test_modules_that_make_vectors_of_texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "AutoProcessor", transformers.AutoTokenizer)  # that of images needs pillow
    PAIRS["clip"].save(tmp_path / "base")
    save_tokenizer(tmp_path / "base", model_max_length=12)
    made = SentenceTransformer(modules=OWN[name](str(tmp_path / "base")), device="cpu", prompts={"q": "z : "})
    made.save(str(tmp_path / "st"))
    calls: list[dict[str, Any]] = [{}, {"prompt_name": "q"}, {"truncate_dim": 4}]
    wanted = [SentenceTransformer(str(tmp_path / "st"), device="cpu").encode(WORDS, **call) for call in calls]
    for target in ("onnx", "ort-cpu", "torch", "transformers"):
        weft.compile(tmp_path / "st", tmp_path / target, target=target, dtype="f32")
        if target == "transformers":
            model: Any = SentenceTransformer(str(tmp_path / target), device="cpu", trust_remote_code=True)
            assert model.get_embedding_dimension() == wanted[0].shape[1]
        else:
            model = partial(weft.load(tmp_path / target, trust=True).encode, truncate=True)
        encode = getattr(model, "encode", model)
        for call, want in zip(calls, wanted, strict=True):
            assert np.abs(encode(WORDS, **call) - want).max() <= 1e-5, (target, call)
