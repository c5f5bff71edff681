"""The section `speculation`: drafts of coming tokens, verified in the model's ordinary steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Section

Suffix = Annotated[int, Field(ge=1, le=32)]


class SpeculationSection(Section):
    """Speculative decoding. Outputs are the same as without it; they take fewer steps."""

    method: Literal["none", "ngram"] = "none"
    """Source of drafts. ngram = what followed the last tokens when they occurred earlier in the
    same prompt or output; it speeds up outputs that repeat parts of their input, such as edits."""

    max_drafts: Annotated[int, Field(ge=1, le=64)] = 10
    """Most drafts of a sequence in one step."""

    adaptive: bool = True
    """Whether the number of drafts, 0 included, follows the measured acceptance and step times of
    each sequence. false = always max_drafts where there are as many."""

    shortest_suffix: Suffix = 2
    """Fewest last tokens that must have occurred earlier. Needs method ngram."""

    longest_suffix: Suffix = 5
    """Most last tokens that are looked up; longer ones are looked up first. Needs method ngram."""

    index_memory: Bytes = 64 * 2**20
    """Memory for the index of texts of all running sequences, in bytes or as 64MiB; the oldest part
    of the longest text is forgotten first. Needs method ngram."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.shortest_suffix > self.longest_suffix:
            yield "shortest_suffix", f"must not exceed longest_suffix, {self.longest_suffix}"
        if self.method != "ngram":
            for key in ("shortest_suffix", "longest_suffix", "index_memory"):
                if key in self.model_fields_set:
                    yield key, "needs method ngram"
