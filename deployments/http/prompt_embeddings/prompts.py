"""Prompts given as embeddings in bodies: rows of JSON numbers, or safetensors files in base64.

A body's validator finds the prompts; `read_embeddings` reads their numbers, which may take long,
and checks them against the model.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remora.configs.errors import InvalidRequest
from remora.configs.planning.plan import EnginePlan
from remora.deployments.http.core.body_limits import check_size
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.fields import fault
from remora.deployments.http.prompt_embeddings.safetensors_file import NotOneTensor, read_tensor
from remora.engine.embeddings import PromptEmbeddings, check_rows

_ROWS = "a list of rows, each a list of numbers, or a list of such prompts"
_FILE = "a safetensors file in base64 with one tensor [tokens, hidden size]"


@dataclass(frozen=True, slots=True)
class SentEmbeddings:
    """Prompts as sent: rows of numbers, or a text, each. `is_list`: they were sent as a list."""

    prompts: list[Any]
    is_list: bool

    @property
    def size(self) -> int:
        """Roughly how many numbers or characters they have."""
        return sum(map(_size_of, self.prompts))


def check_rows_sent(value: Any) -> SentEmbeddings | None:
    """Return the prompts of a field that takes rows only; empty values are no prompts."""
    if not value:
        return None
    found = _sent(value)
    if found is None or any(isinstance(prompt, str) for prompt in found.prompts):
        raise fault(f"must be {_ROWS}")
    return found


def check_rows_or_files_sent(value: Any) -> SentEmbeddings | None:
    """Return the prompts of a field that takes rows or files; empty values are no prompts."""
    if not value:
        return None
    found = [value] if isinstance(value, str) else None
    sent = SentEmbeddings(found, is_list=False) if found is not None else _sent(value)
    if sent is None:
        raise fault(f"must be {_FILE}, or a list of these; or {_ROWS}")
    return sent


def _sent(value: Any) -> SentEmbeddings | None:
    if not isinstance(value, list):
        return None
    first = value[0]
    is_row = isinstance(first, list) and not (first and isinstance(first[0], list))
    if is_row:
        return SentEmbeddings([value], is_list=False)
    check_size("max_prompts", value)
    is_batch = all(isinstance(prompt, list | str) and prompt for prompt in value)
    return SentEmbeddings(value, is_list=True) if is_batch else None


def refuse_with_embeddings(param: str, asked: Mapping[str, bool]) -> None:
    """Raise InvalidRequest for the first field that is asked for and needs a prompt's token ids."""
    for name, is_asked in asked.items():
        if is_asked:
            message = (
                f"{name} is not available with {param}: a prompt given as embeddings has no token "
                "ids. Leave one of the two out."
            )
            raise unsupported(name, message)


def read_embeddings(sent: SentEmbeddings, plan: EnginePlan, param: str) -> list[PromptEmbeddings]:
    """Return the prompts' embeddings, checked against the plan's model. Raises InvalidRequest."""
    made = []
    for number, prompt in enumerate(sent.prompts):
        name = f"{param}[{number}]" if sent.is_list else param
        rows = _of_file(prompt, name) if isinstance(prompt, str) else _of_rows(prompt, name)
        check_rows(rows, hidden_size=plan.embedding_size, dtype=plan.dtype, param=name)
        made.append(PromptEmbeddings(rows))
    return made


def _size_of(prompt: Any) -> int:
    is_matrix = isinstance(prompt[0], list)
    return len(prompt) * len(prompt[0]) if is_matrix else len(prompt)


def _of_rows(prompt: list[Any], param: str) -> npt.NDArray[np.float32]:
    if not all(isinstance(row, list) for row in prompt):
        raise InvalidRequest(f"{param} must be a list of rows, each a list of numbers.", param)
    widths = sorted({len(row) for row in prompt})
    if len(widths) > 1:
        raise InvalidRequest(
            f"{param} has rows of {widths[0]} and of {widths[-1]} numbers; all rows must have as "
            "many as the model's hidden size.",
            param,
        )
    if not all({*map(type, row)} <= {int, float} for row in prompt):
        raise InvalidRequest(f"{param} must hold numbers only.", param)
    with np.errstate(over="ignore"):
        return np.array(prompt, dtype=np.float64).astype(np.float32)


def _of_file(text: str, param: str) -> npt.NDArray[np.float32]:
    try:
        return read_tensor(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        what = str(error) if isinstance(error, NotOneTensor) else "is not valid base64"
        raise InvalidRequest(
            f"{param} {what}; send {_FILE}, or {_ROWS}. Pickles are never read, because they can "
            "run code: write tensors with safetensors.torch.save.",
            param,
        ) from None
