"""pydantic-ai: agents with tools and typed output."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class City(BaseModel):
    name: Literal["Paris", "Rome"]


@pytest.fixture
def chat(server_url: str, model: str) -> Any:
    return OpenAIChatModel(
        model, provider=OpenAIProvider(base_url=f"{server_url}/v1", api_key="any")
    )


def test_text(chat: Any) -> None:
    agent: Any = Agent(chat, model_settings={"temperature": 0, "max_tokens": 32})

    assert "Paris" in agent.run_sync("What is the capital of France?").output


def test_typed_output_by_a_forced_tool(chat: Any) -> None:
    agent: Any = Agent(
        chat,
        output_type=City,
        model_settings={"temperature": 0, "max_tokens": 64, "parallel_tool_calls": False},
    )

    assert isinstance(agent.run_sync("Name a city.").output, City)


def test_a_tool_loop_ends_in_typed_output(chat: Any) -> None:
    agent: Any = Agent(
        chat,
        output_type=City,
        model_settings={"temperature": 0, "max_tokens": 64, "parallel_tool_calls": False},
    )

    @agent.tool_plain
    def favourite(rank: Literal[1]) -> str:
        """Return the favourite city."""
        return "Paris"

    result = agent.run_sync("Which city is my favourite? Then name it.")

    assert isinstance(result.output, City)


async def stream_text(agent: Any, prompt: str) -> str:
    async with agent.run_stream(prompt) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


def test_a_stream(chat: Any) -> None:
    import asyncio

    agent: Any = Agent(chat, model_settings={"temperature": 0, "max_tokens": 32})

    assert "Paris" in asyncio.run(stream_text(agent, "What is the capital of France?"))
