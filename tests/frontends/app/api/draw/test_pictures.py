"""weft viz and weft gallery on the command line: formats, what is open, and what is refused."""

from __future__ import annotations

import base64
import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weft
from weft import MLP, Attention, Block, BlockSparse, Encoder, FourierMixing, WeftError, load_source
from weft.backends.viz.panels import prompts
from weft.frontends.app.api.draw.pictures import run_prompt
from weft.frontends.app.cli import cli

from ....command import done

STARTS = {
    "html": "<!doctype html>",
    "svg": "<svg ",
    "mmd": '---\ntitle: "arch"\n---\nflowchart TD\n',
    "dot": 'digraph "arch" {\n',
    "txt": "arch  ",
}


@pytest.mark.parametrize("ending", STARTS)
def test_suffix_selects_the_picture_format(ending: str, arch: str) -> None:
    said = done("viz", arch, "-o", f"a.{ending}")
    assert said.stderr == f"weft: a.{ending} written\n" and said.stdout == ""
    assert Path(f"a.{ending}").read_text().startswith(STARTS[ending])


def test_draw_in_python(arch: str) -> None:
    weft.draw("gpt2", "a.mmd", depth=0)
    assert "layers 0-11 × 12" in Path("a.mmd").read_text()
    weft.draw(weft.load_source(arch), Path("b.svg"), parts=["attn"], dark=True)
    assert "layers.0.attn.q" in Path("b.svg").read_text()
    with pytest.raises(WeftError, match="unknown format"):
        weft.draw("gpt2", "a.bmp")


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
def test_compiled_folders_are_drawn_with_their_parameters(target: str, arch: str) -> None:
    done("compile", arch, "-o", "out", "--target", target)
    done("viz", "out", "--trust", "-o", "out.svg")
    texts = [e.text for e in ET.parse("out.svg").iter("{http://www.w3.org/2000/svg}text")]
    rows = dict(itertools.pairwise(texts))  # a fact stands behind its name
    norms = 6 * 32 if target == "ort-cpu" else 0  # scales went into the next layer
    assert texts[0] == "arch" and rows["Parameters"] == f"{24_032 - norms:,}"
    assert int(rows["Operations"] or 0) > 30


# -- galleries


IDS = [5, 17, 3, 88, 42, 17, 60, 2, 9, 31, 75]
N = len(IDS)
Save = Callable[..., tuple[Any, Path]]


def text(ids: Any) -> str:
    return "".join(f" t{i}" for i in ids)


def unpacked(layer: dict[str, Any]) -> Any:
    """Attention weights [heads, queries, keys] out of the data of a page."""
    numbers = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8) / 255
    weights = np.zeros((layer["heads"], N, N))
    place = np.tril(np.ones((N, N), bool)) if layer["causal"] else np.ones((N, N), bool)
    for head, row in zip(weights, numbers.reshape(layer["heads"], -1), strict=True):
        head[place] = row
    return weights


def theirs(model: Any, **asked: bool) -> Any:
    import torch

    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # grouped products know no float64
    with torch.no_grad():
        return model.double()(torch.tensor([IDS]), **asked)


