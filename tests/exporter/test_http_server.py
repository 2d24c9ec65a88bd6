"""The page over HTTP and HTTPS: its content type, its time-outs, and clients that misbehave."""

import http.client
import select
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.bad_servers import certificate
from support.exporter_server import Saying, listening
from support.waiting import until

from diag.core.errors import BadUsage
from diag.exporter import http_server
from diag.exporter.http_server import CONTENT_TYPE, Answer, Handler, Listen, PageServer, parse


def get(url: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, str, bytes]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4",
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
    ],
)
def test_content_type_is_independent_of_the_accept_header(accept: str) -> None:
    with listening() as url:
        assert get(f"{url}/metrics", Accept=accept)[:2] == (200, CONTENT_TYPE)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("10", "8.00"),
        ("5", "4.00"),
        *((odd, "8.00") for odd in ("junk", "-1", "nan", "inf", "1e308", "1e-9", "0", "\xff")),
    ],
)
def test_the_parts_get_less_time_than_the_scrape(header: str, seconds: str) -> None:
    with listening() as url:
        body = get(f"{url}/metrics", X_Prometheus_Scrape_Timeout_Seconds=header)[2]
    assert body == f"seconds {seconds}\n".encode()


def talk(url: str, *parts: bytes) -> bytes:
    """Send bytes as they are; all that comes back until the server closes."""
    host, port = url.partition("//")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65536), b""))


INNER = b"GET /config HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize(
    "heads",
    [
        b"Content-Length: %d\r\n" % len(INNER),
        b"Content-Length: 0%d\r\n" % len(INNER),
        b"Content-Length: 1_0\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 999999999999\r\n",
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 00\r\n",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST"])
def test_a_body_is_not_read_as_a_request(method: bytes, heads: bytes) -> None:
    with listening() as url:
        got = talk(url, method + b" /metrics HTTP/1.1\r\nHost: h\r\n" + heads + b"\r\n" + INNER)
    assert got.count(b"HTTP/1.1 ") == 1
    assert got.startswith(b"HTTP/1.1 405" if method == b"POST" else b"HTTP/1.1 200")
    assert b"\r\nConnection: close\r\n" in got


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + (b"a: " + b"b" * 60_000 + b"\r\n") * 3 + b"\r\n", b"431"),
        (b"GET / HTTP/3.7\r\n\r\n", b"505"),
        (b"BREW / HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense<script> x y z\r\n\r\n", b""),
    ],
)
def test_invalid_request_is_refused_without_an_echo(request_bytes: bytes, status: bytes) -> None:
    with listening() as url:
        got = talk(url, request_bytes)
        assert get(f"{url}/metrics")[0] == 200
    assert got.startswith(b"HTTP/1.1 " + status) or not status
    assert b"Python" not in got and b"script" not in got


def test_head_has_the_headers_of_get() -> None:
    with listening() as url:
        got = talk(url, b"HEAD /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200") and got.endswith(b"Content-Length: 13\r\nConnection: close\r\n\r\n")
    assert b"\r\nServer: diag\r\n" in got


def test_more_connections_than_there_may_be_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST", 5)
    with listening() as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        begun = threading.active_count()
        silent = [socket.create_connection(place, timeout=60) for _ in range(30)]
        assert get(f"{url}/metrics")[0] == 200
        # which ones have waited longest is decided by their threads, which end a moment after their connections
        until(lambda: len(select.select(silent, [], [], 0)[0]) >= 25)
        until(lambda: threading.active_count() <= begun + 6)
        for each in silent:
            each.close()


def test_slow_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE", 0.2)
    with listening() as url:
        slow = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"reset|pipe"):
            while True:
                slow.sendall(b"a")
                time.sleep(0.02)
        slow.close()


def test_a_client_that_does_not_take_its_page_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE", 2.0)
    monkeypatch.setattr(Handler, "timeout", 60)

    class Large:
        def answer(self, path: str, seconds: float) -> Answer:
            return Answer(200, b"x" * 2**25)

    with listening(answering=Large(), limit=0.1) as url:
        begun = threading.active_count()
        slow = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert slow.recv(10) == b"HTTP/1.1 2"
        until(lambda: threading.active_count() <= begun)
        slow.close()


