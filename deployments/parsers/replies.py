"""What a served model's replies look like, and what reads them.

Formats are chosen once, when a replica starts: by name, or told from what came with the
checkpoint. From then on a request's prompt and tools say what its replies are read by. Knows
nothing of HTTP and of any dialect.
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
from remora.deployments.parsers.harmony import HarmonyFormat
from remora.deployments.parsers.reasoning import ReasoningFormat, ReasoningSplitter, ReasoningStart
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
"""Name of the format of replies that have to be calls."""

ParserFactory = Callable[[], ReplyParser | None]
NoteCallFault = Callable[[str, CallFault], object]


@dataclass(frozen=True, kw_only=True)
class ReplyFormats:
    """The formats of one served model.

    tool_format:       how it writes tool calls; None: not known, or read by the checkpoint's own
    reasoning_format:  likewise its thought
    checkpoint_format: what reads thought and calls together: the checkpoint's response template,
                       or gpt-oss's messages
    """

    tokenizer: Tokenizer
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    checkpoint_format: CheckpointFormat | HarmonyFormat | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tool_parser: str, reasoning_parser: str) -> Self:
        """Choose the formats of a model: `auto`, `none`, `response_template` or a name for each.

        Raises ConfigError, which lists the names.
        """
        chosen = choose_formats(tokenizer, tool_parser, reasoning_parser)
        return cls(
            tokenizer=tokenizer,
            tool_format=chosen.tools,
            reasoning_format=chosen.reasoning,
            checkpoint_format=chosen.checkpoint,
        )

    @property
    def tool_format_name(self) -> str | None:
        """Name of what tool calls are read by."""
        if self.tool_format is not None:
            return self.tool_format.name
        form = self.checkpoint_format
        return form.name if form is not None and form.has_calls else None

    @property
    def reasoning_format_name(self) -> str | None:
        """Name of what thought is read by."""
        if self.reasoning_format is not None:
            return self.reasoning_format.name
        form = self.checkpoint_format
        return form.name if form is not None and form.has_reasoning else None

    def check_tools(self, use: ToolUse) -> None:
        """Raise InvalidRequest where the model may call tools and its calls could not be told."""
        if use.choice is ToolChoice.AUTO and use.tools and self.tool_format_name is None:
            raise InvalidRequest(
                "tool_choice auto needs to know how this model writes tool calls, and its chat "
                "template does not show it. Start the server with api.tool_parser set to one of "
                f"{', '.join(tool_parser_names())}; or send tool_choice required, none, or the "
                "name of a tool, which work with any model.",
                "tool_choice",
            )

    def shown_special_ids(self, use: ToolUse) -> frozenset[int]:
        """Return the control tokens that have to be in the text for replies to be read."""
        shown = self._control_tokens.reasoning_ids
        return shown | self._control_tokens.call_ids if self.reads_calls(use) else shown

    @property
    def call_mark_ids(self) -> frozenset[int]:
        """Control tokens that the model writes tool calls with."""
        return self._control_tokens.call_ids

    def reasoning_budget(
        self,
        prompt: str,
        *,
        budget: int | None = None,
        continues: bool = False,
        use: ToolUse = NO_TOOLS,
    ) -> ReasoningBudget | None:
        """Return the thought that the reply to a prompt begins within; None if it does not.

        budget:     most tokens of thought
        continues:  whether the reply goes on with the prompt's last message

        A reply that only may open a thought by itself has none here, for a grammar that waited for
        its end might wait for ever; see `open_reasoning`.
        """
        end = self._reasoning_end(prompt, continues=continues)
        if end is None:
            return None
        ids = self.tokenizer.encode(end, add_special_tokens=False)
        exits = self._control_tokens.exit_ids if self.reads_calls(use) else frozenset[int]()
        return ReasoningBudget(end=end, end_ids=tuple(ids), budget=budget, exit_ids=exits)

    def open_reasoning(self, prompt: str, *, continues: bool = False) -> str:
        """Return the prompt with a thought opened at its end, if the model would open it itself.

        For requests that want thought and have a grammar, or a budget of thought: both need to
        know that the reply begins with a thought. The prompt is returned as it is where a thought
        is open or over already, or the model has none.
        """
        opening = self._reasoning_opening(prompt, continues=continues)
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
        """Return what makes the parser of each reply to a prompt.

        It makes None where all text is the answer, a `ReplyReader` where there may be thought, and
        else a parser of tool calls.

        separate_reasoning:   whether thought is told from the answer; else it is part of the text
        stream_reasoning:     whether thought comes as it is written, or in one piece at its end
        skip_special_tokens:  as in the request's sampling
        note:                 takes the name of the format, and what is wrong with a call in it
        """
        note_fault = partial(note, FORCED if use.is_forced else self.tool_format_name or "none")
        hidden = frozenset[int]()
        if skip_special_tokens:
            hidden = self.tokenizer.special_ids - self.shown_special_ids(use)
        styles = {"separate": separate_reasoning, "stream": stream_reasoning}

        def read(parser: ReasoningAwareParser) -> ReplyReader:
            return ReplyReader(
                parser, lambda i: b"" if i in hidden else self.tokenizer.token_bytes(i)
            )

        if self.checkpoint_format is not None:
            make = self._checkpoint_reader(self.checkpoint_format, prompt, use, note_fault, styles)
            return lambda: read(make())
        form = self.reasoning_format
        start = ReasoningStart.OVER
        if form is not None:
            start = form.start(prompt, self._control_tokens.turn_pattern, continues=continues)
        if form is None or start is ReasoningStart.OVER:
            return lambda: self._call_parser(use, note_fault)
        interrupts = self._call_openers(use)
        return lambda: read(
            ReasoningReader(
                ReasoningSplitter(form, start, interrupts=interrupts),
                self._call_parser(use, note_fault),
                **styles,
            )
        )

    def _checkpoint_reader(
        self,
        checkpoint: CheckpointFormat | HarmonyFormat,
        prompt: str,
        use: ToolUse,
        note: FaultCallback,
        styles: dict[str, bool],
    ) -> Callable[[], ReasoningAwareParser]:
        """Return what makes readers of replies in the checkpoint's own format."""
        is_read = self.reads_calls(use)
        if isinstance(checkpoint, HarmonyFormat):
            return lambda: checkpoint.reader(
                prompt,
                use=use if is_read else None,
                after=self._call_parser(use, note),
                make_id=random_id,
                note=note,
                **styles,
            )
        return lambda: PartReader(
            checkpoint,
            prompt,
            tools=use.as_openai() if is_read and checkpoint.has_calls else None,
            after=self._call_parser(use, note),
            make_id=random_id,
            parallel=use.parallel,
            note=note,
            **styles,
        )

    def tool_constraint(self, use: ToolUse) -> Constraint | None:
        """Return what holds replies to a request's tools, if anything does.

        A forced choice is held to its schema whatever the model's format. A free choice with
        strict tools is held to their schemas from where a call opens, in formats that a grammar
        can be told of; in others `strict` is a wish.
        """
        if use.is_forced:
            return call_grammars.forced_calls(use)
        if not self.reads_calls(use) or self.tool_format is None:
            return None
        tag = self.tool_format.structural_tag(use.tools)
        return None if tag is None else call_grammars.from_tag(tag)

    def calls_or(self, answer: Constraint, use: ToolUse) -> Constraint | None:
        """Return what holds replies to calls or, instead, to an answer.

        None: calls in the model's format cannot be told to a grammar.
        Raises ConstraintError where the answer's own source is malformed.
        """
        form = self.tool_format or self.checkpoint_format
        if form is None or isinstance(form, HarmonyFormat):
            return None
        calls = form.calls_alone(use)
        return None if calls is None else call_grammars.calls_or(calls, answer)

    def reads_calls(self, use: ToolUse) -> bool:
        """Whether replies are looked through for calls in the model's own format."""
        has_format = self.tool_format_name is not None
        return has_format and use.choice is ToolChoice.AUTO and bool(use.tools)

    def calls_are_answers(self, use: ToolUse) -> bool:
        """Whether calls may stand where a grammar holds; in gpt-oss's format they are before it."""
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

    def _reasoning_opening(self, prompt: str, *, continues: bool) -> str | None:
        if self.checkpoint_format is not None:
            return None if continues else self.checkpoint_format.reasoning_opening(prompt)
        form = self.reasoning_format
        if form is None:
            return None
        start = form.start(prompt, self._control_tokens.turn_pattern, continues=continues)
        return f"{form.opening}\n" if start is ReasoningStart.OPEN else None

    def _reasoning_end(self, prompt: str, *, continues: bool) -> str | None:
        if self.checkpoint_format is not None:
            return self.checkpoint_format.reasoning_end(prompt)
        form = self.reasoning_format
        if form is None:
            return None
        start = form.start(prompt, self._control_tokens.turn_pattern, continues=continues)
        return form.closing if start is ReasoningStart.WITHIN else None

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(
            self.tokenizer, self.tool_format, self.reasoning_format, self.checkpoint_format
        )
