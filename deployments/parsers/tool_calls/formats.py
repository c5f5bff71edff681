"""The formats in which models write tool calls, by name.

Each entry of the table states the notation of its calls and the structural tags that constrain
them. `json_calls`, `xml_calls` and `python_calls` read the notations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from remora.deployments.parsers.event_writer import CallIdFactory
from remora.deployments.parsers.events import ReplyParser
from remora.deployments.parsers.text_reader import BLANKS, Steps
from remora.deployments.parsers.tool_calls import structural_tags as tags
from remora.deployments.parsers.tool_calls.call_parser import CallParser, CallSyntax, ParseContext
from remora.deployments.parsers.tool_calls.faults import FaultCallback, ignore_fault
from remora.deployments.parsers.tool_calls.ids import kimi_id, mistral_id, random_id
from remora.deployments.parsers.tool_calls.json_calls import Envelopes, NamedObjects
from remora.deployments.parsers.tool_calls.python_calls import read_python_calls
from remora.deployments.parsers.tool_calls.xml_calls import ArgumentType, XmlCalls
from remora.deployments.parsers.tools import Tool, ToolUse

_KIMI_NAME = re.compile(r"(?:functions\.)?(.+):\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One notation of tool calls.

    syntax:        how calls are delimited and read
    make_id:       makes ids for calls without one
    triggers:      texts that open a call, for the grammar; empty: a grammar cannot recognise calls
    make_tags:     makes the tag of a call of each tool, for the grammar
    between:       characters that may separate calls
    inner_markers: markers that only occur inside calls
    """

    name: str
    aliases: tuple[str, ...] = ()
    syntax: CallSyntax
    make_id: CallIdFactory = random_id
    triggers: tuple[str, ...] = ()
    make_tags: tags.TagFactory
    between: str = r" \n"
    inner_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must be visible to the parser."""
        return (*self.syntax.markers, *self.inner_markers)

    def parser(
        self,
        tools: Sequence[Tool],
        *,
        parallel: bool = True,
        make_id: CallIdFactory | None = None,
        note: FaultCallback = ignore_fault,
    ) -> ReplyParser:
        """Return the parser of one reply. Without `parallel` it keeps only the first call."""
        return CallParser(self.syntax, tools, make_id or self.make_id, parallel=parallel, note=note)

    def structural_tag(self, tools: Sequence[Tool]) -> tags.Tag | None:
        """Return the tag that constrains the arguments of strict tools to their schemas.

        None: no tool is strict, or a grammar cannot recognise calls.
        """
        if not self.triggers or not any(tool.strict for tool in tools):
            return None
        return tags.triggered(self.triggers, self.make_tags(tools))

    def calls_alone(self, use: ToolUse) -> tags.Tag:
        """Return the format of a reply of calls only."""
        made, syntax = self.make_tags(use.tools), self.syntax
        # The end of a call does not close a group of calls.
        closes = [c for c in syntax.closes if not any(tag["end"].endswith(c) for tag in made)]
        around = (syntax.wrappers, closes) if syntax.wrappers else ((), ())
        return tags.calls_alone(made, around, self.between, parallel=use.parallel)


def _kimi_name(name: str) -> tuple[str, str | None]:
    found = _KIMI_NAME.fullmatch(name)
    return (found[1], name) if found else (name, None)


_MISTRAL_LIST = Envelopes("[TOOL_CALLS]")
_MISTRAL_NAMED = NamedObjects(name_end="[ARGS]", id_mark="[CALL_ID]", ends=("[TOOL_CALLS]",))


def _read_mistral(context: ParseContext) -> Steps[None]:
    yield from context.reader.run(BLANKS)
    is_list = (yield from context.reader.sees("[")) or (yield from context.reader.sees("{"))
    yield from (_MISTRAL_LIST if is_list else _MISTRAL_NAMED)(context)


_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_GROUP = ("<｜tool▁calls▁begin｜>",)
_DEEPSEEK_CLOSES = (_DEEPSEEK_END, "<｜tool▁calls▁end｜>")
_DSML = "｜DSML｜"


def _qwen_syntax(element: str) -> CallSyntax:
    """Return the syntax of Qwen3-Coder's calls; `element` is around them."""
    return CallSyntax(
        opens=("<function=",),
        closes=(f"</{element}>",),
        wrappers=(f"<{element}>",),
        read=XmlCalls(
            name_end=">",
            key_open="<parameter=",
            key_ends=MappingProxyType({">": ArgumentType.BY_SCHEMA}),
            value_ends=("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>"),
            close="</function>",
            trims=True,
        ),
    )


