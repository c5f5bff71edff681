"""Lengths of requests for offline throughput."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SMALLEST, LARGEST = 4, 1024


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are asked at once: tokens of each prompt and of each answer."""

    name: str
    prompts: list[int]
    answers: list[int]


def chat(count: int) -> Load:
    """Return lengths distributed as those of ShareGPT's conversations: skewed, about 200 each."""
    numbers = np.random.default_rng(7)
    prompts = numbers.lognormal(np.log(100), 1.25, count)
    answers = numbers.lognormal(np.log(130), 0.9, count)
    sizes = (np.clip(each, SMALLEST, LARGEST).astype(int).tolist() for each in (prompts, answers))
    return Load(f"{count} as of chats", *sizes)


def uniform(count: int, least: int, most: int) -> Load:
    """Return lengths between two, equally often."""
    numbers = np.random.default_rng(8)
    prompts, answers = numbers.integers(least, most + 1, (2, count)).tolist()
    return Load(f"{count} of {least}-{most}", prompts, answers)


def equal(count: int, prompt: int, output: int) -> Load:
    """Return the same lengths for all."""
    return Load(f"{count} of {prompt}+{output}", [prompt] * count, [output] * count)


LOADS = (equal(64, 1024, 128), chat(1000), uniform(256, 100, 1024))
TINY_LOADS = (equal(3, 32, 6), uniform(6, 4, 20))
