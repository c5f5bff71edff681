"""The package `remora` itself: the names that scripts need, each imported on first use.

    from remora import LLM, SamplingParams

An editable install imports this file from the checkout. There the packages below `remora` are
folders of the repository, so `__path__` continues with the repository.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remora.configs.errors import RemoraError
    from remora.configs.version import __version__
    from remora.engine.beams.params import BeamParams
    from remora.engine.grammar.constraint import Constraint, ConstraintKind
    from remora.engine.llm import LLM
    from remora.engine.sampling.params import SamplingParams

__all__ = [
    "LLM",
    "BeamParams",
    "Constraint",
    "ConstraintKind",
    "RemoraError",
    "SamplingParams",
    "__version__",
]

_MODULES = {
    "LLM": "remora.engine.llm",
    "BeamParams": "remora.engine.beams.params",
    "Constraint": "remora.engine.grammar.constraint",
    "ConstraintKind": "remora.engine.grammar.constraint",
    "RemoraError": "remora.configs.errors",
    "SamplingParams": "remora.engine.sampling.params",
    "__version__": "remora.configs.version",
}

_folder = os.path.dirname(os.path.abspath(__file__))
if os.path.basename(_folder) != "remora":
    __path__.append(os.path.dirname(os.path.dirname(_folder)))


def _attribute(name: str) -> Any:
    """Import one of the names. Raises AttributeError for any other."""
    if name not in _MODULES:
        raise AttributeError(f"module 'remora' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


if not TYPE_CHECKING:  # for a type checker, it would make every name valid
    __getattr__ = _attribute


def __dir__() -> list[str]:
    """Return the names, imported or not."""
    return sorted({*globals(), *__all__})
