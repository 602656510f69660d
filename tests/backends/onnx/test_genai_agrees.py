"""weft's runtime and onnxruntime-genai say the same with the same folder, for what the latter can represent.

To onnxruntime-genai token 0 ends a text where nothing else does, and a beam search weighs ended texts otherwise: none
of these texts comes upon it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import pytest

import weft
from weft import MLP, Attention, Block, Decoder, GatedMLP, LayerNorm, LearnedPositions, Mask, RMSNorm, RoPE
from weft.backends.runtime.core.generation import Generator
from weft.frontends.dsl import ALiBi, MoE

VOCAB, LONGEST = 997, 48
ROPE = RoPE(100.0)
PROMPTS = [[5, 9, 33, 2, 60, 7, 11], [1, 4, 9, 16, 25, 36, 49]]


def stack(attention: Attention, ffn: Any = None, **options: Any) -> Decoder:
    return Decoder(
        VOCAB, 32, 2, Block(attention, ffn or GatedMLP(48), RMSNorm(1e-6)), **{"context": LONGEST, **options}
    )


GROUPED = {"heads": 4, "kv_heads": 2}
LOCAL, WIDE = (Block(Attention(**GROUPED, rope=ROPE, window=w), GatedMLP(48), RMSNorm(1e-6)) for w in (8, None))
MODELS = {
    "grouped": stack(Attention(**GROUPED, rope=ROPE)),
    "gpt2": Decoder(
        VOCAB, 32, 2, Block(Attention(4), MLP(48, "gelu_tanh", bias=True), LayerNorm()), positions=LearnedPositions(48)
    ),
    "sinks-softcap": stack(Attention(**GROUPED, rope=ROPE, sinks=True, softcap=5.0)),
    "alibi": stack(Attention(**GROUPED, bias=ALiBi())),
    "rolling": Decoder(VOCAB, 32, [LOCAL, LOCAL], context=LONGEST),
    "local-global": Decoder(VOCAB, 32, [LOCAL, WIDE], context=LONGEST),
    "experts": stack(Attention(**GROUPED, rope=ROPE), MoE(experts=4, hidden=24, k=2)),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(name, tmp_path_factory.mktemp(name) / "out")


def compiled(name: str, folder: Path, passes: str = "default") -> Path:
    weft.compile(MODELS[name], folder, seed=5, max_length=LONGEST, passes=passes)
    return folder


def genai(folder: Path, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    """Return `count` tokens after prompts of equal length."""
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    begin = len(prompts[0])
    params.set_search_options(max_length=begin + count, do_sample=False, batch_size=len(prompts), **options)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array(prompts, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row).tolist()[begin:] for row in range(len(prompts))]


def ours(folder: Path, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    model = weft.load(folder, threads=1)
    assert isinstance(model, Generator)
    return [result.tokens for result in model.generate(prompts, max_tokens=count, **options)]


def test_batches_agree_with_genai(folder: Path) -> None:
    wanted = ours(folder, PROMPTS, 20)
    assert len({token for row in wanted for token in row}) > 8
    assert genai(folder, PROMPTS, 20) == wanted
    for prompt, row in zip(PROMPTS, wanted, strict=True):
        assert genai(folder, [prompt], 20) == [row]


def test_beams_agree_with_genai(name: str, folder: Path, tmp_path: Path) -> None:
    """onnxruntime-genai searches with full caches only."""
    rolls = name in ("rolling", "local-global")
    full = compiled(name, tmp_path / "full", "default, -rolling-buffer") if rolls else folder
    for prompt in PROMPTS:
        for options in ({}, {"length_penalty": 0.5}):
            found = genai(full, [prompt], 10, num_beams=4, **options)
            assert found == ours(folder, [prompt], 10, beams=4, **options)


def test_rolling_caches_with_kept_first_keys_agree_with_genai(tmp_path: Path) -> None:
    """Standard operators keep them: GroupQueryAttention rolls all."""
    model = stack(Attention(**GROUPED, rope=ROPE, window=6, mask=Mask(keep_first=2)))
    weft.compile(model, tmp_path / "out", seed=5, max_length=LONGEST)
    wanted = ours(tmp_path / "out", PROMPTS, 30)
    assert genai(tmp_path / "out", PROMPTS, 30) == wanted
    assert wanted == ours(tmp_path / "out", PROMPTS, 30, chunk=4)
    weft.compile(model, tmp_path / "full", seed=5, max_length=LONGEST, passes="default, -rolling-buffer")
    assert wanted == ours(tmp_path / "full", PROMPTS, 30)


def test_full_caches_agree_with_genai(folder: Path) -> None:
    count = LONGEST - len(PROMPTS[0])
    assert genai(folder, PROMPTS[:1], count) == ours(folder, PROMPTS[:1], count)
