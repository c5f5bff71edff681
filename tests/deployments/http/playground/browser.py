"""A headless Chromium, driven by Debian's chromedriver over the WebDriver protocol."""

from __future__ import annotations

import os
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from remora.deployments.free_ports import free_port
from tests.programs import find, library_path

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name of a reference
WAIT_S = 60.0
DRIVER_LOG = "driver.log"
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Shift": "\ue008", "Alt": "\ue00a", "Tab": "\ue004"}
KEYS |= {"Up": "\ue013", "Right": "\ue014", "Control": "\ue009"}
RECORD_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


class Browser:
    """One tab. Elements are named by CSS selectors."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.cdp("Page.addScriptToEvaluateOnNewDocument", {"source": RECORD_VIOLATIONS})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer

    def cdp(self, command: str, params: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def script(self, code: str, *args: Any) -> Any:
        """Return what a function body returns; a promise is awaited."""
        return self._post("execute/sync", {"script": code, "args": args})

    def until(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        end = time.monotonic() + WAIT_S
        while not (value := self.script(f"return {condition}")):
            assert time.monotonic() < end, f"never true: {condition}\n{self.problems()}"
            time.sleep(0.05)
        return value

    def _find(self, selector: str) -> str:
        found = self._post("element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def click(self, selector: str) -> None:
        self._post(f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._post(f"element/{self._find(selector)}/value", {"text": text})

    def clear(self, selector: str) -> None:
        self._post(f"element/{self._find(selector)}/clear", {})

    def press(self, *names: str) -> None:
        """Press keys together, wherever the focus is."""
        keys = [KEYS.get(name, name) for name in names]
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._post("actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def text(self, selector: str) -> str:
        code = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('|')"
        return str(self.script(code, selector))

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.cdp("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme that the system asks for."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", {"features": features})

    def problems(self) -> list[str]:
        """Return violations of the policy and errors on the console since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        found = [str(entry["message"]) for entry in entries if entry["level"] == "SEVERE"]
        return found + [str(each) for each in self.script("return window.violations ?? []")]

    def screenshot(self, path: Path) -> None:
        answer = self._http.get("screenshot").json()["value"]
        path.write_bytes(b64decode(answer))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own, which is written to a folder."""
    chromium, driver_program = find("chromium"), find("chromedriver")
    assert chromium is not None
    assert driver_program is not None
    port = free_port()
    driver = subprocess.Popen(
        [str(driver_program), f"--port={port}", f"--log-path={profile / DRIVER_LOG}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LD_LIBRARY_PATH": library_path()},
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
            until_ready(http)
            session = started(http, str(chromium), profile)
            http.base_url = http.base_url.join(f"session/{session}/")
            try:
                yield Browser(http)
            finally:
                http.delete(str(http.base_url).rstrip("/"))
    finally:
        driver.terminate()
        driver.wait()


def started(http: httpx.Client, chromium: str, profile: Path) -> str:
    """Start Chromium; return its session. An error has the last lines of the driver's log."""
    chrome = {"binary": chromium, "args": [*OPTIONS, f"--user-data-dir={profile}"]}
    wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
    answer = http.post("session", json={"capabilities": {"alwaysMatch": wanted}}).json()
    session = answer["value"].get("sessionId")
    assert session, (profile / DRIVER_LOG).read_text()[-4000:]
    return str(session)


def until_ready(http: httpx.Client) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        try:
            if http.get("status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, "chromedriver did not start"
        time.sleep(0.05)
