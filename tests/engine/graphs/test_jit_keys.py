"""No step after warm-up compiles a kernel, whatever its numbers of tokens, rows and adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyCheckpoints

PROGRAM = Path(__file__).parent / "jit_keys.py"
FAMILIES = ("llama", "qwen3-moe", "deepseek-v3")
MORE_FAMILIES = ("qwen3", "gpt-oss", "mistral", "mixtral", "deepseek-v2-lite")


def check(folders: list[Path], max_rows: int, max_tokens: int, stride: int) -> None:
    sizes = [str(size) for size in (max_rows, max_tokens, stride)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *sizes, *map(str, folders)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["folder"] for each in found} == {str(folder) for folder in folders}
    for each in found:
        assert each["warm"] > 15
        assert each["missing"] == {}, each["folder"]


def test_few_rows(tiny_checkpoints: TinyCheckpoints) -> None:
    check([tiny_checkpoints(family) for family in FAMILIES], 20, 200, 7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_many_rows(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    # Keys depend on 1 and on multiples of 16: an odd stride meets every remainder.
    check([tiny_checkpoints(family)], 300, 2048, 7)
