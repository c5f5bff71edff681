"""TGI's /info."""

from __future__ import annotations

from typing import Any

from remora.configs.version import __version__
from remora.deployments.http.generation.server_state import ServerState


def tgi_info(server: ServerState) -> dict[str, Any]:
    """Return the body of /info."""
    plan, limits = server.plan, server.config.limits
    return {
        "model_id": plan.served_model_name,
        "model_sha": None,
        "model_dtype": f"torch.{plan.dtype}",
        "model_device_type": plan.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": plan.max_open_sequences,
        "max_best_of": limits.max_n,
        "max_stop_sequences": limits.max_stops,
        "max_input_tokens": plan.max_sequence_tokens - 1,
        "max_input_length": plan.max_sequence_tokens - 1,
        "max_total_tokens": plan.max_sequence_tokens,
        "max_batch_total_tokens": plan.kv_tokens,
        "validation_workers": 1,
        "max_client_batch_size": 1,
        "router": "remora",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
