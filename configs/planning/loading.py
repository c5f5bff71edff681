"""How a checkpoint is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from remora.configs.sections.model import ModelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a checkpoint is read.

    mmap:              whether files are memory-mapped
    num_threads:       threads that load the weights
    verify_checksums:  whether files are compared with their checksums
    config_overrides:  entries that replace those of config.json
    impl:              whose code runs the model
    trust_code:        whether the checkpoint's code may run
    formats:           of quantised weights, of which the checkpoint must have one; () = any or none
    """

    mmap: bool = True
    num_threads: int = 1
    verify_checksums: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    impl: Literal["auto", "remora", "transformers"] = "auto"
    trust_code: bool = False
    formats: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: ModelSection) -> Self:
        """Take the keys from the section `model`."""
        return cls(
            mmap=model.mmap,
            num_threads=model.load_threads,
            verify_checksums=model.verify_checksums,
            config_overrides=model.config_overrides,
            impl=model.impl,
            trust_code=model.trust_remote_code,
            formats=tuple(model.checkpoint_formats),
        )


PLAIN_LOADING = Loading()
