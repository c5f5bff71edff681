"""instructor, in its three OpenAI modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.ray


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA]
)
def test_a_model_comes_back(server_url: str, model: str, mode: Any) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server_url}/v1", api_key="any", max_retries=0), mode=mode
    )

    # JSON mode only promises some object; a small model needs to be shown which.
    example = 'Answer with exactly this JSON: {"name": "Paris", "is_capital": true}'
    city = client.chat.completions.create(
        model=model,
        response_model=City,
        messages=[{"role": "user", "content": example}],
        temperature=0,
        max_tokens=128,
        max_retries=3,
    )

    assert isinstance(city, City)
