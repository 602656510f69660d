"""`weft run`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.ir.errors import WeftError

from .completion import complete_sources
from .guard import print_error
from .open_model import open_model
from .options import LOADING, add_loading_options, default_option, device_option, parse_token_ids, prefix_cache_option
from .terminal import echo, escape_controls, print_note

if TYPE_CHECKING:
    from weft.backends.runtime.core.generation import Conversation, Generator, Stream
    from weft.backends.runtime.core.results import Result
    from weft.backends.runtime.ort.ort_encoder import EncoderModel

    from ...model import Model


EMBEDDING = ("pooling", "normalize", "prompt_name", "truncate_dim")  # options of an embedding


def _load_sound(ctx: click.Context, option: click.Parameter, path: str | None) -> Any:
    """Return the array in the file at `path`; a batch of one array is unpacked."""
    import numpy as np

    if path is None:
        return None
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError):
        raise click.BadParameter(f"{path} is not a .npy file, or has no numbers: write it with numpy.save") from None
    return array[0] if isinstance(array, np.ndarray) and array.ndim == 3 and len(array) == 1 else array


@click.command("run", short_help="Generate text or chat.")
@click.argument("source", shell_complete=complete_sources)
@click.option("--prompt", help="The text to continue, or with --chat the message to answer; default: stdin.")
@click.option("--ids", callback=parse_token_ids, help="Token ids to continue, such as 1,15,7; prints token ids.")
@click.option(
    "--sound",
    callback=_load_sound,
    metavar="FILE.npy",
    help="The input of a model that reads sound: a waveform [samples], or a spectrogram [bins, frames].",
)
@click.option("--chat", is_flag=True, help="Use the model's chat template; without --prompt, start a conversation.")
@click.option("--system", help="System message (with --chat).")
@default_option("--max-tokens", 256, "Maximum tokens per answer.", type=click.IntRange(1))
@click.option("--temperature", type=float, help="0 is greedy; default: 0, or 1 with --top-k, --top-p or --min-p.")
@click.option("--top-k", type=int, help="Sample from the k most likely tokens; default: all.")
@click.option("--top-p", type=float, help="Sample from the smallest set of tokens with this probability; default: 1.")
@click.option(
    "--min-p",
    type=float,
    help="Sample from tokens with at least this probability relative to the most likely one; default: 0.",
)
@click.option("--repetition-penalty", type=float, help="Above 1: make earlier tokens less likely; default: 1.")
@click.option("--beams", type=click.IntRange(1), default=1, help="Beams of a beam search; default: 1, no beam search.")
@click.option("--seed", type=int, help="Seed of the sampling; default: a random one.")
@click.option(
    "--prompt-lookup",
    "prompt_lookup_num_tokens",
    type=click.IntRange(0),
    help="Draft up to this number of tokens at a time from the text so far, and verify them in one call; 0: none; "
    "default: 8 where that saves time.",
)
@click.option("--assistant", help="A compiled folder of a smaller model that drafts tokens; default: no drafts.")
@prefix_cache_option
@click.option("--stop", multiple=True, help="End the answer before this text; may be repeated.")
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "max", "last", "weighted"]),
    help="Pooling of an encoder; default: the model's own.",
)
@click.option(
    "--pair",
    "pairs",
    multiple=True,
    help="A second text for a model with a head: the context of a question, a text to rank, a choice; may be repeated.",
)
@click.option(
    "--normalize/--no-normalize",
    default=None,
    help="Scale an encoder's embedding to unit length or not; default: as the model states.",
)
@click.option("--prompt-name", help="The prompt of an encoder to put before the text; default: the model's own.")
@click.option(
    "--truncate-dim",
    type=click.IntRange(1),
    help="Truncate an encoder's embedding to this number of features; default: as the model states, or all.",
)
@click.option(
    "--expose",
    metavar="KINDS",
    help="Instead of an answer, write values inside the model for the prompt to a .npz file: kinds of the pass expose, "
    'such as "attention, residual, logits", or all.',
)
@click.option("--layers", help="With --expose: only these layers, such as 0-5,8; default: all.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --expose: the file to write; default: trace.npz.",
)
@device_option
@click.option(
    "--experts-on-device",
    type=click.IntRange(1),
    help="Experts of each MoE layer to keep on the device, with the others on the host (target torch only); default: "
    "all.",
)
@add_loading_options
def run_command(
    source: str,
    prompt: str | None,
    ids: list[int] | None,
    sound: Any,
    chat: bool,
    system: str | None,
    beams: int,
    assistant: str | None,
    prefix_cache: int | None,
    pairs: tuple[str, ...],
    trust: bool,
    expose: str | None,
    layers: str | None,
    out: Path | None,
    **options: Any,
) -> None:
    """Run a compiled folder, or any SOURCE, which is compiled into a temporary folder first.

    The answer streams to stdout, and timings go to stderr. The input of an encoder-decoder is the prompt, or the array
    of --sound (transformers' WhisperProcessor computes Whisper's spectrograms). An encoder prints the embedding of the
    prompt as JSON. An encoder with a head prints one label, tagged token, answer span or mask token per line.

    \b
    Examples:
      weft run out/ --prompt "Once upon a time" --max-tokens 64
      weft run out/ --chat                                       a conversation; Ctrl-D ends it
      weft run out/ --chat --prompt "What is the capital of France?" --temperature 0.7 --top-p 0.9 --seed 1
      echo "The sky is" | weft run model.gguf --stop "."
      weft run out/ --prompt "The sky is" --beams 4              beam search
      weft run out/ --chat --prompt-lookup 8                     faster where answers repeat the prompt
      weft run model.py --ids 1,15,7 --max-tokens 8              a model without a tokenizer
      weft run reranker/ --prompt "Who wrote Faust?" --pair "Goethe did." --pair "In 1808."   scores of both texts
      weft run whisper/ --sound spectrogram.npy                  an encoder-decoder that reads sound
      weft run model.gguf --prompt "The sky is" --expose "attention, logits"   values inside the model, as trace.npz
      weft run model.gguf --target torch --chat                  with PyTorch even if ONNX Runtime is installed
      weft run moe/ --chat --trust --experts-on-device 16        a mixture of experts larger than the device's memory
    """
    from weft.backends.runtime import load
    from weft.backends.runtime.ort.ort_encoder import EncoderModel
    from weft.backends.runtime.text.tokenizer import check_text

    from ... import load_source

    talk = chat and prompt is None and sys.stdin.isatty()
    if prefix_cache is not None and not talk:
        raise click.UsageError("--prefix-cache needs a conversation: --chat without --prompt, on a terminal")
    if beams > 1 and talk:
        raise click.UsageError("--beams needs --prompt or --ids")
    if prompt is None and ids is None and sound is None and not talk:
        if sys.stdin.isatty():
            raise click.UsageError("give --prompt, or --chat for a conversation, or pipe a prompt in")
        prompt = sys.stdin.read().removesuffix("\n")
    for text in (prompt, system, *options["stop"]):
        check_text("the prompt" if text is prompt else repr(text), text or "")
    if expose is not None:
        loaded = load_source(source, adapters=options["adapters"], without=options["without"])
        _write_trace(loaded, prompt if ids is None else ids, expose, layers or "all", out or Path("trace.npz"))
        return
    loading = {name: options.pop(name) for name in (*LOADING, "experts_on_device")}
    embedding = {name: options.pop(name) for name in EMBEDDING}
    options = {name: value for name, value in options.items() if value is not None}
    if options.keys() & {"top_k", "top_p", "min_p"}:
        options.setdefault("temperature", 1.0)
    drafts = assistant is not None or bool(options.get("prompt_lookup_num_tokens"))
    trusted = [source, *filter(None, [assistant])] if trust else []
    with open_model(source, text=ids is None and sound is None, trusted=trusted, verifies=drafts, **loading) as model:
        if isinstance(model, EncoderModel):
            text = ids if prompt is None else prompt
            assert text is not None  # open_model rejects a sound for encoders
            if model.task is not None and not any(v is not None for v in embedding.values()):
                print_task(model, text, pairs)
                return
            _print_embedding(model, text, source, **embedding)
            return
        if assistant is not None:
            options["assistant"] = load(assistant, loading["device"], loading["threads"], trust=trust)
            if isinstance(options["assistant"], EncoderModel):
                raise WeftError(f"{assistant} is an encoder: an assistant must be a decoder")
        messages = [] if system is None else [{"role": "system", "content": system}]
        if talk:
            model.prefixes.limit = model.prefixes.limit if prefix_cache is None else prefix_cache
            _run_conversation(model.conversation(messages), options)
            return
        if beams == 1 and sound is None and (defaults := _list_defaults(model, options)):
            print_note(
                f"decoding greedily without sampling options; weft serve applies the model's defaults: {defaults}"
            )
        if chat:
            ids = model.chat_prompt([*messages, {"role": "user", "content": prompt}])
        subject = next(x for x in (sound, ids, prompt) if x is not None)
        writes_text = prompt is not None or (sound is not None and (model.folder / "tokenizer.json").is_file())
        if writes_text and beams == 1:
            _print_stream(model.stream(subject, **options))
            return
        (result,) = model.generate([subject], beams=beams, **options)
        echo(result.text if writes_text else ",".join(map(str, result.tokens)))
        echo(format_timing(result), err=True)


def _write_trace(model: Model, prompt: str | list[int] | None, kinds: str, layers: str, out: Path) -> None:
    """Write the values of `kinds` inside `model` for `prompt` to the file `out`, and print their names and shapes."""
    import numpy as np

    from weft.ir.storage import replace_file

    from ..api.observe.trace import trace_text

    assert prompt is not None  # it is read from stdin, unless --sound or --chat is given
    for line in model.notices():
        print_note(line)
    traced = trace_text(model, prompt, kinds, layers)
    for name, array in traced.values.items():
        echo(f"{name}\t[{', '.join(map(str, array.shape))}]")
    with replace_file(out) as path, path.open("wb") as file:
        np.savez(file, allow_pickle=False, ids=np.array(traced.ids), tokens=np.array(traced.tokens), **traced.values)
    print_note(f"{out} written: {len(traced.ids)} tokens")


def _list_defaults(model: Generator, options: dict[str, Any]) -> str:
    """Return the sampling defaults of the model's source, formatted as options; "" if `options` sets one of them."""
    from weft.backends.runtime.core.sampler import DEFAULTS

    defaults = {name: value for name, value in model.defaults.items() if name in DEFAULTS}
    stated = options.keys() & DEFAULTS.keys()
    return "" if stated else " ".join(f"--{name.replace('_', '-')} {value}" for name, value in defaults.items())


