"""What LLM returns: the outputs of a prompt, or its embedding."""

from __future__ import annotations

from dataclasses import dataclass, field

from remora.engine.types import FinishReason, FloatArray, Output, TokenLogprob


@dataclass(slots=True)
class Completion:
    """One of a prompt's n outputs.

    score:  of a beam search's output, by which these are ranked, best first
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    index: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities, when requested."""
        if self.logprobs is None:
            return None
        return sum(line.logprob for line in self.logprobs)


@dataclass(slots=True)
class Generation:
    """The outputs of one prompt. The properties below `outputs` are those of the first one.

    prompt:           the text, also of a chat; None if it was given in another form
    prompt_token_ids: none of a prompt given as embeddings
    prompt_logprobs:  one for each prompt token, the first None; when requested
    hidden_states:    [num_tokens - 1, hidden_size] float32, final states of prompt and output; when
                      requested
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    hidden_states: FloatArray | None = None
    prompt: str | None = None
    request_id: str = ""

    @property
    def outputs(self) -> list[Completion]:
        """The completions, by vLLM's name."""
        return self.completions

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(each.finish_reason is not None for each in self.completions)

    @property
    def token_ids(self) -> list[int]:
        """Output token ids."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        """Output text."""
        return self.completions[0].text

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One for each output token, when requested."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended."""
        return self.completions[0].finish_reason

    def extend(self, output: Output) -> None:
        """Add the newest output of one of the sequences."""
        completion = self.completions[output.index]
        completion.token_ids += output.token_ids
        completion.text += output.text
        completion.finish_reason = output.finish_reason
        completion.stop_reason, completion.score = output.stop_reason, output.score
        if output.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or ()), *output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.hidden_states is not None:
            self.hidden_states = output.hidden_states
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class Vector:
    """An embedding as numbers."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text.

    vector:  [size] float32
    """

    prompt: str | None
    prompt_token_ids: list[int]
    vector: FloatArray

    @property
    def outputs(self) -> Vector:
        """The embedding as vLLM returns it: `outputs.embedding`."""
        return Vector(self.vector.tolist())
