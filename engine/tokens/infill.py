"""Fill-in-the-middle prompts in the format of the model's training.

The markers are control tokens of the vocabulary, by which a model's format is recognised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

# Names of the repository and of the edited file, which requests do not give.
_REPOSITORY, _FILE = "project", "file"


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The markers of one family of models.

    prefix, suffix, middle:  before the text before the gap, the text after it, and the answer
    repository, file:        before the names of a repository and of a file; empty = the family
                             has none
    """

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    file: str = ""

    def prompt(self, before: str, after: str, files: Iterable[tuple[str, str]] = ()) -> str:
        """Return the prompt of the text between two texts.

        files:  names and texts of other files, which come first
        """
        gap = f"{self.prefix}{before}{self.suffix}{after}{self.middle}"
        named = list(files)
        if not named:
            return gap
        if not self.file:
            return "".join(text for _, text in named) + gap
        parts = "".join(f"{self.file}{name}\n{text}\n" for name, text in named)
        return f"{self.repository}{_REPOSITORY}\n{parts}{self.file}{_FILE}\n{gap}"


_MARKERS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
)
_FILE_MARKERS: tuple[tuple[str, str], ...] = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen
    ("<repo_name>", "<file_sep>"),  # StarCoder 2
)


def infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format that the model was trained with; None = it cannot fill in the middle."""
    known = frozenset(tokenizer.added_tokens.values())
    markers = next((found for found in _MARKERS if known.issuperset(found)), None)
    if markers is None:
        return None
    of_files = next((found for found in _FILE_MARKERS if known.issuperset(found)), ("", ""))
    return InfillFormat(*markers, *of_files)
