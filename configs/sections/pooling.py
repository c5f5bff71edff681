"""The section `pooling`: embeddings and scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Name, Section

Task = Literal["generate", "embed", "classify", "rerank", "reward"]
Method = Literal["cls", "last", "mean", "weighted_mean", "max"]
PAIR_PARTS = ("{query}", "{document}")


class PoolingSection(Section):
    """Embeddings and scores."""

    method: Literal["auto", "cls", "last", "mean", "weighted_mean", "max"] = "auto"
    """How the hidden states of a text are pooled: that of the first (cls) or last token, their
    mean, a mean with weights that rise with the position, or their maximum. auto = the checkpoint's
    setting, else mean for encoders and last for decoders."""

    normalize: bool | None = None
    """Whether embeddings are normalised to length 1 unless a request says otherwise. Default: the
    checkpoint's setting, else true."""

    activation: Literal["auto", "none", "sigmoid", "softmax"] = "auto"
    """Function that turns a classifier's logits into scores. auto = the checkpoint's setting, else
    sigmoid for one label, softmax for several, none for reward models."""

    prompts: dict[Name, str] = Field(default_factory=dict, max_length=256)
    """Named texts to prepend to inputs; a request selects one with `prompt_name`. They add to the
    checkpoint's."""

    default_prompt: Name | None = None
    """Name of the prompt for requests that select none. Default: the checkpoint's."""

    dimensions: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, max_length=64)
    """Sizes to which requests may shorten embeddings; [] = any. Default: the checkpoint's, if it
    was trained for that."""

    pair_template: Annotated[str, Field(min_length=1, max_length=2**16)] | None = None
    """Prompt with which a generation model reranks; it contains {query}, {document} and optionally
    {instruction}. Default: that of Qwen3-Reranker."""

    instruction: str | None = None
    """Value of {instruction} for requests that have none."""

    yes_token: Name = "yes"
    """Token whose probability, relative to that of no_token, is the score of a reranker that
    generates."""

    no_token: Name = "no"
    """Token that means the opposite of yes_token."""

    step_token: Name | None = None
    """Token that ends a reasoning step; a process reward model scores each step there. Default:
    <extra_0>, as in Qwen2.5-Math-PRM."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        missing = [
            part for part in PAIR_PARTS if part not in (self.pair_template or "".join(PAIR_PARTS))
        ]
        if missing:
            yield "pair_template", f"lacks {' and '.join(missing)}"
        if self.yes_token == self.no_token:
            yield "no_token", "must differ from yes_token"
