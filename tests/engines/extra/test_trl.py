"""TRL fine-tunes a folder on a local data set."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import peft
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from ...frontends.formats.hf.peft_models import write_tokenizer
from ..compiled import compiled, error, loaded, reference, texts

STEPS = 8


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    """Of all weights: the loss falls, and the folder that is saved is read by weft as trained."""
    folder = with_tokenizer(tmp_path / "folder")
    trainer = SFTTrainer(str(folder), settings(tmp_path / "out"), train_dataset=rows(tmp_path))
    assert type(trainer.model).__name__ == "TinyForCausalLM"
    learned(trainer)
    trainer.save_model(str(folder))  # over the weights that it had
    ids = texts(2, 9, 37)
    with torch.no_grad():
        logits = loaded(folder)(ids, use_cache=False).logits
        assert error(logits, trainer.model.eval()(ids, use_cache=False).logits) <= 1e-6
    assert error(logits, reference(folder, ids)) <= 1e-5


def test_fine_tuning_of_an_adapter(tmp_path: Path) -> None:
    """LoRA, on several texts in a row that positions tell apart: weft merges what is saved."""
    folder = with_tokenizer(tmp_path / "folder")
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    packed = settings(tmp_path / "out", packing=True)
    trainer = SFTTrainer(str(folder), packed, train_dataset=rows(tmp_path), peft_config=lora)
    learned(trainer)
    stay_apart(trainer)
    trainer.save_model(str(tmp_path / "adapter"))
    ids = texts(2, 9, 37)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids, use_cache=False).logits
    assert error(logits, reference(folder, ids, (tmp_path / "adapter",))) <= 1e-5


def stay_apart(trainer: SFTTrainer) -> None:
    """Check that the loss of a packed row is that of its texts, each read by itself."""
    batch = trainer.data_collator(list(trainer.train_dataset.take(1)))
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(ids)]
    assert len(starts) >= 3
    assert len(starts) == 4
    model, losses = trainer.model.eval(), []
    with torch.no_grad():
        for start, end in itertools.pairwise(starts):
            logits = model(input_ids=ids[None, start:end], use_cache=False).logits[0]
            losses += torch.nn.functional.cross_entropy(logits[:-1], ids[start + 1 : end], reduction="none").tolist()
        packed = trainer.compute_loss(model, batch).item()
    assert abs(packed - sum(losses) / len(losses)) <= 1e-5


def with_tokenizer(folder: Path) -> Path:
    """Write a tiny folder with a tokenizer of words, w7 being token 7, and a token that ends texts."""
    compiled("preset/smollm2-135m", folder)
    write_tokenizer(folder)
    # Special tokens are found inside of words, too: none but w36 itself begins with w36.
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w36", "pad_token": "w35"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def rows(folder: Path) -> object:
    """Write texts to a file, and load it as a data set."""
    file = folder / "rows.jsonl"
    lines = (" ".join(f"w{i}" for i in row) for row in texts(32, 9, 35).tolist())
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "datasets"))


def settings(out: Path, **more: Any) -> SFTConfig:
    return SFTConfig(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        max_length=32,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"trust_remote_code": True, "dtype": "float32"},
        **more,
    )


def learned(trainer: SFTTrainer) -> None:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.2
