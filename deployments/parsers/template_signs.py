"""Recognises a model's formats by its chat template.

A template that renders earlier calls and reasoning shows how the model writes new ones, by markers
that no other family uses. The first entry whose texts all occur decides.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """A format, and the texts that all occur in its family's templates."""

    format_name: str
    texts: tuple[str, ...]


TOOL_SIGNS: tuple[Sign, ...] = (
    Sign("qwen3_coder", ("<tool_call>", "<function=")),
    Sign("seed_oss", ("<seed:tool_call>",)),
    Sign("glm45", ("<arg_key>",)),
    Sign("deepseek_v32", ("｜DSML｜",)),
    Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Sign("mistral", ("[TOOL_CALLS]",)),
    Sign("granite", ("<|start_of_role|>", "<|tool_call|>")),
    Sign("llama4", ("<|python_start|>",)),
    Sign("llama3", ("<|python_tag|>",)),
    Sign("llama3", ("parameters", "dictionary of argument name and its value")),
    Sign("hermes", ("<tool_call>", "arguments")),
)
REASONING_SIGNS: tuple[Sign, ...] = (
    Sign("mistral", ("[THINK]",)),
    Sign("kimi", ("◁think▷",)),
    Sign("seed_oss", ("<seed:think>",)),
    # A template with opening tags states in each prompt whether there is reasoning. One that only
    # cuts earlier reasoning at its end expects replies to begin with reasoning.
    Sign("qwen3", ("<think>",)),
    Sign("deepseek-r1", ("</think>",)),
)
HARMONY_SIGNS: tuple[Sign, ...] = (
    Sign("gpt-oss", ("<|channel|>", "<|message|>", "analysis", "commentary")),
)


def matching_format(template_source: str | None, signs: tuple[Sign, ...]) -> str | None:
    """Return the name of the format that a template shows, or None."""
    source = template_source or ""
    found = (sign for sign in signs if all(text in source for text in sign.texts))
    return next((sign.format_name for sign in found), None)
