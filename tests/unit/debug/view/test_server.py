"""The page's server answers one person: who knows the token, on this machine, from its own page."""

import http.client
import json
import socket

import pytest
import torch

import torpor
from torpor.debug.view.server import ViewServer
from torpor.debug.view.sources import FileSource


@pytest.fixture
def server(tmp_path):
    x = torch.ones(3).to("lazy")
    with torpor.record(tmp_path / "f"):
        (x * 2).tolist()
        (x * 2).exp().tolist()
    with ViewServer(FileSource(tmp_path / "f")) as server:
        yield server


def ask(server, path, method="GET", **headers):
    """The answer to a request, its path sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        host = headers.pop("Host", f"127.0.0.1:{server.port}")
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host is not None:
            connection.putheader("Host", host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def status(server, path, method="GET", **headers):
    return ask(server, path, method, **headers)[0].status


def test_the_page_and_its_files_are_served(server):
    for path, kind in (
        ("", "text/html"),
        ("app.js", "text/javascript"),
        ("app.css", "text/css"),
        ("summary.json", "application/json"),
        ("graph/0", "application/json"),
        ("difference/0/1", "application/json"),
        ("passes/0", "application/json"),
    ):
        answer, body = ask(server, f"/{server.token}/{path}")
        assert answer.status == 200, path
        assert answer.headers["Content-Type"].startswith(kind)
        assert body


def test_the_data_is_what_the_source_says(server):
    summary = json.loads(ask(server, f"/{server.token}/summary.json")[1])
    assert [graph["nodes"] for graph in summary["graphs"]] == [1, 2]
    graph = json.loads(ask(server, f"/{server.token}/graph/1")[1])
    assert len(graph["nodes"]) == 2
    words = json.loads(ask(server, f"/{server.token}/difference/0/1")[1])
    assert "aten.exp.default" in words["text"]


def test_nothing_is_sent_twice(server):
    state = json.loads(ask(server, f"/{server.token}/summary.json")[1])["state"]
    answer, body = ask(server, f"/{server.token}/summary.json?have={state}")
    assert (answer.status, body) == (204, b"")
    assert status(server, f"/{server.token}/summary.json?have=other") == 200


@pytest.mark.parametrize("path", ["/", "/app.js", "/graph/0", "/wrong/", "//", "//[", "http://x/"])
def test_without_the_token_there_is_nothing(server, path):
    answer, body = ask(server, path)
    assert answer.status == 403
    assert server.token.encode() not in body


def test_a_part_of_the_token_is_no_token(server):
    for wrong in (server.token[:-1], server.token + "x", server.token.swapcase(), ""):
        assert status(server, f"/{wrong}/summary.json") == 403


def test_every_process_has_a_token_of_its_own(server):
    with ViewServer(server.source) as other:
        assert other.token != server.token
        assert len(other.token) >= 32
        assert status(other, f"/{server.token}/") == 403


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "127.0.0.1:1", "[::1]:80", "", None])
def test_another_host_is_refused(server, host):
    assert status(server, f"/{server.token}/", Host=host) == 421


def test_localhost_is_this_host(server):
    assert status(server, f"/{server.token}/", Host=f"localhost:{server.port}") == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_origin_is_refused(server, headers):
    assert status(server, f"/{server.token}/summary.json", **headers) == 403


def test_its_own_origin_is_not(server):
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Sec_Fetch_Site": "same-origin"}
    assert status(server, f"/{server.token}/summary.json", **own) == 200


@pytest.mark.parametrize(
    "path",
    [
        "../../../../etc/passwd",
        "..%2f..%2fetc/passwd",
        "%2e%2e/app.js",
        "page/app.js",
        "NOTICES.txt",
        "graph/",
        "graph/-1",
        "graph/99",
        "graph/0x0",
        "graph/" + "9" * 400,
        "graph/0/0",
        "difference/0",
        "difference/0/99",
        "__proto__",
    ],
)
def test_there_are_no_other_files(server, path):
    assert status(server, f"/{server.token}/{path}") == 404


def test_bytes_that_are_no_ascii_are_answered_too(server):
    headers = {"host": f"127.0.0.1:{server.port}"}
    assert server.answer("/é/", headers).status == 403
    assert server.answer("/\udcff/", headers).status == 403
    assert server.answer(f"/{server.token}/graph/٣", headers).status == 404
    assert server.answer(f"/{server.token}/graph/0", headers).status == 200


def test_an_error_of_the_source_is_told_to_the_page(server, monkeypatch, capfd):
    def fail(number):
        raise RuntimeError("no graph today")

    monkeypatch.setattr(server.source, "graph", fail)
    answer, body = ask(server, f"/{server.token}/graph/0")
    assert (answer.status, body) == (500, b"RuntimeError: no graph today\n")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server, method):
    answer, _ = ask(server, f"/{server.token}/", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_head_is_get_without_the_body(server):
    answer, body = ask(server, f"/{server.token}/", "HEAD")
    assert (answer.status, body) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 100


@pytest.mark.parametrize("path", ["/{token}/", "/{token}/summary.json", "/{token}/no", "/wrong/"])
def test_the_browser_is_told_to_ask_nobody_else(server, path):
    answer, _ = ask(server, path.format(token=server.token))
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_it_listens_on_this_machine_alone(server):
    assert server._server.server_address[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.port}/{server.token}/"


def test_a_connection_that_says_nonsense_harms_nobody(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert status(server, f"/{server.token}/") == 200


def test_a_stopped_server_answers_nobody(tmp_path, server):
    other = ViewServer(server.source).start()
    port = other.port
    other.stop()
    other.wait()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        pass
