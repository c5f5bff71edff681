"""Facts of pooling models, read from a checkpoint without loading weights.

Parses sentence-transformers folders (modules.json and the files that it names). Scoring heads are
in `scoring.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.sections.pooling import Method, PoolingSection, Task
from remora.engine.encoders.architectures import CLASSIFIER, encoder_architecture
from remora.engine.models.architectures import ARCHITECTURES, sees_both_ways
from remora.engine.models.checkpoint import NO_OVERRIDES, read_raw_config
from remora.engine.models.families.config_values import RawConfig
from remora.engine.pooling.scoring import (
    REWARD_HEADS,
    STEP_HEADS,
    STEP_LABELS,
    STEP_TOKEN,
    labels_of,
    score_activation,
    scoring_layers,
)
from remora.engine.pooling.stages import Stage, torch_activation

TEXTS = "sentence_bert_config.json"
SENTENCES = "config_sentence_transformers.json"
VECTOR = "sentence_embedding"
BASE_HEADS = ("Model",)
CAUSAL = "ForCausalLM"
YES_NO = "yes_no"  # computed from two rows of the LM head
# In the order in which sentence-transformers concatenates them.
_OLD_METHODS: Mapping[str, Method | None] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_METHODS: Mapping[str, Method] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """How a model turns hidden states into embeddings or scores.

    methods:      pooling methods; their results are concatenated
    stages:       layers after pooling
    normalize:    whether embeddings are normalized to length 1
    activation:   none, sigmoid or softmax: turns logits into scores
    labels:       names of the scores; () = the output is an embedding
    max_tokens:   maximum length of a row; None = the model's
    prompts:      texts to prepend to inputs, by name
    size:         of the embedding, or number of scores
    dimensions:   sizes that embeddings may be cut to; () = any, None = none
    step_token:   token whose states are scored separately; None = each row is pooled
    step_id:      its id, if the tokenizer is known
    """

    task: Task
    methods: tuple[Method, ...]
    stages: tuple[Stage, ...] = ()
    normalize: bool = True
    activation: str = "none"
    labels: tuple[str, ...] = ()
    max_tokens: int | None = None
    prompts: Mapping[str, str]
    default_prompt: str | None = None
    size: int = 0
    dimensions: tuple[int, ...] | None = None
    step_token: str | None = None
    step_id: int | None = None

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the layers after pooling."""
        return sum(stage.num_parameters for stage in self.stages)


def pooling_task(
    path: Path, wanted: str, overrides: Mapping[str, Any] = NO_OVERRIDES
) -> Task | None:
    """Return the task of a pooling model; None for text generation.

    wanted:  model.task
    Raises ConfigError if the checkpoint cannot do the task.
    """
    if wanted == "generate" or path.is_file():
        if wanted not in ("generate", "auto"):
            raise ConfigError(f"model.task = {wanted}: GGUF files support text generation only.")
        return None
    raw = read_raw_config(path, overrides)
    architecture = _architecture(raw)
    own_task = _own_task(path, raw, architecture)
    if wanted == "auto":
        return own_task
    task: Task = wanted  # type: ignore[assignment]
    scores = ("classify", "rerank", "reward")
    if task in scores and own_task not in scores and not (task == "rerank" and _is_causal(raw)):
        raise ConfigError(
            f"model.task = {task}: {architecture} has no scoring head; set model.task to "
            f"{'embed' if own_task else 'generate or embed'}."
        )
    if task == "embed" and own_task in scores:
        raise ConfigError(
            f"model.task = embed: {architecture} has a scoring head; set model.task to {own_task} "
            "or auto."
        )
    return task


def _own_task(path: Path, raw: RawConfig, architecture: str) -> Task | None:
    if architecture.endswith(CLASSIFIER):
        if len(labels_of(raw)) > 1:
            return "classify"
        return "rerank" if encoder_architecture(raw) else "reward"
    if architecture.endswith((*REWARD_HEADS, *STEP_HEADS)):
        return "reward"
    is_sentence_folder = (path / "modules.json").is_file()
    if is_sentence_folder:
        _check_kind(path)
    if architecture in ARCHITECTURES and not is_sentence_folder:
        return None  # includes GPT2LMHeadModel and ChatGLMModel
    if is_sentence_folder or encoder_architecture(raw) or not architecture.endswith(CAUSAL):
        is_known = architecture.endswith(BASE_HEADS) or encoder_architecture(raw)
        return "embed" if is_sentence_folder or is_known else None
    return None


