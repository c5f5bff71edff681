"""Keys that a configuration refers to."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.configs.secrets import read_keys


def test_a_variable_holds_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " sk-one\n")
    assert read_keys("env:SOME_KEY", "api.api_key") == ("sk-one",)


def test_a_file_holds_one_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the first team\nsk-one\n\n  sk-two  \n")
    assert read_keys(f"file:{path}", "api.api_key") == ("sk-one", "sk-two")


def test_a_missing_variable_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"api\.api_key: .* SOME_KEY is not set"):
        read_keys("env:SOME_KEY", "api.api_key")


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing but words\n"])
def test_no_key_is_a_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(f"file:{path}", "api.admin_api_key")


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(f"file:{tmp_path}/none", "api.api_key")


@pytest.mark.parametrize("data", [b"sk one", "schlüssel".encode(), b"\xff\xfe"])
def test_a_key_that_no_header_can_carry_is_a_fault_that_does_not_show_it(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"sk-good\n" + data)
    with pytest.raises(ConfigError) as caught:
        read_keys(f"file:{path}", "api.api_key")
    assert "sk" not in str(caught.value).replace(str(path), "").replace("ask", "")
    assert "schl" not in str(caught.value)
