"""TGI's dialect over a real socket with huggingface_hub's client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import OverloadedError, TextGenerationError, ValidationError

from remora.configs.errors import EngineError, QueueFull
from tests.deployments.fakes import FakeEngine, FakeServer
from tests.deployments.http.openai.test_openai_client import listening


@asynccontextmanager
async def client_of(server: FakeServer) -> AsyncGenerator[AsyncInferenceClient, None]:
    async with listening(server) as url, AsyncInferenceClient(url) as client:
        yield client


async def test_an_answer() -> None:
    async with client_of(FakeServer()) as client:
        text = await client.text_generation("ab", max_new_tokens=3)
    assert text == "Par"


async def test_an_answer_with_details() -> None:
    async with client_of(FakeServer()) as client:
        answer = await client.text_generation(
            "ab",
            details=True,
            decoder_input_details=True,
            top_n_tokens=2,
            best_of=2,
            do_sample=True,
            stop=["x"],
            max_new_tokens=2,
        )

    assert answer.generated_text == "Pa"
    assert answer.details is not None
    assert answer.details.finish_reason == "length"
    assert [token.text for token in answer.details.prefill] == ["a", "b"]
    assert [token.logprob for token in answer.details.tokens] == [-0.5, -0.5]
    assert answer.details.best_of_sequences is not None


async def test_a_stream() -> None:
    async with client_of(FakeServer()) as client:
        stream = await client.text_generation("ab", stream=True)
        texts = [text async for text in stream]
    assert "".join(texts) == "Paris."


async def test_a_stream_with_details() -> None:
    async with client_of(FakeServer()) as client:
        stream = await client.text_generation("ab", stream=True, details=True)
        events = [event async for event in stream]

    assert [event.index for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[-1].generated_text == "Paris."
    assert events[-1].details is not None
    assert events[-1].details.finish_reason == "eos_token"


async def test_a_fault_is_a_validation_error() -> None:
    async with client_of(FakeServer()) as client:
        with pytest.raises(ValidationError, match="typical_p"):
            await client.text_generation("ab", typical_p=1.5)


async def test_a_full_queue_is_an_overload() -> None:
    async with client_of(FakeServer(FakeEngine(error=QueueFull("Full.", 1.0)))) as client:
        with pytest.raises(OverloadedError):
            await client.text_generation("ab")


async def test_a_failure_in_a_stream_is_raised() -> None:
    async with client_of(FakeServer(FakeEngine(error=EngineError("x"), fail_at=1))) as client:
        stream = await client.text_generation("ab", stream=True)
        with pytest.raises(TextGenerationError):
            _ = [text async for text in stream]
