"""What becomes of hidden states where no text is made: the section `pooling` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Name, Section, conflict

Task = Literal["generate", "embed", "classify", "rerank", "reward"]
Method = Literal["cls", "last", "mean", "weighted_mean", "max"]
PAIR_PARTS = ("{query}", "{document}")


class PoolingSection(Section):
    """Embeddings and scores: what is made of the hidden states of a text."""

    method: Literal["auto", "cls", "last", "mean", "weighted_mean", "max"] = "auto"
    """How the hidden states of a text become one: those of its first (cls) or last token, their
    mean, a mean in which later tokens count more, or their maximum. auto = what the checkpoint
    says, else mean for encoders and last for decoders."""

    normalize: bool | None = None
    """Whether embeddings have length 1 unless a request says otherwise. Default: what the
    checkpoint says, else yes."""

    activation: Literal["auto", "none", "sigmoid", "softmax"] = "auto"
    """What turns a classifier's numbers into scores; auto = what the checkpoint says, else sigmoid
    for one label, softmax for several, none for reward models."""

    prompts: dict[Name, str] = Field(default_factory=dict, max_length=256)
    """Texts put in front of inputs, by the name that requests choose (`prompt_name`); beside those
    of the checkpoint."""

    default_prompt: Name | None = None
    """Name of the prompt of requests that choose none. Default: the checkpoint's."""

    dimensions: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, max_length=64)
    """Sizes to which requests may cut embeddings; [] = any. Default: the checkpoint's, if it was
    trained for that."""

    pair_template: Annotated[str, Field(min_length=1, max_length=2**16)] | None = None
    """Text that a generating model reads as a reranker, with {query} and {document} and perhaps
    {instruction} in it. Default: that of Qwen3-Reranker."""

    instruction: str | None = None
    """What {instruction} becomes where a request has none of its own."""

    yes_token: Name = "yes"
    """Token whose probability is a generating reranker's score, against that of `no_token`."""

    no_token: Name = "no"
    """Its opposite."""

    step_token: Name | None = None
    """Token that ends a step; a process reward model judges each step there. Default: <extra_0>, as
    Qwen2.5-Math-PRM has it."""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        missing = [
            part for part in PAIR_PARTS if part not in (self.pair_template or "".join(PAIR_PARTS))
        ]
        if missing:
            raise conflict("pair_template", f"it lacks {' and '.join(missing)}")
        if self.yes_token == self.no_token:
            raise conflict("no_token", "it is the same as yes_token")
        return self
