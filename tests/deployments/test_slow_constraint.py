"""A constraint that becomes too slow during a reply is reported as the caller's error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.engine.grammar import xgrammar_backend
from remora.engine.grammar.matching import TOO_SLOW
from remora.engine.grammar.xgrammar_backend import XgrammarMatcher
from remora.engine.types import MatcherTooSlow
from tests.conftest import TinyCheckpoints
from tests.deployments.pooling_replica import running

BODY: dict[str, Any] = {"prompt": "x", "regex": "b{90}", "max_tokens": 200}
QUICK_STEPS = 6


class SlowMatcher(XgrammarMatcher):
    """Exceeds its time budget after QUICK_STEPS."""

    num_steps = 0

    def _in_budget(self, work: Any) -> Any:
        self.num_steps += 1
        if self.num_steps > QUICK_STEPS:
            raise MatcherTooSlow(TOO_SLOW)
        return super()._in_budget(work)


@pytest.mark.timeout(120)
async def test_a_slow_constraint_is_a_400_or_the_last_event(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgrammar_backend, "XgrammarMatcher", SlowMatcher)
    async with running(tiny_checkpoints("llama"), engine={"kv_tokens": 4096}) as (client, _):
        whole = await client.post("/v1/completions", json=BODY)
        stream = await client.post("/v1/completions", json=BODY | {"stream": True})
        other = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})

    assert whole.status_code == 400
    assert whole.json()["error"]["code"] == "constraint_failed"
    assert stream.status_code == 200  # the stream had started
    events = [event for event in stream.text.split("\n\n") if event]
    errors = [json.loads(e.removeprefix("data: "))["error"] for e in events if '"error"' in e]
    assert [error["code"] for error in errors] == ["constraint_failed"]
    assert other.status_code == 200
