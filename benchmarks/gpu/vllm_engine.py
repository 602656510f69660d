"""Folders of target transformers in vLLM on a GPU: the same tokens as transformers, and how many a second.

    python benchmarks/gpu/vllm_engine.py RESULT.json FOLDER [FOLDER ...] [--size hidden_size=256] [--speed] [--dtype D]

Needs a GPU and vLLM, not weft. Each engine runs in a process of its own. With ``--size`` a folder's config is changed
and all its weights are drawn anew, so the folder may come without weights. Results are written after each case.
`vllm_folder.py` does the same for a folder with weights, on several GPUs.
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
from pathlib import Path
from typing import Any

TOKENS, LENGTHS = 24, (5, 60, 17, 33, 8, 41, 90, 12)
MANY, PROMPT, ANSWER = 64, 64, 128  # of the measurement of speed


def prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Token ids that look random, the same in each process."""
    return [
        [(7919 * (i + 3) + 104729 * (j + 1) * (i + 1)) % (vocab - 2) + 1 for j in range(n)]
        for i, n in enumerate(lengths)
    ]


# -- one engine, in a process of its own


def drawn(folder: Path, sizes: dict[str, Any], dtype: str) -> None:
    """Draw all weights of the model of `folder`, with other `sizes`, and save them there."""
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


def by_transformers(folder: Path, dtype: str, speed: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=kind).cuda().eval()
    vocab, rows = model.config.vocab_size, []
    for ids in prompts(vocab, LENGTHS):
        given = torch.tensor([ids], device="cuda")
        settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            made = model.generate(given, **settings)
            logits = model(made[:, :-1], use_cache=False).logits[0].float()
        shares = logits.log_softmax(-1).gather(-1, made[0, 1:, None])[:, 0].tolist()
        best = logits.topk(2).values[len(ids) - 1 :]
        rows.append(
            {"tokens": made[0, len(ids) :].tolist(), "logprobs": shares, "margins": (best[:, 0] - best[:, 1]).tolist()}
        )
    found: dict[str, Any] = {"rows": rows, "class": type(model).__name__}
    if speed:
        config = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
        room = ContinuousBatchingConfig(num_blocks=4096, max_batch_tokens=4096)
        texts = prompts(vocab, (PROMPT,) * MANY)
        model.set_attn_implementation("sdpa")
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate_batch(texts, config, room)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found["generate_batch"] = MANY * ANSWER / min(times)
    return found


def by_vllm(folder: Path, a: argparse.Namespace) -> dict[str, Any]:
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
        kv_cache_memory_bytes=2 << 30,  # without looking how much is free: other cases may run beside it
        **more,
    )
    ready = time.perf_counter() - start
    vocab = llm.llm_engine.model_config.get_vocab_size()
    found: dict[str, Any] = {"version": vllm.__version__, "seconds to start": round(ready, 1)}
    if not a.speed:
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1, detokenize=False
        )
        texts = prompts(vocab, LENGTHS)
        found["rows"] = []
        for made in llm.generate([{"prompt_token_ids": t} for t in texts], asked, use_tqdm=False):
            answer, ids = made.outputs[0], made.prompt_token_ids
            before = [p[i].logprob for p, i in zip(made.prompt_logprobs[1:], ids[1:], strict=True)]
            after = [p[i].logprob for p, i in zip(answer.logprobs, answer.token_ids, strict=True)]
            found["rows"].append({"tokens": [*answer.token_ids], "logprobs": [*before, *after]})
        return found
    asked = vllm.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    texts = [{"prompt_token_ids": t} for t in prompts(vocab, (PROMPT,) * MANY)]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        llm.generate(texts, asked, use_tqdm=False)
        times.append(time.perf_counter() - start)
    found["tokens a second"] = [round(MANY * ANSWER / t) for t in times]
    one = []
    for _ in range(2):
        start = time.perf_counter()
        llm.generate(texts[:1], asked, use_tqdm=False)
        one.append(ANSWER / (time.perf_counter() - start))
    found["one text, tokens a second"] = [round(n) for n in one]
    return found


# -- all of them


def run(role: str, folder: Path, limit: float, *arguments: str) -> dict[str, Any]:
    """Run one engine, and return what it found, or how it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as made:
        command = [sys.executable, __file__, made.name, str(folder), "--role", role, *arguments]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired as late:
            return {"failed": f"{limit} s", "tail": str(late.stderr or b"")[-1500:]}
        if done.returncode:
            lines = [line[:300] for line in (done.stdout + done.stderr).splitlines() if "Loading" not in line]
            return {"failed": done.returncode, "errors": [x for x in lines if "Error" in x][:20], "tail": lines[-25:]}
        return dict(json.loads(Path(made.name).read_text()))


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Count the equal tokens of each text before the first that differs, and compare log-probabilities up to there."""
    equal, worst, margins = [], 0.0, []
    for mine, other in zip(ours["rows"], theirs["rows"], strict=True):
        pairs = [*zip(mine["tokens"], other["tokens"], strict=True)]
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal.append(same)
        if same < len(pairs):
            margins.append(mine["margins"][same])
        shown = len(mine["logprobs"]) - len(pairs) + same
        worst = max(
            worst, *(abs(a - b) for a, b in zip(mine["logprobs"][:shown], other["logprobs"][:shown], strict=True))
        )
    return {
        "equal tokens": equal,
        "of": TOKENS,
        "largest difference of logprobs": worst,
        "margins where they part": margins,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--size", action="append", default=[])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--impl", default="transformers")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--backend", default="")
    parser.add_argument("--memory", type=float, default=0.25, help="the share of the GPU's memory that vLLM may take")
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--role", default="")
    a = parser.parse_args()
    sizes = {name: json.loads(value) for name, _, value in (s.partition("=") for s in a.size)}
    if a.role:
        folder = a.folders[0]
        made: dict[str, Any] = {}
        if a.role == "draw":
            drawn(folder, sizes, a.dtype)
        elif a.role == "transformers":
            made = by_transformers(folder, a.dtype, a.speed)
        else:
            made = by_vllm(folder, a)
        a.result.write_text(json.dumps(made))
        return
    results = json.loads(a.result.read_text()) if a.result.exists() else {}
    rest = [
        "--dtype",
        a.dtype,
        *["--speed"] * a.speed,
        *["--eager"] * a.eager,
        "--backend",
        a.backend,
        "--memory",
        str(a.memory),
    ]
    for source in a.folders:
        work = Path(tempfile.mkdtemp()) / source.name
        shutil.copytree(source, work)
        case: dict[str, Any] = {"sizes": sizes, "dtype": a.dtype}
        if sizes:
            case["draw"] = run("draw", work, a.limit, "--dtype", a.dtype, *(f"--size={s}" for s in a.size))
        case["transformers"] = run("transformers", work, a.limit, *rest)
        case["vllm"] = run("vllm", work, a.limit, *rest, "--impl", a.impl)
        if not a.speed and "rows" in case["transformers"] and "rows" in case["vllm"]:
            case["agree"] = compared(case["transformers"], case["vllm"])
            for engine in ("transformers", "vllm"):
                del case[engine]["rows"]
        case["transformers"].pop("rows", None)
        told = [source.name, a.dtype, *["speed"] * a.speed, *["eager"] * a.eager]
        results[", ".join(told)] = case
        a.result.write_text(json.dumps(results, indent=1) + "\n")
        print(source.name, json.dumps(case)[:4000], flush=True)
        shutil.rmtree(work.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
