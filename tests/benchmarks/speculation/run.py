"""Speed of speculation on texts of three kinds, against the same engine without it.

    python tests/benchmarks/speculation/run.py [MODEL] [--quantization int8] [--rounds 3]
        [--workloads editing summarising free] [--streams 1] [--json FILE]

The prompts are in passages.toml and prompts.toml. Every prompt is answered greedily with and
without speculation in turns, and both must give the same tokens. Prints for each prompt:

    speed-up    ratio of output tokens per second, prefill included; the median of the rounds
    accepted    share of the drafts that became output
    per step    output tokens per step that had drafts
    copied      share of output tokens in an 8-gram that occurred before, in prompt or output
    looping     share in an 8-gram that occurred before in the output itself, less the same share
                of the prompt

and for each workload the median of the prompts that do not loop (`looping` at most 30 %). With
`--streams` that many prompts run at the same time, and count as one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from remora.engine.llm import LLM, SamplingParams

FOLDER = Path(__file__).parent
WORKLOADS = ("editing", "summarising", "free")
GRAM, MOST_LOOPING = 8, 0.3


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a workload."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of the prompts that ran at the same time."""

    workload: str
    index: int
    num_tokens: int
    speed_up: float
    accepted: float
    per_step: float
    copied: float
    looping: float

    def __str__(self) -> str:
        looping = " (loops)" if self.looping > MOST_LOOPING else ""
        return (
            f"{self.workload} {self.index:2}: {self.num_tokens:4} tokens, "
            f"speed-up {self.speed_up:.2f}, accepted {self.accepted:4.0%}, "
            f"{self.per_step:.2f} per step, copied {self.copied:4.0%}, "
            f"looping {self.looping:4.0%}{looping}"
        )


def prompts_of(workload: str) -> list[Prompt]:
    """Return the prompts of a workload, in the order of their file."""
    passages = tomllib.loads((FOLDER / "passages.toml").read_text(encoding="utf-8"))
    settings = tomllib.loads((FOLDER / "prompts.toml").read_text(encoding="utf-8"))[workload]
    if workload == "free":
        texts = settings["prompts"]
    else:
        instructions = settings.get("instructions", {})
        texts = [
            settings["template"].format(
                text=passage["text"].strip(), instruction=instructions.get(name, "")
            )
            for name, passage in passages.items()
        ]
    return [Prompt(text, settings["max_tokens"]) for text in texts]


def repeated_share(token_ids: Sequence[int], before: Sequence[int] = ()) -> float:
    """Return the share of tokens in an n-gram that occurred earlier.

    before:  text in front of the tokens, where an n-gram may have occurred, too
    """
    whole = [*before, *token_ids]
    seen: set[tuple[int, ...]] = set()
    is_repeated = [False] * len(whole)
    for start in range(len(whole) - GRAM + 1):
        gram = tuple(whole[start : start + GRAM])
        if gram in seen:
            is_repeated[start : start + GRAM] = [True] * GRAM
        seen.add(gram)
    return sum(is_repeated[len(before) :]) / max(1, len(token_ids))


def answer(llm: LLM, prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
    """Answer prompts at the same time; returns output tokens and seconds."""
    texts = [
        llm.tokenizer.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts
    ]
    batch = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    params = [SamplingParams(max_tokens=p.max_tokens, temperature=0.0) for p in prompts]
    started = time.perf_counter()
    found = llm.generate(batch, params)
    return [one.token_ids for one in found], time.perf_counter() - started


def measure(
    plain: LLM, drafting: LLM, workload: str, index: int, prompts: Sequence[Prompt], rounds: int
) -> Row:
    """Answer prompts with both engines in turns; exits if their tokens differ."""
    ratios = []
    before = drafting.stats()
    for turn in range(rounds):
        if turn % 2:
            outputs, seconds = answer(drafting, prompts)
            expected, plain_s = answer(plain, prompts)
        else:
            expected, plain_s = answer(plain, prompts)
            outputs, seconds = answer(drafting, prompts)
        if outputs != expected:
            raise SystemExit(f"{workload} {index}: output differs with speculation")
        ratios.append(plain_s / seconds)
    after = drafting.stats()
    drafted = after.draft_tokens_total - before.draft_tokens_total
    accepted = after.accepted_drafts_total - before.accepted_drafts_total
    verified = after.drafted_rows_total - before.drafted_rows_total
    sources = [drafting.tokenizer.encode(p.text, add_special_tokens=False) for p in prompts]
    pairs = list(zip(outputs, sources, strict=True))
    return Row(
        workload,
        index,
        sum(map(len, outputs)),
        statistics.median(ratios),
        accepted / max(1, drafted),
        1 + accepted / max(1, verified),
        statistics.fmean(repeated_share(output, source) for output, source in pairs),
        statistics.fmean(
            repeated_share(output) - repeated_share(source) for output, source in pairs
        ),
    )


def main() -> None:
    """Measure all prompts of the workloads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {"show_progress": False, "quantization": options.quantization}
    # The prefix cache would answer the second round's prompts.
    plain = LLM(options.model, prefix_cache=False, **settings)
    drafting = LLM(options.model, prefix_cache=False, speculation={"method": "ngram"}, **settings)
    rows = []
    for workload in options.workloads:
        prompts = prompts_of(workload)
        for llm in (plain, drafting):
            answer(llm, prompts[:1])  # touches what is used first
        for first in range(0, len(prompts), options.streams):
            chosen = prompts[first : first + options.streams]
            row = measure(plain, drafting, workload, first, chosen, options.rounds)
            rows.append(row)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
        counted = [r.speed_up for r in rows if r.workload == workload and r.looping <= MOST_LOOPING]
        median = f"{statistics.median(counted):.2f}" if counted else "none"
        sys.stdout.write(f"{workload}: median speed-up {median} of {len(counted)} prompts\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    plain.close()
    drafting.close()


if __name__ == "__main__":
    main()
