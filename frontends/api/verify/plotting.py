"""An evaluation as a chart, in the format that a file's name asks for."""

from __future__ import annotations

from pathlib import Path

from weft.backends.storage import whole_file
from weft.backends.viz.charts.trade_off import Candidate, trade_off
from weft.backends.viz.formats.png import png
from weft.ir.errors import WeftError

from .evaluation import Evaluation, Score

FORMATS = (".svg", ".png")


def check_plot(out: str | Path) -> None:
    """Raise WeftError if no chart has the ending of `out`."""
    if Path(out).suffix not in FORMATS:
        raise WeftError(f"a chart is written as {' or '.join(FORMATS)}, not as {Path(out).suffix or Path(out).name}")


def plot_evaluation(evaluation: Evaluation, out: str | Path, dark: bool = False) -> None:
    """Draw what each model lost against its size, and errors and bits by layer, into the file `out`.

    Raises:
        WeftError: if its ending is no format, there is nothing beside the original, or `out` cannot be written.
    """
    out = Path(out)
    check_plot(out)
    original, *others = evaluation.scores
    if not others:
        raise WeftError("a chart compares models with the original: name one, or give --weights or -p")
    decodes = original.nll is not None
    title = f"{_short(original.name)} and what is made of it"
    about = f"{evaluation.tokens:,} tokens of {Path(evaluation.text).name}, in windows of {evaluation.context}"
    measure = "KL divergence from the original, in nats" if decodes else "1 − cosine to the original's embeddings"
    chart = trade_off(title, about, measure, _candidate(original), list(map(_candidate, others)), dark)
    with whole_file(out) as path:
        path.write_bytes(png(chart) if out.suffix == ".png" else chart.encode())


def _candidate(score: Score) -> Candidate:
    lost = score.kl if score.cosine is None else 1 - score.cosine
    facts = [f"{score.bits:.2f} bits"] if score.bits is not None else []
    if score.nll_loss is not None:
        facts.append(f"NLL {score.nll_loss:+.4f}" if score.nll_loss else f"NLL {score.nll:.4f}")
    facts.append(f"{score.seconds * 1e3:.3g} ms/token")
    return Candidate(score.name, score.weight_bytes, lost, score.layers, score.layer_bits, " · ".join(facts))


def _short(name: str) -> str:
    return Path(name).name or name
