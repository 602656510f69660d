"""Compare a folder of --target transformers in vLLM with transformers: greedy tokens, log-probabilities, tokens per
second. Not run yet: it needs a GPU and vLLM.

    weft compile SOURCE --target transformers --dtype bf16 -o hf/
    pip install vllm "transformers>=5.19"
    python benchmarks/vllm_folder.py hf/ [--tp 2] [--pp 2] [--expert-parallel] [--requests 256] [--tokens 128]

transformers runs first, in a process that frees the GPU. Where sequences differ, both tokens must be about equally
likely, because vLLM sums products in another order. The script ends with status 1 if they are not.
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
NEAR = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # tolerance of log-probabilities by dtype


def draw_prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return random token ids of these lengths, the same in every run."""
    import random

    drawn = random.Random(0)
    return [[drawn.randrange(1, vocab) for _ in range(n)] for n in lengths]


def reference(folder: str, texts: list[list[int]], tokens: int, device: str) -> list[dict[str, Any]]:
    """Return the greedy tokens of transformers for each prompt, with log-probabilities of the vocabulary per token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").to(device).eval()
    answers = []
    for text in texts:
        ids = torch.tensor([text], device=device)
        with torch.no_grad():
            output = model.generate(
                ids,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        likely = [row[0].float().log_softmax(-1).cpu().numpy() for row in output.logits]
        answers.append({"tokens": output.sequences[0, len(text) :].tolist(), "likely": likely})
    return answers


def find_differences(want: list[dict[str, Any]], got: list[dict[str, Any]], near: float) -> list[str]:
    """List differences by more than `near`: a token less likely than the best, or a log-probability unlike that of the
    reference. Each answer counts up to the first token that differs."""
    differences = []
    for number, (right, answer) in enumerate(zip(want, got, strict=True)):
        steps = zip(right["tokens"], right["likely"], answer["tokens"], answer["likely"], strict=True)
        for position, (token, likely, other, logprob) in enumerate(steps):
            if abs(float(likely[other]) - logprob) > near:
                differences.append(
                    f"text {number}, token {position}: log-probability {logprob:.3f}, not {float(likely[other]):.3f}"
                )
            if other != token:
                if float(likely[token] - likely[other]) > near:
                    differences.append(f"text {number}, token {position}: {other}, and {token} is more likely")
                break
    return differences


def run_vllm(args: argparse.Namespace, texts: list[list[int]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the answers of vLLM with log-probabilities, and its speed for many requests at once."""
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to query the class of the model
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.folder,
        model_impl="transformers",
        trust_remote_code=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        enable_expert_parallel=args.expert_parallel,
        max_model_len=args.prompt + args.tokens,
    )
    kinds = set(llm.apply_model(class_name))
    greedy = SamplingParams(
        temperature=0.0, max_tokens=args.tokens, min_tokens=args.tokens, logprobs=1, detokenize=False
    )
    answers = []
    for output in llm.generate([{"prompt_token_ids": text} for text in texts], greedy):
        (answer,) = output.outputs
        likely = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
        answers.append({"tokens": [*answer.token_ids], "likely": likely})
    lengths = [args.prompt] * args.requests
    many = [{"prompt_token_ids": text} for text in draw_prompts(max(map(max, texts)), lengths)]
    plain = SamplingParams(temperature=0.0, max_tokens=args.tokens, min_tokens=args.tokens, detokenize=False)
    llm.generate(many[: args.requests // 8], plain)  # compiles the kernels
    began = time.perf_counter()
    outputs = llm.generate(many, plain)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return answers, {"class": sorted(kinds), "tokens_per_second": tokens / seconds, "seconds": seconds}


def class_name(model: Any) -> str:
    """Return the class by which vLLM runs a model; names of those for transformers begin with it."""
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
    parser.add_argument("--out", help="a JSON file for the results")
    args = parser.parse_args()
    config = json.loads((Path(args.folder) / "config.json").read_text(encoding="utf-8"))
    texts = draw_prompts(config["vocab_size"], [args.prompt - n for n in range(PROMPTS)])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        want = pool.apply(reference, (args.folder, texts, args.tokens, "cuda"))
    got, numbers = run_vllm(args, texts)
    numbers["disagreements"] = find_differences(want, got, NEAR[config["dtype"]])
    numbers["same_tokens"] = sum(w["tokens"] == g["tokens"] for w, g in zip(want, got, strict=True)) / len(texts)
    print(json.dumps(numbers, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    wrong = [name for name in numbers["class"] if not name.startswith("Transformers")]
    return 1 if numbers["disagreements"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
