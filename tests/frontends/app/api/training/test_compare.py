"""weft.compare: equal compute, equal parameters, seeds, and runs equal to those of weft.train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest

import weft
from weft import TrainingSettings
from weft.frontends.app.api.training.compare import draw_comparison
from weft.ir.errors import WeftError

from ....command import TINY

SETTINGS = TrainingSettings(steps=20, batch=4, context=16)


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str, Path]:
    """Two architectures and a text."""
    heads, wide, text = tmp_path / "heads.py", tmp_path / "wide.py", tmp_path / "notes.txt"
    heads.write_text(TINY)
    wide.write_text(TINY.replace("kv_heads=2", "kv_heads=4").replace("48", "96"))
    text.write_text("it was a bright cold day in april " * 60)
    return str(heads), str(wide), text


@pytest.mark.long
def test_a_variant_is_trained_as_by_train(sources: tuple[str, str, Path], tmp_path: Path) -> None:
    heads, wide, text = sources
    first, second = weft.compare([heads, wide], text, SETTINGS, seeds=1, tokenizer="bytes")
    for source, variant in ((heads, first), (wide, second)):
        run = weft.train(source, text, tmp_path / Path(variant.name).stem, SETTINGS, tokenizer="bytes")
        assert variant.losses == [pytest.approx(run.last, rel=1e-5)]
        assert variant.runs[0][-1].tokens == 20 * 4 * 16 and variant.spread == 0


def test_equal_compute_gives_a_smaller_variant_more_tokens(sources: tuple[str, str, Path]) -> None:
    heads, wide, text = sources
    first, second = weft.compare(
        [heads, wide], text, replace(SETTINGS, steps=None), flops=2e8, seeds=2, tokenizer="bytes"
    )
    ends = [variant.runs[0][-1] for variant in (first, second)]
    assert ends[0].tokens > 1.3 * ends[1].tokens
    for variant, end in zip((first, second), ends, strict=True):
        assert end.flops == pytest.approx(2e8, rel=0.05)
        inspected = weft.inspect(variant.name)
        assert 3 * 2 * inspected.parameters < 2 * variant.flops_per_token  # of products of a matrix and a token
        assert variant.spread == pytest.approx(stdev(variant.losses)) and variant.spread > 0


def test_widths_change_to_equal_the_parameters(sources: tuple[str, str, Path]) -> None:
    heads, wide, text = sources
    first, second = weft.compare([heads, wide], text, replace(SETTINGS, steps=1), seeds=1, match_parameters=True)
    assert second.parameters == pytest.approx(first.parameters, rel=0.01)
    assert second.cache_bytes == 2 * first.cache_bytes
    (huge := Path(wide)).write_text(TINY.replace("dim=32", "dim=128"))
    with pytest.raises(WeftError, match=r"cannot have the number of parameters of .* by other widths"):
        weft.compare([heads, str(huge)], text, SETTINGS, match_parameters=True)


def test_checkpoints_are_refused(sources: tuple[str, str, Path], tmp_path: Path) -> None:
    heads, _, text = sources
    weft.train(heads, text, tmp_path / "run", replace(SETTINGS, steps=1))
    with pytest.raises(WeftError, match="is not an architecture: comparisons train variants from random weights"):
        weft.compare([heads, str(tmp_path / "run")], text, SETTINGS)
    with pytest.raises(WeftError, match="seeds of 1 or more"):
        weft.compare([heads, heads], text, SETTINGS, seeds=0)
    for settings, flops in ((SETTINGS, 1e8), (replace(SETTINGS, steps=None), -5)):
        with pytest.raises(WeftError, match=r"flops and steps or tokens both are|flops is .* must be a positive"):
            weft.compare([heads, heads], text, settings, flops=flops)
    (small := tmp_path / "small.py").write_text(TINY.replace("vocab=12", "vocab=5"))
    np.save(tmp_path / "ids.npy", np.arange(1000) % 9)
    with pytest.raises(WeftError, match=r"the text has token 8, but the tokens of .*small\.py are 0 to 4"):
        weft.compare([heads, str(small)], tmp_path / "ids.npy", SETTINGS)
    with pytest.raises(WeftError, match="cannot write a chart"):
        draw_comparison([], tmp_path / "curves.gif")


def test_encoders_are_compared_with_encoders_only(sources: tuple[str, str, Path], tmp_path: Path) -> None:
    heads, _, text = sources
    block = "Block(Attention(2, causal=False), MLP(16), RMSNorm())"
    models = (
        f'{name} = Encoder(300, 16, {n}, {block}, head=TaskHead("fill-mask"))' for name, n in (("a", 1), ("b", 2))
    )
    (tmp_path / "bert.py").write_text("\n".join(["from weft import *", *models]))
    one, two = (f"{tmp_path / 'bert.py'}:{name}" for name in "ab")
    for variant in weft.compare([one, two], text, replace(SETTINGS, steps=2), seeds=1):
        assert 4 < variant.losses[0] < 7  # log 300 is 5.7
    with pytest.raises(WeftError, match="losses of next and of masked tokens cannot be compared"):
        weft.compare([one, heads], text, SETTINGS)
