"""Logs each request: its parameters, its output, and the time of its phases.

Lines are JSON, so a client's text cannot break out of its line. By default nothing is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remora.configs.sections.metrics import MetricsSection
from remora.deployments.observing.json_lines import as_json, non_default
from remora.deployments.observing.request_trace import RequestTrace
from remora.engine.types import Request

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_DETAILS = ("metadata", "sampling", "clipped", "full")


class RequestLog:
    """Logs requests when they end.

    keys:  returns the current configuration
    """

    def __init__(self, keys: Callable[[], MetricsSection], tokenizer: Tokenizer) -> None:
        self._keys = keys
        self._tokenizer = tokenizer

    @property
    def is_on(self) -> bool:
        """Whether any line is enabled."""
        keys = self._keys()
        return keys.log_requests != "none" or keys.log_responses != "none" or keys.log_request_times

    def begun(self, trace: RequestTrace) -> None:
        """Log nothing: requests are logged at their end."""

    def ended(self, trace: RequestTrace) -> None:
        """Log the request."""
        keys = self._keys()
        if keys.log_requests != "none":
            log.info("request %s", as_json(self._request(trace, keys.log_requests)).decode())
        if keys.log_responses != "none":
            texts = _answers(
                trace, keys.log_clip_chars if keys.log_responses == "clipped" else None
            )
            log.info("response %s", as_json({"rid": trace.rid, "answers": texts}).decode())
        if keys.log_request_times:
            log.info("times %s", as_json(_times(trace)).decode())

    def _request(self, trace: RequestTrace, detail: str) -> dict[str, Any]:
        level = _DETAILS.index(detail)
        sequences = trace.sequences.values()
        line: dict[str, Any] = {
            "rid": trace.rid,
            "prompts": len(trace.requests),
            "sequences": sum(request.sampling.n for request in trace.requests),
            "prompt_tokens": trace.num_prompt_tokens,
            "cached_tokens": max((s.num_cached_tokens for s in sequences), default=0),
            "output_tokens": trace.num_output_tokens,
            "finish_reasons": [sequence.finish_reason for sequence in sequences],
            "error": trace.error,
            "seconds": round(trace.whole_s or 0.0, 6),
        }
        if level >= 1:
            line["sampling"] = non_default(trace.requests[0].sampling) if trace.requests else {}
        if level >= 2:
            most = self._keys().log_clip_chars if level == 2 else None
            line["texts"] = [self._prompt(request, most) for request in trace.requests]
            line["answers"] = _answers(trace, most)
        return line

    def _prompt(self, request: Request, most: int | None) -> str:
        # Most tokens hold a character or more; four per character covers byte tokens.
        ids = request.shown_ids if most is None else request.shown_ids[: 4 * most]
        return self._tokenizer.decode(ids, skip_special_tokens=False)[:most]


def _answers(trace: RequestTrace, most: int | None) -> list[str]:
    """Return the outputs; `most`: characters of each, None = all."""
    return [sequence.text[:most] for _, sequence in sorted(trace.sequences.items())]


def _times(trace: RequestTrace) -> dict[str, Any]:
    """Return the seconds of each phase; null for phases that the request did not reach."""
    first, queue, whole = trace.first_token_s, trace.queue_s, trace.whole_s or 0.0
    return {
        "rid": trace.rid,
        "queue_s": None if queue is None else round(queue, 6),
        "prefill_s": None if first is None else round(max(0.0, first - (queue or 0.0)), 6),
        "decode_s": None if first is None else round(whole - first, 6),
        "whole_s": round(whole, 6),
        "output_tokens": trace.num_output_tokens,
    }
