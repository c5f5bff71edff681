"""What sources mean, and what lies below a root: also for texts that are made to mislead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remora.engine.sources.addresses import (
    MAX_CHARACTERS,
    HubRepo,
    LocalFolder,
    RemoteFolder,
    SourcePath,
    climbs,
    is_below,
    parse_root,
    parse_source,
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/adapters/pirate", LocalFolder(Path("/adapters/pirate"))),
        ("adapters/pirate", LocalFolder(Path("adapters/pirate"))),
        ("file:///adapters/a%20b", LocalFolder(Path("/adapters/a b"))),
        ("FILE://localhost/adapters", LocalFolder(Path("/adapters"))),
        ("hf://owner/name", HubRepo("owner", "name", None)),
        ("hf://owner/name@refs/pr/1", HubRepo("owner", "name", "refs/pr/1")),
        ("S3://bucket/a/b/", RemoteFolder("s3://bucket/a/b")),
        ("memory:///a", RemoteFolder("memory:///a")),
    ],
)
def test_a_source_is_understood(text: str, place: SourcePath) -> None:
    assert parse_source(text) == place


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_source("~/pirate") == LocalFolder(Path("/home/me/pirate"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("/adapters/\0x", "control character"),
        ("file:///adapters/%00x", "control character"),
        ("/adapters/\ud800", "half a character"),
        ("/" + "x" * MAX_CHARACTERS, "characters"),
        ("file://adapters", "absolute"),
        ("hf://owner", "OWNER/NAME"),
        ("hf://owner/..", "OWNER/NAME"),
        ("hf://owner/name@a/../b", "OWNER/NAME"),
        ("hf://owner/name/file", "OWNER/NAME"),
        ("s3://", "what follows"),
        ("s3://bucket/a/../b", "no ..$"),
        ("s3://bucket/%2e%2E/b", "no ..$"),
        ("s3://bucket//b", "no empty parts"),
        ("s3://bucket/a?versionId=1", "no [?]"),
        ("s3://bucket/a\\..\\b", "backslash"),
        ("s3://bucket::file:///etc", "::"),
        ("ftp://me:secret@host/a", "passwords are not allowed"),
    ],
)
def test_a_source_that_misleads_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        parse_source(text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "root", "is_there"),
    [
        ("s3://bucket/adapters/x", "s3://bucket/adapters", True),
        ("s3://bucket/adapters", "s3://bucket/adapters/", True),
        ("s3://bucket/adapters-of-others/x", "s3://bucket/adapters", False),
        ("s3://bucket2/x", "s3://bucket", False),
        ("gs://bucket/adapters/x", "s3://bucket/adapters", False),
        ("memory://data/x", "memory:///data", False),
        ("hf://owner/name", "hf://owner", True),
        ("hf://owner2/name", "hf://owner", False),
        ("hf://owner/name@v2", "hf://owner/name", True),
        ("hf://owner/name", "hf://owner/name@v2", False),
        ("hf://owner/name@v2/x", "hf://owner/name@v2", False),
        ("/data", "s3://data", False),
    ],
)
def test_what_lies_below_a_root(source: str, root: str, is_there: bool) -> None:
    assert is_below(parse_source(source), parse_root(root)) is is_there


PARTS = st.lists(
    st.sampled_from(["in", "out", "..", ".", "", "loop", "away", "%2e%2e", "a b"]), max_size=6
)


@given(parts=PARTS, begin=st.sampled_from(["", "in/", "away/"]))
@example(parts=["loop", "", "in"], begin="")
def test_what_is_below_a_root_really_lies_there(
    parts: list[str], begin: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever links and dots lead: the folder that would be opened is in the root."""
    top = tmp_path_factory.getbasetemp() / "places"
    if not top.exists():
        (top / "root" / "in" / "in").mkdir(parents=True)
        (top / "out").mkdir()
        (top / "root" / "away").symlink_to(top / "out")
        (top / "root" / "loop").symlink_to(top / "root" / "loop")
        (top / "root" / "in" / "away").symlink_to("../..")
    text = f"{top}/root/{begin}{'/'.join(parts)}"

    allowed = is_below(parse_source(text), LocalFolder(top / "root"))

    # Without Path, which makes one slash of two, realpath leaves a circle of links for "/".
    real = os.path.realpath(Path(text))
    assert allowed == (f"{real}/".startswith(f"{os.path.realpath(top / 'root')}/"))


@given(host=st.sampled_from(["bucket", "bucket2", ""]), parts=PARTS)
def test_an_address_below_a_root_begins_with_it(host: str, parts: list[str]) -> None:
    text = f"s3://{host}/" + "/".join(parts)
    root = RemoteFolder("s3://bucket/in")
    try:
        place = parse_source(text)
    except ValueError:
        return

    assert not climbs(text)
    if is_below(place, root):
        assert [host, *parts][:2] == ["bucket", "in"]
