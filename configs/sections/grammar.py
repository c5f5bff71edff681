"""Constrained output: the section `grammar` of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Bytes, Name, Section, conflict


class GrammarSection(Section):
    """Constrained output: JSON schemas, regular expressions, grammars, tool calls by schema."""

    backend: Literal["xgrammar", "outlines", "none"] = "xgrammar"
    """What compiles constraints. xgrammar takes all kinds; outlines has no recursion, grammars or
    structural tags; none = requests with a constraint are refused."""

    json_compact: bool = False
    """Whether JSON is written without any free whitespace."""

    json_whitespace_pattern: Name | None = None
    """Regular expression of the whitespace allowed between JSON tokens; backend outlines only."""

    max_source_bytes: Annotated[int, Field(ge=256, le=2**20)] = 64 * 1024
    """Longest constraint, in bytes; beyond it, and the next two, HTTP 400."""

    max_depth: Annotated[int, Field(ge=4, le=64)] = 32
    """Deepest nesting of a schema."""

    max_nodes: Annotated[int, Field(ge=16, le=10_000)] = 2000
    """Most objects and lists of a schema."""

    compile_timeout_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Seconds of processor time that compiling one constraint may take; beyond it HTTP 400."""

    compile_memory: Bytes = 512 * 2**20
    """Memory that compiling may take beside the compiler's own, in bytes or as 512MiB."""

    cache_memory: Bytes = 64 * 2**20
    """Memory of compiled constraints kept for later requests, in bytes or as 64MiB."""

    first_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Token ids that an output may begin with; applies to every request. Default: any."""

    token_healing: bool = False
    """Whether the last token of a text prompt is taken back and written anew by the model, so that
    a prompt that ends within a word goes on as if it had not."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.json_whitespace_pattern is not None:
            if self.backend != "outlines":
                raise conflict("json_whitespace_pattern", "needs backend outlines")
            if self.json_compact:
                raise conflict("json_compact", "json_whitespace_pattern is set too; keep one")
        return self
