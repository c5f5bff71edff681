"""Task prompts: texts put before the prompts of requests that name them, computed at startup.

The prefix cache evicts their KV last.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remora.configs.errors import ConfigError, InvalidRequest
from remora.configs.sections.api import ApiSection
from remora.engine.protocols import EngineClient
from remora.engine.types import Request, SamplingParams

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

MAX_SHOWN = 16


class TaskPrompts:
    """Token ids of each task's text."""

    def __init__(self, ids: Mapping[str, list[int]]) -> None:
        self._ids = ids

    @classmethod
    def configured(cls, api: ApiSection, tokenizer: Tokenizer) -> TaskPrompts:
        """Return the tokenised task prompts of a configuration.

        Raises ConfigError for a file with other contents.
        """
        texts = dict(api.task_prompts)
        if api.task_prompts_file is not None:
            texts = _read(Path(api.task_prompts_file))
        return cls(
            {name: tokenizer.encode(text, add_special_tokens=True) for name, text in texts.items()}
        )

    def ids(self, task_id: str | int | None) -> list[int]:
        """Return the ids before a prompt; empty without a task. Raises InvalidRequest."""
        if task_id is None:
            return []
        ids = self._ids.get(str(task_id))
        if ids is None:
            known = ", ".join(sorted(self._ids)[:MAX_SHOWN]) or "none"
            raise InvalidRequest(f"There is no task {task_id}; known are: {known}.", "task_id")
        return ids

    async def compute(self, client: EngineClient, max_tokens: int, *, runs: bool = True) -> None:
        """Check all task prompts and compute their KV.

        max_tokens:  of the engine's longest sequence
        runs:        False = only check them

        Raises ConfigError for a task prompt that leaves no room for a prompt and an output.
        """
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        for name, ids in self._ids.items():
            if len(ids) + 2 > max_tokens:
                raise ConfigError(
                    f"api.task_prompts: the text of {name} has {len(ids)} tokens, and a sequence "
                    f"{max_tokens} at most; shorten it"
                )
            if not runs:
                continue
            request = Request(
                request_id=f"task-{uuid.uuid4().hex}",
                prompt_ids=ids,
                sampling=sampling,
                kept_tokens=len(ids),
            )
            async with aclosing(client.generate(request)) as outputs:
                async for _ in outputs:
                    pass


def _read(path: Path) -> dict[str, str]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"api.task_prompts_file = {path}: cannot be read: {error}") from error
    texts = _texts(written)
    if texts is None:
        raise ConfigError(
            f"api.task_prompts_file = {path}: expected an object from names to texts, or a list "
            'of {"task_id": name or number, "prompt": text}'
        )
    return texts


def _texts(written: Any) -> dict[str, str] | None:
    """Return the texts by name; None if the file has another format."""
    if isinstance(written, list) and all(isinstance(entry, dict) for entry in written):
        pairs = [(entry.get("task_id"), entry.get("prompt")) for entry in written]
    elif isinstance(written, dict):
        pairs = list(written.items())
    else:
        return None
    if all(isinstance(n, str | int) and isinstance(text, str) and text for n, text in pairs):
        return {str(name): text for name, text in pairs}
    return None
