"""A parameter server: a process that serves each client through a process group of the two.

    class Averages(ParameterServer):
        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            return ProcessGroupGloo()

        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            ...                                     # the server is rank 0, the client rank 1

    server = Averages(29600)                        # in one process
    pg = Averages.new_session(server.address())     # in another one: the same class, and that address

The two meet by one HTTP request: the client sends its group's address, and gets the server's. A client that
dies costs its session: the collective that the server is in fails, and no other session notices.

Neither end proves anything to the other: the port is for a network that is trusted.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
import uuid
from abc import ABC, abstractmethod
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from typing import Self

from ft_core.errors import ProcessGroupError
from ft_core.process_group.base import ProcessGroup
from lighthouse.config import MOST_STRANGERS
from lighthouse.own_address import bracketed, outgoing_address
from lighthouse.web import SILENCE_S, bounded_http_server

log = logging.getLogger("ft_core")

CONNECT_S = 10.0
"""How long each end waits for the other one, once they have exchanged addresses."""
_PATH = "/new_session"
_ADDRESS_BYTES = 300


class ParameterServer(ABC):
    """Serves sessions, each in a thread of its own, until `close`. A context manager.

    Args:
        port: where clients ask for a session; 0 means any free one.
        host: the address to bind; the default is all of this machine's.

    Any thread may call its methods. Raises OSError if the port can't be bound.
    """

    def __init__(self, port: int = 0, *, host: str = "*") -> None:
        self._host = host
        self._lock = threading.Lock()  # guards the fields up to the blank line
        self._closed = False
        self._sessions: dict[ProcessGroup, threading.Thread] = {}

        self._meeting = threading.Semaphore(MOST_STRANGERS)  # clients that are waited for
        self._server = bounded_http_server(host, port, self._handler())
        self._accepting = threading.Thread(
            target=self._server.serve_forever, name="ft-parameter-server", daemon=True
        )
        self._accepting.start()

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """A group that is not configured yet; called at both ends of each session."""

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one client until this returns or raises: the session ends then, and `pg` with it.

        Called in the session's thread, beside those of other sessions. In `pg` the server is rank 0 and the client
        rank 1. A collective raises `ProcessGroupError` once the client has gone.
        """

    def address(self) -> str:
        """What `new_session` takes: "http://host:port/new_session"."""
        host = outgoing_address() if self._host == "*" else self._host
        return f"http://{bracketed(host)}:{self._server.server_address[1]}{_PATH}"

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Start a session with the server at `address`; returns its group, in which this process is rank 1.

        Shut the group down to end the session. Raises ProcessGroupError if no server answers there, or it
        can't be connected to within 10 s.
        """
        pg = cls.new_process_group()
        try:
            request = urllib.request.Request(address, data=pg.address(), method="POST")
            with urllib.request.urlopen(request, timeout=CONNECT_S) as response:
                answer = json.load(response)
            server = bytes.fromhex(answer["address"])
            pg.configure(0, 1, [server, pg.address()], CONNECT_S)
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            pg.shutdown()
            raise ProcessGroupError(
                f"no parameter server has answered at {address} ({error}): check that it runs there, and "
                "that host, port and firewall let it be reached"
            ) from error
        except ProcessGroupError:
            pg.shutdown()
            raise
        return pg

    def close(self) -> None:
        """End all sessions, and release port and threads. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            sessions = dict(self._sessions)
        if first:
            self._server.shutdown()
            self._server.server_close()
        for group, thread in sessions.items():
            group.revoke(ProcessGroupError("the parameter server was closed"))
            thread.join()
        self._accepting.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _begin(self, client: bytes) -> dict[str, str] | None:
        """The answer to a client; None: the server is closed, or has as many as it may or can."""
        pg, session_id = self.new_process_group(), str(uuid.uuid4())
        own = pg.address()
        thread = threading.Thread(
            target=self._serve,
            args=(session_id, pg, [own, client]),
            name="ft-session",
            daemon=True,
        )
        with self._lock:
            begins = not self._closed and self._meeting.acquire(blocking=False)
            if begins:
                try:
                    thread.start()
                    self._sessions[pg] = thread
                except RuntimeError:  # no threads are left
                    self._meeting.release()
                    begins = False
        if not begins:
            pg.shutdown()
            return None
        return {"session_id": session_id, "address": own.hex()}

    def _serve(self, session_id: str, pg: ProcessGroup, addresses: list[bytes]) -> None:
        """A session's thread."""
        try:
            try:
                pg.configure(0, 0, addresses, CONNECT_S)
            finally:
                self._meeting.release()
            self.forward(session_id, pg)
        except ProcessGroupError as error:
            log.warning("session %s of the parameter server has ended: %s", session_id, error)
        except Exception:  # the thread's outer edge: a session's failure affects no other
            log.exception("session %s of the parameter server has failed", session_id)
        finally:
            with self._lock:
                self._sessions.pop(pg)
            pg.shutdown()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        begin = self._begin

        class SessionHandler(BaseHTTPRequestHandler):
            timeout = SILENCE_S

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if self.path != _PATH or not length.isdigit() or int(length) > _ADDRESS_BYTES:
                    self.send_error(404, f"ask {_PATH} with the address of a process group")
                    return
                answer = begin(self.rfile.read(int(length)))
                if answer is None:
                    self.send_error(503, "it is closed, or has too many clients")
                    return
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Does nothing: sessions that end with an error are logged, and no others."""

        return SessionHandler
