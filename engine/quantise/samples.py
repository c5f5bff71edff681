"""Text for calibration: windows of a file, or samples of the model itself.

Calibration must not see the text on which the result is measured: `overlaps` finds runs of words
that two texts share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.engine.llm import LLM, SamplingParams
from remora.engine.tokens.tokenizer import Tokenizer

RUN = 8  # words that two texts must not share in a row


def overlaps(text: str, other: str) -> bool:
    """Return whether two texts have RUN words in a row in common."""
    return not _runs(text).isdisjoint(_runs(other))


def _runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1)}


def text_windows(tokenizer: Tokenizer, text: str, number: int, size: int) -> list[list[int]]:
    """Return up to `number` windows of `size` ids that are spread evenly over a text.

    Raises ConfigError for a text that is shorter than a window.
    """
    opening = tokenizer.encode("", add_special_tokens=True)[:1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    step = size - len(opening)
    last = len(ids) - step
    if last < 0:
        raise ConfigError(
            f"the calibration text has {len(ids)} tokens; at least {step} are required."
        )
    number = min(number, len(ids) // step)
    firsts = [last * place // max(number - 1, 1) for place in range(number)]
    return [[*opening, *ids[first : first + step]] for first in firsts]


def own_samples(path: Path, number: int, size: int, avoided: str) -> list[list[int]]:
    """Return windows that the model at `path` writes after a first token chosen at random.

    avoided:  text with which no sample may overlap
    """
    model = LLM(model=str(path), max_running_requests=min(number, 64), prefix_cache=False)
    try:
        tokenizer = model.tokenizer
        opening = tokenizer.encode("", add_special_tokens=True)[:1]
        firsts = _first_tokens(tokenizer, number)
        prompts: list[str | Sequence[int]] = [[*opening, first] for first in firsts]
        sampling = [
            SamplingParams(
                max_tokens=size - len(opening) - 1, temperature=1.0, seed=seed, ignore_eos=True
            )
            for seed in range(number)
        ]
        made = model.generate(prompts, sampling)
        return [
            [*one.prompt_token_ids, *one.token_ids]
            for one in made
            if not overlaps(tokenizer.decode(one.token_ids, skip_special_tokens=True), avoided)
        ]
    finally:
        model.close()


def _first_tokens(tokenizer: Tokenizer, number: int) -> list[int]:
    """Return random tokens that are no control tokens."""
    plain = [at for at in range(tokenizer.vocab_size) if at not in tokenizer.special_ids]
    return random.Random(0).choices(plain, k=number)
