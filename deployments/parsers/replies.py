"""The reply formats of a served model, and the parsers made from them.

A replica chooses its formats once, when it starts: by name, or by what its checkpoint contains.
A request's prompt and tools then decide how its replies are parsed. Knows no HTTP and no API
dialect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self

from remora.configs.errors import InvalidRequest
from remora.deployments.parsers.control_tokens import ControlTokens
from remora.deployments.parsers.events import ReplyParser
from remora.deployments.parsers.format_choice import choose_formats, tool_parser_names
from remora.deployments.parsers.harmony import HarmonyFormat, HarmonyReader
from remora.deployments.parsers.reasoning import (
    ReasoningFormat,
    ReasoningSplitter,
    ReasoningStart,
)
from remora.deployments.parsers.reply_reader import (
    PartReader,
    ReasoningAwareParser,
    ReasoningReader,
    ReplyReader,
)
from remora.deployments.parsers.response_template import CheckpointFormat
from remora.deployments.parsers.tool_calls import grammars as call_grammars
from remora.deployments.parsers.tool_calls.faults import CallFault, FaultCallback
from remora.deployments.parsers.tool_calls.forced import forced_parser
from remora.deployments.parsers.tool_calls.formats import ToolFormat
from remora.deployments.parsers.tool_calls.ids import random_id
from remora.deployments.parsers.tools import NO_TOOLS, ToolChoice, ToolUse
from remora.engine.grammar.constraint import Constraint
from remora.engine.types import ReasoningBudget

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

FORCED = "forced"
"""Format name reported for replies that must be tool calls."""

ParserFactory = Callable[[], ReplyParser | None]
NoteCallFault = Callable[[str, CallFault], object]


@dataclass(frozen=True)
class ReplyFormats:
    """The formats of one served model.

    tool_format:       notation of tool calls; None: unknown, or part of `checkpoint_format`
    reasoning_format:  notation of reasoning; None likewise
    checkpoint_format: reads reasoning and calls together: the checkpoint's response template, or
                       gpt-oss's messages
    """

    tokenizer: Tokenizer
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    checkpoint_format: CheckpointFormat | HarmonyFormat | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tool_parser: str, reasoning_parser: str) -> Self:
        """Choose a model's formats. Each parser is `auto`, `none`, `response_template` or a name.

        Raises ConfigError, which lists the names.
        """
        return cls(tokenizer, *choose_formats(tokenizer, tool_parser, reasoning_parser))

    @property
    def tool_format_name(self) -> str | None:
        """Name of the format of tool calls."""
        if self.tool_format is not None:
            return self.tool_format.name
        form = self.checkpoint_format
        return form.name if form is not None and form.has_calls else None

    @property
    def reasoning_format_name(self) -> str | None:
        """Name of the format of reasoning."""
        if self.reasoning_format is not None:
            return self.reasoning_format.name
        form = self.checkpoint_format
        return form.name if form is not None and form.has_reasoning else None

    def check_tools(self, use: ToolUse) -> None:
        """Raise InvalidRequest if the model may call tools but its notation is unknown."""
        if use.choice is ToolChoice.AUTO and use.tools and self.tool_format_name is None:
            raise InvalidRequest(
                "tool_choice auto needs this model's tool-call format, which its chat template "
                "does not show. Start the server with api.tool_parser set to one of "
                f"{', '.join(tool_parser_names())}; or send tool_choice required, none, or the "
                "name of a tool, which work with any model.",
                "tool_choice",
            )

    def shown_special_ids(self, use: ToolUse) -> frozenset[int]:
        """Return the control tokens that must stay in the text for replies to be parsed."""
        shown = self._control_tokens.reasoning_ids
        return shown | self.call_mark_ids if self.reads_calls(use) else shown

    @property
    def call_mark_ids(self) -> frozenset[int]:
        """Control tokens of the model's tool calls."""
        return self._control_tokens.call_ids

    def reasoning_budget(
        self,
        prompt: str,
        *,
        budget: int | None = None,
        continues: bool = False,
        use: ToolUse = NO_TOOLS,
    ) -> ReasoningBudget | None:
        """Return the reasoning that the reply to a prompt starts in; None if it does not.

        budget:     most tokens of reasoning
        continues:  whether the reply continues the prompt's last message

        None also where the model may open its reasoning itself: a grammar that waited for the end
        of reasoning could wait for ever. See `open_reasoning`.
        """
        if self.checkpoint_format is not None:
            end = self.checkpoint_format.reasoning_end(prompt)
        else:
            form, start = self._reasoning_start(prompt, continues=continues)
            end = form.closing if form and start is ReasoningStart.WITHIN else None
        if end is None:
            return None
        ids = self.tokenizer.encode(end, add_special_tokens=False)
        exits = self._control_tokens.exit_ids if self.reads_calls(use) else frozenset[int]()
        return ReasoningBudget(end=end, end_ids=tuple(ids), budget=budget, exit_ids=exits)

    def open_reasoning(self, prompt: str, *, continues: bool = False) -> str:
        """Return the prompt with reasoning opened at its end, if the model may open it itself.

        For requests with a grammar or a reasoning budget, which need to know that the reply starts
        with reasoning. A prompt whose reasoning is open or over, or of a model without reasoning,
        is returned unchanged.
        """
        opening = None
        if self.checkpoint_format is not None:
            opening = None if continues else self.checkpoint_format.reasoning_opening(prompt)
        else:
            form, start = self._reasoning_start(prompt, continues=continues)
            if form and start is ReasoningStart.OPEN:
                opening = f"{form.opening}\n"
        return prompt if opening is None else prompt + opening

    def make_parser(
        self,
        *,
        prompt: str,
        use: ToolUse,
        separate_reasoning: bool = True,
        stream_reasoning: bool = True,
        continues: bool = False,
        skip_special_tokens: bool = True,
        note: NoteCallFault = lambda *_: None,
    ) -> ParserFactory:
        """Return a factory of parsers, one for each reply to a prompt.

        It returns None where all text is the answer, a `ReplyReader` where there may be reasoning,
        and else a parser of tool calls.

        separate_reasoning:   whether reasoning is separate from the answer, or part of its text
        stream_reasoning:     whether reasoning is streamed, or emitted whole at its end
        skip_special_tokens:  as in the request's sampling parameters
        note:                 takes the format's name and each fault of a call
        """
        note_fault = partial(note, FORCED if use.is_forced else self.tool_format_name or "none")
        hidden = frozenset[int]()
        if skip_special_tokens:
            hidden = self.tokenizer.special_ids - self.shown_special_ids(use)
        options = {"separate": separate_reasoning, "stream": stream_reasoning}

        def read(parser: ReasoningAwareParser) -> ReplyReader:
            return ReplyReader(
                parser, lambda i: b"" if i in hidden else self.tokenizer.token_bytes(i)
            )

        if self.checkpoint_format is not None:
            make = self._checkpoint_reader(self.checkpoint_format, prompt, use, note_fault, options)
            return lambda: read(make())
        form, start = self._reasoning_start(prompt, continues=continues)
        if form is None or start is ReasoningStart.OVER:
            return lambda: self._call_parser(use, note_fault)
        interrupts = self._call_openers(use)
        return lambda: read(
            ReasoningReader(
                ReasoningSplitter(form, start, interrupts=interrupts),
                self._call_parser(use, note_fault),
                **options,
            )
        )

    def _checkpoint_reader(
        self,
        checkpoint: CheckpointFormat | HarmonyFormat,
        prompt: str,
        use: ToolUse,
        note: FaultCallback,
        options: dict[str, bool],
    ) -> Callable[[], ReasoningAwareParser]:
        """Return a factory of parsers in the checkpoint's own format."""
        is_read = self.reads_calls(use)
        if isinstance(checkpoint, HarmonyFormat):
            return lambda: HarmonyReader(
                checkpoint,
                prompt,
                use=use if is_read else None,
                after=self._call_parser(use, note),
                make_id=random_id,
                note=note,
                **options,
            )
        return lambda: PartReader(
            checkpoint,
            prompt,
            tools=use.as_openai() if is_read and checkpoint.has_calls else None,
            after=self._call_parser(use, note),
            make_id=random_id,
            parallel=use.parallel,
            note=note,
            **options,
        )

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """Return the constraint that a request's tools put on its replies, if any.

        A forced choice is constrained to its schema whatever the model's format. A free choice with
        strict tools is constrained to their schemas from the opening of a call, in formats that a
        grammar can describe; in others `strict` is advice.
        """
        if use.is_forced:
            return call_grammars.forced_calls(use)
        if not self.reads_calls(use) or self.tool_format is None:
            return None
        tag = self.tool_format.structural_tag(use.tools)
        return None if tag is None else call_grammars.from_tag(tag)

    def calls_or(self, answer: Constraint, use: ToolUse) -> Constraint | None:
        """Return the constraint of replies that are either calls or a constrained answer.

        None: no grammar can describe calls in the model's format.
        Raises ConstraintError if the answer's source is malformed.
        """
        form = self.tool_format or self.checkpoint_format
        if form is None or isinstance(form, HarmonyFormat):
            return None
        calls = form.calls_alone(use)
        return None if calls is None else call_grammars.calls_or(calls, answer)

    def reads_calls(self, use: ToolUse) -> bool:
        """Whether replies are searched for calls in the model's own format."""
        has_format = self.tool_format_name is not None
        return has_format and use.choice is ToolChoice.AUTO and bool(use.tools)

    def calls_are_answers(self, use: ToolUse) -> bool:
        """Whether calls replace a constrained answer; in gpt-oss's format they precede it."""
        return self.reads_calls(use) and not isinstance(self.checkpoint_format, HarmonyFormat)

    def _call_parser(self, use: ToolUse, note: FaultCallback) -> ReplyParser | None:
        if use.is_forced:
            make_id = random_id if self.tool_format is None else self.tool_format.make_id
            return forced_parser(use, make_id, note)
        if not self.reads_calls(use) or self.tool_format is None:
            return None
        return self.tool_format.parser(use.tools, parallel=use.parallel, note=note)

    def _call_openers(self, use: ToolUse) -> tuple[str, ...]:
        if not self.reads_calls(use) or self.tool_format is None:
            return ()
        syntax = self.tool_format.syntax
        return (*syntax.opens, *syntax.wrappers)

    def _reasoning_start(
        self, prompt: str, *, continues: bool
    ) -> tuple[ReasoningFormat | None, ReasoningStart]:
        form = self.reasoning_format
        if form is None:
            return None, ReasoningStart.OVER
        return form, form.start(prompt, self._control_tokens.turn_pattern, continues=continues)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(
            self.tokenizer, self.tool_format, self.reasoning_format, self.checkpoint_format
        )