def _check_kind(path: Path) -> None:
    kind = _read(path / SENTENCES).get("model_type", "SentenceTransformer")
    if kind == "SentenceTransformer":
        return
    advice = "Use a model with one embedding per text."
    if kind == "CrossEncoder":
        advice = (
            "To serve it, remove modules.json and set model.task: rerank, pooling.pair_template, "
            "pooling.yes_token and pooling.no_token."
        )
    raise ConfigError(
        f"{path / SENTENCES} has the model_type {kind!r} without a classification head; supported: "
        f"SentenceTransformer. {advice}"
    )


def read_pooling_facts(
    path: Path,
    task: Task,
    section: PoolingSection,
    *,
    hidden_size: int,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
) -> PoolingFacts:
    """Read the pooling facts of a checkpoint. Raises ConfigError for unsupported settings."""
    raw = read_raw_config(path, overrides)
    if task == "embed":
        facts = _sentence_facts(path, raw, hidden_size)
    elif _is_causal(raw):
        stage = Stage(name=YES_NO, inputs=hidden_size, outputs=1, bias=False)
        facts = PoolingFacts(
            task=task,
            methods=("last",),
            stages=(stage,),
            labels=("yes",),
            activation="sigmoid",  # of the difference of two logits, which is their softmax
            prompts={},
        )
    else:
        facts = _scoring_facts(path, raw, task, hidden_size)
    facts = replace(
        facts,
        prompts={**facts.prompts, **section.prompts},
        dimensions=_dimensions(raw, section),
    )
    facts = _with_step(facts, section)
    if section.method != "auto":
        facts = replace(facts, methods=(section.method,))
    if section.normalize is not None:
        facts = replace(facts, normalize=section.normalize)
    if section.activation != "auto":
        facts = replace(facts, activation=section.activation)
    if section.default_prompt is not None:
        facts = replace(facts, default_prompt=section.default_prompt)
    pooled = hidden_size * len(facts.methods)
    if facts.stages and facts.stages[0].inputs != pooled:
        raise ConfigError(
            f"pooling.method yields {pooled} values, but the next layer expects "
            f"{facts.stages[0].inputs}; remove pooling.method to use the checkpoint's."
        )
    facts = replace(facts, size=facts.stages[-1].outputs if facts.stages else pooled)
    if facts.default_prompt is not None and facts.default_prompt not in facts.prompts:
        raise ConfigError(
            f"pooling.default_prompt is {facts.default_prompt!r}; available prompts: "
            f"{', '.join(facts.prompts) or 'none'}."
        )
    return facts


def _with_step(facts: PoolingFacts, section: PoolingSection) -> PoolingFacts:
    if facts.step_token is None and section.step_token is not None:
        raise ConfigError("pooling.step_token applies only to process reward models; remove it.")
    if facts.step_token is not None and section.method != "auto":
        raise ConfigError(
            f"pooling.method is {section.method}, but a process reward model scores every step; "
            "set it to auto."
        )
    return replace(facts, step_token=section.step_token or facts.step_token)


def _dimensions(raw: RawConfig, section: PoolingSection) -> tuple[int, ...] | None:
    named = section.dimensions
    if named is None:
        named = raw.get("matryoshka_dimensions") or ([] if raw.get("is_matryoshka") else None)
    return None if named is None else tuple(named)


# -- folders of sentence-transformers --------------------------------------------------------


def _sentence_facts(path: Path, raw: RawConfig, hidden_size: int) -> PoolingFacts:
    usual: Method = "mean" if encoder_architecture(raw) or sees_both_ways(raw) else "last"
    if not (path / "modules.json").is_file():
        return PoolingFacts(task="embed", methods=(usual,), prompts={})
    methods: tuple[Method, ...] = (usual,)
    stages: list[Stage] = []
    normalize, size = False, hidden_size
    for module in _read(path / "modules.json"):
        kind, folder = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        settings = _read(path / folder / "config.json") if folder else {}
        match kind:
            case "Transformer":
                if folder:
                    raise ConfigError(
                        f"{path} has its transformer in {folder}: set model.path to that folder."
                    )
            case "Pooling":
                methods = _methods(path / folder, settings)
                size = hidden_size * len(methods)
            case "Dense":
                stages.append(_dense(path, folder, settings, size))
                size = stages[-1].outputs
            case "Normalize":
                normalize = True
            case "Dropout":
                pass
            case _:
                raise ConfigError(
                    f"{path / 'modules.json'} has a module of type {kind}; supported: Transformer, "
                    "Pooling, Dense, Normalize, Dropout."
                )
    settings = _read(path / SENTENCES)
    prompts = settings.get("prompts") or {}
    return PoolingFacts(
        task="embed",
        methods=methods,
        stages=tuple(stages),
        normalize=normalize,
        max_tokens=_text_settings(path).get("max_seq_length"),
        prompts={name: text for name, text in prompts.items() if text is not None},
        default_prompt=settings.get("default_prompt_name"),
    )


