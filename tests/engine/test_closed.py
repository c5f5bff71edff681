"""An engine that was closed refuses work; its threads are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.engine.llm import LLM, SamplingParams
from tests.conftest import TinyCheckpoints


def test_a_closed_llm_raises(tiny_checkpoints: TinyCheckpoints) -> None:
    path: Path = tiny_checkpoints("llama")
    llm = LLM(str(path), dtype="float32", kv_tokens=1024, num_threads=2, show_progress=False)

    llm.close()

    with pytest.raises(RuntimeError, match="has been closed"):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
