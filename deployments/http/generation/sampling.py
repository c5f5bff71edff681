"""SamplingParams from a request's fields: explicit value, else the model's default, else neutral.

An omitted field stays None throughout, so that it never competes with the default that the model's
authors recommend in its generation_config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest, InvalidSampling
from remora.deployments.http.core.field_names import retold
from remora.deployments.http.core.fields import OpenAIBody, SamplingBody
from remora.engine.types import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from remora.deployments.http.generation.server_state import ServerState
    from remora.engine.tokens.tokenizer import Tokenizer

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def sampling_params(
    fields: SamplingBody,
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    names: Mapping[str, str] | None = None,
    prefix: str = "",
    **given: Any,
) -> SamplingParams:
    """Return the SamplingParams of one request.

    defaults:  the model's generation_config
    given:     parameters whose field names differ by dialect: max_tokens, min_tokens, seed, ...
    names:     parameter -> the caller's field name; other parameters get `prefix`

    Raises InvalidSampling and InvalidRequest, with the caller's names.
    """
    biases = fields.logit_bias or {}
    stop_ids = fields.stop_token_ids or []

    def callers(name: str) -> str:
        known = (names or {}).get(name)
        return known or (prefix + name if name in _FIELDS else name)

    check_vocabulary(biases, vocab_size, callers("logit_bias"))
    check_vocabulary(stop_ids, vocab_size, callers("stop_token_ids"))

    def pick(name: str, neutral: float) -> Any:
        explicit = getattr(fields, name)
        value = explicit if explicit is not None else defaults.get(name)
        return neutral if value is None else value

    try:
        return SamplingParams(
            temperature=float(pick("temperature", 1.0)),
            top_k=max(0, int(pick("top_k", 0))),
            top_p=float(pick("top_p", 1.0)),
            min_p=float(pick("min_p", 0.0)),
            typical_p=float(pick("typical_p", 1.0)),
            presence_penalty=float(pick("presence_penalty", 0.0)),
            frequency_penalty=float(pick("frequency_penalty", 0.0)),
            repetition_penalty=float(pick("repetition_penalty", 1.0)),
            logit_bias=biases,
            stop=tuple(fields.stop or ()),
            stop_regex=tuple(fields.stop_regex or ()),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=bool(fields.ignore_eos),
            skip_special_tokens=fields.skip_special_tokens is not False,
            custom_logit_processor=fields.custom_logit_processor,
            custom_params=fields.custom_params or {},
            max_drafts=fields.max_drafts,
            **{"n": fields.n or 1, **given},
        )
    except InvalidSampling as error:
        raise retold(error, callers) from None


def openai_sampling(
    fields: OpenAIBody,
    server: ServerState,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    names: Mapping[str, str] | None = None,
    **given: Any,
) -> SamplingParams:
    """Return the SamplingParams of a chat or text completion; `given` as in `sampling_params`."""
    tokenizer = server.tokenizer
    allowed = fields.allowed_token_ids or ()
    check_vocabulary(allowed, tokenizer.vocab_size, "allowed_token_ids")
    return sampling_params(
        fields,
        defaults=server.generation_defaults,
        vocab_size=tokenizer.vocab_size,
        names={"bad_words_ids": "bad_words", **(names or {})},
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        seed=as_seed(fields.seed),
        include_stop_in_output=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words_ids=_runs(tokenizer, fields.bad_words or ()),
        allowed_token_ids=tuple(allowed),
        first_token_ids=tuple(server.config.grammar.first_token_ids or ()),
        **given,
    )


def _runs(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the words, both at the start of a line and after a space."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    runs = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(run for run in runs if run))


def as_seed(seed: int | None) -> int | None:
    """Return any 64-bit seed, signed or not, in the engine's range; equal seeds stay equal."""
    return None if seed is None else seed & MAX_SEED


def check_vocabulary(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if one of the ids is outside the vocabulary."""
    bad = min(ids, default=0)
    if bad >= 0:
        bad = max(ids, default=0)
    if not 0 <= bad < vocab_size:
        message = f"{param} holds {str(bad)[:20]}; token ids lie between 0 and {vocab_size - 1}."
        raise InvalidRequest(message, param)
