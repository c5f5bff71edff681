"""The tokenizer of characters has one control token, its end of sequence."""

from __future__ import annotations

import pytest

from tests.deployments.fakes import EOS, CharTokenizer


@pytest.fixture(autouse=True)
def _special_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CharTokenizer, "special_ids", frozenset({EOS}), raising=False)
