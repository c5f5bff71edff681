"""Incidents of comparable servers, which must not happen here."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import subprocess
import sys
import typing
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from remora.configs.errors import EngineError
from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.free_ports import free_port
from remora.deployments.http.app import BODIES, GENERATION
from remora.engine.tokens.chat import render_chat
from remora.engine.tokens.chat_template import ChatTemplate
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
)

ROOT = Path(__file__).parents[2]
FOLDERS = ("configs", "engine", "kernels", "lora", "deployments")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# -- code from data ----------------------------------------------------------------------------

# Attributes that execute their input, in any module.
RUNNING = {
    "eval",
    "exec",
    "literal_eval",
    "recv_pyobj",
    "unsafe_load",
    "full_load",
    "system",
    "popen",
    "getoutput",
}
# Functions of certain modules that do.
LOADERS = {("torch", "load"), ("yaml", "load"), ("joblib", "load"), ("dill", "load")}
SWITCHES = {"trust_remote_code", "allow_pickle", "shell"}


# The use of model.trust_remote_code, which is off by default, and the reader of pickled
# checkpoints, which loads only tensors.
ASKED_FOR = {
    ("engine/tokens/fast_tokenizer.py", "trust_remote_code"),
    ("engine/tokens/hub_tokenizer.py", "trust_remote_code"),
    ("engine/weights/pickled.py", "torch.load"),
}


def dangers_in(tree: ast.AST) -> Iterator[str]:
    """Yield calls that execute their input, and options that enable it."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func
        if isinstance(name, ast.Attribute):
            owner = name.value.id if isinstance(name.value, ast.Name) else ""
            if name.attr in RUNNING or (owner, name.attr) in LOADERS:
                yield f"line {call.lineno}: {owner}.{name.attr}"
        elif isinstance(name, ast.Name) and name.id in RUNNING | {"__import__", "compile"}:
            yield f"line {call.lineno}: {name.id}"
        for option in call.keywords:
            is_off = isinstance(option.value, ast.Constant) and option.value.value is False
            if option.arg in SWITCHES and not is_off:
                yield f"line {call.lineno}: {option.arg}"


def test_the_product_executes_no_input() -> None:
    found = [
        (str(path.relative_to(ROOT)), danger.rpartition(" ")[2])
        for path in SOURCES
        for danger in dangers_in(ast.parse(path.read_text("utf-8")))
    ]

    assert set(found) == ASKED_FOR


@pytest.mark.parametrize(
    "line",
    [
        "builtins.eval(text)",
        "ast.literal_eval(text)",
        "torch.load(path)",
        "yaml.load(text)",
        "socket.recv_pyobj()",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
        "compile(text, 'x', 'exec')",
    ],
)
def test_a_line_that_executes_its_input_is_found(line: str) -> None:
    assert list(dangers_in(ast.parse(line)))


# -- requests to other hosts --------------------------------------------------------------

# HTTP clients; only `deployments/bench` and `cli` may use them.
CLIENTS = {"httpx", "requests", "aiohttp", "urllib3", "urllib.request", "http.client", "ftplib"}
# What asks configured addresses only, which no request can change: metrics are sent there, weights
# taken from there, and models downloaded.
CONFIGURED = [
    ROOT / "deployments" / "observing" / "metrics_push.py",
    ROOT / "deployments" / "live_weights" / "instance.py",
    ROOT / "engine" / "sources" / "modelscope.py",
]
SERVED = [p for p in SOURCES if not {"bench", "cli"} & set(p.parts) and p not in CONFIGURED]


def test_the_server_imports_no_http_client() -> None:
    found = []
    for path in SERVED:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [f"{path.name}: {name}" for name in names if name in CLIENTS]

    assert found == []


@asynccontextmanager
async def counting_listener() -> AsyncGenerator[tuple[int, list[int]], None]:
    """Yield a listening port and a list of its connections."""
    hits: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append(1)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1], hits


