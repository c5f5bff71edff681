"""Tokenisation for all requests of a replica.

Long texts are tokenised off the event loop; texts of concurrent requests can be batched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from remora.configs.sections.api import ApiSection

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

OFF_LOOP_CHARS = 16_384

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A text that waits for its batch."""

    text: str
    special: bool
    ids: asyncio.Future[list[int]]


class Encoder:
    """Tokeniser of many concurrent requests.

    num_threads:   threads for long texts; None = Python's default executor
    batch_size:    most texts tokenised in one call; 1 = no batches across requests
    batch_wait_s:  longest time that a text waits for its batch
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_threads: int | None = None,
        batch_size: int = 1,
        batch_wait_s: float = 0.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._threads: ThreadPoolExecutor | None = None
        if num_threads is not None:
            self._threads = ThreadPoolExecutor(num_threads, "tokeniser")
        self._batch_size = batch_size
        self._batch_wait_s = batch_wait_s
        self._waiting: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def configured(cls, tokenizer: Tokenizer, api: ApiSection) -> Encoder:
        """Return the encoder of a configuration."""
        return cls(
            tokenizer,
            num_threads=api.tokenizer_threads,
            batch_size=api.tokenizer_batch_size,
            batch_wait_s=api.tokenizer_batch_wait_s,
        )

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text."""
        if self._batch_size > 1:
            return await self._together(texts, special=add_special_tokens)
        return await self._now(texts, add_special_tokens)

    async def off_loop_if(self, is_long: bool, work: Callable[[], ResultT]) -> ResultT:
        """Run `work`, in a thread if it takes long."""
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _now(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        def work() -> list[list[int]]:
            return self._tokenizer.encode_batch(texts, add_special_tokens=special)

        return await self.off_loop_if(sum(map(len, texts)) > OFF_LOOP_CHARS, work)

    async def _together(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        mine = [_Waiting(text, special, loop.create_future()) for text in texts]
        for one in mine:
            if not self._waiting:
                loop.call_later(self._batch_wait_s, self._send, one)
            self._waiting.append(one)
            if len(self._waiting) >= self._batch_size:
                self._send(one)
        return await asyncio.gather(*(one.ids for one in mine))

    def _send(self, expected: _Waiting) -> None:
        """Tokenise all waiting texts, unless the batch of `expected` has been sent already."""
        if expected not in self._waiting:
            return
        batch = [one for one in self._waiting if not one.ids.done()]  # a done future was cancelled
        self._waiting = []
        for special in (False, True):
            part = [one for one in batch if one.special is special]
            if part:
                task = asyncio.get_running_loop().create_task(self._answer(part, special))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: Sequence[_Waiting], special: bool) -> None:
        try:
            all_ids = await self._now([one.text for one in batch], special)
        except Exception as error:
            # A boundary: every request of the batch gets the error.
            for one in batch:
                if not one.ids.done():
                    one.ids.set_exception(error)
            return
        for one, ids in zip(batch, all_ids, strict=True):
            if not one.ids.done():  # a done future was cancelled
                one.ids.set_result(ids)
