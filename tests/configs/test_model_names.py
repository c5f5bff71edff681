"""Names of remote models, as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.model_names import HubModel, UrlModel, parse_model_name


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen", "Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B@refs/pr/1", HubModel("Qwen", "Qwen3-0.6B", "refs/pr/1")),
        ("me/tiny/", HubModel("me", "tiny")),
        ("me/tiny@v1:Q4_K_M", HubModel("me", "tiny", "v1", "Q4_K_M")),
        ("me/tiny:BF16/a.gguf", HubModel("me", "tiny", None, "BF16/a.gguf")),
        ("s3://bucket/models/tiny/", UrlModel("s3://bucket/models/tiny")),
        ("hf://owner", UrlModel("hf://owner")),
        *((text, None) for text in ("tiny", "/me/tiny", "./me/tiny", "~/tiny", "a/b/c")),
        *((text, None) for text in ("me/tiny.gguf", "file:///me/tiny", "me/..", "../me", "")),
    ],
)
def test_a_name_is_a_repository_a_url_or_a_path(
    text: str, model: HubModel | UrlModel | None
) -> None:
    assert parse_model_name(text) == model


word = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_]{0,8}", fullmatch=True)


@given(owner=word, name=word, revision=st.none() | word, file=st.none() | word)
def test_a_repository_is_read_back_from_its_text(
    owner: str, name: str, revision: str | None, file: str | None
) -> None:
    model = HubModel(owner, name, revision, file)

    assert parse_model_name(model.text) == model
    assert parse_model_name(model.at("c0ffee").text) == HubModel(owner, name, "c0ffee", file)
