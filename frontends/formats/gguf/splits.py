"""Pre-tokenization before byte-level BPE: the regular expressions for each value of `tokenizer.ggml.pre`.

Each expression is applied to the pieces of the previous one; its matches and the strings between them become the new
pieces. The patterns are spelled exactly as in the models' own tokenizer.json: onnxruntime-genai compares the strings.
"""

from __future__ import annotations

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_WORD}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHED}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_CASED[0]}{_ENDING}|{_CASED[1]}{_ENDING}|\p{{N}}{{1,3}}|{_SLASHED}"

# DeepSeek-V3's, in three steps; Trinity (afmoe) has other scripts and groups digits by another rule.
_KANA = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_SYLLABLES = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # the first group of digits is the shorter one
_PHRASES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NO_HAN = "&&[^\\p{Han}]]"
_KIMI_CASED = (part.replace("]*", f"{_NO_HAN}*").replace("]+", f"{_NO_HAN}+") for part in _CASED)
_KIMI = "|".join([r"[\p{Han}]+", *(f"{part}{_ENDING}" for part in _KIMI_CASED), rf"\p{{N}}{{1,3}}|{_TAIL}"])

_SEED = rf"{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_NAMES: dict[tuple[str, ...], str] = {
    # Converters write `default` for a tokenizer that they do not recognise.
    (_GPT2,): "default gpt-2 gpt2 phi-2 mpt olmo jais gigachat roberta-bpe jina-es jina-de jina-v1-en jina-v2-es "
    "jina-v2-de jina-v2-code exaone4 modern-bert mellum trillion granite-docling",
    (_DIGIT, _GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    (_LLAMA3,): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 pixtral dbrx smaug-bpe chatglm-bpe glm4",
    (_QWEN2,): "qwen2 stablelm2 megrez deepseek-r1-qwen hunyuan grok-2 solar-open",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 minimax-m2",
    (_SEED,): "seed-coder",
    (r"\p{N}{1,3}", _KANA, _PUNCTUATED): "deepseek-v3 hunyuan-dense joyai-llm",
    (_THREES, _SYLLABLES, _PUNCTUATED): "afmoe",
    (_PHRASES,): "exaone-moe",
    (_KIMI,): "kimi-k2",
}
SPLITS: dict[str, tuple[str, ...]] = {name: split for split, names in _NAMES.items() for name in names.split()}

# Tokenizers that leave a piece unsplit if it equals a token, whatever the merges; they also put BOS first.
WHOLE_PIECES = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken"))
