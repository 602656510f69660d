"""Compare folders of target transformers in vLLM with transformers on a GPU: equal tokens, and tokens per second.

    python benchmarks/gpu/vllm_engine.py RESULT.json FOLDER [FOLDER ...] [--size hidden_size=256] [--speed] [--dtype D]

Needs a GPU and vLLM; runs without weft installed. Each engine runs in its own process. With --size all weights are
drawn for a changed config, so that a folder needs none. Results are written after each case. `vllm_folder.py` compares
a folder with weights, also on several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

TOKENS, LENGTHS = 24, (5, 60, 17, 33, 8, 41, 90, 12)
BATCH, PROMPT, ANSWER = 64, 64, 128  # of the measurement of speed


def draw_prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return pseudo-random token ids, the same in each process."""
    return [
        [(7919 * (i + 3) + 104729 * (j + 1) * (i + 1)) % (vocab - 2) + 1 for j in range(n)]
        for i, n in enumerate(lengths)
    ]


def draw_weights(folder: Path, sizes: dict[str, Any], dtype: str) -> None:
    """Draw all weights of the model in `folder` with other `sizes`, and save them there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True, **sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.ndim == 1 else 0.02))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def run_transformers(folder: Path, dtype: str, speed: bool) -> dict[str, Any]:
    """Return the greedy tokens of transformers with log-probabilities and margins, and its tokens per second."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=kind).cuda().eval()
    vocab, rows = model.config.vocab_size, []
    for ids in draw_prompts(vocab, LENGTHS):
        settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            output = model.generate(torch.tensor([ids], device="cuda"), **settings)
            logits = model(output[:, :-1], use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(-1).gather(-1, output[0, 1:, None])[:, 0].tolist()
        best = logits.topk(2).values[len(ids) - 1 :]
        margins = (best[:, 0] - best[:, 1]).tolist()
        rows.append({"tokens": output[0, len(ids) :].tolist(), "logprobs": logprobs, "margins": margins})
    result: dict[str, Any] = {"rows": rows, "class": type(model).__name__}
    if speed:
        config = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(num_blocks=4096, max_batch_tokens=4096)
        batch = draw_prompts(vocab, (PROMPT,) * BATCH)
        model.set_attn_implementation("sdpa")

        def generate() -> None:
            torch.cuda.synchronize()
            model.generate_batch(batch, config, batching)
            torch.cuda.synchronize()

        result["generate_batch"] = BATCH * ANSWER / min(time_calls(generate, 2))
    return result


def run_vllm(folder: Path, a: argparse.Namespace) -> dict[str, Any]:
    """Return the greedy tokens of vLLM with log-probabilities, or its tokens per second."""
    import vllm

    more = {"attention_backend": a.backend} if a.backend else {}
    start = time.perf_counter()
    llm = vllm.LLM(
        model=str(folder),
        trust_remote_code=True,
        model_impl=a.impl,
        dtype=a.dtype,
        skip_tokenizer_init=True,
        enforce_eager=a.eager,
        max_model_len=512,
        gpu_memory_utilization=a.memory,
        kv_cache_memory_bytes=2 << 30,  # a fixed size, because other cases may run on the GPU
        **more,
    )
    ready = time.perf_counter() - start
    vocab = llm.llm_engine.model_config.get_vocab_size()
    result: dict[str, Any] = {"version": vllm.__version__, "seconds to start": round(ready, 1)}
    greedy = partial(vllm.SamplingParams, temperature=0, ignore_eos=True, detokenize=False)
    if not a.speed:
        params = greedy(max_tokens=TOKENS, logprobs=1, prompt_logprobs=1)
        batch = [{"prompt_token_ids": ids} for ids in draw_prompts(vocab, LENGTHS)]
        result["rows"] = []
        for output in llm.generate(batch, params, use_tqdm=False):
            answer, ids = output.outputs[0], output.prompt_token_ids
            before = [p[i].logprob for p, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            after = [p[i].logprob for p, i in zip(answer.logprobs, answer.token_ids, strict=True)]
            result["rows"].append({"tokens": [*answer.token_ids], "logprobs": [*before, *after]})
        return result
    batch = [{"prompt_token_ids": ids} for ids in draw_prompts(vocab, (PROMPT,) * BATCH)]
    for name, size, rounds in (("tokens a second", BATCH, 3), ("one text, tokens a second", 1, 2)):
        times = time_calls(partial(llm.generate, batch[:size], greedy(max_tokens=ANSWER), use_tqdm=False), rounds)
        result[name] = [round(size * ANSWER / seconds) for seconds in times]
    return result


def time_calls(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each of `rounds` calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def run(role: str, folder: Path, limit: float, options: Sequence[str]) -> dict[str, Any]:
    """Run one engine in a process; return its result, or how it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, file.name, str(folder), *options, "--role", role]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired as late:
            return {"failed": f"{limit} s", "tail": str(late.stderr or b"")[-1500:]}
        if done.returncode:
            lines = [line[:300] for line in (done.stdout + done.stderr).splitlines() if "Loading" not in line]
            return {"failed": done.returncode, "errors": [x for x in lines if "Error" in x][:20], "tail": lines[-25:]}
        return dict(json.loads(Path(file.name).read_text()))


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Count the equal tokens of each sequence before the first that differs; compare log-probabilities up to there."""
    counts, worst, margins = [], 0.0, []
    for mine, other in zip(ours["rows"], theirs["rows"], strict=True):
        pairs = [*zip(mine["tokens"], other["tokens"], strict=True)]
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        counts.append(equal)
        margins += mine["margins"][equal : equal + 1]
        shared = len(mine["logprobs"]) - len(pairs) + equal
        logprobs = zip(mine["logprobs"][:shared], other["logprobs"][:shared], strict=True)
        worst = max(worst, *(abs(a - b) for a, b in logprobs))
    differences = {"largest difference of logprobs": worst, "margins where they part": margins}
    return {"equal tokens": counts, "of": TOKENS, **differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("result", type=Path)
    add("folders", type=Path, nargs="+")
    add("--size", action="append", default=[])
    add("--dtype", default="float32")
    add("--speed", action="store_true")
    add("--impl", default="transformers")
    add("--eager", action="store_true")
    add("--backend", default="")
    add("--memory", type=float, default=0.25, help="share of the GPU's memory for vLLM")
    add("--limit", type=float, default=150)
    add("--role", default="")
    a = parser.parse_args()
    sizes = {name: json.loads(value) for name, _, value in (s.partition("=") for s in a.size)}
    if a.role:
        result: dict[str, Any] = {}
        if a.role == "draw":
            draw_weights(a.folders[0], sizes, a.dtype)
        elif a.role == "transformers":
            result = run_transformers(a.folders[0], a.dtype, a.speed)
        else:
            result = run_vllm(a.folders[0], a)
        a.result.write_text(json.dumps(result))
        return
    results = json.loads(a.result.read_text()) if a.result.exists() else {}
    flags = [*["speed"] * a.speed, *["eager"] * a.eager]
    options = [f"--{name}={getattr(a, name)}" for name in ("dtype", "impl", "backend", "memory")]
    options += [*(f"--{flag}" for flag in flags), *(f"--size={size}" for size in a.size)]
    for source in a.folders:
        folder = Path(tempfile.mkdtemp()) / source.name
        shutil.copytree(source, folder)
        case: dict[str, Any] = {"sizes": sizes, "dtype": a.dtype}
        for role in (*["draw"] * bool(sizes), "transformers", "vllm"):
            case[role] = run(role, folder, a.limit, options)
        rows = [{"rows": case[role].pop("rows", None)} for role in ("transformers", "vllm")]
        if not a.speed and all(engine["rows"] for engine in rows):
            case["agree"] = compare(*rows)
        results[", ".join([source.name, a.dtype, *flags])] = case
        a.result.write_text(json.dumps(results, indent=1) + "\n")
        print(source.name, json.dumps(case)[:4000], flush=True)
        shutil.rmtree(folder.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
