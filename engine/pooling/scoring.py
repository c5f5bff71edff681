"""Scoring heads of classifiers and reward models, by architecture.

Knows the layers of a head and the meaning of its outputs. Knows nothing of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from remora.configs.errors import ConfigError
from remora.configs.sections.pooling import Method, Task
from remora.engine.encoders.architectures import CLASSIFIER
from remora.engine.models.families.config_values import RawConfig, activation, refuse
from remora.engine.pooling.stages import Stage, torch_activation

REWARD_HEADS = ("ForRewardModel",)
STEP_HEADS = ("ForProcessRewardModel",)
STEP_TOKEN = "<extra_0>"
STEP_LABELS = ("wrong", "right")  # config.json has other names

Layers = tuple[Method, tuple[Stage, ...]]


def scoring_layers(raw: RawConfig, architecture: str, size: int) -> Layers:
    """Return the pooling method of a scoring model, and the layers after it. Raises ConfigError.

    size:  of a hidden state
    """
    count = len(labels_of(raw))
    family = architecture.removesuffix(CLASSIFIER)
    if family in HEADS:
        return HEADS[family](raw, size, count)
    if architecture.startswith("InternLM2"):
        return "last", (Stage(name="v_head", inputs=size, outputs=1, bias=False),)
    if architecture.endswith((*REWARD_HEADS, *STEP_HEADS)):
        outputs = len(STEP_LABELS) if architecture.endswith(STEP_HEADS) else 1
        first = Stage(name="score.0", inputs=size, outputs=size, activation="relu")
        return "last", (first, Stage(name="score.2", inputs=size, outputs=outputs))
    return "last", (Stage(name="score", inputs=size, outputs=count, bias=False),)


def _two_layers(
    first: str, act: str = "tanh", last: str = "classifier"
) -> Callable[[RawConfig, int, int], Layers]:
    def layers(raw: RawConfig, size: int, count: int) -> Layers:
        return "cls", (
            Stage(name=first, inputs=size, outputs=size, activation=act),
            Stage(name=last, inputs=size, outputs=count),
        )

    return layers


def _deberta(raw: RawConfig, size: int, count: int) -> Layers:
    refuse(raw, "pooler_hidden_size", size, f"and only hidden_size ({size}) is known")
    act = activation(raw, "pooler_hidden_act", "gelu")
    return _two_layers("pooler.dense", act)(raw, size, count)


def _modern(raw: RawConfig, size: int, count: int) -> Layers:
    first = Stage(
        name="head.dense",
        inputs=size,
        outputs=size,
        bias=bool(raw.get("classifier_bias", False)),
        activation=activation(raw, "classifier_activation", "gelu"),
    )
    norm = Stage(
        name="head.norm",
        inputs=size,
        outputs=size,
        bias=bool(raw.get("norm_bias", False)),
        is_norm=True,
        eps=float(raw.get("norm_eps", 1e-5)),
    )
    return _modern_method(raw), (first, norm, Stage(name="classifier", inputs=size, outputs=count))


def _modern_method(raw: RawConfig) -> Method:
    method = raw.get("classifier_pooling", "cls")
    if method not in ("cls", "mean"):
        raise ConfigError(f"classifier_pooling in config.json is {method!r}; supported: cls, mean.")
    return "mean" if method == "mean" else "cls"


def score_activation(raw: RawConfig, task: Task, num_labels: int, named: str | None = None) -> str:
    """Return the activation that turns logits into scores: none, sigmoid or softmax.

    named:  activation in a file of sentence-transformers; None = not given
    """
    named = named or (raw.get("sentence_transformers") or {}).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is not None:
        return torch_activation(str(named), "config.json")
    if task == "reward":
        return "none"
    is_several = num_labels > 1 and raw.get("problem_type") != "multi_label_classification"
    return "softmax" if is_several else "sigmoid"


def labels_of(raw: RawConfig) -> tuple[str, ...]:
    """Return the names of a classifier's outputs."""
    named = raw.get("id2label")
    if named:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    count = raw.get("num_labels", 2)
    return tuple(f"LABEL_{number}" for number in range(count))


_BERT = _two_layers("pooler.dense")
_ROBERTA = _two_layers("classifier.dense", last="classifier.out_proj")
# Keys are those of `encoders.architectures.FAMILIES`.
HEADS: Mapping[str, Callable[[RawConfig, int, int], Layers]] = {
    "Bert": _BERT,
    "NomicBert": _BERT,
    "New": _BERT,
    "Gte": _BERT,
    "Albert": _two_layers("pooler"),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "MPNet": _ROBERTA,
    "Electra": _two_layers("classifier.dense", "gelu", "classifier.out_proj"),
    "DistilBert": _two_layers("pre_classifier", "relu"),
    "DebertaV2": _deberta,
    "ModernBert": _modern,
}
