"""The control tokens of a tokenizer that belong to a model's reply formats or separate turns."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from remora.deployments.parsers.harmony import CALL_END, HarmonyFormat
from remora.deployments.parsers.reasoning import ReasoningFormat
from remora.deployments.parsers.response_template import CheckpointFormat
from remora.deployments.parsers.tool_calls.formats import ToolFormat

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

# Separators of turns that the tokenizer does not list as special, and in templates without tokens.
_TURN_TOKEN = re.compile(r"<[|｜].+[|｜]>")
_TURN_TEXTS = ("[/INST]",)


@dataclass(frozen=True)
class ControlTokens:
    """Control tokens of one served model's formats."""

    tokenizer: Tokenizer
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    checkpoint_format: CheckpointFormat | HarmonyFormat | None

    @cached_property
    def reasoning_ids(self) -> frozenset[int]:
        """Control tokens around reasoning."""
        form, whole = self.reasoning_format, self.checkpoint_format
        tags = (form.opening, form.closing) if form is not None else ()
        return self._ids(lambda text: text in tags or bool(whole and whole.names_mark(text)))

    @cached_property
    def call_ids(self) -> frozenset[int]:
        """Control tokens around and within calls."""
        marks = () if self.tool_format is None else self.tool_format.markers
        return self._ids(lambda text: any(text in mark for mark in marks))

    @cached_property
    def exit_ids(self) -> frozenset[int]:
        """Control tokens with which a call ends a reply before its answer begins."""
        is_harmony = isinstance(self.checkpoint_format, HarmonyFormat)
        return self._ids(lambda text: is_harmony and text == CALL_END)

    @cached_property
    def turn_pattern(self) -> re.Pattern[str]:
        """Pattern of the separators of turns: control tokens, except those within a reply."""
        form = self.reasoning_format
        inner = set() if self.tool_format is None else set(self.tool_format.markers)
        if form is not None:
            inner |= {form.opening, form.closing}
        texts = {
            text
            for token_id, text in self.tokenizer.added_tokens.items()
            if token_id in self.tokenizer.special_ids or _TURN_TOKEN.fullmatch(text)
        }
        return re.compile("|".join(map(re.escape, sorted((texts | {*_TURN_TEXTS}) - inner))))

    def _ids(self, is_wanted: Callable[[str], bool]) -> frozenset[int]:
        """Return the special tokens whose texts are wanted."""
        added, special = self.tokenizer.added_tokens, self.tokenizer.special_ids
        return frozenset(i for i in special if i in added and is_wanted(added[i]))
