"""Quality loss of quantized weights: perplexity, and agreement on the next token.

A text is cut into windows, and the engine scores each as a prompt, so that the served code is
measured. Knows nothing of how weights are quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from remora.configs.errors import EngineError
from remora.deployments.bench.report.record import Report, Result, TextTable
from remora.deployments.bench.session import progress_bar
from remora.deployments.bench.targets import Target
from remora.deployments.cli.terminal import Failure
from remora.engine.engine import Engine
from remora.engine.launch import BuiltEngine, build_engine
from remora.engine.sampling.logprobs import concat_logprobs
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import FloatArray, LogprobRows, Request, SamplingParams
from remora.lora.setup import configured

TEXT = Path(__file__).parent / "data" / "quality.txt"
WINDOW_TOKENS = 512
NUM_TOP = 256  # the likeliest tokens hold nearly all of the probability mass
REFERENCE = "reference"
_LEAST_MASS = 1e-6  # rounding error of 1 minus a sum of float32 probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of a model with the reference on a text.

    perplexity_ratio:        perplexity divided by the reference's
    perplexity_ratio_error:  standard error of that ratio
    top1_share:              share of the positions where both have the same likeliest token
    kl_nats:                 mean Kullback-Leibler divergence from the reference: a lower bound,
                             because tokens outside of either top list count as one outcome
    """

    perplexity_ratio: float
    perplexity_ratio_error: float
    top1_share: float
    kl_nats: float


def perplexity(lines: LogprobRows) -> float:
    """Return e to the mean negative log-probability of the tokens."""
    return math.exp(-float(lines.logprobs.mean(dtype=np.float64)))


def compare(reference: LogprobRows, other: LogprobRows) -> Agreement:
    """Compare the scores of two models for the same tokens."""
    losses = reference.logprobs.astype(np.float64) - other.logprobs
    ratio = math.exp(float(losses.mean()))
    return Agreement(
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio * float(losses.std()) / math.sqrt(len(losses)),
        top1_share=float((reference.top_ids[:, 0] == other.top_ids[:, 0]).mean()),
        kl_nats=float(np.mean([_divergence(*pair) for pair in _common(reference, other)])),
    )


def _common(a: LogprobRows, b: LogprobRows) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield, for each token, both log-probabilities of the ids in both top lists."""
    for line in range(len(a.token_ids)):
        _, in_a, in_b = np.intersect1d(
            a.top_ids[line], b.top_ids[line], assume_unique=True, return_indices=True
        )
        yield a.top_logprobs[line, in_a], b.top_logprobs[line, in_b]


def _divergence(p_float: FloatArray, q_float: FloatArray) -> float:
    """Return the divergence of q from p; all other outcomes count as one."""
    p_log, q_log = p_float.astype(np.float64), q_float.astype(np.float64)
    p = np.exp(p_log)
    p_rest = max(1 - p.sum(), _LEAST_MASS)
    q_rest = max(1 - np.exp(q_log).sum(), _LEAST_MASS)
    return float((p * (p_log - q_log)).sum() + p_rest * math.log(p_rest / q_rest))


def windows(tokenizer: Tokenizer, text: str, size: int) -> list[list[int]]:
    """Cut a text into windows of up to `size` ids, each with the model's first special token.

    Raises Failure for a text without a token to predict.
    """
    opening = tokenizer.encode("", add_special_tokens=True)[:1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    step = size - len(opening)
    cut = [[*opening, *ids[at : at + step]] for at in range(0, len(ids), step)]
    found = [window for window in cut if len(window) > 1]
    if not found:
        raise Failure(f"the text has {len(ids)} tokens; at least 2 are required")
    return found


def score(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    on_finish: Callable[[], object] = lambda: None,
) -> LogprobRows:
    """Return a row for each token of the prompts except their first. Raises EngineError."""
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_TOP
    )
    parts: list[LogprobRows] = []
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=f"quality-{number}", prompt_ids=prompt, sampling=sampling))
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise EngineError(f"Window {number} failed: {output.error}.")
                parts += output.prompt_logprobs
        on_finish()
    return concat_logprobs(parts)


def read_text(path: Path) -> str:
    """Read a text file. Raises Failure."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Failure(f"cannot read {path}: not UTF-8 text") from None


def quality_suite(
    report: Report, reference: Target, modes: Mapping[str, Target], *, text: Path
) -> None:
    """Score the text by the reference and by each mode, one after another.

    modes:  configurations by name; one that equals the reference is skipped
    """
    with _running(reference) as built:
        size = min(WINDOW_TOKENS, built.plan.max_sequence_tokens - 1)
        prompts = windows(built.tokenizer, read_text(text), size)
        expected = _score_with_bar(built, prompts, REFERENCE)
        report.settings |= {
            "reference": reference.spec,
            "dtype": built.plan.dtype,
            "kernels": built.kernels,
            "text": text.name,
        }
    shape = f"{len(expected.token_ids)} tokens"
    report.results.append(
        Result(workload=REFERENCE, shape=shape, figures={"perplexity": perplexity(expected)})
    )
    others = {name: each for name, each in modes.items() if each.config != reference.config}
    for name, target in others.items():
        with _running(target) as built:
            found = _score_with_bar(built, prompts, name)
        figures = {"perplexity": perplexity(found), **asdict(compare(expected, found))}
        report.results.append(Result(workload=name, shape=shape, figures=figures))
    report.tables.append(as_table(report.results))
    report.warnings.clear()  # load does not affect quality


@contextmanager
def _running(target: Target) -> Iterator[BuiltEngine]:
    built = build_engine(target.config, adapting=configured(target.config.lora))
    try:
        yield built
    finally:
        built.engine.close()


def _score_with_bar(built: BuiltEngine, prompts: Sequence[Sequence[int]], name: str) -> LogprobRows:
    with progress_bar(name, len(prompts)) as advance:
        return score(built.engine, prompts, on_finish=advance)


def as_table(results: Sequence[Result]) -> TextTable:
    """Return a table with one row for each mode, the reference first."""
    return TextTable(
        title="Quality",
        header=("weights", "text", "perplexity", "vs reference", "same top-1", "KL in nats"),
        rows=tuple((result.workload, result.shape, *_cells(result.figures)) for result in results),
    )


def _cells(figures: Mapping[str, float]) -> tuple[str, str, str, str]:
    shown = f"{figures['perplexity']:.3f}"
    if "perplexity_ratio" not in figures:
        return shown, "-", "-", "-"
    more, error = figures["perplexity_ratio"] - 1, figures["perplexity_ratio_error"]
    return (
        shown,
        f"{more * 100:+.2f} % ± {error * 100:.2f}",
        f"{figures['top1_share'] * 100:.1f} %",
        f"{figures['kl_nats']:.4f}",
    )
