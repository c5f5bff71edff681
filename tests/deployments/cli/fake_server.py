"""A server that answers by script, on a free port of this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.deployments.bench.openai_server import Answer, FakeOpenAI, events

STOP = "data: [DONE]\n\n"


def chat_event(text: str) -> str:
    return events({"choices": [{"delta": {"content": text}}]}, done=False).decode()


def text_event(text: str) -> str:
    return events({"choices": [{"text": text}]}, done=False).decode()


@dataclass
class FakeServer(FakeOpenAI):
    """`answers` are given in order, one per POST: (status, body). `posts` holds the bodies."""

    answers: list[tuple[int, str]] = field(default_factory=list)
    models: tuple[str, ...] = ("tiny",)
    posts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answer = self._by_script

    def _by_script(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            listed = {"data": [{"id": name} for name in self.models]}
            return 200, "application/json", json.dumps(listed).encode()
        self.posts.append({"path": path, **body})
        status, text = self.answers.pop(0)
        return status, "text/event-stream", text.encode()
