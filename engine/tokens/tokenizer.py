"""Text to ids and back, for one model.

Uses the Rust tokenizer, which is thread-safe (transformers' wrapper sets truncation on the shared
object and is not). Texts of any length are encoded completely. Ids unknown to the tokenizer (a
model's vocabulary may be padded) have no text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend

from remora.configs.errors import ConfigError
from remora.engine.tokens.chat import render_chat
from remora.engine.tokens.chat_template import ChatTemplate
from remora.engine.tokens.fast_tokenizer import TokenizerParts, load_tokenizer
from remora.engine.tokens.generation_config import read_eos_token_ids
from remora.engine.tokens.template_files import (
    OLD_FILE,
    find_template_file,
    read_template_file,
    template_place,
)
from remora.engine.tokens.token_bytes import Spelling, entry_bytes, spelling_of

NO_KWARGS: Mapping[str, Any] = {}


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe.

    vocab_size:       upper bound of ids
    special_ids:      ids of control tokens, which `skip_special_tokens` leaves out
    eos_token_ids:    ids that end a sequence: the tokenizer's own first, then the checkpoint's
    max_token_chars:  maximum number of characters of a text that one token covers
    added_tokens:     text of each token that is matched literally, control or not
    template_place:   source of the chat template, if there is one, for messages
    response_template: the checkpoint's description of its replies, in transformers' format
    """

    takes_text: bool = True
    """Whether there is a tokenizer at all."""
    template_place: str = "the tokenizer"

    def __init__(self, tokenizer: TokenizerParts, *, eos_token_ids: Sequence[int] = ()) -> None:
        """Wrap a fast tokenizer, of this package or transformers; `eos_token_ids` are added to its
        own.
        """
        self._backend = tokenizer.backend_tokenizer
        self._special_tokens = tokenizer.special_tokens_map
        self._templates = self._compiled(tokenizer.chat_template or {})
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.added_tokens: Mapping[int, str] = {
            token_id: token.content for token_id, token in added.items()
        }
        self.response_template: Mapping[str, Any] | None = getattr(
            tokenizer, "response_template", None
        )
        self._spelling = spelling_of(self._backend)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *eos_token_ids)))
        # Without byte tokens, one "unknown" token may cover a word of any length.
        is_bounded = self._spelling in (Spelling.BYTE_LEVEL, Spelling.BYTE_FALLBACK)
        self.max_token_chars = max(map(len, vocabulary), default=1) if is_bounded else sys.maxsize

    @property
    def backend(self) -> Backend:
        """Return the underlying tokenizer, which is shared and must not be changed."""
        return self._backend

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        loader: Literal["auto", "transformers"] = "auto",
        trust_code: bool = False,
    ) -> Self:
        """Load from a checkpoint folder or a GGUF file. Raises ConfigError; never downloads.

        loader:  of folders: always transformers, or only for unknown settings
        trust_code:  whether code in the folder may run
        """
        if path.is_file() and path.suffix == ".gguf":
            from remora.engine.weights.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer

            found = cls(load_gguf_tokenizer(path), eos_token_ids=gguf_eos_token_ids(path))
        else:
            parts = load_tokenizer(path, loader, trust_code=trust_code)
            found = cls(parts, eos_token_ids=read_eos_token_ids(path))
        found.template_place = template_place(path)
        if not found._templates and (path / OLD_FILE).is_file():
            found._templates = found._compiled(read_template_file(path / OLD_FILE))
            found.template_place = f"{OLD_FILE} in {path}"
        return found

    def add_eos_token_ids(self, ids: Sequence[int]) -> None:
        """Add ids that end a sequence."""
        self.eos_token_ids = tuple(dict.fromkeys((*self.eos_token_ids, *ids)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. Control tokens written out in it become control tokens.

        add_special_tokens:  add the tokens that the model expects around a plain text (often a
                             BOS); rendered chats contain them already
        """
        (ids,) = self.encode_batch([text], add_special_tokens=add_special_tokens)
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each of several texts, in one call of the tokenizer."""
        # `encode` would hold the interpreter lock all the time; a batch releases it.
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def places(self, text: str) -> list[tuple[int, int]]:
        """Return the first character of each token of a text and the one after its last.

        Tokens that are added around the text are at (0, 0).
        """
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=True)
        return list(encoding.offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids. Invalid UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for within a text."""
        if token_id in self.added_tokens:
            return self.added_tokens[token_id].encode()
        entry = self._backend.id_to_token(token_id)
        return b"" if entry is None else entry_bytes(entry, self._spelling)

    def entry(self, token_id: int) -> str:
        """Return an id's entry in the vocabulary, as the tokenizer's file spells it; "" = none."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Return the text of an id within a text; U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def choose_template(self, wanted: str) -> None:
        """Render chats with one template only: the checkpoint's of that name, or that of a file.

        Raises ConfigError.
        """
        chosen = self._templates.get(wanted)
        place = f"{wanted!r} of {self.template_place}"
        if chosen is None:
            file = find_template_file(wanted, self._templates.keys())
            chosen = self._compiled(read_template_file(file))["default"]
            place = str(file)
        try:
            chosen.variables  # noqa: B018 - parses it
        except TemplateError as error:
            raise ConfigError(f"model.chat_template: {wanted} is malformed: {error}") from error
        self._templates = {"default": chosen}
        self.template_place = f"{place}, as model.chat_template says"

    def _compiled(self, given: str | Mapping[str, str]) -> dict[str, ChatTemplate]:
        """Return chat templates by name; a single one is named `default`."""
        sources = {"default": given} if isinstance(given, str) else given
        return {name: ChatTemplate(text, self._special_tokens) for name, text in sources.items()}

    @property
    def template_source(self) -> str | None:
        """Text of the chat template, or of all of them."""
        return "\n".join(template.source for template in self._templates.values()) or None

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Names of the chat template's variables: messages, tools, its own switches."""
        try:
            return frozenset[str]().union(*(each.variables for each in self._templates.values()))
        except TemplateError:  # reported when a chat is rendered
            return frozenset()

    def limit_rendering(self, *, max_seconds: float, max_chars: int) -> None:
        """Set the limits of rendering one chat: time and characters."""
        for template in self._templates.values():
            template.max_render_s, template.max_render_chars = max_seconds, max_chars

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation with the model's chat template; encode it without special tokens.

        add_generation_prompt:   end with the start of the assistant's next message
        continue_final_message:  leave the last message open instead
        template_kwargs:         variables for the template
        tools:                   functions that the model may call, in OpenAI's form; described as
                                 plain text if the template has no tool support
        documents:               texts to answer from, for templates that use them

        Raises InvalidRequest.
        """
        template = self._templates.get("tool_use") if tools else None
        return render_chat(
            template or self._templates.get("default"),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
            documents=documents,
        )