def _print_embedding(model: EncoderModel, prompt: str | list[int], source: str, **options: Any) -> None:
    import json

    name = options["prompt_name"]
    if name is not None and not model.prompt(name) and not model.prompt():
        raise WeftError(f"{source} has no prompt called {name} to put before the input: leave out --prompt-name")
    echo(json.dumps([float(x) for x in model.encode([prompt], **options)[0]]))


def _print_stream(stream: Stream) -> None:
    for piece in stream:
        echo(piece, newline=False)
    echo()
    echo(format_timing(stream.result), err=True)


def format_timing(result: Result) -> str:
    """Return the timings of an answer in one line."""
    t = result.timings
    unit = "prompt tokens" if isinstance(result.prompt, list) else "samples" if result.prompt.ndim == 1 else "frames"
    read = f"{t.prompt_tokens} {unit} in {t.prefill_seconds:.2f} s ({t.prefill_rate:.1f}/s)"
    read += f", {t.cached_tokens} more cached" if t.cached_tokens else ""
    count = len(result.tokens)
    rest = f", then {count} token{'s' if count != 1 else ''}" if count else ""
    drafted = f", {t.accepted_tokens} of {t.drafted_tokens} drafted tokens right" if t.drafted_tokens else ""
    experts = ""
    if t.experts.asked:
        megabytes = t.experts.bytes / 1e6 / max(t.decoded_tokens, 1)
        share = f"{t.experts.found / t.experts.asked:.0%} of experts found on the device"
        experts = f", {share}, {megabytes:.1f} MB moved per token"
    return f"weft: {read}{rest}" + (f" at {t.decode_rate:.1f}/s" if t.decoded_tokens else "") + drafted + experts


