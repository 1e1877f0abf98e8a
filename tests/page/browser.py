"""A headless Chromium, driven over a pair of pipes by the DevTools protocol: standard library only.

Every message is answered, or an event is waited for, by reading the pipe: no clock decides, and a browser
that is gone ends the pipe.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUNG = 600
"""Seconds without a word after which the browser counts as gone: far above what any answer takes."""
_SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
_KEYS = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "PageUp": 33,
    "PageDown": 34, "Escape": 27, "Tab": 9, "Enter": 13, "+": 187, "-": 189,
}  # fmt: skip
_TEXT = {"Enter": "\r", "+": "+", "-": "-"}


def chromium() -> str | None:
    """The path of a Chromium, None without one."""
    named = os.environ.get("CHROMIUM")
    return named or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Browser:
    """A process; ``with Browser(path, folder) as one`` ends it."""

    def __init__(self, path: str, profile: Path) -> None:
        self._path, self._profile = path, profile

    def __enter__(self) -> Browser:
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; the shell moves ours there
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
        command = ["bash", "-c", script, self._path, f"--user-data-dir={self._profile}", *_SWITCHES]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, from_write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(from_write)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.call("Browser.close")
        except (OSError, EOFError):
            pass
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of one command; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def wait(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event that fits, seen already or to come."""
        for event in self.events:
            if fits(event):
                return event
        while True:
            self.events.append(self._read())
            if fits(self.events[-1]):
                return self.events[-1]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], HUNG)
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise EOFError("Chromium is gone")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """A tab with a file of the disk in it, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        tab.call("Emulation.setEmulatedMedia", features=scheme)
        tab.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(lambda one: one.get("method") == "Page.loadEventFired" and one.get("sessionId") == session)
        return tab


class Tab:
    """One page."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression, a promise awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            code = {"key": key, "windowsVirtualKeyCode": _KEYS[key], "code": key}
            text = {"text": _TEXT[key]} if key in _TEXT else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def troubles(self) -> list[str]:
        """Errors and warnings in the console, exceptions, refused resources; requests that left the file."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, said = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(said["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
                found.append(str(said["args"]))
            elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
                found.append(said["entry"]["text"])
            elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(
                ("file:", "data:")
            ):
                found.append(said["request"]["url"])
        return found
