"""A headless Chromium, asked through a pipe: pages as a person sees them."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS: Final = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()


class Page:
    """One tab: opens addresses, looks like any screen, presses keys, and remembers what went to the console."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._in, self._out = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb")
        self._numbers, self._events = itertools.count(1), list[dict[str, Any]]()
        self._session = ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        self._in.write(json.dumps(message).encode() + b"\0")
        self._in.flush()
        while (answer := self._read()).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, answer
        return cast("dict[str, Any]", answer["result"])

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (one := self._out.read(1)) != b"\0":
            assert one, "the browser has ended"
            text += one
        return cast("dict[str, Any]", json.loads(text))

    def open(self, address: str | Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Show a page and wait until it is loaded."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._ask("Page.navigate", url=address.resolve().as_uri() if isinstance(address, Path) else address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript; promises are waited for."""
        answer = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **extra)

    def complaints(self) -> list[str]:
        """What the page wrote to the console, and errors nobody caught."""
        self.run("0")
        return [
            json.dumps(event["params"])
            for event in self._events
            if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Save what is seen, or all of the page, as PNG."""
        data = self._ask("Page.captureScreenshot", captureBeyondViewport=whole, **(self._clip() if whole else {}))[
            "data"
        ]
        file.write_bytes(base64.b64decode(data))

    def _clip(self) -> dict[str, Any]:
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with a profile of its own, ended afterwards."""
    assert CHROMIUM is not None
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()

    def place() -> None:
        # The browser reads from descriptor 3 and writes to 4. Copies first, so that neither closes the other.
        first, second = os.dup(their_in), os.dup(their_out)
        os.dup2(first, 3)
        os.dup2(second, 4)

    with subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=place,  # noqa: PLW1509
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(our_out, our_in)
        finally:
            process.kill()
