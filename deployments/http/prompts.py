"""From texts, messages and ids to prompt ids, within the model's context.

Long inputs are tokenised off the event loop, and texts that cannot fit are refused by their
length in characters before they are tokenised at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from remora.configs.errors import InvalidRequest, PromptTooLong
from remora.configs.plan import EnginePlan
from remora.deployments.http.openai_bodies import Message, PromptInput, TemplateBody
from remora.deployments.http.sampling import check_vocabulary

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

OFF_LOOP_CHARS = 16_384

ResultT = TypeVar("ResultT")


async def encode(
    tokenizer: Tokenizer,
    plan: EnginePlan,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    param: str,
) -> list[list[int]]:
    """Return the ids of each text. Raises PromptTooLong."""
    for text in texts:
        _check_chars(len(text), tokenizer, plan, param)

    def work() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await _off_loop_if(sum(map(len, texts)) > OFF_LOOP_CHARS, work)


async def render(
    tokenizer: Tokenizer, plan: EnginePlan, messages: list[Message], options: TemplateBody
) -> str:
    """Return a conversation as the model's template writes it.

    Raises InvalidRequest and PromptTooLong.
    """
    written = [message.as_template_message() for message in messages]
    num_chars = sum(
        len(text) for message in written for text in message.values() if isinstance(text, str)
    )
    _check_chars(num_chars, tokenizer, plan, "messages")

    def work() -> str:
        return tokenizer.render_chat(
            written,
            add_generation_prompt=options.wants_generation_prompt,
            continue_final_message=bool(options.continue_final_message),
            template_kwargs=options.chat_template_kwargs or {},
        )

    try:
        return await _off_loop_if(num_chars > OFF_LOOP_CHARS, work)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, error.param or "messages", error.code) from None


async def prompt_ids(
    tokenizer: Tokenizer,
    plan: EnginePlan,
    prompts: Sequence[PromptInput],
    *,
    add_special_tokens: bool,
    param: str,
) -> list[list[int]]:
    """Return the ids of each prompt, given as text or ids.

    Raises InvalidRequest and PromptTooLong.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(
        await encode(tokenizer, plan, texts, add_special_tokens=add_special_tokens, param=param)
    )
    all_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
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
