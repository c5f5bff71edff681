"""How long a device takes for a step, from its bandwidth, its rate of products and its launches."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("figures.toml")
WEIGHT_BYTES = KV_BYTES = 2  # bfloat16
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of device work of one model.

    figures:  of `figures.toml`
    shape:    a checkpoint's config.json
    """

    figures: dict[str, dict[str, float]]
    shape: dict[str, Any]

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Roofline:
        return cls(tomllib.loads(FIGURES.read_text()), shape)

    @property
    def num_layers(self) -> int:
        return int(self.shape["num_hidden_layers"])

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in one layer."""
        return int(self.shape["num_key_value_heads"] * self.shape["head_dim"])

    @property
    def num_weights(self) -> int:
        """Elements that every step reads: products and head."""
        hidden = self.shape["hidden_size"]
        heads = self.shape["num_attention_heads"] * self.shape["head_dim"]
        attention = hidden * (2 * heads + 2 * self.kv_size)
        mlp = 3 * hidden * self.shape["intermediate_size"]
        return int(self.num_layers * (attention + mlp) + hidden * self.shape["vocab_size"])

    @property
    def num_nodes(self) -> int:
        """Kernels and copies of a forward pass, its logits written."""
        nodes = self.figures["nodes"]
        return int(nodes["per_layer"] * self.num_layers + nodes["per_step"])

    def step_s(self, num_tokens: int, num_rows: int) -> float:
        """Return the seconds of a forward pass, its logits written."""
        device = self.figures["device"]
        keys = 2 * KV_BYTES * self.num_layers * self.kv_size * device["context"] * num_rows
        read = WEIGHT_BYTES * self.num_weights + keys + self._logit_bytes(num_rows)
        products_s = 2 * self.num_weights * num_tokens / device["flops_per_s"]
        return max(read / device["bytes_per_s"], products_s) + self.num_nodes * device["node_s"]

    def sampling_s(self, num_rows: int) -> float:
        """Return the seconds of choosing tokens, which reads all logits twice."""
        device = self.figures["device"]
        read_s = 2 * self._logit_bytes(num_rows) / device["bytes_per_s"]
        return read_s + self.figures["nodes"]["sampling"] * device["node_s"]

    def _logit_bytes(self, num_rows: int) -> float:
        return float(LOGIT_BYTES * num_rows * self.shape["vocab_size"])
