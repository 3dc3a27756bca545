"""A headless Chromium, controlled over its debugging pipe, without an open port and without a driver."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


class Browser:
    """One tab. `requests` are those of the page; `complaints` are its log messages and exceptions."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._buffer, self._sent, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path) -> None:
        """Load a page and wait until its scripts have run."""
        self.requests.clear()
        self.complaints.clear()
        self._ask("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self._receive().get("method", ""):
            pass

    def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window in CSS pixels, and a light or dark colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=media)

    def ask(self, expression: str, wait: bool = False) -> Any:
        """Return the value of a JavaScript expression in the page.

        A promise is awaited if `wait` is true; an exception is raised.
        """
        given = {"expression": expression, "returnByValue": True, "awaitPromise": wait}
        answer = self._ask("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37}
        codes |= {"ArrowRight": 39, "ArrowDown": 40, "c": 67, "/": 191}
        for kind in ("keyDown", "keyUp"):
            given = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self._ask("Input.dispatchKeyEvent", type=kind, **given)

    def type(self, text: str) -> None:
        self._ask("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._receive()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._answers.fileno(), 2**16)
            assert more, "Chromium has ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Runtime.exceptionThrown" | "Log.entryAdded" | "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(message["params"]))
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with pipes 3 and 4, as --remote-debugging-pipe needs them."""
    assert FOUND is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # the shell puts the pipes at 3 and 4, whatever numbers they have here
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", script, FOUND, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(10)
