"""Facts that plans are made from: what a checkpoint is, and what a machine offers.

Plain values. `configs/machine.py` reads MachineFacts, and `engine/models/facts.py` ModelFacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """Weights that a checkpoint stores in one quantised format, less the embedding's lookup.

    label:         the format in a few words
    number:        of weights
    bits:          of each number, scales included
    is_native:     whether native CPU kernels multiply with them as they are stored
    layers, head:  numbers in the layers' weights, and in the head's
    device_layers: numbers in the layers' weights that kernels on a GPU multiply as stored
    """

    label: str
    number: int
    bits: float
    is_native: bool
    layers: int
    head: int
    device_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The shape of a checkpoint's model.

    dtype:                  of the stored weights: bfloat16, float16 or float32
    max_position:           longest sequence that the model was trained for, in tokens
    num_parameters:         of the whole model; tied weights count once
    tied_embeddings:        whether the head uses the embedding's weight
    layer_parameters:       of each layer; () = all layers have the same number
    linear_weights:         weights of the layers' linears and experts, by the last part of their
                            names in the model
    copied_parameters:      most parameters of a layer that every tensor-parallel rank holds in
                            full, not counting norms and the K and V projections
    gated:                  whether feed-forward layers have a gate projection
    experts_per_token:      experts that each token uses in a layer; 0 = the model has no experts
    kv_vectors:             vectors that each KV head stores for a token: 2 (K and V), or 1 latent
    fingerprint:            distinguishes checkpoints of the same shape
    windows:                [num_layers] sliding window of each layer in tokens, None = full
                            attention; empty = no layer has a window
    module_words:           the checkpoint's module names -> remora's, where they differ
    implementation:         whose code runs the model
    indivisible:            why tensor-parallel ranks cannot share its layers; empty if they can
    stored:                 quantised weights, by format; () = none
    kv_dtype:               8-bit format in which the checkpoint says to cache K and V; "" = none
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str
    num_parameters: int
    tied_embeddings: bool = False
    layer_parameters: tuple[int, ...] = ()
    linear_weights: Mapping[str, int] = field(default_factory=dict)
    copied_parameters: int = 0
    gated: bool = True
    experts_per_token: int = 0
    kv_vectors: int = 2
    fingerprint: str = ""
    windows: tuple[int | None, ...] = ()
    module_words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    implementation: Literal["remora", "transformers"] = "remora"
    indivisible: str = ""
    stored: tuple[StoredFormat, ...] = ()
    kv_dtype: Literal["", "int8", "fp8_e4m3"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The resources of a machine.

    num_cores:         physical cores that this process may use
    total_bytes:       memory of the device that the model runs on
    available_bytes:   memory that can be allocated now without swapping, cgroup limits included
    has_triton:        whether GPU kernels can be compiled
    attention_libraries:  installed ones, by the names of engine.attention_backend
    converts_e4m3:     whether Triton kernels on its GPUs convert 8-bit floats of e4m3
    """

    num_cores: int
    total_bytes: int
    available_bytes: int
    cpu_name: str
    cpu_features: tuple[str, ...]
    devices: tuple[str, ...]
    has_triton: bool = False
    attention_libraries: tuple[str, ...] = ()
    converts_e4m3: bool = True
