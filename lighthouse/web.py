"""A small status page: `/` for people, `/status` as JSON for tools. Read-only, no password."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from lighthouse.config import normalize_address, split_address
from lighthouse.own_address import bracketed

log = logging.getLogger("lighthouse")

Status = Callable[[], dict[str, Any]]

# The page renders what /status says; texts are set as text, never as markup.
_PAGE = b"""<!doctype html>
<meta charset="utf-8"><title>lighthouse</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
 :root { color-scheme: light dark }
 body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
 h2 { font-size: 1.1rem; margin: 2rem 0 0 } p { margin: .2rem 0 .6rem; opacity: .75 }
 table { border-collapse: collapse; width: 100% }
 td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884 }
 .gone { color: #c33 } .healing, .waiting { color: #a70 } .voted { color: #383 }
</style>
<h1>lighthouse</h1><p id="server"></p><main></main>
<script>
const make = (tag, text, kind) => {
  const e = document.createElement(tag); e.textContent = text ?? ""; e.className = kind ?? "";
  return e;
};
const many = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
function row(table, cells, kind) {
  const tr = make("tr", "", kind);
  for (const cell of cells) tr.append(make("td", cell));
  table.append(tr);
}
function show(job) {
  const part = document.createElement("section"), table = document.createElement("table");
  part.append(make("h2", `${job.job_id}/${job.room_id}: ${job.state}, step ${job.step}`),
    make("p", `${job.reason}; ${job.commits} committed, ${job.discards} discarded`), table);
  job.members.forEach((m, rank) => {
    const kind = m.gone ? "gone" : m.healing ? "healing" : m.voted ? "voted" : "training";
    row(table, [rank, m.name, m.replica_id, m.gone ? "gone: " + m.gone : kind], kind);
  });
  for (const name of job.waiting) row(table, ["-", name, "", "waiting"], "waiting");
  return part;
}
async function refresh() {
  const line = document.getElementById("server");
  try {
    const s = await (await fetch("status")).json();
    line.textContent = `${s.server.address}: ${many(s.server.connections, "connection")}, ` +
      `${many(s.server.received, "request")}, ${many(s.server.lost_peers, "connection")} lost`;
    document.querySelector("main").replaceChildren(...s.jobs.map(show));
  } catch { line.textContent = "no answer from the lighthouse"; }
}
refresh(); setInterval(refresh, 1000);
</script>
"""


MOST_CONNECTIONS = 16
"""At a time; more are closed at once. They take descriptors that the members' connections need."""
SILENCE_S = 10.0
"""How long a visitor that says nothing may hold a thread."""


class StatusPage:
    """Serves the page from threads of its own until `close`; `url` is where. A context manager.

    Args:
        address: "tcp://host:port" or "host:port"; port 0 means any free one.
        status: what to show; called from any thread. On RuntimeError, `/status` answers 503.

    Raises ValueError for a malformed address, OSError if it can't be bound.
    """

    def __init__(self, address: str, status: Status) -> None:
        host, port = split_address(normalize_address(address, to_connect=False))
        self._server = bounded_http_server(host, port, _handler_of(status))
        shown = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{bracketed(shown)}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="lighthouse-web", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Release port and threads. Any thread; once."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def bounded_http_server(
    host: str, port: int, handler: type[BaseHTTPRequestHandler]
) -> ThreadingHTTPServer:
    """A server bound to `host` ("*": all IPv4 addresses), which closes connections beyond
    `MOST_CONNECTIONS` at once and prints nothing. The handler's `timeout` should be `SILENCE_S`.

    Raises OSError if the address can't be bound.
    """
    kind = _Server6 if ":" in host else _Server
    return kind(("" if host == "*" else host.strip("[]"), port), handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *args: Any) -> None:
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__(*args)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # no descriptor is free, and the caller asks again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no threads are left
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser has hung up, say: nothing for standard error."""
        log.debug("an HTTP request of %s failed", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler_of(status: Status) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SILENCE_S

        def do_GET(self) -> None:
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", _PAGE)
            elif self.path == "/status":
                try:
                    body = json.dumps(status()).encode()
                except RuntimeError as error:
                    self._answer(503, "text/plain; charset=utf-8", str(error).encode())
                    return
                self._answer(200, "application/json", body)
            else:
                self._answer(404, "text/plain; charset=utf-8", b"there are / and /status\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Does nothing: a page that refreshes every second would fill the log."""

    return Handler
