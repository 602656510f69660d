"""A decoder's ONNX model obeys any attention_mask: padding on the left, on the right, in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import weft

from ....caches import empty_caches

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MASKS = [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]


class Raw:
    """The file model.onnx of `folder` with its states, as someone without weft feeds it."""

    def __init__(self, folder: Path, batch: int, capacity: int) -> None:
        self.session = onnxruntime.InferenceSession(folder / "model.onnx")
        self.states = empty_caches(self.session, batch, capacity)

    def __call__(self, ids: Any, mask: Any) -> Any:
        mask = np.asarray(mask)
        at = np.maximum(mask.cumsum(1) - 1, 0)[:, -np.shape(ids)[1] :]  # as transformers counts
        names = [o.name for o in self.session.get_outputs()]
        feed = {"input_ids": np.asarray(ids), "attention_mask": mask, "position_ids": at}
        made = dict(zip(names, self.session.run(names, feed | self.states), strict=True))
        self.states = {
            name: made[name.replace("past_key_values", "present").replace("past_", "present_")] for name in self.states
        }
        return made["logits"]


def saved(folder: Path, family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, f"{family}ForCausalLM")
    model = cls(cls.config_class(**{**SIZES, **config})).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.halved
@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
@pytest.mark.parametrize("options", [{"opset": 17}, {}, {"opset": 17, "cache": "buffer"}, {"cache": "buffer"}], ids=str)
@pytest.mark.parametrize(("family", "target"), [("Llama", "ort-cpu"), ("Llama", "onnx"), ("Gemma2", "onnx")])
def test_any_attention_mask_gives_the_result_of_each_row_alone(
    family: str, every: bool, target: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = options if target == "onnx" else {}
    model = saved(tmp_path / "hf", family, sliding_window=8)
    weft.compile(
        tmp_path / "hf",
        tmp_path / "out",
        target=target,
        passes="default,-last-token-logits" if every else "default",
        **options,
    )
    ids = np.random.default_rng(1).integers(3, 64, (4, 6))
    raw = Raw(tmp_path / "out", 4, 16)
    first, after = raw(ids, MASKS), [np.array([[7 + row] for row in range(4)])]
    then = raw(after[0], np.pad(MASKS, ((0, 0), (0, 1)), constant_values=1))
    for row, mask in enumerate(np.array(MASKS, bool)):
        own = [*ids[row][mask], *after[0][row]]
        with torch.inference_mode():
            want = model(torch.tensor([own])).logits[0].numpy()
        got = first[row][mask] if every else first[row]
        assert np.abs(got - (want[:-1] if every else want[-2:-1])).max() <= 1e-5
        assert np.abs(then[row] - want[-1:]).max() <= 1e-5


@pytest.mark.parametrize(("family", "target"), [("Mamba", "ort-cpu"), ("Mamba", "onnx"), ("Gemma2", "onnx")])
def test_padding_that_would_enter_a_state_gives_nan_logits(family: str, target: str, tmp_path: Path) -> None:
    saved(tmp_path / "hf", family, sliding_window=4)
    options: Any = {"cache": "buffer"} if family == "Gemma2" else {}  # rolling
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, **options)
    raw = Raw(tmp_path / "out", 4, 16)
    logits = raw(np.random.default_rng(1).integers(3, 64, (4, 6)), MASKS)
    assert np.isnan(logits).all((1, 2)).tolist() == [True, True, True, False]
    assert not np.isnan(logits[3]).any()
