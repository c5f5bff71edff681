"""Sampling parameters of one request: every field, its limits and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from remora.configs.errors import InvalidSampling
from remora.engine.beams.params import BeamParams
from remora.engine.tokens.stop_regex import check_stop_regex

MAX_SEED = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # spreads the indexes of one request over the seed space
MAX_LOGPROBS = 1024
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 32
MAX_N = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled. Immutable and validated on construction.

    max_tokens:       most output tokens; None = as many as context and KV memory allow
    min_tokens:       until then, end-of-sequence and stop ids are masked and stop strings ignored;
                      a complete grammar ends the output all the same
    temperature:      0 = greedy
    top_k:            0 = off
    logit_bias:       token id -> number added to its logit
    bad_words_ids:    runs of output tokens that are never completed
    allowed_token_ids:  only these are sampled; empty = all
    first_token_ids:  only these are sampled as the first output token; empty = all
    typical_p:        locally typical sampling after the other filters; 1 = off
    infill:           whether to prefer tokens that complete a gap in a text, and its end
    stop:             output ends before (`include_stop_in_output`: after) the first of these texts
    stop_regex:       likewise, the first match of one of these RE2 expressions, without anchors;
                      no match may be longer than 256 characters
    ignore_eos:       end-of-sequence ids do not end the output, unless they complete a grammar
    shown_special_ids: control tokens that remain in the text despite `skip_special_tokens`: the
                      marks of tool calls and reasoning
    seed:             same seed, same tokens, whatever else is in the batch; None = drawn on arrival
    custom_logit_processor:  name of the operator's function that changes the logits after bans
    custom_params:    its arguments
    logprobs:         None = none; k = the chosen token's and the k most likely ones', of the raw
                      distribution (before masks, bias, penalties and temperature)
    hidden_states:    whether to return the final hidden states of all tokens but the last; disables
                      prefix reuse for the request, whose n is 1
    prompt_logprobs:  as `logprobs`, for each prompt token; disables prefix reuse for the request
    logprob_token_ids:  tokens whose log-probabilities are returned as well, wherever `logprobs` and
                      `prompt_logprobs` are, whether likely or not
    max_drafts:       most drafts of speculative decoding in a step, 0 = none; None = the engine's
    beams:            beam search, which draws no tokens; the n best outputs arrive at the end

    Raises InvalidSampling, which names the field.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    infill: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    first_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    seed: int | None = None
    n: int = 1
    custom_logit_processor: str | None = None
    custom_params: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    hidden_states: bool = False
    max_drafts: int | None = None
    beams: BeamParams | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex"):  # scripts give a text or a list
            texts = getattr(self, name)
            if not isinstance(texts, tuple):
                found = (texts,) if isinstance(texts, str) else tuple(texts or ())
                object.__setattr__(self, name, found)
        self._check_numbers()
        self._check_texts()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSampling(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}).",
                "min_tokens",
            )
        self._check_logprob_ids()
        if self.hidden_states:
            self._check_hidden()
        if self.beams is not None:
            self._check_beams(self.beams)
        if self.custom_params and self.custom_logit_processor is None:
            raise InvalidSampling(
                "custom_params needs custom_logit_processor, which is not set.",
                "custom_params",
            )
        if any(not math.isfinite(bias) for bias in self.logit_bias.values()):
            raise InvalidSampling("logit_bias holds a value that is not finite.", "logit_bias")
        if len(self.bad_words_ids) > MAX_BAD_WORDS or any(
            not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS for ids in self.bad_words_ids
        ):
            raise InvalidSampling(
                f"bad_words takes up to {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_TOKENS} "
                "tokens.",
                "bad_words",
            )

    def _check_logprob_ids(self) -> None:
        ids, name = self.logprob_token_ids, "logprob_token_ids"
        if ids and self.logprobs is None and self.prompt_logprobs is None:
            raise InvalidSampling(f"{name} needs logprobs, which is not set.", name)
        if len(ids) > MAX_LOGPROBS:
            raise InvalidSampling(
                f"{name} has {len(ids)} ids; at most {MAX_LOGPROBS} are allowed.", name
            )

    def _check_hidden(self) -> None:
        if self.n > 1:
            raise InvalidSampling(f"n is {self.n}; it must be 1 with hidden states.", "n")
        for name in ("stop", "stop_regex"):  # the engine does not know where such an output ends
            if getattr(self, name):
                raise InvalidSampling(f"{name} must be empty with hidden states.", name)

    def _check_beams(self, beams: BeamParams) -> None:
        if self.n > beams.width:
            raise InvalidSampling(
                f"n is {self.n}; a search with {beams.width} beams has as many outputs at most.",
                "n",
            )
        for name, neutral in (
            ("temperature", (0.0, 1.0)),
            ("top_k", (0,)),
            ("top_p", (1.0,)),
            ("min_p", (0.0,)),
            ("typical_p", (1.0,)),
            ("infill", (False,)),
            ("logprob_token_ids", ((),)),
            ("hidden_states", (False,)),
            ("custom_logit_processor", (None,)),
        ):
            if getattr(self, name) not in neutral:
                raise InvalidSampling(
                    f"{name} does not work together with beam search; leave it out.", name
                )

    def stop_ids(self, eos_token_ids: Set[int], *, constrained: bool) -> Set[int]:
        """Return the tokens that end an output.

        constrained:  whether a grammar ends it, by an end-of-sequence token
        """
        ends = frozenset[int]() if self.ignore_eos and not constrained else eos_token_ids
        return ends | frozenset(self.stop_token_ids)

    def _check_numbers(self) -> None:
        for name, value, low, high in (
            ("max_tokens", self.max_tokens, 1, 2**31 - 1),
            ("min_tokens", self.min_tokens, 0, 2**31 - 1),
            ("max_drafts", self.max_drafts, 0, 2**31 - 1),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("typical_p", self.typical_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", self.repetition_penalty, 0.0, 100.0),
            ("seed", self.seed, 0, MAX_SEED),
            ("n", self.n, 1, MAX_N),
            ("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
        ):
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidSampling(
                    f"{name} is {value}; it must lie between {low} and {high}.", name
                )
        for name in ("top_p", "typical_p", "repetition_penalty"):
            if getattr(self, name) <= 0:
                raise InvalidSampling(f"{name} is 0; it must be greater than 0.", name)

    def _check_texts(self) -> None:
        for name, texts in (("stop", self.stop), ("stop_regex", self.stop_regex)):
            if len(texts) > MAX_STOP_STRINGS or any(
                not 1 <= len(text) <= MAX_STOP_CHARS for text in texts
            ):
                raise InvalidSampling(
                    f"{name} takes up to {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARS} "
                    "characters.",
                    name,
                )
        for pattern in self.stop_regex:
            check_stop_regex(pattern, max_width=MAX_STOP_CHARS)

    @property
    def has_filter(self) -> bool:
        """Whether the drawn tokens are limited by more than top-k, top-p and min-p."""
        return not self.is_greedy and (self.typical_p < 1 or self.infill)

    @property
    def is_greedy(self) -> bool:
        """Whether no token is drawn."""
        return self.temperature == 0.0 or self.beams is not None


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of one of a request's sequences, which alone has the same tokens with it."""
    return (seed + index * _GOLDEN) & MAX_SEED
