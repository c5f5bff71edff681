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


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing but comments\n", None])
def test_a_reference_without_keys_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if text is not None:
        (tmp_path / "keys").write_text(text)
    for reference in (f"file:{tmp_path}/keys", "env:SOME_KEY"):
        with pytest.raises(ConfigError, match=r"^api\.admin_api_key: .*(keys|SOME_KEY) "):
            read_keys(reference, "api.admin_api_key")


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
