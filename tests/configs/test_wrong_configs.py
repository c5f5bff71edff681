"""Wrong configurations, as operators give them: each is one line that helps, and Ray never starts.

Keys and values of `args` themselves are tried in `test_load.py`; here they come from the command
line, the environment, files and the words of other servers.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner
from typer.main import get_command

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import SYSTEMS, Parameter, System, catalogue
from remora.configs.dialects.rules import Refused
from remora.deployments.cli import serve
from remora.deployments.cli.main import app
from tests.configs.test_load import KEYS, wrong_values

HEAD = "applications:\n  - import_path: remora.deployments.app:build\n    args:\n"
SGLANG = DIALECTS["sglang"].name
GOOD = f"{HEAD}      model: {{path: smollm2-135m-instruct}}\n"
# Made once: it takes longer than what is tested. A command of typer is one of click in all but type.
COMMAND = get_command(app)
HELPS = (
    "expected", "must ", "set it", "write", "did you mean", "lists what is known", "keep one", "missing", "give",
    "not yet", "must not", "there are", "not valid", "no such", "found", "finite", "agree", "power of two",
    "needs", "nothing is downloaded", "knows", "go under", "listed in", "supported: ", "written twice", "leave", "put ", "Ray ",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """One wrong configuration.

    args:   of `remora serve`; FOLDER stands for the folder of the files
    says:   what the message begins with, and further parts of it
    """

    args: tuple[str, ...]
    says: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What pytest calls it."""
        return " ".join((*self.env.values(), *self.args, self.says[0]))[-90:]


def in_file(text: str, *says: str) -> Wrong:
    return Wrong(args=("a.yaml",), files={"a.yaml": text}, says=says)


def of_keys() -> Iterator[Wrong]:
    """One wrong value of each key, by --set and by a variable in turn."""
    wrong = [
        (section, key, value)
        for section, key in KEYS
        if (section, key) != ("model", "path")
        for value in [value for value in wrong_values(section, key) if value not in ({}, [])][:1]
    ]
    for number, (section, key, value) in enumerate(wrong, 1):
        text = yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
        if number % 2:
            given = Wrong(
                args=("a.yaml", "--set", f"{section}.{key}={text}"),
                files={"a.yaml": GOOD},
                says=(f"--set {section}.{key}: {section}.{key}",),
            )
        else:
            name = f"REMORA_{section}__{key}".upper()
            given = Wrong(
                args=("a.yaml",),
                files={"a.yaml": GOOD},
                env={name: text},
                says=(f"{name}: {section}.{key}",),
            )
        yield given


def parameters(keep: Callable[[Parameter], bool]) -> Iterator[tuple[System, Parameter]]:
    for system in SYSTEMS:
        if system != "backend":
            yield from ((system, each) for each in catalogue(system).values() if keep(each))


def of_misspelt_parameters() -> Iterator[Wrong]:
    """A letter too many in the name of every sixth parameter, on a command line and in a file."""
    for number, (system, parameter) in enumerate(parameters(lambda each: len(each.name) > 9)):
        if number % 6:
            continue
        typo = parameter.name + "x"
        says = f"{typo} = 'v': {DIALECTS[system].name} has no such parameter; did you mean "
        if number % 12 and system != "ray_serve_llm":  # whose dialect is of files only
            yield Wrong(args=("--dialect", system, "--", typo, "v"), says=(says,))
            continue
        name = typo.removeprefix("--")
        yield in_file(
            f"{HEAD}      dialect: {system}\n      args:\n        {name}: v\n",
            f"FOLDER/a.yaml:6:9: {says.removeprefix('--')}",
        )


TYPES = {
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
    "json": "not valid JSON",
    "enum": "must be one of",
}


def of_mistyped_parameters() -> Iterator[Wrong]:
    """A word that is no value of every fourth parameter: on the command line, or its variable."""
    typed = parameters(lambda each: each.type in TYPES and not each.additional)
    for number, (system, parameter) in enumerate(typed):
        if number % 4 or isinstance(DIALECTS[system].rule(parameter), Refused):
            continue
        kind = TYPES[parameter.type]
        if parameter.type == "enum" and isinstance((parameter.choices or ("",))[0], int):
            kind = "expected a whole number"
        says = (" = '{soon'", kind)
        if parameter.env is not None:
            yield Wrong(
                args=("--dialect", system, "--", "--checkpoint-path", "m"),
                env={parameter.env: "{soon"},
                says=(parameter.env + says[0], kind),
            )
        elif system == "ray_serve_llm":
            yield in_file(
                f"{HEAD}      dialect: {system}\n      args:\n        {parameter.name}: '{{soon'\n",
                f"FOLDER/a.yaml:6:9: {parameter.name}{says[0]}",
                kind,
            )
        else:
            yield Wrong(
                args=("--dialect", system, "--", f"{parameter.name}={{soon"),
                says=(parameter.name + says[0], kind),
            )


