"""Settings: sizes by default, values per layer, and the model that they build."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.dsl import AudioEncoder, Decoder, Encoder, EncoderDecoder, ImageEncoder, RoPE
from weft.frontends.models.tables.settings import Settings, build, build_norm
from weft.ir import WeftError


def settings(**options: Any) -> Settings:
    return Settings(**{"vocab": 11, "dim": 8, "layers": 2, "heads": 2, "ffn": 12} | options)


def test_sizes_of_heads() -> None:
    assert (settings().head_size, settings(head_dim=6).head_size, settings(heads=None).head_count) == (4, 6, 1)
    assert (settings().groups, settings(kv_heads=1).groups) == (2, 1)
    by_layer = settings(heads=(None, 4), head_dim=(None, 3), kv_heads=(None, 2))
    assert (by_layer.head_count, by_layer.head_size, by_layer.groups) == (4, 3, 2)


def test_values_per_layer() -> None:
    assert settings(window=(None, 4)).expand("window") == (None, 4)
    assert settings(window=4).expand("window") == (4, 4)
    with pytest.raises(WeftError, match=r"^window has 3 values, but needs one for each of 2 layers$"):
        settings(window=(1, 2, 3)).expand("window")


def test_resolved_settings_state_defaults_and_merge_equal_layers() -> None:
    found = settings(rope=(RoPE(fraction=0.5),) * 2, window=(4, 4), kv_heads=1).resolved
    assert (found.rope.dim, found.rope.fraction, found.window, found.head_dim) == (2, 1.0, 4, 4)


def test_kind_selects_the_class() -> None:
    assert isinstance(build(settings()), Decoder)
    assert isinstance(build(settings(kind="encoder")), Encoder)
    image = build(settings(kind="image-encoder", vocab=None, image=8, patch=4))
    assert isinstance(image, ImageEncoder) and not isinstance(image, AudioEncoder)
    model = build(settings(kind="encoder-decoder", decoder={"layers": 3}))
    assert isinstance(model, EncoderDecoder)
    assert (model.encoder.layers, model.decoder.layers) == (2, 3)


def test_equal_layers_become_one_block() -> None:
    assert build(settings()).layers == 2
    assert len(build(settings(window=(None, 4))).layers) == 2
    shared = build(settings(layers=4, shared_layers=2))
    assert shared.layers == 2 and shared.block.times == 2


def test_norms() -> None:
    assert build_norm(settings()).eps == 1e-6
    norm = build_norm(settings(norm="layer", eps=1e-5, norm_bias=False))
    assert (norm.eps, norm.weight, norm.bias) == (1e-5, True, False)
    assert build_norm(settings(norm="layer", norm_weight=False)).bias is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "^dim=0 must be positive$"),
        ({"heads": (2, 0)}, r"^heads=\(2, 0\) must be positive$"),
        ({"activation": "mish"}, "^activation 'mish' is unknown; known are gelu"),
        ({"shared_layers": 3, "layers": 4}, "^shared_layers=3 must divide layers=4$"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        build(settings(**options))
