"""Custom logit processors: the operator's functions, which a request selects by name.

    def no_digits(logits, token_ids, params):
        logits[params["ids"]] = -float("inf")

receives the logits [V] float32 of one row, after masks, bias, penalties and bans, to change in
place; the tokens of prompt and output so far; and the request's `custom_params`. A class is
instantiated once for each row. Code is imported from the operator's configuration only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from remora.engine.plugins import import_callable
from remora.engine.types import RowFault, RowInit

LogitProcessor = Callable[..., Any]  # (logits, token_ids, params), or a class of such objects


def load_processors(paths: Mapping[str, str]) -> dict[str, LogitProcessor]:
    """Import processors from `module:attribute`. Raises ConfigError.

    paths:  by the names that requests use
    """
    return {
        name: import_callable(f"engine.logit_processors: {name} = {path}", path)
        for name, path in paths.items()
    }


class RowProcessor:
    """The processor of one row, and the row's tokens."""

    def __init__(self, name: str, processor: LogitProcessor, init: RowInit) -> None:
        self._name = name
        self._process: LogitProcessor = processor() if isinstance(processor, type) else processor
        self._params = init.sampling.custom_params
        self._token_ids: list[int] = init.token_ids.tolist()

    def add_token(self, token_id: int) -> None:
        """Append an output token."""
        self._token_ids.append(token_id)

    def run(self, logits: Tensor) -> RowFault | None:
        """Change the row's logits [V] in place; returns a fault if the processor failed."""
        try:
            self._process(logits, self._token_ids, self._params)
        except Exception as error:  # the operator's code may raise anything
            return self._fault(f"failed: {type(error).__name__}: {error}")
        if bool(torch.isnan(logits).any()):
            return self._fault("made a logit NaN")
        return None

    def _fault(self, what: str) -> RowFault:
        return RowFault(f"the logit processor {self._name} {what}")
