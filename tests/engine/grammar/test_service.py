"""The service: what a fault costs, caches, the queue, and equal requests at once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import EngineError, InvalidRequest, QueueFull
from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar import compiler_process, service
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.grammar.service import GrammarService
from remora.engine.tokens.tokenizer import Tokenizer
from tests.engine.grammar.faulty import COMMAND
from tests.engine.grammar.walks import allowed, vocabulary_of

K = ConstraintKind
MakeService = Callable[..., GrammarService]
BACKENDS = ("xgrammar", "outlines")

# Of the tokenizer's ids the first, which spell every text: compiling takes milliseconds.
NUM_TOKENS = 1024


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture
async def make_service(tokenizer: Tokenizer) -> AsyncIterator[MakeService]:
    made: list[GrammarService] = []

    def make(
        eos_token_ids: tuple[int, ...] = (2,), vocab_size: int = NUM_TOKENS, **section: Any
    ) -> GrammarService:
        made.append(
            GrammarService(
                GrammarSection(**section),
                tokenizer,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "COMMAND", COMMAND)


def regex(pattern: str) -> Constraint:
    return Constraint(kind=K.REGEX, source=pattern)


def schema(value: Any) -> Constraint:
    return Constraint(kind=K.JSON_SCHEMA, source=json.dumps(value))


def pid_of(grammars: GrammarService) -> int | None:
    return None if grammars._process is None else grammars._process.pid


def num_children(grammars: GrammarService) -> int:
    pid = pid_of(grammars)
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return 0 if pid is None else len(path.read_text().split())


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_compiled_grammar_comes_out_of_the_other_process(
    backend: str, make_service: MakeService, smollm2_path: Path
) -> None:
    vocabulary = vocabulary_of(smollm2_path)
    grammars = make_service(backend=backend, vocab_size=vocabulary.size)

    grammar = await grammars.compile(regex("yes|no"), param="p")

    starts = {vocabulary.tokens[i] for i in allowed(grammar.matcher(), vocabulary)}
    assert starts == {b"y", b"ye", b"yes", b"n", b"no"}


@pytest.mark.parametrize(
    ("fault", "limit"), [("spin", "compile_timeout_s"), ("crash", "compile_memory")]
)
@pytest.mark.usefixtures("faulty")
@pytest.mark.observes("grammar.compile_timeout_s")
async def test_a_fault_of_the_compiler_costs_one_request(
    fault: str, limit: str, make_service: MakeService
) -> None:
    grammars = make_service(compile_timeout_s=0.5)

    with pytest.raises(InvalidRequest, match=r"^p cannot be enforced: compiling it") as caught:
        await grammars.compile(regex(fault), param="p")

    assert (caught.value.param, caught.value.code) == ("p", "invalid_grammar")
    assert caught.value.limit == limit
    with pytest.raises(InvalidRequest) as remembered:
        await grammars.compile(regex(fault), param="p")
    assert remembered.value.limit == limit
    stats = grammars.stats()
    assert (stats.misses_total, stats.failures_total, stats.hits_total) == (1, 1, 1)
    assert await grammars.compile(regex("next"), param="p")


@pytest.mark.usefixtures("faulty")
async def test_a_fault_that_may_pass_is_not_remembered(
    make_service: MakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "once"))
    grammars = make_service()
    once = regex("felled")

    with pytest.raises(InvalidRequest, match="takes more memory"):
        await grammars.compile(once, param="p")

    assert await grammars.compile(once, param="p")


@pytest.mark.usefixtures("faulty")
async def test_so_many_are_compiled_at_once_and_the_others_wait(make_service: MakeService) -> None:
    grammars = make_service(compile_timeout_s=60)
    tasks = [
        asyncio.create_task(grammars.compile(regex(f"sleep {i}"), param="p"))
        for i in range(service.NUM_PARALLEL + 1)
    ]
    waiting = asyncio.create_task(grammars.compile(regex("next"), param="p"))

    while num_children(grammars) < service.NUM_PARALLEL:
        await asyncio.sleep(0.01)

    assert grammars.stats().num_waiting == len(tasks) + 1
    assert not waiting.done()
    await asyncio.to_thread(grammars.close)
    for task in (*tasks, waiting):
        with pytest.raises((EngineError, asyncio.CancelledError)):
            await task


HOSTILE = [
    (K.REGEX, "(?:a{100}){101}"),
    (K.REGEX, "(a*)*(a*)*b" * 100),
    (K.REGEX, "(?:" * 400 + "a" + ")*" * 400),
    (K.REGEX, "(?:.{1,99}x){1,99}"),
    (K.REGEX, "(?:(?:(?:a|b)?){99}c?){99}"),
    (K.JSON_SCHEMA, "[" * 30_000),
    (K.JSON_SCHEMA, '{"a":' * 10_000 + "1" + "}" * 10_000),
    (K.JSON_SCHEMA, '{"$ref":"#"}'),
    (K.JSON_SCHEMA, '{"$ref":"file:///etc/passwd"}'),
    (K.JSON_SCHEMA, '{"$ref":"http://127.0.0.1:1/x"}'),
    (K.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": {"$ref": "#"} for i in range(1500)}})),
    (K.JSON_SCHEMA, json.dumps({"anyOf": [{"items": {"$ref": "#"}}] * 900})),
    (K.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 90_000})),
    (K.JSON_SCHEMA, json.dumps({"items": {"items": {"maxItems": 99_999}, "maxItems": 99_999}})),
    (K.JSON_SCHEMA, json.dumps({"enum": ["x" * 30_000, "x" * 30_001]})),
    (K.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(900)}})),
    (K.CHOICE, json.dumps(["x" * 60 + str(i) for i in range(900)])),
    (K.EBNF, "root ::= root"),
    (K.EBNF, "root ::= (" + "(" * 20_000 + '"a"' + ")" * 20_000 + ")"),
    (K.EBNF, "root ::= " + "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(500))),
    (K.EBNF, 'root ::= ("a"{1,9999}){1,9999}'),
    (K.EBNF, 'root ::= a a a\na ::= (b? b? b?)*\nb ::= (a? "x"?)*'),
    (K.STRUCTURAL_TAG, '{"format":' * 5_000 + "1" + "}" * 5_000),
    (K.STRUCTURAL_TAG, '{"format":{"type":"triggered_tags","triggers":[""],"tags":[]}}'),
    (K.STRUCTURAL_TAG, '{"format":{"type":"token","token":99999999}}'),
]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_hostile_constraints_are_compiled_or_refused(
    backend: str, make_service: MakeService
) -> None:
    grammars = make_service(backend=backend, compile_timeout_s=1)

    for kind, source in HOSTILE:
        constraint = Constraint(kind=kind, source=source)
        (made,) = await asyncio.gather(
            grammars.compile(constraint, param="p"), return_exceptions=True
        )
        if isinstance(made, BaseException):
            assert isinstance(made, InvalidRequest)
            assert made.param == "p"
            assert len(str(made)) < 700
        else:
            made.matcher()

    assert await grammars.compile(regex("fine"), param="p")


async def test_equal_constraints_at_once_are_compiled_once(make_service: MakeService) -> None:
    grammars = make_service()
    texts = ('{"type":"string","title":"a"}', '{"title": "b", "type": "string"}')

    made = await asyncio.gather(
        *(
            grammars.compile(Constraint(kind=K.JSON_SCHEMA, source=text), param="p")
            for text in texts * 8
        )
    )

    assert all(one is made[0] for one in made)
    stats = grammars.stats()
    assert (stats.misses_total, stats.hits_total, stats.num_cached) == (1, 15, 1)


async def test_a_cancelled_request_does_not_take_the_others_grammar_along(
    make_service: MakeService,
) -> None:
    grammars = make_service()
    first = asyncio.create_task(grammars.compile(regex("shared"), param="p"))
    second = asyncio.create_task(grammars.compile(regex("shared"), param="p"))
    while grammars.stats().hits_total == 0:
        await asyncio.sleep(0.01)

    first.cancel()

    assert await second
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.observes("grammar.compile_memory")
async def test_a_compiler_has_the_memory_that_the_operator_gives(make_service: MakeService) -> None:
    large = regex("(a|b){1,3000}")
    with pytest.raises(InvalidRequest, match=r"more memory than grammar\.compile_memory"):
        await make_service(compile_memory=2**20).compile(large, param="p")

    assert await make_service().compile(large, param="p")


@pytest.mark.observes("grammar.cache_memory")
async def test_many_schemas_stay_within_the_cache(make_service: MakeService) -> None:
    limit = 2**19
    grammars = make_service(cache_memory=limit)

    for number in range(60):
        value = {"properties": {f"name_{number}": {"type": "string"}}}
        await grammars.compile(schema(value), param="p")
        assert grammars.stats().cached_bytes <= limit

    stats = grammars.stats()
    assert stats.misses_total == 60
    assert 0 < stats.num_cached < 60


async def test_nothing_of_a_constraint_is_written_to_a_disk(
    make_service: MakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "OUTLINES_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert await make_service(backend="outlines").compile(regex("[0-9]{3}"), param="p")

    assert os.listdir(tmp_path) == []


async def test_the_event_loop_goes_on_while_a_grammar_is_compiled(
    make_service: MakeService,
) -> None:
    grammars = make_service()
    task = asyncio.create_task(grammars.compile(regex("[a-z]{1,9}"), param="p"))

    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1

    assert turns > 10
    assert await task


@pytest.mark.observes("grammar.backend")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "none"}, "grammar.backend"),
        ({"eos_token_ids": ()}, "end-of-sequence"),
        ({"eos_token_ids": (10**6,)}, "end-of-sequence"),
    ],
)
async def test_without_a_backend_the_key_is_named(
    make_service: MakeService, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        await make_service(**options).compile(regex("a"), param="p")

    assert caught.value.code == "unsupported"


async def test_a_queue_of_too_many_is_refused(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_WAITING", 3)
    grammars = make_service()

    made = await asyncio.gather(
        *(grammars.compile(regex(f"number {i}"), param="p") for i in range(8)),
        return_exceptions=True,
    )

    refused = [one for one in made if isinstance(one, QueueFull)]
    assert [one.limit for one in refused] == ["grammar_queue"] * 5


@pytest.mark.usefixtures("faulty")
async def test_closing_ends_the_compiler_and_those_who_wait(make_service: MakeService) -> None:
    grammars = make_service(compile_timeout_s=60)
    waiting = asyncio.create_task(grammars.compile(regex("sleep"), param="p"))
    while num_children(grammars) == 0:
        await asyncio.sleep(0.01)
    pid = pid_of(grammars)

    for _ in range(2):
        await asyncio.to_thread(grammars.close)

    with pytest.raises((InvalidRequest, EngineError)):
        await waiting
    with pytest.raises(EngineError, match="closed"):
        await grammars.compile(regex("a"), param="p")
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_importing_the_service_imports_no_backend() -> None:
    code = (
        "import sys, remora.engine.grammar.service;"
        "heavy = {'torch', 'xgrammar', 'outlines_core', 'transformers', 'ray'};"
        "print(sorted(heavy & set(sys.modules)))"
    )

    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"