_FORMATS = (
    ToolFormat(
        name="hermes",
        aliases=("qwen25", "qwen", "qwen3_json", "ernie45"),
        syntax=CallSyntax(
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            read=Envelopes("</tool_call>", "<tool_call>"),
        ),
        triggers=("<tool_call>",),
        make_tags=tags.tool_tags('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ),
    ToolFormat(
        name="granite",
        syntax=CallSyntax(opens=("<|tool_call|>",), read=Envelopes("<|tool_call|>")),
        triggers=("<|tool_call|>",),
        make_tags=tags.list_tags("<|tool_call|>["),
    ),
    ToolFormat(
        name="llama3",
        aliases=("llama3_json", "llama4_json"),
        syntax=CallSyntax(
            opens=("<|python_tag|>",),
            closes=("<|eom_id|>", "<|eot_id|>"),
            read=Envelopes("<|eom_id|>", "<|eot_id|>"),
            bare=Envelopes("<|eom_id|>", "<|eot_id|>", bare=True),
        ),
        triggers=('{"name": "',),
        make_tags=tags.tool_tags('{"name": "NAME", "parameters": ', "}"),
        between=r"; ,\n",
    ),
    ToolFormat(
        name="llama4",
        aliases=("llama4_pythonic", "pythonic", "olmo3"),
        syntax=CallSyntax(
            opens=("<|python_start|>",),
            closes=("<|python_end|>",),
            read=read_python_calls,
            bare=read_python_calls,
        ),
        make_tags=tags.python_tags,
    ),
    ToolFormat(
        name="mistral",
        syntax=CallSyntax(opens=("[TOOL_CALLS]",), read=_read_mistral),
        make_id=mistral_id,
        triggers=("[TOOL_CALLS]",),
        make_tags=tags.mistral_tags,
        inner_markers=("[CALL_ID]", "[ARGS]"),
    ),
    ToolFormat(
        name="deepseek_v3",
        aliases=("deepseek", "r1", "deepseek_r1"),
        syntax=CallSyntax(
            opens=(_DEEPSEEK_CALL,),
            closes=_DEEPSEEK_CLOSES,
            wrappers=_DEEPSEEK_GROUP,
            read=NamedObjects(
                lead=f"function{_DEEPSEEK_SEP}",
                name_end="```json",
                tail="```",
                ends=("```", _DEEPSEEK_CALL, _DEEPSEEK_END),
            ),
        ),
        triggers=(_DEEPSEEK_CALL,),
        make_tags=tags.tool_tags(
            f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}NAME\n```json\n", f"\n```{_DEEPSEEK_END}"
        ),
        inner_markers=(_DEEPSEEK_SEP,),
    ),
    ToolFormat(
        name="deepseek_v31",
        syntax=CallSyntax(
            opens=(_DEEPSEEK_CALL,),
            closes=_DEEPSEEK_CLOSES,
            wrappers=_DEEPSEEK_GROUP,
            read=NamedObjects(name_end=_DEEPSEEK_SEP, ends=(_DEEPSEEK_CALL, _DEEPSEEK_END)),
        ),
        triggers=(_DEEPSEEK_CALL,),
        make_tags=tags.tool_tags(f"{_DEEPSEEK_CALL}NAME{_DEEPSEEK_SEP}", _DEEPSEEK_END),
        inner_markers=(_DEEPSEEK_SEP,),
    ),
    ToolFormat(
        name="deepseek_v32",
        aliases=("deepseek_v4",),
        syntax=CallSyntax(
            opens=(f'<{_DSML}invoke name="',),
            closes=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
            wrappers=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
            read=XmlCalls(
                name_end='">',
                key_open=f'<{_DSML}parameter name="',
                key_ends=MappingProxyType(
                    {
                        '" string="true">': ArgumentType.TEXT,
                        '" string="false">': ArgumentType.VALUE,
                        '">': ArgumentType.BY_SCHEMA,
                    }
                ),
                value_ends=(f"</{_DSML}parameter>",),
                close=f"</{_DSML}invoke>",
            ),
        ),
        triggers=(f'<{_DSML}invoke name="',),
        make_tags=tags.tool_tags(
            f'<{_DSML}invoke name="NAME">\n', f"</{_DSML}invoke>", "deepseek_xml"
        ),
        inner_markers=(_DSML,),
    ),
    ToolFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml", "step3p5"),
        syntax=_qwen_syntax("tool_call"),
        triggers=("<function=",),
        make_tags=tags.tool_tags("<function=NAME>\n", "\n</function>", "qwen_xml"),
    ),
    ToolFormat(
        name="seed_oss",
        syntax=_qwen_syntax("seed:tool_call"),
        triggers=("<function=",),
        make_tags=tags.tool_tags("<function=NAME>\n", "\n</function>", "qwen_xml"),
    ),
    ToolFormat(
        name="glm45",
        aliases=("glm47",),
        syntax=CallSyntax(
            opens=("<tool_call>",),
            read=XmlCalls(
                key_open="<arg_key>",
                key_ends=MappingProxyType({"</arg_key>": ArgumentType.BY_SCHEMA}),
                value_open="<arg_value>",
                value_ends=("</arg_value>",),
                close="</tool_call>",
            ),
        ),
        triggers=("<tool_call>",),
        make_tags=tags.tool_tags("<tool_call>NAME", "</tool_call>", "glm_xml"),
        inner_markers=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat(
        name="kimi_k2",
        syntax=CallSyntax(
            opens=("<|tool_call_begin|>",),
            closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            wrappers=("<|tool_calls_section_begin|>",),
            read=NamedObjects(
                name_end="<|tool_call_argument_begin|>",
                split=_kimi_name,
                ends=("<|tool_call_begin|>", "<|tool_call_end|>"),
            ),
        ),
        make_id=kimi_id,
        triggers=("<|tool_call_begin|>",),
        make_tags=tags.kimi_tags,
        inner_markers=("<|tool_call_argument_begin|>",),
    ),
)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {name: entry for entry in _FORMATS for name in (entry.name, *entry.aliases)}
)