def sglang(*tokens: str, says: tuple[str, ...]) -> Wrong:
    return Wrong(args=("--dialect", "sglang", "--", "--model-path", "FOLDER", *tokens), says=says)


def backend(data: Any, *says: str) -> Wrong:
    text = data if isinstance(data, str) else json.dumps(data)
    return Wrong(
        args=("--dialect", "backend", "--set", "model.path=FOLDER", "--", "b.json"),
        files={"b.json": text},
        says=says,
    )


FAULTS = [
    # other servers' values: ranges, pairs, what is not offered
    sglang("--page-size", "17", says=("--page-size: engine.page_size = 17: must be a power",)),
    sglang("--tp", "0", says=("--tp: parallel.tp_size = 0: must be at least 1",)),
    sglang("--port", "70000", says=("--port: http_options.port = 70000: must be 1 to 65535",)),
    sglang("--mem-fraction-static", "1.5", says=("--mem-fraction-static: engine.total_mem",)),
    sglang("--tp", "2", "--tensor-parallel-size", "4", says=("--tensor-parallel-size = '4'", "keep one")),
    sglang("--disable-cuda-graph", "--cuda-graph-max-bs", "8", says=("--disable-cuda-graph = true: refused", "keep one")),
    sglang("--quantization", "qoq", says=("--quantization = 'qoq': refused: not offered: weights in the order of QServe",)),
    sglang("--attention-backend", "trtllm_mha", says=("--attention-backend = 'trtllm_mha': refused: not", "flashinfer")),
    sglang("--decode-attention-backend", "flashmla", says=("--decode-attention-backend = 'flashmla': refused: not", "triton")),
    sglang("--schedule-policy", "lmp", says=("--schedule-policy = 'lmp': must be one of", "mean lpm?")),
    sglang("--model-impl", "vllm", says=("--model-impl: model.impl = 'vllm': must be one of",)),
    sglang("--nnodes", "2", says=("--nnodes: parallel.num_nodes = 2: cannot divide 1 ranks", "set it to a divisor")),
    sglang("--nnodes", "2", "--tp", "2", "--node-rank", "1", says=("--node-rank = 1: refused: start the server once", "leave it out")),
    sglang("--api-key", "abc", says=("--api-key = ***: refused: a secret", "env:NAME")),
    sglang("--lora-paths", "{", says=("--lora-paths = ", "not valid JSON")),
    sglang("--lora-paths", "a=/no/where", says=("--lora-paths: lora.adapters = '/no/where': no such folder", "adapter_config.json")),
    sglang("--tokenizer-path", "/no/where", says=("--tokenizer-path: model.tokenizer_path = '/no/where': no such",)),
    sglang("--prompt-tokens-buckets", "tse", "9", says=("--prompt-tokens-buckets = ['tse', '9']: refused: exp",)),
    sglang("--config", "no.yaml", says=("--config = no.yaml: no such file",)),
    sglang("--watchdog-timeout", "-5", says=("--watchdog-timeout: engine.step_timeout_s = -5.0: must be",)),
    sglang("--max-running-requests", "0", says=("--max-running-requests: engine.max_running_requests = 0: must",)),
    sglang("--tp", says=("--tp: a value is missing",)),
    Wrong(args=("--dialect", "sglang", "--", "--tp", "2"), says=("model.path: required key is missing; set it with --model-path",)),
    Wrong(args=("--dialect", "lightllm", "--", "--tp", "2"), says=("model.path: required key is missing; set it with --model_dir",)),
    Wrong(args=("--dialect", "rtp_llm", "--", "--tp-size", "2"), says=("model.path: required key is missing; set it with --checkpoint-path",)),
    Wrong(args=("--dialect", "sglang", "--", "--model-path", "models/a/b"), says=("--model-path: model.path = 'models/a/b': no such folder", "OWNER/NAME of the hub")),
    Wrong(args=("--dialect", "lightllm", "--", "--model_dir", "/no/where"), says=("--model_dir: model.path = '/no/where': no such folder",)),
    Wrong(args=("--dialect", "lightllm", "--", "--mode", "triton_fp8kv"), says=("--mode = ['triton_fp8kv']: refused: triton_fp8kv: not offered: 8-bit latents",)),
    Wrong(args=("--dialect", "lightllm", "--", "--grouping_key", "a"), says=("--grouping_key = ['a']: refused: expected name=value",)),
    Wrong(args=("--dialect", "rtp_llm", "--", "--world-size", "4", "--tp-size", "2"), says=("--world-size = 4: refused: --tp-size", "make them agree")),
    Wrong(args=("--dialect", "rtp_llm", "--", "--checkpoint-path", "FOLDER", "--ft-alog-conf-path", "/no/log.conf"), says=("--ft-alog-conf-path: metrics.log_config = '/no/log.conf': no such file",)),
    Wrong(args=("--dialect", "nim", "--", "--model", "m"), says=("--dialect nim: must be one of sglang, lightllm",)),
    Wrong(args=("--dialect", "sglang", "--", "model"), says=("model.path: required key is missing",)),
    sglang("x", "--tp", "2", says=("x: expected an option that begins with --",)),
    sglang("--speculative-algorithm", "EAGLE3", says=("--speculative-algorithm = 'EAGLE3': refused: EAGLE3 needs --speculative-draft",)),
    sglang("--json-model-override-args", "{", says=("--json-model-override-args = '{': not valid JSON",)),
    # its YAML file
    *(
        Wrong(args=("--dialect", "sglang", "--", "--config", "FOLDER/c.yaml"), files={"c.yaml": text}, says=says)
        for text, says in (
            ("a: [1\n", ("FOLDER/c.yaml:2:1: not valid YAML",)),
            ("tp: 1\ntp: 2\n", ("FOLDER/c.yaml:2:1: tp: written twice",)),
            ("", ("FOLDER/c.yaml: the file is empty; expected",)),
            ("- a\n", ("FOLDER/c.yaml:1:1: expected a mapping of options", "found ['a']")),
            ("model-path: x\ntp-sise: 2\n", (f"FOLDER/c.yaml:2:1: tp-sise = 2: {SGLANG} has no such", "did you mean")),
            ("model-path: x\ntp: two\n", ("FOLDER/c.yaml:2:1: tp = 'two': expected a whole number",)),
            ("model-path: x\npage-size: 5\n", ("FOLDER/c.yaml:2:12: page-size: engine.page_size = 5: must be a power",)),
            ("model-path: /no/where\n", ("FOLDER/c.yaml:1:13: model-path: model.path = '/no/where': no such",)),
        )
    ),
    # the backend's JSON
    backend('{"backend": {},}', "FOLDER/b.json:1:16: not valid JSON"),
    backend("[]", "FOLDER/b.json:1:1: expected an object", "found []"),
    backend({"tensor_parallel_size": 0}, "FOLDER/b.json:1:26: tensor_parallel_size: parallel.tp_size = 0: must"),
    backend({"tensor_parallel_siz": 1}, "FOLDER/b.json:1:2: tensor_parallel_siz = 1: the backend config has no such"),
    backend({"backend": {"name": "v5"}}, "FOLDER/b.json:1:14: backend.name = 'v5': must be one of auto, v3, v4"),
    backend({"backend": {"version": "3"}}, "FOLDER/b.json:1:14: backend.version = '3': refused: remora has one", "give latest"),
    backend({"mode": "talk"}, "FOLDER/b.json:1:2: mode = 'talk': must be one of chat, completion"),
    backend({"model_type": "vision"}, "FOLDER/b.json:1:2: model_type = 'vision': refused: not yet"),
    backend({"quantization": "float4"}, "FOLDER/b.json:1:2: quantization = 'float4'", "float8"),
    backend({"loras": [{"id": "a"}]}, "FOLDER/b.json:1:2: loras = [{'id': 'a'}]: refused: each adapter has an id"),
    backend({"lora_repo": {"type": "s3"}}, "FOLDER/b.json:1:16: lora_repo.type = 's3': refused: needs lora_repo.path"),
    backend({"lora_repo": {"type": "hub"}}, "FOLDER/b.json:1:16: lora_repo.type = 'hub': refused: supported: local, s3", "lora.roots"),
    Wrong(args=("--dialect", "backend", "--", "no.json"), says=("no.json: no such file; give the path",)),
    Wrong(args=("--dialect", "backend", "--", "b.json"), files={"b.json": "{}"}, says=("model.path: required key is missing; set it with --set",)),
    # files of ours
    *(
        in_file(
            f"{HEAD}      dialect: sglang\n      args:\n        model-path: m\n        {line}\n", f"FOLDER/a.yaml:{says}"
        )
        for line, says in (
            ("page-size: 17", "7:20: engine.page_size = 17: must be a power of two"),
            ("schedule-policy: lmp", "7:9: schedule-policy = 'lmp': must be one of"),
            ("enable-lmcache: true", "7:9: enable-lmcache = true: refused: not yet: KV cache tiers"),
        )
    ),
    in_file("http_optons: {}\n" + GOOD, "FOLDER/a.yaml:1:1: http_optons = {}: unknown key; did you mean http_op"),
    in_file(GOOD + "    route_prefx: /\n", "FOLDER/a.yaml:5:5: applications[0].route_prefx = '/': unknown key; did you mean app"),
    in_file(GOOD + "    route_prefix: a\n", "FOLDER/a.yaml:5:19: applications[0].route_prefix = 'a': must begin with /"),
    in_file(HEAD + "      dialect: nim\n      args: {}\n", "FOLDER/a.yaml:4:16: dialect = 'nim': must be one of"),
    in_file(HEAD + "      dialect: sglang\n      args: [1]\n", "FOLDER/a.yaml:5:13: args = [1]: expected"),
    in_file(HEAD + "      profile: tpu\n", "FOLDER/a.yaml:4:16: profile = 'tpu': must be one of"),
    in_file(HEAD + "      model: {path: /no/where}\n", "FOLDER/a.yaml:4: model.path = '/no/where': no such folder"),
    in_file(GOOD + "      metrics: {log_config: /no/l.ini}\n", "FOLDER/a.yaml:5: metrics.log_config = '/no/l.ini': no such file"),
    in_file(GOOD + "      api: {task_prompts_file: /no/t.json}\n", "FOLDER/a.yaml:5: api.task_prompts_file = '/no/t.json': no such"),
    in_file(GOOD + "      api: {api_key: 'file:/no/key'}\n", "api.api_key: /no/key cannot be read", "write the keys into it"),
    in_file(GOOD + "      api: {api_key: plain}\n", "FOLDER/a.yaml:5:22: api.api_key"),
    in_file(GOOD + "      engine: {}\n      engine: {}\n", "FOLDER/a.yaml:6:7: ", "written twice"),
    in_file("a: {\n", "FOLDER/a.yaml:2:1: not valid YAML"),
    Wrong(args=("no.yaml",), says=("no.yaml: no such file",)),
    Wrong(args=("/no/where",), says=("/no/where: no such file or folder; give",)),
    Wrong(args=("a", "b"), says=("expected one target, found a b; ",)),
    # --set and variables
    *(
        Wrong(args=("a.yaml", "--set", text), files={"a.yaml": GOOD}, says=says)
        for text, says in (
            ("engine.page_size", ("--set engine.page_size: expected section.key=value, such as",)),
            ("page_size=3", ("--set page_size = '3': expected section.key=value",)),
            ("engin.page_size=3", ("--set engin.page_size = '3': no section engin; did you mean engine?",)),
            ("engine.page_siz=3", ("--set engine.page_siz: engine.page_siz = 3: unknown key; did you mean",)),
            ("engine.page_size=[3", ("--set engine.page_size = '[3': not valid YAML", "put it in")),
            ("model.path=/no/where", ("--set model.path: model.path = '/no/where': no such",)),
        )
    ),
    *(
        Wrong(args=("a.yaml",), files={"a.yaml": GOOD}, env={name: text}, says=says)
        for name, text, says in (
            ("REMORA_ENGIN__PAGE_SIZE", "3", ("REMORA_ENGIN__PAGE_SIZE = '3': no section engin; did",)),
            ("REMORA_ENGINE__PAGE_SIZ", "3", ("REMORA_ENGINE__PAGE_SIZ: engine.page_siz = 3: unknown key; did",)),
            ("REMORA_ENGINE__DEVICE", "{", ("REMORA_ENGINE__DEVICE = '{': not valid YAML",)),
        )
    ),
]  # fmt: skip