def bodies_with(url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield bodies with a URL, in every API that has a field for one."""
    image = {"type": "image_url", "image_url": {"url": url}}
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}
    for kind in ("video_url", "audio_url"):
        part = {"type": kind, kind: {"url": url}}
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}
    part = {"type": "input_image", "image_url": url}
    yield "/v1/responses", {"input": [{"role": "user", "content": [part]}]}
    yield "/v1/responses", {"input": "a", "tools": [{"type": "mcp", "server_url": url}]}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    yield "/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
    yield "/generate", {"text": "a", "image_data": url}
    yield "/generate", {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 1}}
    yield (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "a", "images": [url]}]},
    )
    schema = {"$ref": url}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "response_format": form},
    )


HOSTS = ("127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "[::ffff:127.0.0.1]", "x@127.0.0.1")


async def test_urls_in_bodies_are_never_requested() -> None:
    async with counting_listener() as (port, hits), make_client() as client:
        for host in HOSTS:
            for path, body in bodies_with(f"http://{host}:{port}/a.png"):
                response = await client.post(path, json=dict(body))
                assert response.status_code < 500, response.text
        await asyncio.sleep(0.05)
        assert hits == []

        # The listener counts connections.
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await asyncio.sleep(0.05)
    assert hits == [1]


# -- templates ---------------------------------------------------------------------------------

INJECTIONS = (
    "{{ 7 * 7 }}",
    "{% for i in range(9) %}x{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('x') }}",
    "<%= 7 * 7 %>",
    "${7*7}",
    "#{7*7}",
)


@pytest.mark.parametrize("text", INJECTIONS)
async def test_messages_are_not_interpreted_as_templates(text: str) -> None:
    server = FakeServer(tokenizer=Templated())
    async with make_client(server) as client:
        messages = [{"role": "user", "content": text}]
        response = await client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 200
    assert "".join(map(chr, server.client.requests[0].prompt_ids)) == text


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs.chat_template"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages"])
async def test_a_request_cannot_bring_a_template(path: str, name: str) -> None:
    head, _, tail = name.partition(".")
    value: Any = {tail: "{{ 7 * 7 }}"} if tail else "{{ 7 * 7 }}"
    server = FakeServer(tokenizer=Templated())
    async with make_client(server) as client:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, head: value}
        response = await client.post(path, json=body)

    assert response.status_code == 400, response.text
    assert server.client.requests == []


class Templated(CharTokenizer):
    """Renders chats with a Jinja template."""

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return render_chat(
            ChatTemplate("{{ messages[0].content }}", {}),
            messages,
            **{"add_generation_prompt": True, "continue_final_message": False} | options,
        )


# -- numbers -----------------------------------------------------------------------------------

NUMBERS = (True, False, 1.5, -1, -(2**31), 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 2**200)


def integer_fields(model: type[BaseModel]) -> list[str]:
    """Return the fields of a body that accept an integer or a list of integers."""
    return [
        name for name, field in model.model_fields.items() if int in _types_in(field.annotation)
    ]


def _types_in(annotation: Any) -> set[Any]:
    inner = typing.get_args(annotation)
    return {annotation}.union(*(_types_in(one) for one in inner)) if inner else {annotation}


PATHS = {route.path: route.body for route in GENERATION} | dict(BODIES)


@pytest.mark.parametrize("path", PATHS)
async def test_no_number_causes_a_server_error(path: str) -> None:
    base = {
        "messages": [{"role": "user", "content": "a"}],
        "prompt": "a",
        "input": "a",
        "text": "a",
        "inputs": "a",
        "model": "tiny",
        "max_tokens": 1,
    }
    known = {k: v for k, v in base.items() if k in PATHS[path].model_fields}
    async with make_client() as client:
        for name in integer_fields(PATHS[path]):
            for number in NUMBERS:
                for value in (number, [number]):
                    response = await client.post(path, json=known | {name: value})
                    assert response.status_code < 500, (name, value, response.text)


# -- logs --------------------------------------------------------------------------------------

SECRET = "zebra-crossing-4711"


@pytest.mark.parametrize("error", [None, EngineError("x"), RuntimeError("y")], ids=str)
async def test_no_prompt_is_logged(
    caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    caplog.set_level(logging.DEBUG, "remora")
    engine = FakeEngine(text=f"{SECRET} ", error=error, fail_at=2)
    config = make_config(tool_parser="hermes", unknown_fields="reject")
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
    async with make_client(FakeServer(engine, config=config)) as client:
        for fields in (
            {},
            {"stream": True},
            {"temperature": SECRET},
            {SECRET: 1},
            {"stop": [SECRET * 100]},
            {"response_format": {"type": SECRET}},
            {"tools": [{"type": "function", "function": {"name": SECRET}}]},
        ):
            await client.post("/v1/chat/completions", json=chat | fields)
        await client.post("/v1/chat/completions", content=f'{{"{SECRET}')
        await client.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"})

    assert SECRET not in caplog.text
    assert bool(caplog.records) is (error is not None)


# -- Ray's own ports ---------------------------------------------------------------------------

STARTED = """
import json, os, sys, ray

def init(**options):
    report = {"options": options, "mode": os.environ.get("RAY_AUTH_MODE")}
    print(json.dumps(report), flush=True)
    os._exit(0)

ray.init = init
from remora.deployments.cli.main import app
app(["serve", sys.argv[1], "--port", sys.argv[2], "--proxy", "python"])
"""


def test_ray_requires_a_token_and_its_dashboard_is_local() -> None:
    port = str(free_port())
    environment = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_MODE"}

    done = subprocess.run(
        [sys.executable, "-c", STARTED, BUILTIN_MODEL, port],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,  # its driver ends without a word
    )

    started = json.loads(done.stdout.splitlines()[-1])
    assert started["mode"] == "token"
    assert started["options"]["dashboard_host"] == "127.0.0.1"
    assert started["options"]["address"] == "local"
