"""PEFT trains adapters of a folder, and weft merges them as PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import weft
from weft.ir.errors import WeftError

from ...frontends.command import done
from ..compiled import compiled, error, loaded, reference, texts

LINEAR = ["q", "k", "v", "o", "gate", "up", "down"]
EXPERTS = ["ffn.experts.gate_up_proj", "ffn.experts.down_proj", "ffn.router.weight"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("preset/smollm2-135m", {"target_modules": LINEAR}),
    "rslora": ("preset/smollm2-135m", {"target_modules": LINEAR, "use_rslora": True}),
    "dora": ("preset/smollm2-135m", {"target_modules": LINEAR, "use_dora": True}),
    "all": ("variant/hybrid", {"target_modules": "all-linear", "use_dora": True}),
    "experts": ("preset/mixtral-8x7b", {"target_modules": ["q", "o"], "target_parameters": EXPERTS}),
    "untied": ("preset/mistral-7b", {"target_modules": ["embed_tokens", "lm_head", "v"], "modules_to_save": ["norm"]}),
}
# One weight in the folder, two in the merged model: PEFT computes this before it merges, and would then change both.
PARTED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q"]},
    "head": {"target_modules": ["lm_head"]},
    "saved head": {"target_modules": ["q"], "modules_to_save": ["lm_head"]},
}
IDS = texts(2, 9, 37, seed=5)


def trained(folder: Path, out: Path, steps: int, **lora: Any) -> Any:
    """PEFT's model after `steps` of training; its adapter is saved into `out`."""
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **lora})
    model = peft.get_peft_model(loaded(folder), config).train()
    assert all("lora" in n or "modules_to_save" in n for n, p in model.named_parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for step in range(steps):
        rows = texts(8, 12, 37, seed=step)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(out)
    keys = load_file(out / "adapter_model.safetensors").keys()
    for name in (
        (*lora["target_modules"], *lora.get("modules_to_save", ())) if lora["target_modules"] != "all-linear" else ()
    ):
        assert any(f".{name}." in key for key in keys), name
    return model.eval()


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", CASES)
def test_peft_adapter_is_merged(name: str, tmp_path: Path) -> None:
    """In 50 steps the loss falls; loaded again, merged by PEFT and merged by weft, the adapter computes the same."""
    source, lora = CASES[name]
    folder, adapter = compiled(source, tmp_path / "folder"), tmp_path / "adapter"
    model = trained(folder, adapter, 50 if name == "lora" else 10, **lora)
    want = answer(model)
    assert error(answer(loaded(folder)), want) > 1e-2
    assert error(answer(peft.PeftModel.from_pretrained(loaded(folder), adapter)), want) <= 1e-5
    assert error(answer(model.merge_and_unload()), want) <= 1e-5
    assert error(want, reference(folder, IDS, (adapter,))) <= 1e-5
    assert error(want, reference(adapter, IDS)) <= 1e-5  # its config names the folder


@pytest.mark.parametrize("name", PARTED)
def test_merging_unties_a_trained_head(name: str, tmp_path: Path) -> None:
    folder, adapter = compiled("preset/smollm2-135m", tmp_path / "folder"), tmp_path / "adapter"
    want = answer(trained(folder, adapter, 10, **PARTED[name]))
    assert error(want, reference(folder, IDS, (adapter,))) <= 1e-5


def test_compiles_merged_folders(tmp_path: Path) -> None:
    """For transformers again, and for ONNX Runtime, where `weft verify` reads base and adapters anew."""
    folder, adapter = compiled("preset/smollm2-135m", tmp_path / "folder"), tmp_path / "adapter"
    want = answer(trained(folder, adapter, 10, target_modules=LINEAR))
    weft.compile(folder, tmp_path / "again", target="transformers", adapters=[adapter])
    assert error(answer(loaded(tmp_path / "again")), want) <= 1e-5
    weft.compile(folder, tmp_path / "onnx", adapters=[adapter], passes="default,-last-token-logits")
    assert error(weft.load(tmp_path / "onnx").logits(IDS[0].tolist()), want[0]) <= 1e-5
    assert "passed" in done("verify", tmp_path / "onnx", "--tokens", 2).stdout


def test_refuses_adapters_of_another_model(tmp_path: Path) -> None:
    folder, other = compiled("preset/smollm2-135m", tmp_path / "folder"), compiled("variant/hybrid", tmp_path / "other")
    trained(other, tmp_path / "adapter", 10, target_modules=["q", "k"])
    with pytest.raises(WeftError, match=r"adapter.* do not fit model\.layers\..*is it an adapter of this model"):
        weft.compile(folder, tmp_path / "out", adapters=[tmp_path / "adapter"])


def test_merges_adapters_of_encoders(tmp_path: Path) -> None:
    folder, adapter = compiled("preset/bert-base", tmp_path / "folder"), tmp_path / "adapter"
    torch.manual_seed(0)
    model = peft.get_peft_model(
        loaded(folder, "AutoModel"), peft.LoraConfig(target_modules=["q", "down"], use_dora=True)
    )
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(adapter)
    with torch.no_grad():
        want = model.eval()(input_ids=IDS).last_hidden_state
        assert error(loaded(folder, "AutoModel")(input_ids=IDS).last_hidden_state, want) > 1e-2
    assert error(want, reference(folder, IDS, (adapter,))) <= 1e-5
