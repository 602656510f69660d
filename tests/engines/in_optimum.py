"""The script that runs folders in optimum, whose transformers is older: jobs from stdin as JSON, replies to stdout.

A job is {"folder", "class", "ids": rows, "new": tokens or 0}, a reply {"tokens"} or {"outputs": name → nested list}.
"""

from __future__ import annotations

import json
import sys

import torch
from optimum import onnxruntime as library

replies = []
for job in json.load(sys.stdin):
    model = getattr(library, job["class"]).from_pretrained(job["folder"])
    inputs = {"input_ids": (ids := torch.tensor(job["ids"])), "attention_mask": torch.ones_like(ids)}
    if job["new"]:
        rows = model.generate(**inputs, max_new_tokens=job["new"], do_sample=False, num_beams=1, eos_token_id=None)
        replies.append({"tokens": rows.tolist()})
    else:
        outputs = model(**inputs)
        replies.append({"outputs": {name: value.tolist() for name, value in outputs.items() if value is not None}})
print(json.dumps(replies))
