"""`stretto watch RUN`: the page of a run, refreshed in place while it trains."""

import dataclasses
import http.server
import secrets
import threading
import time
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import parse_qs, urlsplit

import tyro
from pydantic import Field

from stretto.cli.flags import check_flags, parse
from stretto.errors import StrettoError
from stretto.files import is_locked
from stretto.report import page, run_page, write_run_report
from stretto.training import EVENTS_FILE, read_events

HOST: Final = "127.0.0.1"
LOOK_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 60.0
"""How long an open page may take to fetch the end of the run; browsers let pages in the background wait."""
# Asks for the page again and again, and for less than a tenth of the time. Plots keep their zoom and what was hidden in
# them; while something has the focus or is selected, the page stays as it is.
REFRESH: Final = """
const draw = (div, data, layout, config) => Plotly.react(div, data, {...layout, uirevision: 1}, config);
Plotly.newPlot = draw;
const inUse = () => document.querySelector("main").contains(document.activeElement) || String(getSelection());
function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const main = document.importNode(fresh.querySelector("main"), true), at = scrollY;
  for (const plot of main.querySelectorAll(".plotly-graph-div")) {
    const drawn = document.getElementById(plot.id);
    if (drawn) plot.replaceWith(drawn);
  }
  document.querySelector("main").replaceWith(main);
  document.title = fresh.title;
  for (const script of main.querySelectorAll("script")) {
    const run = document.createElement("script");
    run.textContent = script.textContent;
    script.replaceWith(run);
  }
  scrollTo(0, at);
}
async function refresh(seen, waiting) {
  const began = performance.now();
  let ended = false;
  try {
    const answer = await fetch("page?seen=" + seen);
    if (!answer.ok) throw answer.status;
    ended = answer.headers.get("X-Ended") === "1";
    if (answer.status === 200) {
      waiting = await answer.text();
      seen = answer.headers.get("X-Version");
    }
  } catch {
    ended = true;
    document.title += " (stretto watch has stopped)";
  }
  if (waiting && !inUse()) {
    show(waiting);
    waiting = "";
  }
  if (waiting || !ended) setTimeout(refresh, Math.max(1000, 10 * (performance.now() - began)), seen, waiting);
}
refresh("", "");
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """The page of a run while it trains, for a browser on this machine; it ends with the run, or by Ctrl-C.

    From another machine, forward the port first: ssh -L 8765:127.0.0.1:8765 HOST.

    Attributes:
        run: The run folder, as `stretto train` names it.
        port: Where to serve the page, on the loopback interface alone; 0 takes any free port.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    port: Annotated[int, Field(ge=0, le=65535)] = 8765


def run(words: list[str]) -> int:
    """Serve the page until the run ends."""
    settings = check_flags(parse(WatchSettings, words, prog="stretto watch"))
    folder = settings.run
    if not folder.is_dir():
        raise StrettoError(
            f"there is no run folder {str(folder)!r}", fix="Start the run first; `stretto train` names its folder."
        )
    if is_locked(folder):
        try:
            serve(folder, port=settings.port)
        except KeyboardInterrupt:
            print("Stopped watching; the run goes on.")
            return 0
    states = [
        event["event"] for event in read_events(folder) if event["event"] in ("resumed", "interrupted", "finished")
    ]
    state = states[-1] if states and states[-1] != "resumed" else "not finished, and no process trains it"
    print(f"The run is {state}.\npage  {write_run_report(folder)}")
    return 0


def serve(folder: Path, *, port: int) -> None:
    """Serve the page of a run until no process trains it and an open page has shown its end."""
    watched = Watched(folder)
    try:
        server = http.server.ThreadingHTTPServer((HOST, port), watched.handler())
    except OSError as error:
        raise StrettoError(
            f"cannot serve on port {port} ({error.strerror or error})",
            fix="Choose another --port, or --port 0 for any free one.",
        ) from error
    with server:
        server.timeout = LOOK_SECONDS
        print(f"watch  http://{HOST}:{server.server_port}/{watched.key}/  (Ctrl-C ends it, not the run)", flush=True)
        ended_at = None
        while ended_at is None or (watched.must_show_end and time.monotonic() < ended_at + GRACE_SECONDS):
            server.handle_request()
            if watched.error is not None:
                raise watched.error
            if ended_at is None and watched.look()[1]:
                ended_at = time.monotonic()


class Watched:
    """A run and its page, which is written again when a browser asks and there are new events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Other users of this machine reach the loopback interface, too.
        self.key = secrets.token_urlsafe(8)
        self.error: StrettoError | None = None
        self.must_show_end = False
        self._lock = threading.Lock()
        self._version, self._text = "", ""

    def look(self) -> tuple[str, bool]:
        """The version of the page that would be made now, and whether the run has ended."""
        # In this order: what a process records before it leaves is seen.
        ended = not is_locked(self.folder)
        record = self.folder / EVENTS_FILE
        return f"{record.stat().st_size if record.exists() else 0}-{int(ended)}", ended

    def page(self, version: str) -> str:
        """The page, without the plotting library."""
        with self._lock:
            if version != self._version:
                self._version, self._text = version, self._make()
            return self._text

    def _make(self) -> str:
        if not (self.folder / EVENTS_FILE).exists():
            return self.shell(subtitle="Nothing is recorded yet: data are being read or made.", live="")
        return run_page(self.folder, scripted=False)

    def shell(self, *, subtitle: str, live: str) -> str:
        """A page without content."""
        footer = f"Run folder: {self.folder}"
        title = f"Run {self.folder.name}"
        return page(title=title, subtitle=subtitle, top=[], sections=[], footer=footer, scripted=bool(live), live=live)

    def handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        """What answers the browser."""
        watched = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                # A page of another site that was given our address would send its own name.
                is_ours = (self.headers.get("Host") or "").partition(":")[0] in (HOST, "localhost")
                if not is_ours or url.path not in (f"/{watched.key}/", f"/{watched.key}/page"):
                    self.send_error(404)
                elif url.path.endswith("/page"):
                    self.answer_page(seen=parse_qs(url.query).get("seen", [""])[0])
                else:
                    watched.must_show_end = True
                    self.answer(watched.shell(subtitle="Asking for the page ...", live=REFRESH))

            def answer_page(self, *, seen: str) -> None:
                version, ended = watched.look()
                try:
                    text = "" if version == seen else watched.page(version)
                except StrettoError as error:
                    watched.error = error
                    self.send_error(500)
                    return
                self.answer(text, **{"X-Version": version, "X-Ended": str(int(ended))})
                if ended:
                    watched.must_show_end = False

            def answer(self, text: str, **headers: str) -> None:
                body = text.encode()
                self.send_response(200 if body else 204)
                for name, value in {
                    "Cache-Control": "no-store",
                    "X-Content-Type-Options": "nosniff",
                    **headers,
                }.items():
                    self.send_header(name, value)
                if body:
                    self.send_header("Content-Type", "text/html; charset=utf-8")
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler
