"""How much one request may ask for: the section `limits` of a configuration.

A request beyond any of them is refused before anything of it is copied, and counted under the name
of the key (`remora_refusals_total`). Upper bounds of the keys are what the layers below can hold.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Seconds, Section

_MANY = 2**20


class LimitsSection(Section):
    """How much one request may ask for; beyond it HTTP 400 where nothing else is said."""

    max_url_bytes: Annotated[int, Field(ge=64, le=64 * 1024)] = 8 * 1024
    """Longest URL, in bytes; beyond it HTTP 414."""

    max_headers: Annotated[int, Field(ge=16, le=1000)] = 100
    """Most headers; beyond it HTTP 431."""

    max_header_bytes: Annotated[int, Field(ge=1024, le=64 * 1024)] = 32 * 1024
    """Most bytes of all headers together; beyond it HTTP 431."""

    body_timeout_s: Seconds = 30.0
    """Seconds in which a body must have arrived; beyond it HTTP 408."""

    stream_timeout_s: Seconds = 60.0
    """Seconds after which a stream is closed whose client takes nothing of it."""

    max_json_depth: Annotated[int, Field(ge=8, le=512)] = 64
    """Deepest nesting of objects and lists in a body."""

    max_json_digits: Annotated[int, Field(ge=20, le=4096)] = 64
    """Most digits of a number in a body."""

    max_messages: Annotated[int, Field(ge=1, le=_MANY)] = 2048
    """Most messages of a chat."""

    max_parts: Annotated[int, Field(ge=1, le=_MANY)] = 512
    """Most parts of a message."""

    max_tools: Annotated[int, Field(ge=1, le=_MANY)] = 128
    """Most tools that a model is told of."""

    template_timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Seconds of processor time that writing a chat by the model's template may take."""

    max_template_chars: Annotated[int, Field(ge=1024, le=2**30)] = 4 * 2**20
    """Most characters that the model's template may write."""

    max_stops: Annotated[int, Field(ge=1, le=16)] = 16
    """Most texts that end an output."""

    max_stop_chars: Annotated[int, Field(ge=1, le=256)] = 256
    """Most characters of a text that ends an output."""

    max_logit_biases: Annotated[int, Field(ge=0, le=_MANY)] = 1024
    """Most tokens with a bias."""

    max_prompts: Annotated[int, Field(ge=1, le=_MANY)] = 256
    """Most prompts of one request."""

    max_inputs: Annotated[int, Field(ge=1, le=_MANY)] = 2048
    """Most texts of one request for embeddings or scores."""

    max_n: Annotated[int, Field(ge=1, le=16)] = 16
    """Most outputs for one prompt: n and best_of."""

    max_sequences: Annotated[int, Field(ge=1, le=_MANY)] = 256
    """Most outputs of one request: prompts times n."""

    max_hidden_tokens: Annotated[int, Field(ge=1, le=_MANY)] = 4096
    """Most tokens of a request, prompts and outputs, whose hidden states are told."""

    max_top_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    """Most candidates that are told of a token, of outputs and of prompts."""
