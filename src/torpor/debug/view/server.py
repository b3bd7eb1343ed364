"""Serves the page on 127.0.0.1, for whoever knows the address on this machine.

The address contains a secret token, which every request is checked for. `Host` and `Origin` headers
are checked too, so that no page of another origin can send requests. The browser may load nothing
from elsewhere. Requests only read.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

from torpor.debug.view.assets import asset
from torpor.debug.view.document import Source

HOST: Final = "127.0.0.1"

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_ASSETS: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "app.css": ("app.css", "text/css; charset=utf-8"),
}
_JSON: Final = "application/json"
_MOST_DIGITS: Final = 9


class Response(NamedTuple):
    """An HTTP response."""

    status: int
    kind: str = "text/plain; charset=utf-8"
    body: bytes = b""


class ViewServer:
    """Serves the page of one source until it is stopped."""

    def __init__(self, source: Source, port: int = 0) -> None:
        self.source = source
        self.token = secrets.token_urlsafe(24)
        self._server = _Server((HOST, port), self._handler())
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    def start(self) -> ViewServer:
        """Serve from a daemon thread."""
        serve: Callable[..., None] = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.1,), name="torpor-view", daemon=True)
        self._thread.start()
        return self

    def wait(self) -> None:
        """Block until it is stopped."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ViewServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- requests ------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        view = self

        class Handler(_Handler):
            def answer(self) -> Response:
                try:
                    return view.answer(self.path, {k.lower(): v for k, v in self.headers.items()})
                except Exception as error:  # shown on the page; must not affect the program
                    return Response(500, body=f"{type(error).__name__}: {error}\n".encode())

        return Handler

    def answer(self, target: str, headers: dict[str, str]) -> Response:
        """The response to a request for `target`; header names are in lower case."""
        hosts = {f"{HOST}:{self.port}", f"localhost:{self.port}"}
        if headers.get("host") not in hosts:
            return Response(421, body=b"this server answers to 127.0.0.1 only\n")
        if not _same_origin(headers, hosts):
            return Response(403, body=b"no other origin may ask\n")
        path, _, query = target.partition("?")
        first, _, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(first.encode(errors="replace"), self.token.encode()):
            return Response(403, body=b"the address holds a token, and this is not it\n")
        if rest in _ASSETS:
            name, kind = _ASSETS[rest]
            return Response(200, kind, asset(name))
        return self._data(rest.split("/"), parse_qs(query))

    def _data(self, parts: list[str], query: dict[str, list[str]]) -> Response:
        match parts:
            case ["summary.json"]:
                version = self.source.version()
                if query.get("have") == [version]:
                    return Response(204)
                return _json({**self.source.summary().to_json(), "state": version})
            case ["graph", number] if _is_number(number):
                graph = self.source.graph(int(number))
                return _json(None if graph is None else graph.to_json())
            case ["difference", before, after] if _is_number(before) and _is_number(after):
                text = self.source.difference(int(before), int(after))
                return _json(None if text is None else {"text": text})
            case ["passes", number] if _is_number(number):
                return _json(self.source.passes(int(number)))
        return Response(404, body=b"there is nothing here\n")


def _json(found: Any) -> Response:
    if found is None:
        return Response(404, _JSON, b"null")
    return Response(200, _JSON, json.dumps(found, separators=(",", ":")).encode())


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _same_origin(headers: dict[str, str], hosts: set[str]) -> bool:
    """Whether the request comes from our own page, or from the address bar."""
    origin = headers.get("origin")
    if origin is not None and origin not in {f"http://{host}" for host in hosts}:
        return False
    return headers.get("sec-fetch-site", "none") in ("none", "same-origin")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """No-op: an aborted connection is of no interest to the program."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "torpor"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds before an idle connection is closed

    def answer(self) -> Response:
        raise NotImplementedError

    def do_GET(self) -> None:
        self._send(self.answer(), with_body=True)

    def do_HEAD(self) -> None:
        self._send(self.answer(), with_body=False)

    def _refuse(self) -> None:
        self.close_connection = True  # the request body is not read
        self._send(Response(405, body=b"nothing can be changed here\n"), with_body=True)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def _send(self, answer: Response, with_body: bool) -> None:
        self.send_response(answer.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
        if answer.status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if with_body and answer.status != 204:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """No-op: do not write to the program's output."""
