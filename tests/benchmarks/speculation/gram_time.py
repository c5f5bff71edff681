"""Measure the time that n-gram drafts take of a step, for prompts made to take long.

    python -m tests.benchmarks.speculation.gram_time [NAME ...]

Each prompt of 100,000 tokens begins, gets drafts in every step while it is indexed and after, grows
by a token per step, and ends; steps go on until its text is indexed for later requests, too, and
a second request with the same prompt follows. A step is all that the proposer does in it, in CPU
time of its thread, which other processes do not lengthen.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable

from remora.engine.spec.ngram import NgramProposer
from remora.engine.types import Namespace

LENGTH, ROWS, DRAFTS = 100_000, 4, 10
STEPS = 2_000  # of each request; its prompt is indexed in some 500 to 1,600
MIB = 2**20


def all_windows(num_ids: int) -> list[int]:
    """A text in which no four tokens occur twice (a de Bruijn sequence, cut)."""
    seen: set[tuple[int, ...]] = set()
    text = [0, 0, 0]
    while len(text) < LENGTH:
        for token in reversed(range(num_ids)):
            window = (*text[-3:], token)
            if window not in seen:
                seen.add(window)
                text.append(token)
                break
        else:
            text += [0, 0, 0]
    return text[:LENGTH]


def near_matches() -> list[int]:
    """The same four tokens again and again, each time before another one."""
    return [token for number in range(LENGTH // 5) for token in (1, 2, 3, 4, 10 + number)]


def at_random(num_ids: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(0)
    return [draw.randrange(num_ids) for _ in range(LENGTH)]


TEXTS: dict[str, Callable[[], list[int]]] = {
    "one token": lambda: [7] * LENGTH,
    "period 2": lambda: [5, 9] * (LENGTH // 2),
    "all windows": lambda: all_windows(18),
    "random, 150,000 ids": lambda: at_random(150_000),
    "random, 30 ids": lambda: at_random(30),
    "near matches": near_matches,
}


def measure(text: list[int], max_shared_bytes: int | None, sizes: tuple[int, int]) -> list[float]:
    """Return the milliseconds of each step; the first of a request has its beginning, too."""
    proposer = NgramProposer(
        shortest=sizes[0],
        longest=sizes[1],
        max_bytes=64 * MIB,
        max_shared_bytes=max_shared_bytes,
    )
    for key in range(1, ROWS):
        proposer.begin(key, text[:50], Namespace())
    taken = []
    for _ in range(2):
        prompt = list(text)
        for number in range(STEPS):
            grown = [(key, [text[(number * 31 + key) % LENGTH]]) for key in range(ROWS)]
            started = time.thread_time()
            if number == 0:
                proposer.begin(0, prompt, Namespace())
            for key, token_ids in grown:
                proposer.extend(key, token_ids)
            proposer.propose([(key, DRAFTS) for key in range(ROWS)])
            if number == STEPS - 1:
                proposer.end(0)
            taken.append(1000 * (time.thread_time() - started))
    return taken


def main(names: list[str]) -> None:
    """Measure, and print a table."""
    gc.disable()
    print("| prompt | grams | earlier texts | p50, ms | p99, ms | max, ms |")
    print("|---|---|---|---|---|---|")
    for name in names or TEXTS:
        text = TEXTS[name]()
        for sizes in ((2, 5), (1, 12)):
            for shared in (None, 64 * MIB):
                taken = sorted(measure(text, shared, sizes))
                print(
                    f"| {name} | {sizes[0]} to {sizes[1]} | {'yes' if shared else 'no'} | "
                    f"{taken[len(taken) // 2]:.3f} | {taken[len(taken) * 99 // 100]:.3f} | "
                    f"{taken[-1]:.3f} |"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
