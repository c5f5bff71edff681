"""Names of vLLM's parsers of tool calls and reasoning, and the same formats' names here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import UNSAID, Effect, Means, Refusal, Settings

TOOL_NAMES: Mapping[str, str] = {
    "hermes": "hermes",
    "qwen3_json": "hermes",
    "ernie45": "hermes",
    "granite": "granite",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "llama4",
    "pythonic": "llama4",
    "olmo3": "llama4",
    "mistral": "mistral",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "seed_oss": "seed_oss",
    "glm45": "glm45",
    "glm47": "glm45",
    "kimi_k2": "kimi_k2",
    "openai": "gpt-oss",
}
REASONING_NAMES: Mapping[str, str] = {
    "deepseek_r1": "deepseek-r1",
    "deepseek_v3": "qwen3",
    "qwen3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "kimi_k2": "qwen3",
    "nemotron_v3": "qwen3",
    "mistral": "mistral",
    "openai_gptoss": "gpt-oss",
    "seed_oss": "seed_oss",
    "step3": "deepseek-r1",
    "minimax_m2": "deepseek-r1",
}


def _parser(key: str, names: Mapping[str, str]) -> Means:
    """Return the rule of a parser's name."""

    def read(value: str, given: Mapping[str, Any]) -> Effect:
        if not value or value.lower() == "none":
            return Effect({key: "none"})
        if value not in names:
            raise Refusal(
                "not offered: this parser; leave it out, and the chat template decides; "
                f"supported: {', '.join(names)}"
            )
        return Effect({key: names[value]})

    def write(settings: Settings) -> Any:
        ours = settings.get(key)
        own = [theirs for theirs, named in names.items() if named == ours or theirs == ours]
        return own[0] if own else UNSAID

    return Means(keys=(key,), reads=read, writes=write)


TOOLS = _parser("api.tool_parser", TOOL_NAMES)
REASONING = _parser("api.reasoning_parser", REASONING_NAMES)
