"""What each process of a server does not import: libraries that it has no use for at its start."""

from __future__ import annotations

import subprocess
import sys

import pytest

ML = ("torch", "transformers", "xgrammar", "outlines_core")
RARE = ("httpx", "openai", "jsonschema", "gguf", "fsspec", "huggingface_hub")
# Ray itself imports jsonschema.
RARE_OF_RAY = tuple(name for name in RARE if name != "jsonschema")

ROLES = {
    "configuration": ("configs.load", (*ML, *RARE, "ray", "fastapi", "rich")),
    "command": ("deployments.cli.main", (*ML, *RARE, "ray", "fastapi", "uvicorn")),
    "gateway": ("deployments.gateway.gateway", (*ML, *RARE_OF_RAY)),
    "replica": ("deployments.llm_server", (*ML, *RARE, "ray")),
    "local server": ("deployments.local.server", (*ML, *RARE, "ray")),
    "rank": ("deployments.ranks.worker", (*ML, *RARE_OF_RAY, "fastapi", "ray.serve")),
    "engine": ("engine.launch", ("transformers", "xgrammar", "outlines_core", "ray", *RARE)),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_process_imports_only_what_it_needs(role: str) -> None:
    module, unwanted = ROLES[role]
    program = (
        f"import sys, remora.{module}\n"
        f"sys.stdout.write(' '.join(name for name in {unwanted!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
