"""The weights of a plan: which are computed as they are stored, and their bytes.

Knows facts and configurations; knows nothing of readers or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts, StoredFormat
from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.kv_format import DTYPE_BYTES
from remora.configs.planning.offload_plan import OffloadPlan
from remora.configs.planning.rounding import Rounding, asked_rounding
from remora.configs.planning.shares import stage_parameters
from remora.configs.schema import ServeConfig

_SCALE_BYTES = 4  # of an output of a weight that is rounded to 8 bits on a GPU


def held_as_stored(
    config: ServeConfig, stored: Sequence[StoredFormat], device: str, on_device: DevicePlan
) -> list[StoredFormat]:
    """Return the formats of weights that are computed as they are stored. Raises ConfigError."""
    if device == "cpu":
        held = [each for each in stored if each.is_native and _is_native(config, device)]
    elif on_device.held_weights == "dequantised":
        held = []
    else:
        held = [each for each in stored if each.device_layers > 0]
    _check_rounded_once(config, held)
    return held


def describe_stored(
    stored: Sequence[StoredFormat], held: Sequence[StoredFormat], dtype: str
) -> str:
    """Return how many weights of which formats are computed as stored, and which dequantised."""
    texts = []
    for how, some in (
        ("as stored", held),
        (f"dequantised to {dtype}", [each for each in stored if each not in held]),
    ):
        formats = ", ".join(
            f"{each.number} {each.label} ({each.bits:.2f} bits a weight)" for each in some
        )
        if formats:
            texts.append(f"{how}: {formats}")
    return "; ".join(texts)


def weight_bytes_of(
    config: ServeConfig,
    model: ModelFacts,
    dtype: str,
    device: str,
    on_device: DevicePlan,
    held: Sequence[StoredFormat],
    rounding: Rounding | None = None,
    offload: OffloadPlan | None = None,
) -> int:
    """Return the bytes of the weights of the rank with the most.

    held:      weights that are computed as they are stored; the rank has the whole model then
    rounding:  to which the others are rounded on a CPU
    offload:   weights in host memory, which do not count, except for their buffers

    A tied head takes extra memory where kernels pack it (on a CPU, except torch in float32), and
    where embedding and head are on different pipeline stages.
    """
    parallel = config.parallel
    each = float(DTYPE_BYTES[dtype])
    layer_bytes = head_bytes = each
    if device != "cpu":
        layer_bytes, head_bytes = device_layer_bytes(model, dtype, on_device, held), each
        held = ()
    elif rounding is not None:
        numbers, plain = model.linear_weights, 8 * each
        layer_bytes = rounding.bits(numbers, num_layers=model.num_layers, plain=plain) / 8
        head_bytes = rounding.bits_of(rounding.head, plain=plain) / 8
    by_torch = config.engine.cpu_kernels == "torch" or parallel.num_ranks > 1
    is_packed = device == "cpu" and not (by_torch and dtype != "bfloat16")
    is_packed = is_packed and not (by_torch and config.engine.compile)
    if not is_packed and model.tied_embeddings and parallel.pp_size == 1:
        head_bytes = 0.0
    stages = stage_parameters(model, tp_size=parallel.tp_size, pp_size=parallel.pp_size)
    in_layers, in_head = sum(one.layers for one in held), sum(one.head for one in held)
    held_bytes = int(sum((one.layers + one.head) * one.bits / 8 for one in held))
    saved = (0,) * len(stages) if offload is None else offload.saved_bytes
    return held_bytes + max(
        int(
            stage.table * each
            + (stage.head - in_head) * head_bytes
            + (stage.layers - in_layers) * layer_bytes
        )
        - saved_bytes
        for stage, saved_bytes in zip(stages, saved, strict=True)
    )


def device_layer_bytes(
    model: ModelFacts, dtype: str, on_device: DevicePlan, held: Sequence[StoredFormat]
) -> float:
    """Return the average bytes of a layer's parameter on a GPU."""
    if on_device.held_weights in ("int8", "fp8"):
        return 1 + _SCALE_BYTES / model.hidden_size
    each = float(DTYPE_BYTES[dtype])
    saved = sum(one.device_layers * (each - one.bits / 8) for one in held)
    number = sum(model.layer_parameters) or model.num_parameters
    return each - saved / max(1, number)  # 0 = not known, where no weights are read


def _check_rounded_once(config: ServeConfig, held: Sequence[StoredFormat]) -> None:
    """Raise ConfigError if weights that are computed as stored would be rounded again."""
    asked = asked_rounding(config.model)
    if asked and held:
        raise ConfigError(
            f"{asked}: the checkpoint's weights are quantised already ({held[0].label}) and "
            "computed as they are stored; leave the key out, or use the original checkpoint"
        )


def _is_native(config: ServeConfig, device: str) -> bool:
    """Whether native kernels compute, as far as the configuration says."""
    one_rank = config.parallel.num_ranks == 1
    return device == "cpu" and config.engine.cpu_kernels != "torch" and one_rank
