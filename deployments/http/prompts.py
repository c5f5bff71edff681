"""From texts, messages and ids to prompt ids, within the model's context.

Long inputs are tokenised off the event loop, and texts that cannot fit are refused by their
length in characters before they are tokenised at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.plan import EnginePlan
from remora.deployments.http.chat_reasoning import template_variables
from remora.deployments.http.fields import OpenAIBody
from remora.deployments.http.messages import Message
from remora.deployments.http.openai_bodies import PromptInput, TemplateBody
from remora.deployments.http.sampling import check_vocabulary
from remora.deployments.http.tools_body import template_tools, tool_use_of

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

OFF_LOOP_CHARS = 16_384
# Tokens at a cut may differ from those of the whole text; so many more are made and then dropped.
_CUT_MARGIN_TOKENS = 64

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a prompt is kept: its last tokens, or with `keeps_start` its first."""

    num_tokens: int
    keeps_start: bool = False

    def of(self, ids: list[int]) -> list[int]:
        """Return what is kept."""
        return ids[: self.num_tokens] if self.keeps_start else ids[-self.num_tokens :]

    def of_text(self, text: str, tokenizer: Tokenizer) -> str:
        """Return a part of a text that holds the tokens to be kept."""
        num_chars = (self.num_tokens + _CUT_MARGIN_TOKENS) * tokenizer.max_token_chars
        return text[:num_chars] if self.keeps_start else text[-num_chars:]


def cut_of(body: OpenAIBody, plan: EnginePlan, max_tokens: int | None) -> Cut | None:
    """Return how prompts are cut, if they are. Raises InvalidRequest."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        if body.truncation_side is not None:
            message = "truncation_side needs truncate_prompt_tokens."
            raise InvalidRequest(message, "truncation_side")
        return None
    room = max(1, plan.max_sequence_tokens - (1 if max_tokens is None else max_tokens))
    if wanted == 0 or wanted > plan.max_sequence_tokens:
        message = (
            f"truncate_prompt_tokens is {wanted}; it must lie between 1 and "
            f"{plan.max_sequence_tokens}, or be -1: as many as fit."
        )
        raise InvalidRequest(message, "truncate_prompt_tokens")
    return Cut(room if wanted < 0 else wanted, keeps_start=body.truncation_side == "right")


async def encode(
    tokenizer: Tokenizer,
    plan: EnginePlan,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    param: str,
    cut: Cut | None = None,
) -> list[list[int]]:
    """Return the ids of each text. Raises PromptTooLong."""
    if cut is not None:
        texts = [cut.of_text(text, tokenizer) for text in texts]
    else:
        for text in texts:
            _check_chars(len(text), tokenizer, plan, param)

    def work() -> list[list[int]]:
        all_ids = [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return all_ids if cut is None else [cut.of(ids) for ids in all_ids]

    return await _off_loop_if(sum(map(len, texts)) > OFF_LOOP_CHARS, work)


async def render(
    tokenizer: Tokenizer, plan: EnginePlan, messages: list[Message], options: TemplateBody
) -> str:
    """Return a conversation as the model's template writes it.

    Raises InvalidRequest and PromptTooLong.
    """
    tools = template_tools(tool_use_of(options))
    documents = options.documents or None
    variables = template_variables(tokenizer, options)
    num_chars = sum(message.num_chars for message in messages)
    num_chars += sum(len(str(given)) for given in (tools, documents) if given)
    _check_chars(num_chars, tokenizer, plan, "messages")

    def work() -> str:
        return tokenizer.render_chat(
            [message.as_template_message() for message in messages],
            add_generation_prompt=options.wants_generation_prompt,
            continue_final_message=bool(options.continue_final_message),
            tools=tools,
            documents=documents,
            template_kwargs=variables,
        )

    try:
        return await _off_loop_if(num_chars > OFF_LOOP_CHARS, work)
    except InvalidRequest as error:
        param = error.param or "messages"
        raise InvalidRequest(error.message, param, error.code, limit=error.limit) from None


async def prompt_ids(
    tokenizer: Tokenizer,
    plan: EnginePlan,
    prompts: Sequence[PromptInput],
    *,
    add_special_tokens: bool,
    param: str,
    cut: Cut | None = None,
) -> list[list[int]]:
    """Return the ids of each prompt, given as text or ids.

    Raises InvalidRequest and PromptTooLong.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(
        await encode(
            tokenizer, plan, texts, add_special_tokens=add_special_tokens, param=param, cut=cut
        )
    )
    all_ids = [
        next(encoded) if isinstance(prompt, str) else prompt if cut is None else cut.of(prompt)
        for prompt in prompts
    ]
    for prompt, ids in zip(prompts, all_ids, strict=True):
        if not ids:
            raise InvalidRequest(f"{param} is empty; at least one token is needed.", param)
        # A longer list is refused for its length; no need to look at each id.
        if not isinstance(prompt, str) and len(ids) <= plan.max_sequence_tokens:
            check_vocabulary(ids, tokenizer.vocab_size, param)
    return all_ids


def check_room(num_prompt: int, max_tokens: int | None, plan: EnginePlan, param: str) -> None:
    """Raise PromptTooLong if prompt and output cannot fit the context or the KV memory."""
    limit = plan.max_sequence_tokens
    total = num_prompt + (1 if max_tokens is None else max_tokens)
    if total <= limit:
        return
    what = "context length" if limit == plan.max_model_len else "sequence length (KV memory)"
    output = "at least 1" if max_tokens is None else str(max_tokens)
    message = (
        f"This model's maximum {what} is {limit} tokens. However, you requested {total} tokens "
        f"({num_prompt} in the {param}, {output} in the completion), {total - limit} too many. "
        f"Please reduce the length of the {param} or completion."
    )
    raise PromptTooLong(message, param)


def _check_chars(num_chars: int, tokenizer: Tokenizer, plan: EnginePlan, param: str) -> None:
    limit = plan.max_sequence_tokens
    if num_chars > limit * tokenizer.max_token_chars:
        message = (
            f"This model's maximum context length is {limit} tokens. However, the {param} has "
            f"{num_chars} characters, which is more than {limit} tokens can hold. "
            f"Please reduce the length of the {param}."
        )
        raise PromptTooLong(message, param)


async def _off_loop_if(is_long: bool, work: Callable[[], ResultT]) -> ResultT:
    return await asyncio.to_thread(work) if is_long else work()
