"""The forms of a prompt in scripts: text, token ids, rows instead of ids, or a mapping of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from remora.configs.errors import InvalidRequest
from remora.configs.validation_messages import nearest
from remora.engine.embeddings import PromptEmbeddings
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import FloatArray

PromptDict = Mapping[str, Any]
Prompt = str | Sequence[int] | FloatArray | PromptDict
Prompts = Prompt | Sequence[Prompt]
KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A prompt as the engine takes it.

    text:        None if it was given in another form
    ids:         of embeddings, ids that stand for their rows
    cache_salt:  its pages in the prefix cache are shared with prompts of the same salt only
    """

    ids: Sequence[int]
    text: str | None = None
    embeddings: PromptEmbeddings | None = None
    cache_salt: str = ""


def as_batch(prompts: Prompts) -> list[Prompt]:
    """Return a list of prompts, given one or several."""
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind == "f":
        return [prompts] if prompts.ndim == 2 else list(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) > 0 and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> ReadPrompt:
    """Tokenize a prompt. Raises InvalidRequest.

    A mapping has one of `prompt`, `prompt_token_ids` and `prompt_embeds`; ids may have their text.
    """
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt, tokenizer)
    if isinstance(prompt, str):
        return ReadPrompt(ids=tokenizer.encode(prompt, add_special_tokens=True), text=prompt)
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind == "f":
        embeddings = PromptEmbeddings(np.array(prompt, dtype=np.float32))
        return ReadPrompt(ids=embeddings.ids, embeddings=embeddings)
    return ReadPrompt(ids=list(prompt))


def _of_mapping(prompt: PromptDict, tokenizer: Tokenizer) -> ReadPrompt:
    for key in prompt:
        if key not in KEYS:
            near = nearest(str(key), list(KEYS))
            hint = f"did you mean {near}?" if near else f"a prompt has {', '.join(KEYS)}"
            raise InvalidRequest(f"The key {key!r} of a prompt is not supported; {hint}", "prompts")
    text, ids, rows = (prompt.get(key) for key in KEYS[:3])
    if rows is not None and (text is not None or ids is not None):
        raise InvalidRequest("A prompt has prompt_embeds or a text or ids, not both.", "prompts")
    if text is None and ids is None and rows is None:
        raise InvalidRequest(
            f"A prompt has none of {', '.join(KEYS[:3])}; it must have one.", "prompts"
        )
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt is {type(text).__name__}; it must be text.", "prompts")
    given = rows if rows is not None else text if ids is None else ids
    if rows is not None and not isinstance(rows, np.ndarray):
        given = np.asarray(rows.float().numpy() if hasattr(rows, "numpy") else rows, np.float32)
    read = read_prompt(given, tokenizer)  # type: ignore[arg-type]
    return ReadPrompt(
        ids=read.ids,
        text=text,
        embeddings=read.embeddings,
        cache_salt=str(prompt.get("cache_salt") or ""),
    )
