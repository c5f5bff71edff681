"""The GGUF families that can be read, by their names in the files."""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf.dense import DENSE, FALCON_WITH_TWO_NORMS
from remora.engine.weights.gguf.experts import DEEPSEEK_V3, EXPERTS, MIXTRAL, SIGMOID
from remora.engine.weights.gguf.family import GGUFFamily
from remora.engine.weights.gguf.file import GGUFFile

FAMILIES = {**DENSE, **EXPERTS}


def family_of(file: GGUFFile) -> GGUFFamily:
    """Return the family of a file's model. Raises ConfigError for an unknown one."""
    name = file.architecture
    match name:
        case "llama" if file.setting("expert_count"):
            return MIXTRAL
        case "falcon" if "blk.0.attn_norm_2.weight" in file.shapes:
            return FALCON_WITH_TWO_NORMS
        case "deepseek2" if file.setting("expert_gating_func") == SIGMOID or any(
            stored.endswith(".exp_probs_b.bias") for stored in file.shapes
        ):
            return DEEPSEEK_V3
        case _ if name in FAMILIES:
            return FAMILIES[name]
    raise ConfigError(
        f"{file.path} holds a model of GGUF architecture {name!r}; "
        f"known are {', '.join(FAMILIES)}. Use the model's Hugging Face folder instead."
    )