def test_one_connection_serves_many_scrapes() -> None:
    with listening() as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        for _ in range(3):
            connection.request("GET", "/metrics")
            assert connection.getresponse().read() == b"seconds 8.00\n"
        connection.close()


def test_unknown_path_is_not_found() -> None:
    with listening() as url:
        assert get(f"{url}/?x=1")[::2] == (200, b"hello\n")
        assert get(f"{url}/config")[0] == 404


def test_writing_request_is_refused() -> None:
    with listening() as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/metrics", body="x")
        response = connection.getresponse()
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
        connection.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_idle_clients_do_not_block_others(tmp_path: Path, encrypted: bool) -> None:
    cert, key = certificate(tmp_path, "server")
    listen = Listen("127.0.0.1", 0, str(cert), str(key)) if encrypted else Listen("127.0.0.1", 0)
    with listening(listen) as url:
        silent = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(20)]
        context = ssl.create_default_context(cafile=str(cert)) if encrypted else None
        assert get(f"{url}/metrics", context)[0] == 200
        for each in silent:
            each.close()


def test_idle_clients_leave_file_descriptors_and_a_lack_of_them_is_no_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (16, 16))
    with listening() as url:
        silent = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(20)]
        assert get(f"{url}/metrics")[0] == 200
        assert sum(bool(select.select([each], [], [], 0.0)[0]) for each in silent) >= 16  # closed
        calls: list[float] = []

        def full(*_: object) -> None:
            calls.append(time.monotonic())
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(http_server.ThreadingHTTPServer, "get_request", full)
        silent.append(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
        while len(calls) < 3:
            time.sleep(0.01)
        assert calls[2] - calls[0] > 1.5 * http_server.FULL_SECONDS
        for each in silent:
            each.close()


def test_only_clients_with_a_certificate_are_answered(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    client, client_key = certificate(tmp_path, "client")
    with listening(Listen("127.0.0.1", 0, str(cert), str(key), str(client))) as url:
        context = ssl.create_default_context(cafile=str(cert))
        with pytest.raises((urllib.error.URLError, OSError, http.client.HTTPException)):
            get(f"{url}/metrics", context)
        context.load_cert_chain(client, client_key)
        assert get(f"{url}/metrics", context)[0] == 200


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        (Listen("127.0.0.1", 0, "no.pem"), "no.pem cannot be used: No such file"),
        (Listen("127.0.0.1", 0, key="k.pem"), "need --tls-cert"),
        (Listen("192.0.2.1", 0), "cannot listen on 192.0.2.1:0"),
        (Listen("no.such.host.invalid", 0), "cannot listen on no.such.host.invalid:0"),
    ],
)
def test_unusable_listen_address_is_one_sentence(listen: Listen, reason: str) -> None:
    with pytest.raises(BadUsage, match=reason):
        PageServer(listen, Saying(), 1)


def test_invalid_tls_key_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("not PEM")
    with pytest.raises(BadUsage, match="not PEM, encrypted, or not a pair"):
        PageServer(Listen("127.0.0.1", 0, str(tmp_path / "c.pem")), Saying(), 1)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadUsage, match="cannot listen on"):
        PageServer(Listen("127.0.0.1", taken.getsockname()[1]), Saying(), 1)


@pytest.mark.parametrize(
    ("text", "place"),
    [("127.0.0.1:9400", ("127.0.0.1", 9400)), (":9400", ("0.0.0.0", 9400)), ("[::1]:9400", ("::1", 9400))],
)
def test_listen_addresses_are_parsed(text: str, place: tuple[str, int]) -> None:
    assert parse(text) == place


@pytest.mark.parametrize("text", ["9400", "host:", "host:port", "host:70000", ""])
def test_invalid_listen_address_is_one_sentence(text: str) -> None:
    with pytest.raises(BadUsage, match="--listen takes host:port"):
        parse(text)
