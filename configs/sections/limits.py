"""The section `limits`: what one request may ask for.

A request over a limit is refused before any of it is copied, and counted under the name of the key
(`remora_refusals_total`). The keys' upper bounds are the capacities of the layers below.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Seconds, Section

_MANY = 2**20


class LimitsSection(Section):
    """Limits of one request; a request over a limit gets HTTP 400 unless stated otherwise."""

    max_url_bytes: Annotated[int, Field(ge=64, le=64 * 1024)] = 8 * 1024
    """Longest URL, in bytes; longer ones get HTTP 414."""

    max_headers: Annotated[int, Field(ge=16, le=1000)] = 100
    """Most headers; requests with more get HTTP 431."""

    max_header_bytes: Annotated[int, Field(ge=1024, le=64 * 1024)] = 32 * 1024
    """Total size of all headers, in bytes; larger ones get HTTP 431."""

    body_timeout_s: Seconds = 30.0
    """Seconds until a request body must have arrived; later ones get HTTP 408."""

    stream_timeout_s: Seconds = 60.0
    """Seconds after which a stream is closed whose client reads nothing."""

    max_json_depth: Annotated[int, Field(ge=8, le=512)] = 64
    """Deepest nesting of objects and lists in a body."""

    max_json_digits: Annotated[int, Field(ge=20, le=4096)] = 64
    """Most digits of a number in a body."""

    max_messages: Annotated[int, Field(ge=1, le=_MANY)] = 2048
    """Most messages of a chat."""

    max_parts: Annotated[int, Field(ge=1, le=_MANY)] = 512
    """Most content parts of a message."""

    max_tools: Annotated[int, Field(ge=1, le=_MANY)] = 128
    """Most tools of a request."""

    template_timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """CPU seconds to render the chat template."""

    max_template_chars: Annotated[int, Field(ge=1024, le=2**30)] = 4 * 2**20
    """Most characters of a rendered chat template."""

    max_stops: Annotated[int, Field(ge=1, le=16)] = 16
    """Most stop strings."""

    max_stop_chars: Annotated[int, Field(ge=1, le=256)] = 256
    """Most characters of a stop string."""

    max_logit_biases: Annotated[int, Field(ge=0, le=_MANY)] = 1024
    """Most tokens with a logit bias."""

    max_prompts: Annotated[int, Field(ge=1, le=_MANY)] = 256
    """Most prompts of a request."""

    max_inputs: Annotated[int, Field(ge=1, le=_MANY)] = 2048
    """Most texts of a request for embeddings or scores."""

    max_n: Annotated[int, Field(ge=1, le=16)] = 16
    """Most outputs per prompt (n and best_of)."""

    max_sequences: Annotated[int, Field(ge=1, le=_MANY)] = 256
    """Most outputs of a request: prompts times n."""

    max_hidden_tokens: Annotated[int, Field(ge=1, le=_MANY)] = 4096
    """Most tokens, of prompts and outputs, of a request that returns hidden states."""

    max_top_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    """Most candidates per token whose log-probabilities are returned, for outputs and prompts."""
