"""No step after warm-up compiles a kernel, whatever its numbers of tokens, rows and adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import TinyCheckpoints
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import BLOCKS, SAMPLES, Sample

PROGRAM = Path(__file__).parent / "jit_keys.py"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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
    check([tiny_checkpoints(family) for family in FAMILIES], 12, 100, 7)


def quantised(
    tiny_checkpoints: TinyCheckpoints, folder: Path, samples: Mapping[str, Sample]
) -> list[Path]:
    """Write copies of a checkpoint whose layers are quantised."""
    path = tiny_checkpoints("llama", hidden_size=192, num_hidden_layers=1)
    return [quantise(path, folder / name, samples[name], LINEARS)[0] for name in samples]


def test_quantised_products(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    samples = {"awq": SAMPLES["awq"], "blocks": BLOCKS}
    check(quantised(tiny_checkpoints, tmp_path, samples), 20, 60, 13)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_many_rows(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    # Keys depend on 1 and on multiples of 16: an odd stride meets every remainder.
    check([tiny_checkpoints(family)], 300, 2048, 17)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quantised_products_of_many_rows(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    samples = {name: SAMPLES[name] for name in ("awq", "ct-int8", "fp8-tensor")}
    folders = quantised(tiny_checkpoints, tmp_path, {**samples, "blocks": BLOCKS})
    mixtral = tiny_checkpoints("mixtral", intermediate_size=128, num_hidden_layers=1)
    experts, _ = quantise(mixtral, tmp_path / "experts", BLOCKS, (".w1", ".w2", ".w3"))
    check([*folders, experts], 300, 2048, 17)
