"""The fields of Ray Serve LLM's configuration, read from a release of Ray without importing it.

Knows which classes make up an entry of `llm_configs` and the arguments of `build_openai_app`, and
that fields are named by their path. Knows nothing of remora's catalogue.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.configs.catalogues.sources import Fact, Sources, default_of, kind_of, type_of

_CONFIGS = "ray.llm._internal.serve.core.configs"
_INGRESS = "ray.llm._internal.serve.core.ingress.builder"
_HARDWARE = ("GPU", "CPU", "TPU")
# Where a class's fields are: the prefix of their names, module, class.
_CLASSES = (
    ("", _INGRESS, "LLMServingArgs"),
    ("ingress_cls_config.", _INGRESS, "IngressClsConfig"),
    ("", f"{_CONFIGS}.llm_config", "LLMConfig"),
    ("model_loading_config.", f"{_CONFIGS}.llm_config", "ModelLoadingConfig"),
    ("lora_config.", f"{_CONFIGS}.llm_config", "LoraConfig"),
    ("callback_config.", "ray.llm._internal.common.callbacks.base", "CallbackConfig"),
    *(("accelerator_config.", f"{_CONFIGS}.accelerators", f"{kind}Config") for kind in _HARDWARE),
    (
        "placement_group_config.",
        "ray.llm._internal.serve.engines.vllm.vllm_models",
        "PlacementGroupConfig",
    ),
    ("deployment_config.autoscaling_config.", "ray.serve.config", "AutoscalingConfig"),
)
# Fields whose own fields are listed, so that they are no parameters themselves.
_PARENTS = {prefix.rstrip(".") for prefix, *_ in _CLASSES} | {
    "deployment_config",
    "experimental_configs",
    "engine_kwargs",
    "llm_configs",
}
_OPTIONS = {"num_replicas": "str", "name": "str"}  # the number may be auto


def fields(path: Path) -> list[Fact]:
    """Return the fields in a wheel of Ray, or in a folder that contains `ray/`."""
    sources = Sources(path)
    found: dict[str, Fact] = {}
    for prefix, module, name in _CLASSES:
        for fact in _of_class(sources, prefix, module, name):
            if fact.name in found and fact.choices is not None:  # one of several classes
                first = found[fact.name]
                found[fact.name] = replace(first, choices=(*(first.choices or ()), *fact.choices))
            elif fact.name not in _PARENTS:
                found.setdefault(fact.name, fact)
    for fact in _described(sources):
        if fact.name not in _PARENTS:
            found.setdefault(fact.name, fact)
    return list(found.values())


def _of_class(sources: Sources, prefix: str, module: str, name: str) -> Iterator[Fact]:
    place, node = sources.find(module, name) or (module, None)
    if not isinstance(node, ast.ClassDef):
        raise LookupError(f"{module} has no class {name}")
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            kind, choices = type_of(kind_of(sources, place, each.annotation))
            default = default_of(sources, place, each.value)
            yield Fact(f"{prefix}{ast.unparse(each.target)}", (), kind, default, choices)


def _described(sources: Sources) -> Iterator[Fact]:
    """Yield the options of deployments and experiments, which descriptions and code name."""
    definition = sources.find(f"{_CONFIGS}.llm_config", "LLMConfig")
    assert definition is not None
    texts = {
        each.target.id: ast.unparse(each)
        for each in definition[1].body  # type: ignore[attr-defined]  # a class, as above
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    known = {
        each.target.id: each
        for each in _deployment(sources).body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for name in re.findall(r"`(\w+)`", texts["deployment_config"]):
        kind = "json"
        default: Any = None
        if name in known:
            kind = type_of(kind_of(sources, "ray.serve._private.config", known[name].annotation))[0]
            default = default_of(sources, "ray.serve._private.config", known[name].value)
        yield Fact(f"deployment_config.{name}", (), _OPTIONS.get(name, kind), default, None)
    for name in re.findall(r"`(\w+)`", texts["experimental_configs"]):
        yield Fact(f"experimental_configs.{name}", (), "int", None, None)


def _deployment(sources: Sources) -> ast.ClassDef:
    definition = sources.find("ray.serve._private.config", "DeploymentConfig")
    if definition is None or not isinstance(definition[1], ast.ClassDef):
        raise LookupError("ray.serve._private.config has no class DeploymentConfig")
    return definition[1]
