"""Time the compilation of a 1.2 B-parameter checkpoint to ONNX: wall time and peak memory of whole processes.

Writes a random bf16 llama checkpoint (d 2048, 16 layers, 32/8 heads, ffn 8192, vocabulary 128256, tied; sharded) and
compiles it to fp32 in turn by weft, onnxruntime-genai's model builder and, if installed, mobius. --int4 compiles to
4 bits instead, rounding to the nearest like the builder; --gptq does so by weft alone, by GPTQ on 16,384 tokens.
Rounds interleave the contenders; outputs are deleted in between.

    python benchmarks/bench_streaming.py [--rounds 3] [--work DIR] [--int4 | --gptq | --mobius PYTHON]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
from machine import facts, save, spread
from safetensors.numpy import save_file

DIM, LAYERS, HEADS, KV_HEADS, FFN, VOCAB, SHARDS = 2048, 16, 32, 8, 8192, 128_256, 4


def write_checkpoint(folder: Path) -> int:
    """Write a random checkpoint of the above sizes; return the number of parameters."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM // HEADS,
        "intermediate_size": FFN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    for i in range(LAYERS):
        kv = KV_HEADS * DIM // HEADS
        sizes = {
            "self_attn.q_proj": (DIM, DIM),
            "self_attn.k_proj": (kv, DIM),
            "self_attn.v_proj": (kv, DIM),
            "self_attn.o_proj": (DIM, DIM),
            "mlp.gate_proj": (FFN, DIM),
            "mlp.up_proj": (FFN, DIM),
            "mlp.down_proj": (DIM, FFN),
            "input_layernorm": (DIM,),
            "post_attention_layernorm": (DIM,),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in sizes.items()}
    rng = np.random.default_rng(0)
    index: dict[str, str] = {}
    keys = list(shapes)
    for s in range(SHARDS):
        shard = f"model-{s + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = keys[s::SHARDS]
        tensors = {}
        for key in part:
            noise = rng.standard_normal(shapes[key], np.float32)
            tensors[key] = (1 + 0.1 * noise if len(shapes[key]) == 1 else 0.02 * noise).astype(ml_dtypes.bfloat16)
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    total = sum(int(np.prod(s)) for s in shapes.values())
    text = json.dumps({"metadata": {"total_size": 2 * total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return total


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def commands(source: Path, out: Path, mobius: str | None) -> dict[str, list[str]]:
    """Return the commands by which contenders compile `source` into `out`, in f32."""
    contenders = {"weft": weft_command(source, out), "genai_builder": builder_command(source, out, "fp32")}
    if mobius:
        contenders["mobius"] = [mobius, "-m", "mobius", "build", "--config"]
        contenders["mobius"] += [str(source), str(out), "--ep", "cpu", "--dtype", "f32"]
    return contenders


def int4_commands(source: Path, out: Path) -> dict[str, list[str]]:
    """Return the commands by which contenders compile `source` into `out`, rounding to 4 bits."""
    weft = weft_command(source, out, "--weights", "int4{method=rtn}")
    return {"weft": weft, "genai_builder": builder_command(source, out, "int4")}


def weft_command(source: Path, out: Path, *options: str) -> list[str]:
    """Return the command by which weft compiles `source`."""
    return [sys.executable, "-m", "weft", "compile", str(source), "-o", str(out), "--target", "ort-cpu", *options]


def builder_command(source: Path, out: Path, precision: str) -> list[str]:
    """Return the command of onnxruntime-genai's model builder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(out)]
    return [*command, "-p", precision, "-e", "cpu", "-c", str(out) + ".cache"]


def time_process(command: list[str], log: Path) -> tuple[float, float]:
    """Return wall seconds and peak resident GiB of a process and its children."""
    start = time.perf_counter()
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')[-3000:]}")
    return wall, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None, help="folder with 20 GB of room (default: a temporary one)")
    parser.add_argument("--mobius", default=None, help="a Python that can import mobius")
    parser.add_argument("--int4", action="store_true", help="compile to 4 bits")
    parser.add_argument("--gptq", action="store_true", help="compile to 4 bits by GPTQ")
    args = parser.parse_args()
    packages = ("numpy", "onnx", "onnx-ir", "onnxruntime-genai", "torch", "transformers")
    runs: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        source, out, log = Path(work) / "checkpoint", Path(work) / "out", Path(work) / "log"
        # In a separate process: the peak memory of a child includes that of its parent at the fork.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            parameters = pool.submit(write_checkpoint, source).result()

        def run(name: str, command: list[str]) -> None:
            os.sync()  # else dirty pages of the previous run would cost time
            runs.setdefault(name, []).append(time_process(command, log))
            print(f"{name}: {runs[name][-1][0]:.1f} s, {runs[name][-1][1]:.2f} GiB", flush=True)
            shutil.rmtree(out)

        if args.gptq:
            tokens = Path(work) / "tokens.npy"
            np.save(tokens, np.random.default_rng(0).integers(3, VOCAB, (128, 128)))
            contenders = {"weft": weft_command(source, out, "--weights", f'int4{{calibration="{tokens}"}}')}
        else:
            contenders = int4_commands(source, out) if args.int4 else commands(source, out, args.mobius)
        for r in range(args.rounds):
            order = list(contenders.items())
            for name, command in order if r % 2 == 0 else reversed(order):
                run(name, command)
    result = {
        "what": f"compile a bf16 checkpoint to {'int4' if args.int4 or args.gptq else 'fp32'} ONNX",
        "parameters": parameters,
        "machine": facts(*packages),
        "wall_seconds": {n: spread([w for w, _ in v]) for n, v in runs.items()},
        "peak_rss_gib": {n: spread([m for _, m in v]) for n, v in runs.items()},
    }
    ours = result["wall_seconds"]["weft"]["median"]
    result["wall_ratio_to_weft"] = {n: round(v["median"] / ours, 2) for n, v in result["wall_seconds"].items()}
    save("streaming_gptq" if args.gptq else "streaming_int4" if args.int4 else "streaming", result)


if __name__ == "__main__":
    main()
