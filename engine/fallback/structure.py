"""Finds the class of transformers for a checkpoint, and builds models of it without weights.

Everything that can be checked before weights are read is refused here. A checkpoint's own code runs
only if the operator allows it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import nn

from remora.configs.errors import ConfigError
from remora.engine.fallback import probe
from remora.engine.fallback.attention import Attended, register
from remora.engine.fallback.head import split_ends

CAUSAL, CONFIG = "AutoModelForCausalLM", "AutoConfig"
_BUILDING = RLock()  # default dtypes and replaced torch functions apply to all threads
# Their angles depend on the length of the longest sequence, which a cache cannot follow.
CHANGING_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A model of transformers before its weights.

    model_class:  of transformers or of the checkpoint
    config:       of transformers
    attentions:   arguments of each attention of a pass, in order
    """

    model_class: Any
    config: Any
    attentions: tuple[Attended, ...]

    @property
    def name(self) -> str:
        """Return the class's name."""
        return str(self.model_class.__name__)

    def build(self, dtype: torch.dtype) -> Any:
        """Return the model with weights on the meta device, and buffers with their values."""
        with _weights_on_meta():
            model = _make(self.model_class, self.config, dtype, register())
            model.tie_weights()  # which belongs to what was left out
        return model

    def outline(self) -> Any:
        """Return the model on the meta device."""
        with torch.device("meta"):
            return _make(self.model_class, self.config, torch.bfloat16, register())


def read_structure(path: Path, raw: Mapping[str, Any], *, trust_code: bool) -> Structure:
    """Find the class and how it attends. Raises ConfigError with the reason.

    path:        of the checkpoint, whose code may be run
    raw:         its config.json, with overrides
    trust_code:  whether that code may run
    """
    if raw.get("quantization_config"):
        raise _refused(_named(raw), "its weights are quantised; use the original checkpoint")
    config = _config(path, raw, trust_code=trust_code)
    model_class = _model_class(path, raw, config, trust_code=trust_code)
    name = str(model_class.__name__)
    reason = _reason_against(model_class, config)
    if reason:
        raise _refused(name, reason)
    try:
        with torch.device("meta"):
            model = _make(model_class, config, torch.bfloat16, probe.register())
        text = config.get_text_config()
        attentions = probe.look(
            split_ends(model).decoder,
            num_layers=int(text.num_hidden_layers),
            num_positions=num_positions(config),
        )
    except ConfigError as error:
        raise _refused(name, str(error)) from error
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise _refused(name, f"transformers cannot build it ({said})") from error
    return Structure(model_class=model_class, config=config, attentions=attentions)


def num_positions(config: Any) -> int:
    """Return the longest sequence of a model. Raises ConfigError."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise ConfigError(
            "config.json does not say how many positions it has; set "
            "model.config_overrides: {max_position_embeddings: N}"
        )
    return found


def code_files(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the code that a config names: transformers' class and the file of its replacement."""
    named = raw.get("auto_map")
    if not isinstance(named, Mapping):
        return {}
    return {str(of): str(one[0] if isinstance(one, list) else one) for of, one in named.items()}


def _named(raw: Mapping[str, Any]) -> str:
    return ", ".join(map(str, raw.get("architectures") or ())) or "the model"


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} cannot be run by transformers' code on our KV cache: {reason}.")


def _config(path: Path, raw: Mapping[str, Any], *, trust_code: bool) -> Any:
    from transformers import CONFIG_MAPPING

    code = code_files(raw)
    model_type = raw.get("model_type")
    if CONFIG in code and trust_code:
        found = _from_checkpoint(path, code[CONFIG])
    elif model_type in CONFIG_MAPPING:
        found = CONFIG_MAPPING[model_type]
    elif code:
        raise _untrusted(path, raw, code)
    else:
        version = importlib.metadata.version("transformers")
        raise ConfigError(
            f"{_named(raw)}: neither remora nor transformers {version} knows the model type "
            f"{model_type!r}, and no code comes with the checkpoint."
        )
    try:
        return found.from_dict(dict(raw))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers does not accept config.json: {reason}") from error


def _untrusted(path: Path, raw: Mapping[str, Any], code: Mapping[str, str]) -> ConfigError:
    files = sorted({f"{one.rpartition('.')[0]}.py" for one in code.values()})
    return ConfigError(
        f"{_named(raw)} needs code that comes with the checkpoint ({', '.join(files)} in {path}), "
        "which is not run unless model.trust_remote_code is true. Read it first: it runs with all "
        "that the server may do."
    )


def _from_checkpoint(path: Path, reference: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if "--" in reference:
        raise ConfigError(
            f"config.json names code of another repository, {reference.partition('--')[0]}; "
            "remora downloads nothing. Put the files into the model's folder and name them there."
        )
    try:
        return get_class_from_dynamic_module(reference, str(path), local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{reference} of {path} cannot be loaded: {error}") from error


def _model_class(path: Path, raw: Mapping[str, Any], config: Any, *, trust_code: bool) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    code = code_files(raw)
    if CAUSAL in code and trust_code:
        return _from_checkpoint(path, code[CAUSAL])
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(found, tuple | list):
        found = found[0]
    if found is None and code:
        raise _untrusted(path, raw, code)
    named = raw.get("architectures") or ()
    if found is None or (named and found.__name__ not in named):
        raise _refused(_named(raw), "it is no causal language model of transformers'")
    return found


def _reason_against(model_class: Any, config: Any) -> str:
    """Return a reason to refuse a model before it is built; empty if there is none."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if getattr(model_class, "_is_stateful", False):
        return "it keeps state other than keys and values, as recurrent layers do"
    if config.get_text_config() is not config:
        return "it is multimodal"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "transformers does not let its attention be replaced"
    for kind in _rope_kinds(config):
        if kind in CHANGING_ROPES:
            return f"rotation of the type {kind} depends on what else is in the batch"
    return ""


def _rope_kinds(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, Mapping) and "rope_type" in one:
            yield str(one["rope_type"])


def _make(model_class: Any, config: Any, dtype: torch.dtype, attention: str) -> Any:
    """Build a model without its log lines."""
    with _BUILDING:
        model = model_class._from_config(
            deepcopy(config), dtype=dtype, attn_implementation=attention
        )
    return model.train(False).requires_grad_(False)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Keep parameters that modules create on the meta device, and buffers in memory."""
    from transformers.initialization import no_init_weights

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        plain(module, name, param)

    with _BUILDING, ExitStack() as stack:
        plain = nn.Module.register_parameter
        stack.enter_context(no_init_weights())
        nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
        stack.callback(setattr, nn.Module, "register_parameter", plain)
        yield