def _text_settings(path: Path) -> Mapping[str, Any]:
    """Return the settings for input texts. Raises ConfigError if they need a chat template."""
    settings: Mapping[str, Any] = _read(path / TEXTS)
    if "message" in (settings.get("modality_config") or {}):
        raise ConfigError(
            f"{path / TEXTS} has message in modality_config: sentence-transformers applies "
            "the chat template to each text, which remora does not support. If the model was "
            "trained with plain texts, remove that entry."
        )
    return settings


def _methods(folder: Path, settings: Mapping[str, Any]) -> tuple[Method, ...]:
    if settings.get("include_prompt", True) is False:
        raise ConfigError(f"{folder} has include_prompt: false, which is not supported.")
    named = settings.get("pooling_mode")
    if named is None:
        named = [key for key in _OLD_METHODS if settings.get(key)]
        found = [_OLD_METHODS[key] for key in named]
    else:
        named = [named] if isinstance(named, str) else list(named)
        found = [_METHODS.get(name) for name in named]
    if not found or None in found:
        raise ConfigError(
            f"{folder / 'config.json'} has the pooling {', '.join(named) or 'none'}; "
            f"supported: {', '.join(_METHODS)}."
        )
    return tuple(method for method in found if method is not None)


def _dense(path: Path, folder: str, settings: Mapping[str, Any], inputs: int) -> Stage:
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key, VECTOR) not in (VECTOR, None):
            raise ConfigError(
                f"{path / folder} has the {key} {settings[key]!r}; supported: {VECTOR!r}, "
                "which is one vector per text."
            )
    if settings.get("use_residual") or settings.get("in_features") != inputs:
        raise ConfigError(
            f"{path / folder} must have {inputs} in_features and no residual; it has "
            f"{settings.get('in_features')}."
        )
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = torch_activation(name, str(path / folder))
    if activation == "softmax":
        raise ConfigError(
            f"{path / folder} ends in a softmax, which is not supported for embeddings."
        )
    return Stage(
        name="linear",
        folder=folder,
        inputs=inputs,
        outputs=int(settings["out_features"]),
        bias=bool(settings.get("bias", True)),
        activation=activation,
    )


def _scoring_facts(path: Path, raw: RawConfig, task: Task, hidden_size: int) -> PoolingFacts:
    architecture, labels = _architecture(raw), labels_of(raw)
    settings = _read(path / SENTENCES)
    _text_settings(path)
    if settings.get("default_prompt_name") is not None:
        raise ConfigError(
            f"{path / SENTENCES} has the default_prompt_name {settings['default_prompt_name']!r}, "
            "which is not supported for models with a classification head."
        )
    method, stages = scoring_layers(raw, architecture, hidden_size)
    activation = score_activation(raw, task, len(labels), settings.get("activation_fn"))
    step_token = None
    if architecture.endswith(STEP_HEADS):
        labels, activation, step_token = STEP_LABELS, "softmax", STEP_TOKEN
    elif architecture.endswith(REWARD_HEADS):
        labels = labels[:1]
    return PoolingFacts(
        task=task,
        methods=(method,),
        stages=stages,
        normalize=False,
        activation=activation,
        step_token=step_token,
        labels=labels,
        prompts={},
    )


def _architecture(raw: RawConfig) -> str:
    return str((raw.get("architectures") or ["none"])[0])


def _is_causal(raw: RawConfig) -> bool:
    architecture = _architecture(raw)
    return architecture.endswith(CAUSAL) or architecture in ARCHITECTURES


def _read(file: Path) -> Any:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from error
