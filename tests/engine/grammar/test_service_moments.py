"""Calls of the service that are cancelled at any moment, over a compiler that is none."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from remora.configs.errors import InvalidRequest
from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.grammar.prepare import Source
from remora.engine.grammar.service import GrammarService
from tests.moments import cancelled, nothing_left


class Compiler:
    """Compiles what holds no x."""

    def compile(self, source: Source) -> bytes:
        time.sleep(0.0005)
        if "x" in source.text:
            raise ConstraintError("it holds an x")
        return b""

    def load(self, _compiled: bytes) -> Any:
        return SimpleNamespace(num_bytes=1)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> GrammarService:
    tokenizer: Any = SimpleNamespace(takes_text=True)
    made = GrammarService(GrammarSection(), tokenizer, vocab_size=257, eos_token_ids=(256,))
    monkeypatch.setattr(made, "_ready", Compiler)
    monkeypatch.setattr(made, "_ready_loader", Compiler)
    return made


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("text", ["a", "x"])
async def test_a_call_that_is_cancelled_leaves_the_grammar_to_others(
    service: GrammarService, text: str, again: bool
) -> None:
    async with nothing_left():
        for moment in range(40):
            shared, own = (
                Constraint(kind=ConstraintKind.REGEX, source=text + letter * moment)
                for letter in "bc"
            )
            other = asyncio.create_task(service.compile(shared, param="p"))
            for constraint in (shared, own):
                leaving = service.compile(constraint, param="p")
                await cancelled(leaving, moment, again=again)
            if text == "x":
                with pytest.raises(InvalidRequest):
                    await other
            else:
                await other
        while service.stats().num_waiting:
            await asyncio.sleep(0.001)
    service.close()
