"""Well-known open models by the shape in their config.json, for `remora models --fits`.

A model that is not in this list is served as well; `remora plan OWNER/NAME` says what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TABLE = """\
repository                                parameters  family    layers hidden inner heads kv head vocab  context tied
HuggingFaceTB/SmolLM2-135M-Instruct        134515008  llama     30 576  1536  9  3  64  49152  8192   yes
HuggingFaceTB/SmolLM2-360M-Instruct        361821120  llama     32 960  2560  15 5  64  49152  8192   yes
Qwen/Qwen3-0.6B                            596049920  qwen3     28 1024 3072  16 8  128 151936 40960  yes
meta-llama/Llama-3.2-1B-Instruct          1235814400  llama     16 2048 8192  32 8  64  128256 131072 yes
HuggingFaceTB/SmolLM2-1.7B-Instruct       1711376384  llama     24 2048 8192  32 32 64  49152  8192   yes
Qwen/Qwen3-1.7B                           1720574976  qwen3     28 2048 6144  16 8  128 151936 40960  yes
meta-llama/Llama-3.2-3B-Instruct          3212749824  llama     28 3072 8192  24 8  128 128256 131072 yes
Qwen/Qwen3-4B-Instruct-2507               4022468096  qwen3     36 2560 9728  32 8  128 151936 262144 yes
mistralai/Mistral-7B-Instruct-v0.3        7248023552  mistral   32 4096 14336 32 8  128 32768  32768  no
meta-llama/Llama-3.1-8B-Instruct          8030261248  llama     32 4096 14336 32 8  128 128256 131072 no
Qwen/Qwen3-8B                             8190735360  qwen3     36 4096 12288 32 8  128 151936 40960  no
Qwen/Qwen3-14B                           14768307200  qwen3     40 5120 17408 40 8  128 151936 40960  no
mistralai/Mistral-Small-24B-Instruct-2501 23572403200 mistral   40 5120 32768 32 8  128 131072 32768  no
Qwen/Qwen3-30B-A3B-Instruct-2507         30532122624  qwen3_moe 48 2048 6144  32 4  128 151936 262144 no
Qwen/Qwen3-32B                           32762123264  qwen3     64 5120 25600 64 8  128 151936 40960  no
meta-llama/Llama-3.3-70B-Instruct        70553706496  llama     80 8192 28672 64 8  128 128256 131072 no
"""  # noqa: E501
_KEYS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A repository of the hub.

    parameters:  as published
    config:      the keys of its config.json from which memory follows
    """

    name: str
    parameters: int
    config: Mapping[str, Any]


def open_models() -> Iterator[OpenModel]:
    """Yield the models, the smallest first."""
    for row in _TABLE.splitlines()[1:]:
        name, parameters, family, *numbers, tied = row.split()
        config = {
            "model_type": family,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": tied == "yes",
            **_FAMILIES[family],
            **dict(zip(_KEYS, map(int, numbers), strict=True)),
        }
        yield OpenModel(name, int(parameters), config)
