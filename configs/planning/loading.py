"""How a checkpoint is read, as the rooms that read it need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from remora.configs.sections.model import ModelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a checkpoint is read.

    mmap:              whether files are mapped
    num_threads:       that fill the weights
    verify_checksums:  whether files are compared with the checksums beside them
    config_overrides:  entries in the place of config.json's
    impl:              whose code runs it
    trust_code:        whether code beside the weights may run
    """

    mmap: bool = True
    num_threads: int = 1
    verify_checksums: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    impl: Literal["auto", "remora", "transformers"] = "auto"
    trust_code: bool = False

    @classmethod
    def of(cls, model: ModelSection) -> Self:
        """Read it from a configuration."""
        return cls(
            mmap=model.mmap,
            num_threads=model.load_threads,
            verify_checksums=model.verify_checksums,
            config_overrides=model.config_overrides,
            impl=model.impl,
            trust_code=model.trust_remote_code,
        )


PLAIN_LOADING = Loading()
