"""What adaptive speculation costs where its drafts are never right.

    python -m tests.benchmarks.speculation.never_right [--rounds 8]

One stream of a random model of Qwen3-0.6B's shape decodes without speculation, with a draft model
of other random weights, and with drafts that cost nothing and are wrong, in turns. Prints the ratio
of each to the first in every round, and the median. Speculation must not cost more than 3 %.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from remora.engine.llm import LLM
from remora.engine.spec.prediction import PredictionProposer
from tests.benchmarks.speculation import draft_cost
from tests.engine.spec.proposers import GuessingProposer

OUTPUT = 256
OPTIONS: dict[str, Any] = {"kv_tokens": 4096, "max_running_requests": 8, "show_progress": False}


def engines(folder: Path) -> dict[str, LLM]:
    """Build the engines to compare; the first is without speculation."""
    target, _ = draft_cost.write_pair(folder / "one")
    _, stranger = draft_cost.write_pair(folder / "other", seed=1)
    wrong = LLM(str(target), speculation={"method": "ngram"}, **OPTIONS)
    speculation = wrong._engine._scheduler.speculation
    assert speculation is not None
    guesser = GuessingProposer(lambda known, limit: [known[-1] ^ 1] * limit)
    speculation._proposer = PredictionProposer(guesser)
    return {
        "without": LLM(str(target), **OPTIONS),
        "draft model": LLM(
            str(target), speculation={"method": "draft", "draft_model": str(stranger)}, **OPTIONS
        ),
        "wrong drafts": wrong,
    }


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    draft_cost.OUTPUT = OUTPUT
    with tempfile.TemporaryDirectory() as made:
        llms = engines(Path(made))
        found: dict[str, list[float]] = {name: [] for name in llms}
        for _ in range(rounds):
            for name, llm in llms.items():
                found[name].append(draft_cost.decode(llm))
    print("without:", ", ".join(f"{speed:.1f}" for speed in found["without"]), "tok/s")
    for name in list(llms)[1:]:
        pairs = zip(found[name], found["without"], strict=True)
        ratios = [speed / plain for speed, plain in pairs]
        stats = llms[name].stats()
        print(f"{name}:", ", ".join(f"{ratio:.3f}" for ratio in ratios), end="; ")
        right = f"{stats.accepted_drafts_total} of {stats.draft_tokens_total} drafts right"
        print(f"median {median(ratios):.3f}; {right}")


if __name__ == "__main__":
    main()
