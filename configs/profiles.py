"""Profiles: values that suit a kind of machine, below what a file says and above the defaults.

`args: {profile: gpu}` takes one; `remora config init --profile gpu` writes a file around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

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
        "gpu": {
            "engine": {
                "device": "cuda",
                "max_running_requests": 256,
                "max_step_tokens": 8192,
                "prefill_chunk_tokens": 8192,
                "max_queued_requests": 1024,
            },
        },
        "multi-gpu": {
            "engine": {
                "device": "cuda",
                "max_running_requests": 256,
                "max_step_tokens": 8192,
                "prefill_chunk_tokens": 8192,
                "max_queued_requests": 1024,
            },
            "parallel": {"tp_size": 2},
        },
        # A step reads the experts of all its tokens: the more tokens, the less for each.
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
