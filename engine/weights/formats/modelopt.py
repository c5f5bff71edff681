"""NVIDIA ModelOpt: 8-bit floats (FP8), and 4-bit floats with two scales (NVFP4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from remora.configs.errors import ConfigError
from remora.engine.weights.formats.fp8 import scaled
from remora.engine.weights.formats.stored import (
    ACTIVATION_SCALES,
    Format,
    Inventory,
    Parts,
    Settings,
    StoredWeight,
)
from remora.kernels.quantised.weight_kinds import Float4Weight

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")
SCALE, FACTOR = "_scale", "_scale_2"
GROUP = 16  # inputs that share a scale in NVFP4


def check(settings: Settings) -> None:
    """Raise ConfigError for other algorithms."""
    found = settings.get("quant_algo")
    has_only_kv = found is None and settings.get("kv_cache_quant_algo")
    if found not in ALGORITHMS and not has_only_kv:
        raise ConfigError(
            f"config.json: modelopt with quant_algo {found} is not read; read are "
            f"{', '.join(ALGORITHMS)}. Use the original checkpoint."
        )


def find(settings: Settings, inventory: Inventory) -> Iterator[StoredWeight]:
    """Yield a weight for each tensor with a scale: NVFP4 if there is a second one."""
    for name in inventory.having(SCALE):
        if name not in inventory.shapes or len(inventory.shapes[name]) < 2:
            continue
        if name + FACTOR not in inventory.shapes:
            yield scaled(inventory, name, name + SCALE, None)
            continue
        outputs, half = inventory.matrix(name)
        why = f"for groups of {GROUP} of {2 * half} inputs"
        inventory.expect(name + SCALE, (outputs, 2 * half // GROUP), why=why)
        inventory.expect(name + FACTOR, (), (1,), why="for the tensor")
        yield StoredWeight(
            name=name,
            shape=(outputs, 2 * half),
            parts={"values": name, "scales": name + SCALE, "factor": name + FACTOR},
            decode=_decode,
            label=f"nvfp4, groups of {GROUP}",
        )


def _decode(parts: Parts) -> Float4Weight:
    factors = parts["factor"].float().flatten().expand(len(parts["values"]))
    return Float4Weight(values=parts["values"], scales=parts["scales"], factors=factors)


def kept(settings: Settings) -> Iterable[str]:
    """Return the modules that are listed as unquantised; patterns of shells are left out."""
    for key in ("ignore", "exclude_modules"):
        yield from (name for name in settings.get(key) or () if "*" not in name)


def _from_file(content: Settings) -> Settings:
    inside = content.get("quantization")
    return {"quant_method": "modelopt", **(inside if isinstance(inside, Mapping) else {})}


FORMAT = Format(
    methods=("modelopt", "modelopt-fp4"),
    find=find,
    check=check,
    kept=kept,
    unused=ACTIVATION_SCALES,
    key="quant_algo",
    file="hf_quant_config.json",
    from_file=_from_file,
)
