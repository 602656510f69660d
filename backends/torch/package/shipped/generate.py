"""Continue a text with the model in this folder:  python generate.py "Once upon a time" --max-tokens 64
Needs only PyTorch, and for text the package `tokenizers`; without it or with --ids, prompt and answer are token ids."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

try:
    import torch
    from load import DTYPES, check_ids, load_model, main, make_stepper, parse_ids, read_facts, read_tokenizer
    from sampling import draw_tokens
    from torch import Tensor
except ImportError as error:
    if error.name != "torch":
        raise
    print("generate.py: PyTorch is not installed: pip install torch", file=sys.stderr)
    sys.exit(2)

CHUNK = 512  # tokens of a prompt per call


@torch.inference_mode()
def generate(
    model: Any,
    ids: Tensor,
    length: int,
    choose: Callable[[Tensor], Tensor],
    source: Tensor | None = None,
    forced: Mapping[int, int] | None = None,
) -> Iterator[int]:
    """Yield the tokens after `ids` [1, tokens], the last at position `length`. `choose` draws each from logits [1,
    vocab], unless `forced` maps its position to a token. An encoder-decoder first encodes `source` [1, tokens]."""
    cache, step = model.new_cache(1, length), make_stepper(model)
    read = {} if source is None else {"encoder_input_ids": source, "encoder_attention_mask": torch.ones_like(source)}
    sparing = "last" in inspect.signature(model.forward).parameters  # logits of one token instead of all
    for part in torch.split(ids, CHUNK, 1):
        last = {"last": ids.new_tensor([part.shape[1] - 1])} if sparing else {}
        logits = model(input_ids=part, cache=cache, **read, **last)
    for position in range(ids.shape[1], length + 1):
        imposed = (forced or {}).get(position)
        token = choose(logits[:, -1]) if imposed is None else ids.new_full((1,), imposed)
        yield int(token)
        if position < length:
            logits = step(token[:, None], ids.new_full((1, 1), position), cache)


def print_text(tokens: Iterator[int], stop: set[int], decode: Callable[[list[int]], str]) -> int:
    """Print the text of the tokens before the first in `stop`, in complete characters; return the number of tokens."""
    written, printed = list[int](), 0
    for token in tokens:
        if token in stop:
            break
        written.append(token)
        text = decode(written)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[printed:], end="", flush=True)
            printed = len(text)
    print(decode(written)[printed:], flush=True)
    return len(written)


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", help="the text to continue, or to answer for an encoder-decoder")
    parser.add_argument("--ids", type=parse_ids, help="token ids instead, such as 1,15,7; the answer is ids too")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of the answer (default: 128)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 0, or 1 if a filter is given)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k most likely tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the smallest set of tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, help="seed of the random draws, for repeatable answers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as they are stored)")
    args = parser.parse_args()
    if (args.prompt is None) == (args.ids is None):
        parser.error("give a prompt, or --ids")
    if args.max_tokens < 1 or args.top_k < 0 or not 0 < args.top_p <= 1 or not 0 <= (args.temperature or 0) < math.inf:
        parser.error("--max-tokens is at least 1, --top-k and --temperature at least 0, --top-p above 0 and at most 1")
    if args.temperature is None:
        args.temperature = 1.0 if args.top_k or args.top_p < 1 else 0.0
    return args


def run(args: argparse.Namespace) -> None:
    """Load the model, and print its continuation of the prompt."""
    facts = read_facts()
    if "sound" in facts:
        raise SystemExit("this model reads sound, not text: load it in Python with load_model of load.py")
    tokenizer = read_tokenizer() if args.ids is None else None
    prompt = args.ids if tokenizer is None else tokenizer.encode(args.prompt).ids
    answers = facts["kind"] == "encoder-decoder"
    most = facts["max_source_length"] if answers else facts["max_length"]
    check_ids("the prompt", prompt, facts["vocab"], most)
    model = load_model(device=args.device, dtype=args.dtype)
    random = torch.Generator(args.device)
    random.manual_seed(random.seed() if args.seed is None else args.seed)
    read = torch.tensor([prompt], device=args.device)
    ids = torch.tensor([[facts["decoder_start_token_id"]]], device=args.device) if answers else read
    length = min(ids.shape[1] + args.max_tokens - 1, facts["max_length"])
    ends = {length: facts.get("forced_eos_token_id"), ids.shape[1]: facts.get("forced_bos_token_id")}
    start = time.perf_counter()
    tokens = generate(
        model,
        ids,
        length,
        lambda logits: draw_tokens(logits, args.temperature, args.top_k, args.top_p, random),
        read if answers else None,
        {position: token for position, token in ends.items() if token is not None},
    )
    count = print_text(tokens, {*facts["eos_token_ids"]}, tokenizer.decode if tokenizer else lambda ids: f"{ids}"[1:-1])
    seconds = time.perf_counter() - start
    print(f"{len(prompt)} tokens read and {count} written in {seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main("generate.py", lambda: run(parse_arguments()))
