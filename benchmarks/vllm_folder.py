"""A folder of --target transformers in vLLM, beside transformers: the same greedy tokens and log-probabilities; tokens
per second. Not run yet: it needs a GPU and vLLM.

    weft compile SOURCE --target transformers --dtype bf16 -o hf/
    pip install vllm "transformers>=5.19"
    python benchmarks/vllm_folder.py hf/ [--tp 2] [--pp 2] [--expert-parallel] [--requests 256] [--tokens 128]

Transformers answers first, in a process of its own that gives the GPU back. Where texts part, both tokens must be about
equally likely: vLLM adds up products in another order. The script ends with status 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = 8
NEAR = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # differences of log-probabilities by dtype


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids of these lengths, the same in every run."""
    import random

    drawn = random.Random(0)
    return [[drawn.randrange(1, vocab) for _ in range(n)] for n in lengths]


def reference(folder: str, texts: list[list[int]], tokens: int, device: str) -> list[dict[str, Any]]:
    """The greedy tokens of transformers for each text, with log-probabilities of the whole vocabulary at each place."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").to(device).eval()
    answers = []
    for text in texts:
        ids = torch.tensor([text], device=device)
        with torch.no_grad():
            made = model.generate(
                ids,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        likely = [row[0].float().log_softmax(-1).cpu().numpy() for row in made.logits]
        answers.append({"tokens": made.sequences[0, len(text) :].tolist(), "likely": likely})
    return answers


def disagreements(want: list[dict[str, Any]], got: list[dict[str, Any]], near: float) -> list[str]:
    """Differences between answers: a token that is less likely than the best by more than `near`, or a log-probability
    that is that far from the reference; each text counts up to where it parts."""
    found = []
    for number, (right, answer) in enumerate(zip(want, got, strict=True)):
        steps = zip(right["tokens"], right["likely"], answer["tokens"], answer["likely"], strict=True)
        for place, (token, likely, other, told) in enumerate(steps):
            if abs(float(likely[other]) - told) > near:
                found.append(
                    f"text {number}, token {place}: log-probability {told:.3f}, not {float(likely[other]):.3f}"
                )
            if other != token:
                if float(likely[token] - likely[other]) > near:
                    found.append(f"text {number}, token {place}: {other}, and {token} is more likely")
                break
    return found


def served(arguments: argparse.Namespace, texts: list[list[int]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The answers of vLLM, with the log-probability of each token, and its speed for many requests at once."""
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to ask for the class of the model
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.folder,
        model_impl="transformers",
        trust_remote_code=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        enable_expert_parallel=arguments.expert_parallel,
        max_model_len=arguments.prompt + arguments.tokens,
    )
    kinds = set(llm.apply_model(class_name))
    greedy = SamplingParams(
        temperature=0.0, max_tokens=arguments.tokens, min_tokens=arguments.tokens, logprobs=1, detokenize=False
    )
    answers = []
    for output in llm.generate([{"prompt_token_ids": text} for text in texts], greedy):
        made = output.outputs[0]
        likely = [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)]
        answers.append({"tokens": [*made.token_ids], "likely": likely})
    lengths = [arguments.prompt] * arguments.requests
    many = [{"prompt_token_ids": text} for text in prompts(max(map(max, texts)), lengths)]
    plain = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, min_tokens=arguments.tokens, detokenize=False)
    llm.generate(many[: arguments.requests // 8], plain)  # kernels are compiled
    began = time.perf_counter()
    outputs = llm.generate(many, plain)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return answers, {"class": sorted(kinds), "tokens_per_second": tokens / seconds, "seconds": seconds}


def class_name(model: Any) -> str:
    """The class by which vLLM runs a model: one for models of transformers begins so."""
    return type(model).__name__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--out", help="a file for the numbers, as JSON")
    arguments = parser.parse_args()
    config = json.loads((Path(arguments.folder) / "config.json").read_text(encoding="utf-8"))
    texts = prompts(config["vocab_size"], [arguments.prompt - n for n in range(PROMPTS)])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        want = pool.apply(reference, (arguments.folder, texts, arguments.tokens, "cuda"))
    got, numbers = served(arguments, texts)
    numbers["disagreements"] = disagreements(want, got, NEAR[config["dtype"]])
    numbers["same_tokens"] = sum(w["tokens"] == g["tokens"] for w, g in zip(want, got, strict=True)) / len(texts)
    print(json.dumps(numbers, indent=2))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    wrong = [name for name in numbers["class"] if not name.startswith("Transformers")]
    return 1 if numbers["disagreements"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
