"""Embed texts with the model in this folder:  python embed.py "a text" "another"  prints one JSON vector per line.
Needs only PyTorch, and for text the package `tokenizers`; without that, pass token ids, as in --ids 1,15,7."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

try:
    import torch
    from load import DTYPES, check_ids, load_model, main, parse_ids, read_facts, read_tokenizer
    from torch import Tensor
except ImportError as error:
    if error.name != "torch":
        raise
    print("embed.py: PyTorch is not installed: pip install torch", file=sys.stderr)
    sys.exit(2)


@torch.inference_mode()
def embed(model: Any, ids: Sequence[int], outputs: Sequence[str], pooling: str | None, normalize: bool) -> Tensor:
    """Return the embedding [dim], float32, of the token sequence `ids`. `pooling` reduces the hidden states: to their
    mean, maximum per feature (max), first (cls), last, or mean with weights 1, 2, … (weighted); None returns the output
    sentence_embedding unchanged. `outputs` names the model's outputs; `normalize` scales pooled vectors to length 1."""
    row = torch.tensor([ids], device=next(model.parameters()).device)
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), "token_type_ids": torch.zeros_like(row)}
    output = model(**{name: value for name, value in inputs.items() if name in model.forward.__annotations__})
    name = "sentence_embedding" if pooling is None else "last_hidden_state"
    hidden: Tensor = (output if isinstance(output, tuple) else (output,))[outputs.index(name)][0].float()
    if pooling is None:
        return hidden
    weights = torch.arange(1.0, len(hidden) + 1, device=hidden.device)[:, None]
    vector = {
        **{"mean": hidden.mean(0), "max": hidden.amax(0), "cls": hidden[0], "last": hidden[-1]},
        "weighted": (weights * hidden).sum(0) / weights.sum(),
    }[pooling]
    return vector / vector.norm().clamp(min=1e-12) if normalize else vector


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", help="the texts to embed")
    parser.add_argument("--ids", type=parse_ids, action="append", help="token ids instead; may be given several times")
    parser.add_argument(
        "--pooling",
        choices=["mean", "max", "cls", "last", "weighted"],
        help="how the vectors of tokens become one (default: that of the model, else mean)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as they are stored)")
    args = parser.parse_args()
    if bool(args.texts) == bool(args.ids):
        parser.error("give texts, or --ids")
    return args


def run(args: argparse.Namespace) -> None:
    """Load the model, and print the embedding of each text or list of ids."""
    facts = read_facts()
    tokenizer = read_tokenizer() if args.texts else None
    sentence = facts.get("sentence", {})
    prompt = sentence.get("prompts", {}).get(sentence.get("default_prompt_name"), "")
    rows = args.ids if tokenizer is None else [tokenizer.encode(prompt + text).ids for text in args.texts]
    for row in rows:
        check_ids("a text", row, facts["vocab"], facts["max_length"])
    model = load_model(device=args.device, dtype=args.dtype)
    has_embedding = args.pooling is None and "sentence_embedding" in facts["outputs"]
    if has_embedding and facts.get("padding") == "max_length":
        rows = [[*row, *[facts["pad_token_id"] or 0] * (facts["max_length"] - len(row))] for row in rows]
    pooling = None if has_embedding else args.pooling or facts.get("pooling", "mean")
    normalize = facts.get("normalize", False)
    for row in rows:
        vector = embed(model, row, facts["outputs"], pooling, normalize)[: sentence.get("truncate_dim")]
        print(json.dumps(vector.tolist()), flush=True)


if __name__ == "__main__":
    main("embed.py", lambda: run(parse_arguments()))
