"""Batched tokenisation of texts of several requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from remora.deployments.http.generation.encoding import Encoder
from tests.deployments.fakes import CharTokenizer
from tests.moments import cancelled, nothing_left


class Failing(CharTokenizer):
    """A tokenizer that always fails."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        raise ValueError("no")


def make_encoder(tokenizer: Any, batch_size: int) -> Encoder:
    return Encoder(tokenizer, batch_size=batch_size)


@pytest.mark.parametrize("again", [False, True])
async def test_a_request_that_is_cancelled_at_any_moment_keeps_nobody_waiting(again: bool) -> None:
    async with nothing_left():
        for batch_size in (1, 2, 4):
            for moment in range(8):
                encoder = make_encoder(CharTokenizer(), batch_size)
                other = asyncio.create_task(encoder.encode(["d"], add_special_tokens=True))
                texts = ["a", "b", "c"]
                await cancelled(encoder.encode(texts, add_special_tokens=True), moment, again=again)
                assert await other == [[100]]


async def test_a_failure_is_told_to_each_request_and_to_nobody_else() -> None:
    encoder = make_encoder(Failing(), 8)
    async with nothing_left():
        asking = (
            encoder.encode(["a", "b", "c"], add_special_tokens=True),
            encoder.encode(["d", "e"], add_special_tokens=True),
        )
        assert [str(e) for e in await asyncio.gather(*asking, return_exceptions=True)] == ["no"] * 2