def ours(folder: Path) -> dict[str, Any]:
    return prompts.run_prompt(load_source(folder).graph, IDS, text, lambda done, count: None)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
        ("gpt2", {}),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
        ("gpt_oss", {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4}),
        ("deepseek_v3", {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                         "v_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4,
                         "first_k_dense_replace": 1}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_attention_weights_and_expected_tokens(save: Save, kind: str, config: dict[str, Any]) -> None:
    model, folder = save(kind, **config)
    found, known = ours(folder), theirs(model, output_attentions=True)
    assert len(found["layers"]) == len(known.attentions) == 3
    for layer, weights in zip(found["layers"], known.attentions, strict=True):
        expected = weights[0].double().numpy()
        assert np.abs(unpacked(layer) - expected).max() < 0.5 / 255 + 1e-5
        assert np.ptp(expected) > 0.1  # not all alike
    chances = known.logits[0].double().softmax(-1).numpy()
    for i, at in enumerate(found["next"]):
        best = np.argsort(-chances[i])[:5]
        assert [token for token, _ in at["likely"]] == [f" t{t}" for t in best]
        assert [p for _, p in at["likely"]] == pytest.approx(chances[i][best], rel=2e-3)
        if i + 1 < N:
            assert at["came"] == pytest.approx(chances[i][IDS[i + 1]], rel=2e-3)
            assert at["rank"] == 1 + (chances[i] > chances[i][IDS[i + 1]]).sum()
    assert "came" not in found["next"][-1]
    assert found["tokens"] == [f" t{i}" for i in IDS]


def test_loads_of_experts(save: Save) -> None:
    import torch

    model, folder = save("mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    found, known = ours(folder)["experts"], theirs(model, output_router_logits=True).router_logits
    for layer, logits in zip(found, known, strict=True):
        chosen = logits.topk(2, -1).indices.flatten()
        assert layer["counts"] == torch.bincount(chosen, minlength=4).tolist()
        assert sum(layer["counts"]) == 2 * N


def test_encoders_look_both_ways_and_expect_nothing(save: Save) -> None:
    model, folder = save("bert", "AutoModel")
    found, known = ours(folder), theirs(model, output_attentions=True)
    assert found["next"] == [] and not found["layers"][0]["causal"]
    for layer, weights in zip(found["layers"], known.attentions, strict=True):
        assert np.abs(unpacked(layer) - weights[0].numpy()).max() < 0.5 / 255 + 1e-5


def test_prompts_that_cannot_be_shown(save: Save, smollm2_gguf: Path) -> None:
    graph = load_source(save("llama")[1]).graph
    with pytest.raises(WeftError, match="the prompt has no tokens"):
        prompts.check_prompt(graph, 0)
    with pytest.raises(WeftError, match=r"the prompt has 65 tokens, .* supports at most 64"):
        prompts.check_prompt(graph, 65)
    prompts.check_prompt(graph, 64)
    large = load_source(smollm2_gguf).graph
    prompts.check_prompt(large, 104)
    with pytest.raises(WeftError, match="with 270 heads at most 104 fit a page: shorten it"):
        prompts.check_prompt(large, 105)
    assert 270 * 104 * 105 // 2 <= prompts.MOST < 270 * 105 * 106 // 2
    with pytest.raises(WeftError, match=r"only input is a text, but .* also reads encoder_input_ids"):
        prompts.check_prompt(load_source("t5-base").graph, 3)
    with pytest.raises(WeftError, match="has no trained weights, so its attention is random"):
        run_prompt(load_source("gpt2"), "hello")
    with pytest.raises(WeftError, match="has no tokenizer"):
        run_prompt(load_source(save("llama")[1]), "hello")


def test_models_without_attention_have_no_limit_of_heads() -> None:
    prompts.check_prompt(load_source("mamba-130m").graph, 900)


@pytest.mark.parametrize("more", [["--vs", "gpt2"], ["-o", "x.svg"], ["-o", "-"]], ids=str)
def test_a_prompt_is_for_the_page_of_one_model(more: list[str]) -> None:
    run = CliRunner().invoke(cli, ["viz", "gpt2", "--prompt", "hello", *more])
    assert run.exit_code == 2 and "--prompt needs the .html page of one model" in run.output


def test_a_prompt_on_real_weights(smollm2_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "prompt.html"
    prompt = "The capital of France is Paris, and the capital of Italy is"
    run = CliRunner().invoke(cli, ["viz", str(smollm2_gguf), "--prompt", prompt, "-o", str(out)])
    assert run.exit_code == 0, run.output
    page = out.read_text()
    assert '"tokens":["The"," capital"," of"," France"' in page
    assert len(page) < 600_000
    likely = page.split('"next":')[1].split('"experts"')[0].rsplit('"likely":', 1)[1]
    assert likely.startswith('[[" Rome",0.')


def test_encoders_in_blocks_and_without_attention() -> None:
    attention, mixing = (Block(m, MLP(24)) for m in (Attention(2, mask=BlockSparse(2)), FourierMixing()))
    graph = load_source(Encoder(99, 16, [attention, mixing])).graph
    (layer,) = prompts.run_prompt(graph, IDS, text, lambda done, count: None)["layers"]
    block = np.arange(N) // 2
    ends = (block == 0) | (block == block[-1])
    seen = (abs(block[:, None] - block) < 2) | ends | ends[:, None]
    weights = unpacked(layer)
    assert (weights[:, ~seen] == 0).all() and (weights[:, seen] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=N / 255)
    none = prompts.run_prompt(load_source(Encoder(99, 16, [mixing])).graph, IDS, text, lambda done, count: None)
    assert none["layers"] == []
