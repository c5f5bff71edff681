"""The section `speculation`: drafts of coming tokens, verified in the model's ordinary steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Name, Section

Method = Literal["none", "ngram", "draft", "eagle", "mtp"]
_ONLY_WITH: Mapping[str, tuple[Method, ...]] = {
    "shortest_suffix": ("ngram",),
    "longest_suffix": ("ngram",),
    "index_memory": ("ngram",),
    "shared_index_memory": ("ngram",),
    "draft_model": ("draft", "eagle"),
    "draft_quantization": ("draft",),
}
Suffix = Annotated[int, Field(ge=1, le=32)]


class SpeculationSection(Section):
    """Speculative decoding. Outputs are the same as without it; they take fewer steps."""

    method: Method = "none"
    """Source of drafts. ngram = what followed the last tokens when they occurred earlier in the
    same prompt or output; it speeds up outputs that repeat parts of their input, such as edits.
    draft = a smaller model with the same vocabulary, `draft_model`. eagle = an EAGLE, EAGLE-2 or
    EAGLE-3 head that was trained for the model, `draft_model`. mtp = the multi-token prediction
    layer that DeepSeek-V3, GLM-4.5 and MiMo checkpoints contain."""

    draft_model: Name | None = None
    """Draft model: a directory, a .gguf file, a built-in or a remote model, like model.path, whose
    tokenizer has the same vocabulary as the model's. With method eagle, the head's. Needs method
    draft or eagle."""

    draft_quantization: Literal["none", "int8", "int4", "int4_pure"] = "none"
    """Format to which the draft model's weights are quantised at start-up, like
    model.quantization. Needs method draft."""

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

    shared_index_memory: Bytes | None = None
    """Memory for texts of earlier requests, prompts and outputs, in bytes or as 64MiB; the least
    recently used are forgotten first. Drafts come from them where the request's own text has none,
    within the same adapter and `cache_salt` only, like pages of the prefix cache. null = every
    request drafts from its own text. Needs method ngram."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.shortest_suffix > self.longest_suffix:
            yield "shortest_suffix", f"must not exceed longest_suffix, {self.longest_suffix}"
        for key, methods in _ONLY_WITH.items():
            if self.method not in methods and key in self.model_fields_set:
                yield key, f"needs method {' or '.join(methods)}"
        if self.method in _ONLY_WITH["draft_model"] and self.draft_model is None:
            yield "draft_model", f"method {self.method} needs it"
