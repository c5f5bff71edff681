"""Workloads are reproducible and have the stated lengths."""

from __future__ import annotations

import pytest

from remora.deployments.bench.workloads import (
    OFFLINE,
    WORDS,
    chat_messages,
    find,
    online,
    token_prompts,
    word_prompts,
)


@pytest.mark.parametrize("name", ["decode", "prefill", "batch", "shared-prefix"])
def test_prompts_have_the_stated_length(name: str) -> None:
    workload = OFFLINE[name]

    prompts = token_prompts(workload, seed=0)

    assert [len(prompt) for prompt in prompts] == [workload.input_tokens] * workload.num_requests


def test_the_same_seed_gives_the_same_prompts_and_another_one_others() -> None:
    workload = OFFLINE["decode"]

    assert token_prompts(workload, seed=1) == token_prompts(workload, seed=1)
    assert token_prompts(workload, seed=1) != token_prompts(workload, seed=2)
    # Pinned: figures of different days must be of the same prompts.
    assert token_prompts(workload, seed=0)[0][:4] == [4598, 6069, 14663, 15786]
    assert chat_messages(0, 1) == chat_messages(0, 1) != chat_messages(0, 2)


def test_prompts_share_exactly_the_shared_part() -> None:
    shared, other, *_ = token_prompts(OFFLINE["shared-prefix"], seed=0)
    first, second, *_ = token_prompts(OFFLINE["batch"], seed=0)

    assert shared[:1000] == other[:1000]
    assert shared[1000:] != other[1000:]
    assert first[:8] != second[:8]


@pytest.mark.parametrize("vocab_size", [8, 512, 1500, 49_152])
def test_prompts_hold_ids_of_the_vocabulary_or_words(vocab_size: int) -> None:
    ids = token_prompts(OFFLINE["prefill"], seed=0, vocab_size=vocab_size)[0]
    words = word_prompts(OFFLINE["decode"], seed=0)[0].split()

    assert 0 < min(ids) <= max(ids) < vocab_size
    assert (len(words), set(words) - set(WORDS)) == (128, set())


def test_resizing_scales_the_shared_part_and_keeps_single_requests() -> None:
    shared = OFFLINE["shared-prefix"].resized(requests=4, inputs=129, outputs=8)

    assert (shared.num_requests, shared.input_tokens, shared.shared_tokens) == (4, 129, 125)
    assert OFFLINE["prefill"].resized(requests=9, outputs=9).shape == "1 x 1500/1"


def test_online_workloads_are_found_by_their_number() -> None:
    assert find("online-8") == online(8)
    assert find("batch") == OFFLINE["batch"]
    assert [find(name) for name in ("online-0", "online-x", "online-", "nope")] == [None] * 4
    assert (online(8).num_at_once, online(8).resized(requests=3).num_at_once) == (8, 3)
    assert OFFLINE["batch"].num_at_once == 64
