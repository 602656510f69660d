"""Continue a text with the model in this folder:  python generate.py "Once upon a time" --max-tokens 64

Needs PyTorch alone, and for text the package `tokenizers`: without it (or with --ids) prompt and answer are token ids.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

try:
    import torch
    from load import DTYPES, FOLDER, Failure, load_model, stepper
    from sampling import draw
    from torch import Tensor
except ImportError as error:
    if error.name != "torch":
        raise
    print("generate.py: PyTorch is not installed: pip install torch", file=sys.stderr)
    sys.exit(2)

CHUNK = 512  # tokens of a prompt that are read at once


@torch.inference_mode()
def generate(model: Any, ids: Tensor, length: int, choose: Callable[[Tensor], Tensor]) -> Iterator[int]:
    """The tokens that `choose` draws from the logits [1, vocab] after `ids` [1, tokens], until all are `length`."""
    cache, step = model.new_cache(1, length), stepper(model)
    for part in torch.split(ids, CHUNK, 1):
        logits = model(part, cache=cache)
    for position in range(ids.shape[1], length + 1):
        token = choose(logits[:, -1])
        yield int(token)
        if position < length:
            logits = step(token[:, None], ids.new_full((1, 1), position), cache)


def say(tokens: Iterator[int], stop: set[int], decode: Callable[[list[int]], str]) -> int:
    """Print the text of `tokens` up to one of `stop` as it comes, whole characters at a time; how many they were."""
    known, shown = list[int](), 0
    for token in tokens:
        if token in stop:
            break
        known.append(token)
        text = decode(known)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(decode(known)[shown:])
    return len(known)


def read_tokenizer() -> Any:
    """The tokenizer of this folder, by the package `tokenizers`."""
    path = FOLDER / "tokenizer.json"
    if not path.is_file():
        raise Failure(f"{FOLDER} has no tokenizer.json: give the prompt as token ids, as in --ids 1,15,7")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        why = "the package tokenizers is not installed: pip install tokenizers"
        raise Failure(f"{why}, or give the prompt as token ids, as in --ids 1,15,7") from None
    return Tokenizer.from_file(str(path))


def parsed(text: str) -> list[int]:
    """Token ids such as 1,15,7."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", help="the text to continue")
    parser.add_argument("--ids", type=parsed, help="token ids to continue, such as 1,15,7; the answer is ids too")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of the answer (default: 128)")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest (default: 0, or 1 with a filter)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest that reach this probability")
    parser.add_argument("--seed", type=int, help="draw the same way every time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as they are stored)")
    given = parser.parse_args()
    if (given.prompt is None) == (given.ids is None):
        parser.error("give a prompt, or --ids")
    if given.max_tokens < 1 or given.top_k < 0 or not 0 < given.top_p <= 1 or (given.temperature or 0) < 0:
        parser.error("--max-tokens is at least 1, --top-k and --temperature at least 0, --top-p above 0 and at most 1")
    if given.temperature is None:
        given.temperature = 1.0 if given.top_k or given.top_p < 1 else 0.0
    return given


def run(given: argparse.Namespace) -> None:
    """Read the model, and continue the prompt."""
    facts = json.loads((FOLDER / "weft.json").read_text(encoding="utf-8"))
    tokenizer = read_tokenizer() if given.ids is None else None
    ids = given.ids if tokenizer is None else tokenizer.encode(given.prompt).ids
    if not ids or not 0 <= min(ids) <= max(ids) < facts["vocab"]:
        raise Failure(f"the prompt is {ids}, but it must be tokens from 0 to {facts['vocab'] - 1}, one at least")
    if len(ids) > facts["max_length"]:
        raise Failure(f"the prompt has {len(ids)} tokens, but the model was compiled for {facts['max_length']}")
    model = load_model(device=given.device, dtype=given.dtype)
    random = torch.Generator(given.device)
    random.manual_seed(random.seed() if given.seed is None else given.seed)
    start, length = time.perf_counter(), min(len(ids) + given.max_tokens - 1, facts["max_length"])
    tokens = generate(
        model,
        torch.tensor([ids], device=given.device),
        length,
        lambda logits: draw(logits, given.temperature, given.top_k, given.top_p, random),
    )
    count = say(tokens, {*facts["eos_token_ids"]}, tokenizer.decode if tokenizer else lambda ids: f"{ids}"[1:-1])
    seconds = time.perf_counter() - start
    print(f"{len(ids)} tokens read and {count} written in {seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        run(arguments())
    except (Failure, torch.OutOfMemoryError) as failed:
        print(f"generate.py: {failed}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
