"""Gathering outputs: what each choice of a call has become so far, and what it has used."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from remora.deployments.http.generation.request_tracker import Event
from remora.engine.types import FinishReason, FloatArray, Output, TokenLogprob

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False)
class Choice:
    """One of the answers of a call: index `index` of prompt `prompt`.

    written:  log-probabilities as a dialect has written them so far, by the name of their field
    """

    prompt: int
    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    hidden_states: FloatArray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    written: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    def add(self, output: Output) -> None:
        """Append one output."""
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if output.hidden_states is not None:
            self.hidden_states = output.hidden_states
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stop_reason = output.stop_reason
        self.num_output_tokens = output.num_output_tokens
        self.num_cached_tokens = output.num_cached_tokens


class Choices:
    """All choices of a call, made when their first output comes."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._n = n
        self._choices = [
            Choice(prompt, index) for prompt in range(num_prompts) for index in range(n)
        ]

    def add(self, event: Event) -> Choice:
        """Append an output to its choice, and return that."""
        prompt, output = event
        choice = self._choices[prompt * self._n + output.index]
        choice.add(output)
        return choice

    def number(self, choice: Choice) -> int:
        """Return the place of a choice in the answer."""
        return choice.prompt * self._n + choice.index

    async def each(self) -> AsyncGenerator[Choice, None]:
        """Yield all choices, and let other calls go on in between: writing one may take long."""
        async for choice in let_others_go_on(self._choices):
            yield choice

    def best(self, n: int) -> list[Choice]:
        """Return the n choices of each prompt whose tokens are the likeliest, the best first."""
        if n == self._n:
            return self._choices
        groups = (self._choices[at : at + self._n] for at in range(0, len(self._choices), self._n))
        ranked = (sorted(group, key=_mean_logprob, reverse=True) for group in groups)
        return [choice for group in ranked for choice in group[:n]]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def prompt_logprobs(self, choice: Choice) -> tuple[TokenLogprob | None, ...] | None:
        """Return those of the choice's prompt; they came with its index 0."""
        return self._choices[choice.prompt * self._n].prompt_logprobs

    async def gather(self, outputs: AsyncIterable[Event]) -> None:
        """Append everything until the call has ended."""
        async for event in outputs:
            self.add(event)

    def usage(self, prompt_lens: Sequence[int]) -> dict[str, Any]:
        """Return OpenAI's usage object; each prompt counts once, whatever n."""
        num_prompt = sum(prompt_lens)
        num_output = sum(choice.num_output_tokens for choice in self._choices)
        num_cached = sum(choice.num_cached_tokens for choice in self._choices[:: self._n])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def _mean_logprob(choice: Choice) -> float:
    lines = choice.logprobs
    return sum(line.logprob for line in lines) / len(lines) if lines else -math.inf


async def let_others_go_on(items: Iterable[ItemT]) -> AsyncGenerator[ItemT, None]:
    """Yield the items, with a chance for other calls after each."""
    for item in items:
        yield item
        await asyncio.sleep(0)
