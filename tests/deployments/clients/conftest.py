"""Real clients against a real server: SmolLM2 on Ray Serve.

`make test` runs the official openai client here, on the shared Ray cluster. The requirements of the
other clients conflict with remora's or each other's, so `make test-clients` creates an environment
for each, starts one server and runs every file (`run.py`). Files of missing clients are ignored.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

CLIENTS = {
    "test_anthropic.py": "anthropic",
    "test_ollama.py": "ollama",
    "test_cohere.py": "cohere",
    "test_text_generation.py": "text_generation",
    "test_huggingface_hub.py": "huggingface_hub",
    "test_ollama_embeddings.py": "ollama",
    "test_cohere_embeddings.py": "cohere",
    "test_huggingface_hub_embeddings.py": "huggingface_hub",
    "test_langchain.py": "langchain_openai",
    "test_instructor.py": "instructor",
    "test_pydantic_ai.py": "pydantic_ai",
    "test_litellm.py": "litellm",
    "test_lm_eval.py": "lm_eval",
}
ONLY = os.environ.get("REMORA_CLIENT")  # set by run.py: the module under test
collect_ignore = [
    name for name, module in CLIENTS.items() if module != ONLY or find_spec(module) is None
]
if ONLY:
    collect_ignore.append("test_openai.py")


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> str:
    """Address of the server, without /v1."""
    given = os.environ.get("REMORA_URL")
    if given:
        return given
    from tests.deployments.conftest import SMOL

    url: str = request.getfixturevalue("cluster").url(SMOL)
    return url


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    """Name that the server gives its model."""
    return "all-minilm-l6-v2" if "embeddings" in request.path.stem else "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def tokenizer() -> str:
    """Folder of the model's tokenizer, for clients that tokenize locally."""
    return os.environ["REMORA_TOKENIZER"]
