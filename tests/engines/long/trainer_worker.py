"""Train a folder with `Trainer`: ``[torchrun] trainer_worker.py FOLDER OUT BATCH`` saves the model and the losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, dynamic_module_utils

STEPS, ROWS, SEQ = 6, 48, 10


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of random tokens, each its own labels."""

    def __init__(self, vocab: int) -> None:
        self.rows = torch.randint(1, vocab, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main(folder: str, out: str, batch: str) -> None:
    """Train and save."""
    dynamic_module_utils.HF_MODULES_CACHE = f"{out}/modules"  # where transformers copies the code of folders
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=int(batch),
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(model.config.vocab_size))
    trainer.train()
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"processes": trainer.accelerator.num_processes, "losses": losses}
        (Path(out) / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
