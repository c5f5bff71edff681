"""What becomes of a model's hidden states, as its checkpoint says: found without loading weights.

Understands folders of sentence-transformers (modules.json and what it names); heads that give
scores are in `scoring.py`.
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
YES_NO = "yes_no"  # made of two rows of the head for text
# In the order in which sentence-transformers puts them together.
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
    """What becomes of hidden states.

    methods:      whose results stand side by side
    normalize:    whether vectors have length 1, as the model means it
    activation:   none, sigmoid or softmax: what makes scores of numbers
    labels:       names of the numbers that come out; () = a vector comes out
    max_tokens:   of a row; None = as many as the model takes
    prompts:      texts in front of inputs, by name
    size:         of the vector, or numbers that come out
    dimensions:   sizes that vectors may be cut to; () = any, None = they may not be cut
    step_token:   where the states are that count, each by itself; None = one state of a row counts
    step_id:      its id, once there is a tokenizer
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
        """Return how many numbers the weights of the layers behind pooling have."""
        return sum(stage.num_parameters for stage in self.stages)


def pooling_task(
    path: Path, wanted: str, overrides: Mapping[str, Any] = NO_OVERRIDES
) -> Task | None:
    """Return what a model is for, if it is not for making text.

    wanted:  model.task. Raises ConfigError for what the checkpoint cannot do.
    """
    if wanted == "generate" or path.is_file():
        if wanted not in ("generate", "auto"):
            raise ConfigError(f"model.task = {wanted}: GGUF files are served for generating only.")
        return None
    raw = read_raw_config(path, overrides)
    architecture = _architecture(raw)
    says = _says(path, raw, architecture)
    if wanted == "auto":
        return says
    task: Task = wanted  # type: ignore[assignment]
    scores = ("classify", "rerank", "reward")
    if task in scores and says not in scores and not (task == "rerank" and _is_causal(raw)):
        raise ConfigError(
            f"model.task = {task}: {architecture} has no head that gives scores; it can be served "
            f"with model.task = {'embed' if says else 'generate or embed'}."
        )
    if task == "embed" and says in scores:
        raise ConfigError(
            f"model.task = embed: {architecture} gives scores; set model.task to {says} or auto."
        )
    return task


def _says(path: Path, raw: RawConfig, architecture: str) -> Task | None:
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
        return None  # for text, also GPT2LMHeadModel and ChatGLMModel
    if is_sentence_folder or encoder_architecture(raw) or not architecture.endswith(CAUSAL):
        is_known = architecture.endswith(BASE_HEADS) or encoder_architecture(raw)
        return "embed" if is_sentence_folder or is_known else None
    return None


def _check_kind(path: Path) -> None:
    kind = _read(path / SENTENCES).get("model_type", "SentenceTransformer")
    if kind == "SentenceTransformer":
        return
    fix = "Choose a model that gives one vector for each text."
    if kind == "CrossEncoder":
        fix = (
            "To serve it, remove modules.json and set model.task: rerank, pooling.pair_template, "
            "pooling.yes_token and pooling.no_token."
        )
    raise ConfigError(
        f"{path / SENTENCES} says model_type {kind!r} of a model without a head for classes; known "
        f"is SentenceTransformer. {fix}"
    )


def read_pooling_facts(
    path: Path,
    task: Task,
    section: PoolingSection,
    *,
    hidden_size: int,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
) -> PoolingFacts:
    """Gather what becomes of hidden states. Raises ConfigError for what is not understood."""
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
            activation="sigmoid",  # of the difference of two logits: their softmax
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
            f"pooling.method gives {pooled} numbers, and the layer behind it takes "
            f"{facts.stages[0].inputs}; leave it to the checkpoint."
        )
    facts = replace(facts, size=facts.stages[-1].outputs if facts.stages else pooled)
    if facts.default_prompt is not None and facts.default_prompt not in facts.prompts:
        raise ConfigError(
            f"pooling.default_prompt is {facts.default_prompt!r}; there are: "
            f"{', '.join(facts.prompts) or 'none'}."
        )
    return facts


def _with_step(facts: PoolingFacts, section: PoolingSection) -> PoolingFacts:
    if facts.step_token is None and section.step_token is not None:
        raise ConfigError("pooling.step_token is for process reward models; leave it out.")
    if facts.step_token is not None and section.method != "auto":
        raise ConfigError(
            f"pooling.method is {section.method}, and a process reward model judges every step; "
            "leave it at auto."
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
                    raise ConfigError(f"{path} keeps its transformer in {folder}: give that path.")
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
                    f"{path / 'modules.json'} names a module of the type {kind}; known are "
                    "Transformer, Pooling, Dense, Normalize and Dropout."
                )
    said = _read(path / SENTENCES)
    length = _texts(path).get("max_seq_length")
    prompts = {name: text for name, text in (said.get("prompts") or {}).items() if text is not None}
    return PoolingFacts(
        task="embed",
        methods=methods,
        stages=tuple(stages),
        normalize=normalize,
        max_tokens=length,
        prompts=prompts,
        default_prompt=said.get("default_prompt_name"),
    )


def _texts(path: Path) -> Mapping[str, Any]:
    """Return how texts are read. Raises ConfigError where a chat template writes them first."""
    said: Mapping[str, Any] = _read(path / TEXTS)
    if "message" in (said.get("modality_config") or {}):
        raise ConfigError(
            f"{path / TEXTS} has message in modality_config: sentence-transformers writes each "
            "text by the chat template, which is not done here. If the model was trained with "
            "plain texts, remove that entry."
        )
    return said


def _methods(folder: Path, settings: Mapping[str, Any]) -> tuple[Method, ...]:
    if settings.get("include_prompt", True) is False:
        raise ConfigError(f"{folder} leaves prompts out of the mean (include_prompt), not known.")
    named = settings.get("pooling_mode")
    if named is None:
        named = [key for key in _OLD_METHODS if settings.get(key)]
        found = [_OLD_METHODS[key] for key in named]
    else:
        named = [named] if isinstance(named, str) else list(named)
        found = [_METHODS.get(name) for name in named]
    if not found or None in found:
        raise ConfigError(
            f"{folder / 'config.json'} asks for the pooling {', '.join(named) or 'of nothing'}; "
            f"known are {', '.join(_METHODS)}."
        )
    return tuple(method for method in found if method is not None)


def _dense(path: Path, folder: str, settings: Mapping[str, Any], inputs: int) -> Stage:
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key, VECTOR) not in (VECTOR, None):
            raise ConfigError(
                f"{path / folder} has the {key} {settings[key]!r}; known is {VECTOR!r}: one vector "
                "of each text, and not one of each token."
            )
    if settings.get("use_residual") or settings.get("in_features") != inputs:
        raise ConfigError(
            f"{path / folder} must take the {inputs} numbers that come before it, without a "
            f"residual; it takes {settings.get('in_features')}."
        )
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = torch_activation(name, str(path / folder))
    if activation == "softmax":
        raise ConfigError(f"{path / folder} ends in a softmax, which makes no embedding.")
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
    said = _read(path / SENTENCES)
    _texts(path)
    if said.get("default_prompt_name") is not None:
        raise ConfigError(
            f"{path / SENTENCES} puts the prompt {said['default_prompt_name']!r} in front of "
            "pairs, which is not known of models with a head for classes."
        )
    method, stages = scoring_layers(raw, architecture, hidden_size)
    activation = score_activation(raw, task, len(labels), said.get("activation_fn"))
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
    named = raw.get("architectures") or ["none at all"]
    return str(named[0])


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