ALL = [*of_keys(), *of_misspelt_parameters(), *of_mistyped_parameters(), *FAULTS]


@pytest.fixture(scope="module", autouse=True)
def no_ray() -> Iterator[None]:
    import ray

    with (
        mock.patch.object(ray, "init", side_effect=AssertionError("Ray was started")),
        mock.patch.object(serve, "run_supervised", side_effect=AssertionError("Ray would start")),
        mock.patch.dict(os.environ),
    ):
        yield


@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
def test_a_wrong_configuration_is_told_in_a_line_that_helps(wrong: Wrong, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name, text in wrong.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    args = [
        f"{folder}/{each}" if each in wrong.files else each.replace("FOLDER", folder)
        for each in wrong.args
    ]

    result = CliRunner().invoke(COMMAND, ["serve", *args], env=wrong.env)  # type: ignore[arg-type]

    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    lines = result.stderr.replace(folder, "FOLDER").splitlines()
    assert lines[0].startswith(f"error: {wrong.says[0]}")
    for part in wrong.says[1:]:
        assert part in lines[0]
    assert len(lines) == 1
    assert any(word in lines[0] for word in HELPS)


def test_there_are_hundreds_of_them_and_no_two_the_same() -> None:
    assert len({(w.args, str(w.files), str(w.env)) for w in ALL}) == len(ALL) >= 300
