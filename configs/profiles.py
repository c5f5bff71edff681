"""Profiles: values for a kind of machine, which override defaults and which a file overrides.

`args: {profile: gpu}` applies one; `remora config init --profile gpu` writes its values to a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

_GPU = {
    "device": "cuda",  # whose memory decides the rows and tokens of a step
    "max_queued_requests": 1024,
}
PROFILES: Mapping[str, Sections] = MappingProxyType(
    {
        "cpu": {
            "engine": {"device": "cpu", "max_running_requests": 32},
            "parallel": {"cpus_per_rank": 2.0},
        },
        "embedding": {
            "model": {"task": "embed"},
            "api": {"prompt_truncation": "tail"},
        },
        "gpu": {"engine": _GPU},
        "multi-gpu": {"engine": _GPU, "parallel": {"tp_size": 2}},
        # A step reads the weights of all experts that its tokens use: more tokens share the cost.
        "moe": {
            "engine": {
                "device": "cuda",
                "max_running_requests": 512,
                "max_step_tokens": 16_384,
                "prefill_chunk_tokens": 16_384,
                "max_queued_requests": 2048,
            },
        },
    }
)
