"""A headless Chromium for tests, driven through chromedriver: the protocol is HTTP and JSON."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What the packages chromium and chromium-driver of Debian install; other systems name them so too.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
PATIENCE = 30.0
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"} | {
    f"Arrow{way}": chr(0xE012 + at) for at, way in enumerate(("Left", "Up", "Right", "Down"))
}


def missing() -> str | None:
    """Why there is no browser to test with; None if there is one."""
    if shutil.which(DRIVER) is None:
        return "needs chromedriver: apt-get install chromium chromium-driver"
    if browser() is None:
        return "needs Chromium: apt-get install chromium chromium-driver"
    return None


def browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """A window of the browser."""

    def __init__(self, port: int, arguments: list[str]) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {"args": arguments, "binary": browser()}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
            "unhandledPromptBehavior": "ignore",  # a dialog is a finding
        }
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{answer['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())["value"]
            raise AssertionError(f"{said['error']}: {said['message'].splitlines()[0]}") from None

    def open(
        self, path: Path, *, width: int = 1380, height: int = 1000, dark: bool = False
    ) -> None:
        """Opens a report, and waits until it answers."""
        self._ask("POST", "/window/rect", {"width": width, "height": height})
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("POST", "/url", {"url": path.as_uri()})
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def visit(self, url: str) -> None:
        """Opens a page of a server."""
        self._ask("POST", "/url", {"url": url})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns. It runs beside the page, which its policy does not stop."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def value(self, expression: str, *arguments: Any) -> Any:
        return self.run(f"return ({expression})", *arguments)

    def wait(self, expression: str, *arguments: Any) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression, *arguments):
            if time.monotonic() > end:
                raise AssertionError(f"not true: {expression}\n{self.problems()}")
            time.sleep(0.02)

    def element(self, selector: str) -> dict[str, str]:
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})

    def text(self, selector: str) -> str:
        return self.value("document.querySelector(arguments[0]).textContent", selector)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which must be visible and on top there."""
        self._ask("POST", f"/element/{self.element(selector)[ELEMENT]}/click")

    def type(self, selector: str, text: str) -> None:
        path = f"/element/{self.element(selector)[ELEMENT]}"
        self._ask("POST", f"{path}/clear")
        self._ask("POST", f"{path}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys, by their names in KeyboardEvent.key, to whatever has the focus."""
        moves = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": moves}]})

    def point(self, x: float, y: float, *more: tuple[float, float], press: bool = False) -> None:
        """Moves the pointer through places of the window; with its button down if `press`."""
        steps: list[dict[str, Any]] = []
        for at, (right, down) in enumerate([(x, y), *more]):
            place = {"x": round(right), "y": round(down), "duration": 30 if at else 0}
            steps.append({"type": "pointerMove", "origin": "viewport", **place})
            if press and at == 0:
                steps.append({"type": "pointerDown", "button": 0})
        if press:
            steps.append({"type": "pointerUp", "button": 0})
        pointer = {"type": "pointer", "id": "m", "parameters": {"pointerType": "mouse"}}
        self._ask("POST", "/actions", {"actions": [{**pointer, "actions": steps}]})

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element in the window, after it was scrolled there."""
        script = """
            const found = document.querySelector(arguments[0]);
            found.scrollIntoView({block: "center"});
            const {left, top, width, height} = found.getBoundingClientRect();
            return [left, top, width, height];"""
        left, top, width, height = self.run(script, selector)
        return left, top, width, height

    def problems(self) -> list[str]:
        """What the browser has logged since the last call: errors, warnings, what was blocked."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self, clip: tuple[float, float, float, float] | None = None) -> bytes:
        """The window as PNG, or a part of the document: left, top, width, height."""
        parameters: dict[str, Any] = {"format": "png", "optimizeForSpeed": True}
        if clip is not None:
            names = ("x", "y", "width", "height")
            parameters["clip"] = dict(zip(names, clip, strict=True)) | {"scale": 1}
            parameters["captureBeyondViewport"] = True
        return base64.b64decode(self.devtools("Page.captureScreenshot", **parameters)["data"])

    def close(self) -> None:
        self._ask("DELETE", "")


@contextmanager
def driver(profile: Path) -> Iterator[int]:
    """A chromedriver of our own, and the port on which it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"HOME": str(profile)}
    with open(profile / "chromedriver.log", "w") as log:
        process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=log, stderr=log, env=environment
        )
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for attempt in itertools.count():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                if re.search(rb'"ready":\s*true', answer.read()):
                    return
        except OSError:
            pass
        if attempt > 600 or process.poll() is not None:
            raise AssertionError("chromedriver does not answer")
        time.sleep(0.05)


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """A window without a network: only files can be opened, and nothing can be asked for."""
    arguments = [
        "--headless=new",
        "--no-sandbox",  # containers run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        "--lang=en-US",
        f"--user-data-dir={folder / 'profile'}",
        "--proxy-server=127.0.0.1:9",  # where nothing listens
    ]
    with driver(folder) as port:
        page = Page(port, arguments)
        try:
            yield page
        finally:
            page.close()
