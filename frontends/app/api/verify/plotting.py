"""An evaluation as a chart, in the format of a file name."""

from __future__ import annotations

from pathlib import Path

from weft.backends.viz.formats.chart import ChartModel, check_chart, render_chart
from weft.ir.errors import WeftError
from weft.ir.storage import replace_file

from .evaluation import Evaluation, Score


def plot_evaluation(evaluation: Evaluation, out: str | Path, dark: bool = False) -> None:
    """Draw each model's loss of quality against its size, and errors and bits by layer, into the file `out`.

    Raises:
        WeftError: if no chart has the suffix of `out`, matplotlib is not installed, there is no model to compare with
            the original, or `out` cannot be written.
    """
    out = Path(out)
    check_chart(out)
    original, *compared = evaluation.scores
    if not compared:
        raise WeftError("a chart needs a model to compare with the original: name one, or use --weights or -p")
    decodes = original.nll is not None
    title = f"{Path(original.name).name or original.name} and its rewrites"
    about = f"{evaluation.tokens:,} tokens of {Path(evaluation.text).name}, in windows of {evaluation.context}"
    measure = "KL divergence from the original, in nats" if decodes else "1 − cosine to the original's embeddings"
    picture = render_chart(out.suffix, title, about, measure, list(map(_build_candidate, evaluation.scores)), dark)
    with replace_file(out) as path:
        path.write_bytes(picture)


def _build_candidate(score: Score) -> ChartModel:
    loss = score.kl if score.cosine is None else 1 - score.cosine
    facts = {
        "{:.2f} bits": score.bits,
        "KL {:.3g}": score.kl,
        "NLL {:+.4f}": score.nll_loss or None,
        "NLL {:.4f}": None if score.nll_loss else score.nll,
        "cosine {:.4f}": score.cosine,
        "{:.3g} ms/token": score.seconds * 1e3,
    }
    caption = " · ".join(form.format(value) for form, value in facts.items() if value is not None)
    return ChartModel(score.name, score.weight_bytes, loss, score.layers, score.layer_bits, caption)
