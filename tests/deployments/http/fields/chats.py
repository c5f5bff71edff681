"""Fields of OpenAI's chats and text completions, with the extensions of vLLM and SGLang."""

from __future__ import annotations

from remora.deployments.http.generation.bodies import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from tests.deployments.fakes import EOS
from tests.deployments.http.fields.observing import Api, Row, Rows, effect, hint, refused
from tests.deployments.http.fields.shared import (
    ADD,
    CONSTRAINTS,
    CONVERSATION,
    HELLO,
    HINTS,
    SAMPLING,
    STREAM_OPTIONS,
    TEMPLATE,
    rich_server,
)

OPENAI: Rows = {
    **SAMPLING,
    **HINTS,
    **CONSTRAINTS,
    **STREAM_OPTIONS,
    "model": refused("other"),
    "max_tokens": effect(3),
    "min_tokens": effect(3),
    "seed": effect(3),
    "include_stop_str_in_output": effect(True),
    "prompt_logprobs": effect(1),
    "bad_words": effect(["x"]),
    "allowed_token_ids": effect([65]),
    "add_special_tokens": effect(True),
    "truncate_prompt_tokens": effect(1),
    "truncation_side": effect("right", {"truncate_prompt_tokens": 1}),
    "stream": effect(True),
    "return_token_ids": effect(True),
    "return_prompt_text": effect(True),
    "return_hidden_states": effect(True),
    "priority": effect(3),
    "cache_salt": effect("a"),
    "rid": effect("mine"),
    "request_id": effect("mine"),
    "task_id": effect("sum"),
}
CHAT: Rows = {
    **OPENAI,
    **TEMPLATE,
    **CONVERSATION,
    "best_of": refused(2),
    "max_completion_tokens": effect(3),
    "logprobs": effect(True),
    "top_logprobs": effect(2, {"logprobs": True}),
    "logprob_token_ids": effect([7], {"logprobs": True}),
    "return_tokens_as_token_ids": effect(True, {"logprobs": True}),
    "echo": effect(True, {"messages[0].role": "assistant"}),
    "store": effect(True, then="/v1/chat/completions"),
    "metadata": effect({"a": "b"}, {"store": True}, then="/v1/chat/completions"),
    "include_reasoning": effect(False),
    "separate_reasoning": effect(False),
    "stream_reasoning": effect(False, {"stream": True}),
    "thinking_token_budget": effect(3),
    "prediction.type": refused("image", {"prediction": {"type": "content", "content": "a"}}),
    "prediction.content[0].type": refused(
        "image", {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}}
    ),
    "prediction.content[0].text": effect(
        "b", {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}}
    ),
}
COMPLETION: Rows = {
    **OPENAI,
    "prompt": effect("abc"),
    "prompt_embeds": effect([[1.0, 2.0]], {"prompt": None, "prompt_embeds": [[0.5, 2.0]]}),
    "best_of": effect(2),
    "suffix": effect("b"),
    "add_special_tokens": effect(False),
    "echo": effect(True),
    "logprobs": effect(2),
    "logprob_token_ids": effect([7], {"logprobs": 1}),
    "return_tokens_as_token_ids": effect(True, {"logprobs": 1}),
    "metadata": hint({"a": "b"}),
}


def _of_several(rows: Rows) -> dict[str, Row]:
    """Return the rows of a conversation as those of the first of several."""
    moved = {}
    for name, row in rows.items():
        needs = {
            key.replace("messages[0]", "messages[0][0]"): [value] if key == "messages" else value
            for key, value in row.needs.items()
        }
        moved[name.replace("messages[0]", "messages[0][0]")] = row._replace(needs=needs)
    return moved


BATCH: Rows = {
    **{name: row for name, row in CHAT.items() if name not in CONVERSATION},
    **_of_several(CONVERSATION),
    **dict.fromkeys(STREAM_OPTIONS, refused(True, named="stream_options")),
    "stream": refused(True),
    "store": refused(True),
    "echo": refused(True),
    "stream_reasoning": hint(False),
    "metadata": hint({"a": "b"}),
}
# Of tools, only what templates show decides a prompt.
PROMPT: Rows = {
    **TEMPLATE,
    "tools[0].function.strict": hint(True, {"tools": [ADD]}),
    "functions[0].strict": hint(True, {"functions": [ADD["function"]]}),
    "tool_choice": effect("none", {"tools": [ADD]}),
    "parallel_tool_calls": hint(False, {"tools": [ADD]}),
}
TOKENIZE: Rows = {
    **PROMPT,
    **CONVERSATION,
    "model": refused("other"),
    "prompt": refused("a"),
    "add_special_tokens": effect(True),
    "return_token_strs": effect(True),
}
DETOKENIZE: Rows = {
    "model": refused("other"),
    "tokens": effect([65]),
    "skip_special_tokens": effect(True),
}

APIS = {
    "chat": Api(ChatBody, "/v1/chat/completions", {"messages": HELLO}, CHAT, rich_server()),
    "chat batch": Api(
        ChatBatchBody, "/v1/chat/completions/batch", {"messages": [HELLO]}, BATCH, rich_server()
    ),
    "completion": Api(
        CompletionBody, "/v1/completions", {"prompt": "ab"}, COMPLETION, rich_server()
    ),
    "tokenize": Api(TokenizeBody, "/tokenize", {"messages": HELLO}, TOKENIZE, rich_server()),
    "detokenize": Api(DetokenizeBody, "/detokenize", {"tokens": [EOS]}, DETOKENIZE, rich_server()),
}
