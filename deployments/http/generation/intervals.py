"""Streams that say something every so many tokens, and not at each."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from remora.deployments.http.generation.request_tracker import Event, OutputStream
from remora.engine.types import Output


def in_intervals(call: OutputStream, num_tokens: int) -> OutputStream:
    """Return a call whose outputs come every `num_tokens` tokens, and the first and last at once.

    Closing what is returned closes the call.
    """
    return call if num_tokens == 1 else _GatheredCall(call, num_tokens)


class _GatheredCall(OutputStream):
    def __init__(self, call: OutputStream, num_tokens: int) -> None:
        super().__init__(None, _gathered(call, num_tokens))
        self._call = call

    async def aclose(self) -> None:
        await super().aclose()
        await self._call.aclose()  # a generator that nobody has begun to read closes nothing


async def _gathered(call: OutputStream, num_tokens: int) -> AsyncGenerator[Event, None]:
    held: dict[tuple[int, int], Output] = {}
    begun: set[tuple[int, int]] = set()
    async for prompt, output in call:
        key = (prompt, output.index)
        whole = output if key not in held else _joined(held.pop(key), output)
        is_due = key not in begun or whole.finish_reason is not None
        if is_due or len(whole.token_ids) >= num_tokens:
            begun.add(key)
            yield prompt, whole
        else:
            held[key] = whole


def _joined(first: Output, second: Output) -> Output:
    """Return what two outputs of one sequence say together."""
    logprobs = second.logprobs
    if first.logprobs is not None:
        logprobs = first.logprobs + (second.logprobs or ())
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