def _run_conversation(conversation: Conversation, options: dict[str, Any]) -> None:
    """Run a conversation on a terminal (Ctrl-C stops an answer, Ctrl-D ends); raise WeftError for invalid options."""
    from weft.backends.runtime.core.sampler import Sampling, SamplingOptions

    Sampling.from_options(**{name: options[name] for name in SamplingOptions.__annotations__ if name in options})
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing on platforms that have it
    from weft.backends.runtime.text.tokenizer import check_text

    print_note("a conversation; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            echo()
            return
        if not text:
            continue
        try:
            check_text("the message", text)
            _print_stream(conversation.say(text, **options))
        except WeftError as error:  # most likely the conversation is too long: it goes on without this message
            print_error(str(error))
        except KeyboardInterrupt:
            echo()


def print_task(model: EncoderModel, text: str | list[int], pairs: Sequence[str]) -> None:
    """Print a line for each label, token, answer or candidate of `pairs`; the line begins with its score.

    Raise WeftError if the task cannot be printed, or does not fit token ids or the number of `pairs`.
    """
    assert model.task is not None
    task = model.task.name
    if isinstance(text, list) and (pairs or task != "text-classification"):
        raise WeftError(f"--ids needs a model that labels one sequence, and {model.folder} is for {task}: use --prompt")
    inputs: Any = text  # the check above rejects ids for methods that need text
    if task == "question-answering":
        if len(pairs) != 1:
            raise WeftError(f"a question needs one context, not {len(pairs)}: give it by --pair, once")
        _print_scores((span.score, span.text) for span in model.answer(inputs, pairs[0]))
    elif task == "multiple-choice":
        if not pairs:
            raise WeftError("a multiple-choice model needs at least one choice: give each by --pair")
        _print_scores(sorted(zip(model.choose(inputs, pairs), pairs, strict=True), reverse=True))
    elif task in ("fill-mask", "token-classification"):
        if pairs:
            raise WeftError(f"a model for {task} reads one text: leave out --pair")
        if task == "fill-mask":
            for best in model.fill(inputs):
                _print_scores((score, token) for token, score in best.items())
        else:
            _print_scores((s.score, f"{s.label}\t{s.text}\t{s.start}:{s.end}") for s in model.tag(inputs))
    elif task == "text-classification" and len(pairs) > 0 and len(model.task.labels) == 1:
        _print_scores((rank.score, pairs[rank.index]) for rank in model.rank(inputs, pairs))
    elif task in ("text-classification", "next-sentence-prediction"):
        for scores in model.classify([(text, pair) for pair in pairs] if pairs else [text]):
            _print_scores((score, label) for label, score in scores.items())
    else:
        raise WeftError(f"{model.folder} has a model for {task}, which `weft run` does not print: use `weft.load`")


def _print_scores(lines: Any) -> None:
    for score, answer in lines:
        echo(f"{score:.4f}\t{escape_controls(answer)}")
