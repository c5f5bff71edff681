"""/info of text-embeddings-inference, for servers of pooling models."""

from __future__ import annotations

from typing import Any

from remora.configs.version import __version__
from remora.deployments.http.generation.server_state import ServerState
from remora.engine.pooling.facts import PoolingFacts


def tei_info(server: ServerState, facts: PoolingFacts) -> dict[str, Any]:
    """Return the body of /info."""
    plan = server.plan
    return {
        "model_id": plan.served_model_name,
        "model_sha": None,
        "model_dtype": plan.dtype,
        "model_type": _model_type(facts),
        "max_concurrent_requests": plan.max_open_sequences,
        "max_input_length": plan.max_sequence_tokens,
        "max_batch_tokens": plan.max_step_tokens,
        "max_batch_requests": plan.max_running_requests,
        "max_client_batch_size": server.config.limits.max_inputs,
        "auto_truncate": server.config.api.prompt_truncation != "none",
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _model_type(facts: PoolingFacts) -> dict[str, Any]:
    if facts.task == "embed":
        return {"embedding": {"pooling": facts.methods[0]}}
    labels = {
        "id2label": {str(number): label for number, label in enumerate(facts.labels)},
        "label2id": {label: number for number, label in enumerate(facts.labels)},
    }
    return {"classifier" if facts.task == "classify" else "reranker": labels}
