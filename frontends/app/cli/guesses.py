"""Unknown commands: names that people know from other tools, each with the command of weft that does the same."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

_TABLE = """
chat talk | talk to a model | weft run model.gguf --chat
generate complete infer inference predict sample prompt | continue a text | weft run model.gguf --prompt "Once upon"
embed encode | embed a text | weft run ./all-MiniLM-L6-v2 --prompt "a sentence"
server api host start | answer requests of OpenAI's API | weft serve out/
finetune fine-tune tune sft pretrain fit | train on a text | weft train ./SmolLM2-135M --text notes.txt -o tuned/
distill distillation | train a rewritten model on its original | weft distil q4/ --against model.gguf -o run/
lora adapter merge | merge a LoRA adapter | weft compile ./SmolLM2-135M --adapter ./my-lora -o out/
quantize quantise quant | store the weights in fewer bits | weft compile model.gguf --weights int4 -o out/
convert save | write a checkpoint for transformers or llama.cpp | weft export model.gguf -o folder/
build make onnx | write a folder that ONNX Runtime runs | weft compile model.gguf -o out/
web deploy | write a page that runs the model | weft compile model.gguf --target web -o site/
prune shrink compress slim | leave out layers | weft opt model.gguf -p "prune-layers{layers=[24, 25]}" -o smaller/
optimize optimise rewrite transform pass apply | rewrite a model by passes | weft opt model.gguf -p pack-qkv,dce
bench benchmark speed profile time | measure the time per token | weft eval out/ --against model.gguf --text notes.txt
evaluate score perplexity ppl | measure the loss | weft eval out/ --against model.gguf --text notes.txt
draw plot graph show view visualize visualise picture | draw a model | weft viz model.gguf -o model.html
diff | draw the differences of two models | weft viz model.gguf --vs smaller/ -o diff.html
info summary describe print count params stats size memory | print sizes and costs | weft inspect model.gguf
list ls models catalog zoo | list the published architectures | weft presets
download pull fetch get | fetch a model, which weft does not do itself | hf download HuggingFaceTB/SmolLM2-135M
test check validate | compare a compiled folder with its source | weft verify out/
"""
ROWS = [tuple(line.split(" | ")) for line in _TABLE.strip().splitlines()]  # names, purpose, example


def explain_unknown(name: str, commands: Iterable[str]) -> str:
    """Return a sentence that names the command to use instead of `name`; `commands` exist."""
    if Path(name).exists() or "." in name or "/" in name:
        return f"{name} is not a command: to inspect a file, use `weft inspect {shlex.quote(name)}`"
    guesses = {word: (purpose, example) for words, purpose, example in ROWS for word in words.split()}
    names, word = [*guesses, *commands], name.lower()
    match = word if word in names else next(iter(difflib.get_close_matches(word, names, 1)), "")
    if match in guesses:
        purpose, example = guesses[match]
        return f"there is no command {name}: to {purpose}, use `{example}`"
    return f"there is no command {name}{f': did you mean `weft {match}`?' if match else '; see `weft --help`'}"
