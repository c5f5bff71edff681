"""Each field of each API has an effect, is refused by name, or is a documented hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.deployments.http.core.fields import Body
from remora.deployments.http.rtp_llm.bodies import RtpBody, TokenizerEncodeBody
from remora.deployments.http.rtp_llm.pooling_bodies import (
    RtpClassifierBody,
    RtpOtherVectorsBody,
    RtpRerankerBody,
    RtpSimilarityBody,
)
from tests.deployments.http.fields import chats, generating, messages, ollama, pooling, responses
from tests.deployments.http.fields.observing import (
    Api,
    documented_hints,
    faults_of,
    fields_of,
    hints_of,
    models_in,
)

ROOT = Path(__file__).parents[4]
GENERATING: dict[str, Api] = {
    **chats.APIS,
    **generating.APIS,
    **ollama.APIS,
    **messages.APIS,
    **responses.APIS,
}
APIS = GENERATING | pooling.APIS

# Bodies of the operator's routes, of batches and of stored chats, which need more than one request:
# the fields, and the tests that see them.
_HTTP = "tests/deployments/http"
SEEN_ELSEWHERE: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "LoadBody": (
        {"lora_name", "lora_path", "load_inplace", "pinned", "model"},
        ("tests/deployments/adapters/test_routes.py",),
    ),
    "UnloadBody": (
        {"lora_name", "lora_int_id", "force", "model"},
        ("tests/deployments/adapters/test_routes.py",),
    ),
    "PauseBody": ({"mode"}, (f"{_HTTP}/sglang/test_control.py",)),
    "ContinueBody": (set(), ()),
    "AbortBody": ({"rid", "abort_all"}, (f"{_HTTP}/admin/test_server.py",)),
    "ProfileBody": ({"num_steps"}, ("tests/deployments/observing/test_debug.py",)),
    "LineBody": ({"custom_id", "method", "url", "body"}, (f"{_HTTP}/batches/jobs.py",)),
    "BatchBody": (
        {"input_file_id", "endpoint", "completion_window", "metadata"},
        (f"{_HTTP}/batches/jobs.py", f"{_HTTP}/batches/test_batches.py"),
    ),
    "MessageBatchBody": (
        {"requests[0].custom_id", "requests[0].params"},
        (f"{_HTTP}/batches/test_message_batches.py",),
    ),
    "MetadataBody": ({"metadata"}, (f"{_HTTP}/openai/test_stored_chats.py",)),
    "DiskBody": (
        {"model_path", "load_format", "abort_all_requests", "weight_version"},
        (f"{_HTTP}/weights/test_routes.py",),
    ),
    "TensorBody": (
        {
            *("safetensors", "serialized_named_tensors", "load_format", "upload_id", "offset"),
            *("is_last", "abort_all_requests", "weight_version"),
        },
        (f"{_HTTP}/weights/test_routes.py",),
    ),
    "InstanceBody": (
        {"url", "api_key", "model", "weight_version", "abort_all_requests"},
        (f"{_HTTP}/weights/test_routes.py", "tests/deployments/live_weights/test_instance.py"),
    ),
    "VersionBody": ({"new_version", "abort_all_requests"}, (f"{_HTTP}/weights/test_routes.py",)),
    "MemoryBody": ({"tags"}, (f"{_HTTP}/weights/test_routes.py",)),
    "SaveBody": ({"path"}, (f"{_HTTP}/weights/test_routes.py",)),
    "SleepQuery": ({"level", "mode"}, (f"{_HTTP}/weights/test_routes.py",)),
    # RTP-LLM's have a table of their own; constraints are those of other APIs.
    **{
        model.__name__: (
            set(fields_of(model)),
            (*(f"{_HTTP}/rtp_llm/{file}.py" for file in files), f"{_HTTP}/fields/shared.py"),
        )
        for files, models in {
            ("test_conformance", "test_rtp_llm"): (RtpBody, TokenizerEncodeBody),
            ("test_rtp_pooling",): (
                RtpClassifierBody,
                RtpOtherVectorsBody,
                RtpRerankerBody,
                RtpSimilarityBody,
            ),
        }.items()
        for model in models
    },
    "_Constraints": ({"guided_json", "guided_grammar", "guided_regex"}, ()),
}


def _bodies(base: type[Body] = Body) -> set[type[Body]]:
    """Return all models of bodies that no other model extends."""
    found = set()
    for model in base.__subclasses__():
        found |= _bodies(model) if model.__subclasses__() else {model}
    return found


async def test_no_body_is_left_out() -> None:
    in_tables = set().union(*(models_in(api.model) for api in APIS.values()))
    rest = {model.__name__: model for model in _bodies() - in_tables}
    within = {inner for model in rest.values() for inner in models_in(model) - {model}}

    others = {name: set(fields_of(model)) for name, model in rest.items() if model not in within}

    assert others == {name: fields for name, (fields, _) in SEEN_ELSEWHERE.items()}


@pytest.mark.parametrize("name", SEEN_ELSEWHERE)
async def test_a_field_of_another_body_has_a_test(name: str) -> None:
    fields, files = SEEN_ELSEWHERE[name]
    text = "".join((ROOT / file).read_text("utf-8") for file in files)

    names = {field.rpartition(".")[2] for field in fields} if files else set()

    assert {one for one in names if one not in text} == set()


@pytest.mark.parametrize("name", APIS)
async def test_a_table_has_a_row_for_each_field(name: str) -> None:
    api = APIS[name]

    fields = set(fields_of(api.model))

    assert sorted(api.rows.keys() - fields) == []
    assert sorted(fields - api.rows.keys()) == []


@pytest.mark.parametrize("name", GENERATING)
async def test_a_field_is_seen_refused_or_a_hint(name: str) -> None:
    faults = await faults_of(GENERATING[name])

    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", APIS)
async def test_the_documentation_lists_the_hints(name: str) -> None:
    api = APIS[name]

    assert documented_hints().get(api.title or api.path, set()) == hints_of(api.rows)
