"""The playground's chat in a real browser."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.deployments import serve_context
from remora.deployments.http.core.auth import Access, Keys
from remora.deployments.llm_server import LLMServer
from tests.conftest import TinyCheckpoints
from tests.deployments.fakes import (
    CharTokenizer,
    FakeEngine,
    FakeServer,
    make_config,
    make_server_config,
)
from tests.deployments.http.playground.browser import WAIT_S, Browser
from tests.deployments.http.playground.serving import fake, served

IDLE = "!document.querySelector('#send').hidden"
ADAPTERS = [{"name": name, "path": f"/{name}"} for name in ("pirate", "poet")]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def open_page(tab: Browser, url: str) -> None:
    tab.open(url)
    tab.until("document.body.dataset.ready")


def ask(tab: Browser, text: str) -> None:
    """Type a question, send it, and wait for the end of the answer."""
    tab.type("#prompt", text)
    tab.press("Enter")
    tab.until(f"{IDLE} && document.querySelector('.turn.assistant')")


def set_field(tab: Browser, name: str, value: str) -> None:
    code = """
        const field = document.querySelector(`#settings [name=${arguments[0]}]`);
        field.value = arguments[1];
        field.dispatchEvent(new Event("input", { bubbles: true }));
        field.dispatchEvent(new Event("change", { bubbles: true }));
    """
    tab.script(code, name, value)


def prompts(server: FakeServer) -> list[str]:
    tokenizer = server.tokenizer
    return [
        tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        for request in server.client.requests
    ]


@pytest.fixture(scope="module")
def real_url(tiny_checkpoints: TinyCheckpoints) -> Iterator[str]:
    """The application over an engine of a tiny model, in a loop of its own."""
    args: dict[str, Any] = {
        "model": {"path": str(tiny_checkpoints("llama")), "served_name": "tiny"},
        "engine": {"num_threads": 1, "kv_tokens": 4096},
    }
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = LLMServer.__new__(LLMServer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_context, "log_through_serve", lambda: None)
        starting = server.__init__(args)  # type: ignore[misc]
        asyncio.run_coroutine_threadsafe(starting, loop).result()
    try:
        with served(server.__serve_build_asgi_app__()) as url:
            yield url
    finally:
        server.__del__()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_question_to_a_real_engine_is_answered(tab: Browser, real_url: str) -> None:
    open_page(tab, real_url)
    set_field(tab, "temperature", "0")
    set_field(tab, "max_completion_tokens", "256")  # in several packets
    set_field(tab, "system", "Be brief.")
    ask(tab, "What is the capital of France?")

    shown = json.loads(tab.script("return Object.values(sessionStorage)[0]"))
    turns = [{"role": "system", "content": "Be brief."}]
    turns += [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "tiny", "messages": turns, "temperature": 0, "max_tokens": 256}
    answer = httpx.post(f"{real_url}/v1/chat/completions", json=body, timeout=60).json()
    assert shown[0]["turns"][1]["text"] == answer["choices"][0]["message"]["content"] != ""
    stats = tab.text(".stats")
    assert f"{answer['usage']['completion_tokens']} tokens" in stats
    assert "tokens/s" in stats
    assert "TTFT" in stats


def test_an_answer_streams_until_it_is_stopped(tab: Browser) -> None:
    engine = FakeEngine(text="Paris.", gate=asyncio.Event())
    with fake(FakeServer(client=engine)) as url:
        open_page(tab, url)
        tab.type("#prompt", "Where?")
        tab.press("Enter")
        tab.until("document.querySelector('.answer').innerText.trim() === 'P'")
        assert tab.script("return document.querySelector('.turn.assistant').ariaBusy") == "true"
        tab.press("Escape")
        tab.until(IDLE)

        assert "stopped" in tab.text(".stats")
        assert tab.text(".answer") == "P"
        end = time.monotonic() + WAIT_S
        while not engine.closed:  # until the server has noticed that its client left
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_question_is_edited_and_an_answer_is_drawn_again(tab: Browser) -> None:
    server = FakeServer()
    with fake(server) as url:
        open_page(tab, url)
        ask(tab, "One")
        ask(tab, "Two")
        tab.click(".turn.user button[title=Edit]")
        tab.clear(".editor textarea")
        tab.type(".editor textarea", "Uno")
        tab.press("Enter")
        tab.until(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
        tab.click(".turn.assistant [data-action=retry]")
        tab.until(f"{IDLE} && document.querySelector('.stats').innerText")
        assert tab.script("return document.activeElement.className") == "log"
        tab.press("Alt", "r")
        tab.until(f"{IDLE} && document.querySelector('.stats').innerText")

    assert prompts(server) == [
        "<|user|>One<|assistant|>",
        "<|user|>One<|assistant|>Paris.<|user|>Two<|assistant|>",
        *["<|user|>Uno<|assistant|>"] * 3,
    ]


def test_an_edited_answer_is_what_the_model_sees_next(tab: Browser) -> None:
    server = FakeServer()
    with fake(server) as url:
        open_page(tab, url)
        ask(tab, "One")
        tab.click(".turn.assistant [data-action=edit]")
        tab.clear(".editor textarea")
        tab.type(".editor textarea", "Rome.")
        tab.click(".editor .primary")
        ask(tab, "Two")

    assert prompts(server)[1] == "<|user|>One<|assistant|>Rome.<|user|>Two<|assistant|>"


def test_settings_are_sent_and_last(tab: Browser) -> None:
    server = FakeServer()
    given = {"temperature": "0.25", "top_k": "7", "seed": "3", "stop": "x\ny", "min_p": "0.1"}
    with fake(server) as url:
        open_page(tab, url)
        for name, value in given.items():
            set_field(tab, name, value)
        open_page(tab, url)
        ask(tab, "Hi")

    sampling = server.client.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.25, 7, 3)
    assert (sampling.stop, sampling.min_p) == (("x", "y"), 0.1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("tools", "[{", "Tools"), ("tools", "{}", "a list is needed"), ("schema", "3", "an object")],
)
def test_a_setting_that_is_wrong_is_named(
    tab: Browser, name: str, value: str, message: str
) -> None:
    server = FakeServer()
    with fake(server) as url:
        open_page(tab, url)
        set_field(tab, name, value)
        tab.type("#prompt", "Hi")
        tab.press("Enter")
        tab.until(f"document.activeElement.name === '{name}'")

        assert message in tab.text(f"#set-{name}-fault")
        assert tab.script("return document.activeElement.ariaInvalid") == "true"
    assert server.client.requests == []


def test_a_call_is_shown_and_its_result_sent(tab: Browser) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    server = FakeServer(client=FakeEngine(text=call), config=make_config(tool_parser="hermes"))
    with fake(server) as url:
        open_page(tab, url)
        set_field(tab, "tools", json.dumps([WEATHER]))
        ask(tab, "Weather?")
        assert tab.text(".call-name") == "weather"
        server.client.text = "Sunny."
        tab.type(".results textarea", "28 degrees")
        tab.click(".results button")
        tab.until(f"{IDLE} && document.querySelectorAll('.turn.assistant').length === 2")

        assert tab.text(".answer").endswith("Sunny.")
    messages = server.tokenizer.rendered[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["content"] == "28 degrees"


def test_a_schema_constrains_the_answer(tab: Browser) -> None:
    server = FakeServer(client=FakeEngine(text='{"city": "Paris"}'))
    with fake(server) as url:
        open_page(tab, url)
        set_field(tab, "schema", '{"type": "object"}')
        ask(tab, "City?")

    assert server.grammars.asked[0][0].source == '{"type":"object"}'


def test_reasoning_is_apart_and_folds(tab: Browser) -> None:
    engine = FakeEngine(text="<think>Hm, France.</think>Paris.")
    server = FakeServer(client=engine, config=make_config(reasoning_parser="deepseek-r1"))
    with fake(server) as url:
        open_page(tab, url)
        ask(tab, "Where?")

        assert tab.text(".answer") == "Paris."
        assert tab.script("return document.querySelector('details.reasoning').open") is False
        tab.click(".reasoning summary")
        assert tab.text(".reasoning-text") == "Hm, France."


def test_probabilities_are_read_by_keyboard_and_pointer(tab: Browser) -> None:
    with fake(FakeServer()) as url:
        open_page(tab, url)
        set_field(tab, "top_logprobs", "3")
        ask(tab, "Where?")
        tab.click("button[title='Show the tokens']")
        tab.script("document.querySelector('.token-list').focus()")
        tab.press("Right")
        tab.press("Right")

        assert tab.text(".token-list") == "Paris."
        assert tab.text(".token-view [role=status]").startswith('"a", 61 %; instead of "!" 22 %')
        assert "61 %" in tab.text(".token-detail .chosen")
        over = "new PointerEvent('pointerover', { bubbles: true })"
        tab.script(f"document.querySelectorAll('.token')[3].dispatchEvent({over})")
        assert tab.text(".token-detail .chosen code") == '"i"'


def test_two_adapters_answer_next_to_each_other(tab: Browser) -> None:
    server = FakeServer(config=make_server_config(lora={"adapters": ADAPTERS}))
    with fake(server) as url:
        open_page(tab, url)
        ask(tab, "One")
        tab.click("#compare")
        for number, name in ((1, "pirate"), (2, "poet")):
            choice = f".pane:nth-child({number}) option[value={name}]"
            tab.click(choice)
        ask(tab, "Two")
        tab.until("document.querySelectorAll('.turn.assistant .stats span').length > 4")
        names = tab.text(".turn.assistant .who")
        tab.click("#compare")
        panes = tab.script("return document.querySelectorAll('.pane').length")

    assert names == "tiny|pirate|tiny|poet"
    assert panes == 1
    assert sorted(request.lora_id for request in server.client.requests) == [0, 1, 2]
    assert prompts(server)[1] == prompts(server)[2]


def test_a_request_is_shown_as_code(tab: Browser) -> None:
    access = Access(keys=Keys(["secret"]))
    with fake(FakeServer(), access=access) as url:
        tab.open(url)
        tab.until("document.querySelector('#key-dialog').open")
        enter_key(tab, "secret")
        set_field(tab, "top_k", "5")
        ask(tab, "It's a test")
        tab.click("button[title='Copy as curl or Python']")
        curl = tab.text("#code-text")
        tab.click("#code-python")
        python = tab.text("#code-text")

    assert f"curl -N '{url}/v1/chat/completions'" in curl
    assert r"It'\''s a test" in curl
    assert 'extra_body={"top_k": 5}' in python
    compile(python, "snippet", "exec")
    assert all("REMORA_API_KEY" in code and "secret" not in code for code in (curl, python))


def enter_key(tab: Browser, key: str) -> None:
    tab.clear("#key")
    tab.type("#key", key)
    tab.press("Enter")
    tab.until("document.body.dataset.ready && document.querySelector('.model option')")


def test_a_key_is_asked_for_and_kept_in_the_tab_only(tab: Browser) -> None:
    access = Access(keys=Keys(["secret"]))
    with fake(FakeServer(), access=access) as url:
        tab.open(url)
        tab.until("document.querySelector('#key-dialog').open")
        assert "needs an API key" in tab.text("#key-text")
        enter_key(tab, "secret")
        tab.open(url)
        tab.until("document.querySelector('.model option')")
        ask(tab, "Hi")

        assert tab.text(".answer") == "Paris."
        assert "secret" not in tab.script("return JSON.stringify(localStorage)")
        assert "secret" not in tab.script("return document.cookie")


def test_it_works_below_a_root_path(tab: Browser) -> None:
    with fake(FakeServer(), root="/team/llm") as url:
        open_page(tab, f"{url}/team/llm")
        ask(tab, "Hi")

        assert tab.script("return location.pathname") == "/team/llm/"
        assert tab.text(".answer") == "Paris."


def test_an_error_is_shown_where_the_answer_would_be(tab: Browser) -> None:
    server = FakeServer(client=FakeEngine(limit=0))
    with fake(server) as url:
        open_page(tab, url)
        ask(tab, "Hi")

        assert tab.text(".turn.assistant .fault") == "Too many sequences are waiting."


def test_the_keyboard_reaches_everything(tab: Browser) -> None:
    with fake(FakeServer()) as url:
        open_page(tab, url)
        ask(tab, "One")
        tab.press("Up")
        assert tab.script("return document.activeElement.value") == "One"
        tab.press("Escape")
        tab.press("Alt", "c")
        assert tab.script("return document.querySelectorAll('.pane').length") == 2
        tab.press("Alt", "e")
        assert tab.script("return document.querySelector('#chat').hidden") is True
        tab.press("Alt", "n")
        assert tab.script("return document.activeElement.id") == "prompt"
        assert tab.text(".turn") == ""
        tab.press("Control", "/")
        assert tab.script("return document.querySelector('#help-dialog').open") is True
        tab.press("Escape")


def test_a_conversation_outlives_a_reload(tab: Browser) -> None:
    with fake(FakeServer()) as url:
        open_page(tab, url)
        ask(tab, "One")
        open_page(tab, url)

        assert tab.text(".turn .bubble") == "One"
        assert tab.text(".answer") == "Paris."


def test_screenshots(tab: Browser, tmp_path: Path) -> None:
    """The picture that the driver takes is not empty: the page has been painted."""
    with fake(FakeServer(tokenizer=CharTokenizer())) as url:
        open_page(tab, url)
        tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
