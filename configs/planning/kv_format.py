"""The format of cached K and V: what is asked for, its bytes, and who supports it.

Knows plans and facts; knows nothing of page layouts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.shares import kv_heads_of, share
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import KV_8_BIT, KVDtype

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 2  # of each token and head, in 8-bit formats
KVScales = tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
"""Static scales: of K and V of each layer, for each KV head."""


def pick_kv_dtype(
    config: ServeConfig,
    model: ModelFacts,
    dtype: str,
    on_device: DevicePlan,
    *,
    converts_e4m3: bool = True,
) -> KVDtype:
    """Return the format of cached K and V; auto = that of activations, `dtype`.

    converts_e4m3:  whether Triton kernels do, on the GPUs of this machine

    With auto, a format that the checkpoint declares comes first, where it is supported.
    Raises ConfigError for a format that the model or the backend does not support.
    """
    wanted = config.engine.kv_dtype
    if wanted == "auto" and model.kv_dtype:
        is_free = not _obstacle(model.kv_dtype, model, on_device, converts_e4m3)
        return model.kv_dtype if is_free else "auto"
    if wanted in ("auto", dtype):
        return "auto"
    name = f"engine.kv_dtype = {wanted}"
    if wanted not in KV_8_BIT:
        raise ConfigError(
            f"{name}: the model computes in {dtype}, and K and V are cached in that format or in "
            f"8 bits; set it to auto, {', '.join(KV_8_BIT)}, or set model.dtype to {wanted}"
        )
    if reason := _obstacle(wanted, model, on_device, converts_e4m3):
        raise ConfigError(f"{name}: {reason}")
    return wanted


def _obstacle(
    wanted: KVDtype, model: ModelFacts, on_device: DevicePlan, converts_e4m3: bool
) -> str:
    """Return why K and V cannot be cached in an 8-bit format, and what to set; "" = they can."""
    reasons = (
        (
            model.kv_vectors == 1,
            "the model caches latents (MLA), of which one scale for a token would also be that of "
            "its rotary key; set it to auto",
        ),
        (
            on_device.attention_backend not in ("torch", "triton"),
            f"engine.attention_backend {on_device.attention_backend} reads no scales for each "
            "token and head; set that to triton, or kv_dtype to auto",
        ),
        (
            wanted == "fp8_e4m3" and on_device.attention_backend == "triton" and not converts_e4m3,
            "Triton kernels cannot convert e4m3 on this GPU (they can on NVIDIA GPUs of compute "
            "capability 8.9 and above); set it to int8 or fp8_e5m2",
        ),
        (
            on_device.compiled_rows > 0,
            "compiled decode steps read K and V unquantised; leave engine.compile out, or set "
            "kv_dtype to auto",
        ),
    )
    return next((reason for is_fault, reason in reasons if is_fault), "")


def kv_fields(
    config: ServeConfig,
    model: ModelFacts,
    dtype: str,
    on_device: DevicePlan,
    machine: MachineFacts,
) -> dict[str, Any]:
    """Return the plan's fields of the format of K and V, but for scales.

    Raises ConfigError for a format that is not supported, and for keys that it excludes.
    """
    kv_dtype = pick_kv_dtype(config, model, dtype, on_device, converts_e4m3=machine.converts_e4m3)
    _check_keys(config, model, kv_dtype)
    skipped = sorted({*config.engine.kv_dtype_skip_layers})
    return {"kv_dtype": kv_dtype, "kv_skip_layers": tuple(skipped)}


def _check_keys(config: ServeConfig, model: ModelFacts, kv_dtype: KVDtype) -> None:
    engine = config.engine
    for key, value in (
        ("kv_scales_file", engine.kv_scales_file),
        ("kv_dtype_skip_layers", engine.kv_dtype_skip_layers),
    ):
        if value and kv_dtype not in KV_8_BIT:
            raise ConfigError(
                f"engine.{key} = {value}: K and V are cached in the model's format; set "
                f"engine.kv_dtype to {', '.join(KV_8_BIT)}, or leave the key out"
            )
    beyond = [layer for layer in engine.kv_dtype_skip_layers if layer >= model.num_layers]
    if beyond:
        raise ConfigError(
            f"engine.kv_dtype_skip_layers: the model has no layer {beyond[0]}; its "
            f"{model.num_layers} layers are counted from 0"
        )


def kv_layer_bytes(
    model: ModelFacts,
    dtype: str,
    kv_dtype: str = "auto",
    skip_layers: Collection[int] = (),
    *,
    tp_size: int = 1,
) -> list[int]:
    """Return the bytes of one token in each layer, scales included, on the rank with the most.

    skip_layers:  with K and V in `dtype` all the same
    """
    num_vectors = model.kv_vectors * len(kv_heads_of(model.num_kv_heads, 0, tp_size))
    plain = num_vectors * model.head_dim * DTYPE_BYTES[dtype]
    quantised = num_vectors * (model.head_dim + SCALE_BYTES)
    return [
        plain if kv_dtype not in KV_8_BIT or layer in skip_layers else quantised
        for layer in range(model.num_layers)
    ]


def kv_bytes_per_token(
    model: ModelFacts, dtype: str, kv_dtype: str = "auto", *, tp_size: int = 1, pp_size: int = 1
) -> int:
    """Return the bytes of K and V of one token on the rank with the most, scales included."""
    layers = kv_layer_bytes(model, dtype, kv_dtype, tp_size=tp_size)
    stages = (share(model.num_layers, stage, pp_size) for stage in range(pp_size))
    return max(sum(layers[layer] for layer in stage) for stage in stages)


def kv_gain(
    model: ModelFacts, dtype: str, kv_dtype: str, skip_layers: Collection[int] = ()
) -> float:
    """Return how many tokens fit where one of the format `dtype` would."""
    layers = kv_layer_bytes(model, dtype, kv_dtype, skip_layers)
    return kv_bytes_per_token(model, dtype) / sum(layers)
