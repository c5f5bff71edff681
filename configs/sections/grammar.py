"""The section `grammar`: constrained output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Name, Section


class GrammarSection(Section):
    """Constrained output: JSON schemas, regular expressions, grammars, tool calls by schema."""

    backend: Literal["xgrammar", "outlines", "none"] = "xgrammar"
    """Compiler of constraints. xgrammar supports all kinds; outlines has no recursion, grammars or
    structural tags; none = requests with a constraint are refused."""

    json_compact: bool = False
    """Whether JSON output has no optional whitespace."""

    json_whitespace_pattern: Name | None = None
    """Regular expression of the whitespace allowed between JSON tokens. Needs backend outlines."""

    max_source_bytes: Annotated[int, Field(ge=256, le=2**20)] = 64 * 1024
    """Longest constraint, in bytes; longer ones get HTTP 400."""

    max_depth: Annotated[int, Field(ge=4, le=64)] = 32
    """Deepest nesting of a schema; deeper ones get HTTP 400."""

    max_nodes: Annotated[int, Field(ge=16, le=10_000)] = 2000
    """Most objects and lists in a schema; larger ones get HTTP 400."""

    compile_timeout_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    """CPU seconds to compile one constraint; constraints that need more get HTTP 400."""

    compile_memory: Bytes = 512 * 2**20
    """Memory that compilation may use on top of the compiler's own, in bytes or as 512MiB."""

    cache_memory: Bytes = 64 * 2**20
    """Memory for compiled constraints kept for later requests, in bytes or as 64MiB."""

    first_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Token ids allowed as the first token of every output. Default: any."""

    token_healing: bool = False
    """Whether the last token of a text prompt is removed and generated again, so that a prompt that
    ends within a word continues naturally."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.json_whitespace_pattern is not None:
            if self.backend != "outlines":
                yield "json_whitespace_pattern", "needs backend outlines"
            if self.json_compact:
                yield "json_compact", "json_whitespace_pattern is set too; remove one"
