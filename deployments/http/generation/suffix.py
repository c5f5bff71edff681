"""Fill-in-the-middle prompts, in the format of the model's training.

The format is detected from the vocabulary, where its markers are control tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.generation.bodies import CompletionBody

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

# Markers before the prompt, between prompt and suffix, and after the suffix.
_FORMS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
)


def with_suffix(tokenizer: Tokenizer, body: CompletionBody) -> list[str]:
    """Return the prompts of a body, combined with its suffix. Raises InvalidRequest."""
    known = frozenset(tokenizer.added_tokens.values())
    form = next((form for form in _FORMS if known.issuperset(form)), None)
    if form is None:
        raise unsupported("suffix", "suffix: this model was not made to fill in the middle.")
    if body.echo:
        raise unsupported("echo", "echo is not available with suffix.")
    before, between, after = form
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise InvalidRequest("suffix needs prompts that are texts.", "suffix")
    return [f"{before}{text}{between}{body.suffix}{after}" for text in texts]
