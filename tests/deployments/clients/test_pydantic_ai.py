"""pydantic-ai: agents with tools and typed output."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.ray


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

    # A model this small would call it for ever.
    async def until_called(context: RunContext[None], definition: Any) -> Any:
        is_called = any(
            part.part_kind == "tool-return"
            for message in context.messages
            for part in message.parts
        )
        return None if is_called else definition

    @agent.tool_plain(prepare=until_called)
    def favourite(rank: Literal[1]) -> str:
        """Return the favourite city."""
        return "Paris"

    result = agent.run_sync("Which city is my favourite? Then name it.")

    assert isinstance(result.output, City)
    parts = [part for message in result.all_messages() for part in message.parts]
    called = [part.tool_name for part in parts if part.part_kind == "tool-call"]
    assert called == ["favourite", "final_result"]


async def stream_text(agent: Any, prompt: str) -> str:
    async with agent.run_stream(prompt) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


def test_a_stream(chat: Any) -> None:
    import asyncio

    agent: Any = Agent(chat, model_settings={"temperature": 0, "max_tokens": 32})

    assert "Paris" in asyncio.run(stream_text(agent, "What is the capital of France?"))
