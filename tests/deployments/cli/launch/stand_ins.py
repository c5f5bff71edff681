"""Tiny random checkpoints under the names of published models, in a cache of the hub library.

A launch command then runs as it is written: its model is found by name, offline.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf

from tests.configs.dialects.launch_commands import Launch
from tests.engine.fallback.checkpoints import make_checkpoint
from tests.engine.models.families import make_family
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import SAMPLES, small
from tests.engine.weights.gguf.tiny_gguf import make_gguf
from tests.lora.adapters import ATTENTION, make_adapter
from tests.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer

LENGTH = 32_768
COMMIT = "0" * 40


class StandIn(NamedTuple):
    """A tiny model.

    make:       writes it, and returns its path
    is_instruct:  whether it has a chat template
    """

    make: Callable[[Path], Path]
    is_instruct: bool = True


def _tiny(family: str, *, is_instruct: bool = True, **settings: Any) -> StandIn:
    settings = {"max_position_embeddings": LENGTH, **settings}
    return StandIn(lambda to: make_tiny_checkpoint(to, family, **settings), is_instruct)


def _float8(family: str, **settings: Any) -> StandIn:
    """Return a model whose matrices are float8 in blocks."""

    def make(to: Path) -> Path:
        plain = _tiny(family, **settings).make(to / "written")
        return quantise(plain, to, small(SAMPLES["fp8-blocks"]))[0]

    return StandIn(make)


def _family(family: str, **settings: Any) -> StandIn:
    def make(to: Path) -> Path:
        path, _ = make_family(to, family, max_position_embeddings=LENGTH, **settings)
        make_tiny_tokenizer().save_pretrained(path)
        return path

    return StandIn(make)


def _qwen_vl(to: Path) -> Path:
    """Write a language model whose config.json is that of a model which also sees."""
    path = make_tiny_checkpoint(to, "qwen2.5-tied", max_position_embeddings=LENGTH)
    raw = json.loads((path / "config.json").read_text())
    rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
    raw |= {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_theta": raw.pop("rope_parameters")["rope_theta"],
        "rope_scaling": rope,
        "vision_config": {"depth": 1},
    }
    (path / "config.json").write_text(json.dumps(raw))
    return path


def _qwen3_5(to: Path) -> Path:
    """Write a model whose layers are recurrent, but for each fourth; without its weights."""
    path = make_tiny_checkpoint(to, "qwen3")
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "model_type": "qwen3_5",
                "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
            }
        )
    )
    return path


def _opt(to: Path) -> Path:
    return make_checkpoint(to, "opt")


def _gguf(to: Path) -> Path:
    plain = make_tiny_checkpoint(to / "plain", "qwen3")
    return make_gguf(plain, to / "model.gguf", stored_as=gguf.GGMLQuantizationType.Q8_0)


_QWEN3_MOE = _tiny("qwen3-moe")
MODELS: Mapping[str, StandIn] = {
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _QWEN3_MOE,
    "Qwen/Qwen3-235B-A22B": _QWEN3_MOE,
    "deepseek-ai/DeepSeek-V3.1": _float8("deepseek-v3"),
    "moonshotai/Kimi-K2-Instruct": _float8("deepseek-v3", model_type="kimi_k2"),
    "zai-org/GLM-4.5-Air-FP8": _float8("glm4-moe"),
    "meta-llama/Llama-3.1-8B-Instruct": _tiny("llama3-rope"),
    "meta-llama/Llama-2-7b-hf": _tiny("llama", is_instruct=False),
    "facebook/opt-6.7b": StandIn(_opt, is_instruct=False),
    "./Qwen3-0.6B-Q4_K_M.gguf": StandIn(_gguf),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _family("seed-oss"),
    "Qwen/Qwen2.5-VL-72B-Instruct": StandIn(_qwen_vl),
    "Qwen/Qwen2.5-VL-7B-Instruct": StandIn(_qwen_vl),
    "baidu/ERNIE-4.5-300B-A47B-PT": _float8("ernie4.5-moe"),
    "baidu/ERNIE-4.5-21B-A3B-PT/": _tiny("ernie4.5-moe"),
    "openai/gpt-oss-120b": _tiny("gpt-oss", max_position_embeddings=131_072),
    "microsoft/Phi-4-mini-instruct": _family("phi4-partial"),
}
# Ray Serve LLM's files name a model by its id.
IDS: Mapping[str, StandIn] = {
    "qwen-0.5b": _tiny("qwen2.5-tied"),
    "qwen-1.5b": _tiny("qwen2.5-tied"),
    "qwen2.5-7b-instruct": _tiny("qwen2"),
    "qwen3.5-0.8b": StandIn(_qwen3_5),
}


def put(name: str, stand_in: StandIn, folder: Path) -> None:
    """Write a stand-in: a file of the working folder `folder`, or a repository in `folder/hub`."""
    if name.endswith(".gguf"):
        stand_in.make(folder / "gguf").rename(folder / name)
        return
    repo = folder / "hub" / f"models--{name.strip('/').replace('/', '--')}"
    made = stand_in.make(repo / "made")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / COMMIT).symlink_to(made)


def tokens_of(launch: Launch, folder: Path) -> list[str]:
    """Return the command; drafts, tokenizers and adapters are folders of `folder`."""
    text = launch.text
    if "DRAFT" in text:
        text = text.replace("DRAFT", str(make_tiny_checkpoint(folder / "draft", "llama")))
    if "ADAPTER" in text:
        base = folder / "hub" / f"models--{launch.model.replace('/', '--')}" / "made"
        make_adapter(base, folder / "adapter", r=8, target_modules=ATTENTION)
        text = text.replace("ADAPTER", str(folder / "adapter"))
    return shlex.split(text)


def architecture_of(folder: Path) -> str:
    """Return the architecture of a checkpoint."""
    return str(json.loads((folder / "config.json").read_text())["architectures"][0])
