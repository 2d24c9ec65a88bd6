"""The HTTP client: what it sends, how it keeps connections, its limits, and proxies; real servers on 127.0.0.1."""

import base64
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import bad_servers as bad
from support.bad_servers import Reply, Request, serving, talking

from diag.http.address import Credentials, is_within, parse
from diag.http.client import Client, Proxy, Response, proxy_for
from diag.http.failure import Failure, sentence
from diag.http.prometheus_api import NO_API, decoded

Talk = Callable[[socket.socket, threading.Event], None]


def client(url: str, wait: float = 30.0, **manner: bool | str) -> Client:
    return Client(parse(url), Credentials(), wait, **manner)  # type: ignore[arg-type]


def counting(connections: list[int], per_connection: int) -> Talk:
    """Answers that many requests over each connection with its number, then closes it."""

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connections.append(len(connections) + 1)
        body = str(connections[-1]).encode()
        for _ in range(per_connection):
            bad.take(connection)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    return talk


# Connections


def test_connection_is_kept_alive_on_request() -> None:
    connections: list[int] = []
    with talking(counting(connections, per_connection=3)) as server:
        kept = client(server.url, keep=True)
        assert [kept.get("/").body for _ in range(3)] == [b"1", b"1", b"1"]


def test_every_request_has_its_own_connection_otherwise() -> None:
    connections: list[int] = []
    with talking(counting(connections, per_connection=3)) as server:
        fresh = client(server.url)
        assert [fresh.get("/").body for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    connections: list[int] = []
    with talking(counting(connections, per_connection=1)) as server:
        kept = client(server.url, keep=True)
        assert [kept.get("/").body for _ in range(3)] == [b"1", b"2", b"3"]


def test_all_kept_connections_are_closed_after_one_of_them_failed() -> None:
    """The server ends two connections, without closing them, so that it sees when the client does."""
    both, closed = threading.Barrier(2), [threading.Event(), threading.Event()]
    connections: list[socket.socket] = []

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connections.append(connection)
        bad.take(connection)
        if connection in connections[:2]:
            both.wait(10)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        if connection in connections[:2]:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1024):
                pass
            closed[connections.index(connection)].set()

    with talking(talk) as server, ThreadPoolExecutor(2) as pool:
        kept = client(server.url, keep=True)
        assert [response.status for response in pool.map(kept.get, ["/", "/"])] == [200, 200]
        assert not any(event.is_set() for event in closed)
        assert kept.get("/").status == 200
        assert all(event.wait(5) for event in closed)


def test_a_connection_with_half_a_response_is_not_kept() -> None:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        bad.take(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"#" * 2**20)
        over.wait()

    with talking(talk) as server:
        kept = client(server.url, keep=True)
        for _ in range(2):
            with pytest.raises(Failure, match="sent more than 0 MiB"):
                kept.get("/", most_bytes=1000)


# What is sent


def test_path_is_percent_encoded() -> None:
    with serving(lambda _: Reply()) as server:
        client(server.url).get("/a b/ä%20?x=[1]")
    assert server.requests[0].path == "/a%20b/%C3%A4%20?x=[1]"


def test_a_header_is_sent_once_whatever_its_case() -> None:
    with serving(lambda _: Reply()) as server:
        credentials = Credentials(headers={"authorization": "Custom x", "user-agent": "me"})
        Client(parse(f"http://me:pass@127.0.0.1:{server.port}"), credentials, 30.0).get("/")
    headers = [(name.lower(), value) for name, value in server.requests[0].headers.items()]
    basic = "Basic " + base64.b64encode(b"me:pass").decode()
    assert [pair for pair in headers if pair[0] in ("authorization", "user-agent")] == [
        ("user-agent", "me"),
        ("authorization", basic),
    ]


OUTSIDE = (
    "/", "/metrics", "/team-b/metrics", "/team-ab/metrics", "/team-a/../team-b", "/team-a/x/../../team-b",
    "//team-b/metrics", "/team-a//../../team-b", "/team-a/%2e%2e/team-b", "/team-a/.%2E/team-b",
    "/team-a/%252e%252e/team-b", "/team-a/%25252e%25252e%25252fteam-b", "/team-a/..%2fteam-b", "/team-a/..%5cteam-b",
    "/team-a/..\\team-b", "/team-a\\..\\team-b", "/team-a/..;/team-b", "/team-a/..%3b/team-b",
    "/team-a/%2e%2e;x=1/team-b", "/team-a%2f..%2fteam-b", "/%74eam-a/../team-b", "/team-a/%" + "25" * 9 + "2e%2e",
)  # fmt: skip
"""Paths that a server may resolve to one outside of /team-a, whatever it decodes first."""
INSIDE = ("/team-a", "/team-a/", "/team-a/real/metrics", "/team-a/x/../metrics", "/team-a//metrics", "/team-a/%20;v=1")


@pytest.mark.parametrize("path", [*OUTSIDE, *INSIDE])
def test_path_is_within_a_prefix_only_if_no_decoding_of_it_leads_outside(path: str) -> None:
    assert is_within(path, "/team-a") == (path in INSIDE)


@pytest.mark.parametrize("path", OUTSIDE)
def test_credentials_do_not_follow_a_redirect_to_another_path_prefix(path: str) -> None:
    def answer(request: Request) -> Reply:
        location = f"http://{request.headers['Host']}{path}"  # an absolute URL, whose `..` no client resolves
        return Reply(b"", 307, {"Location": location}) if request.count == 1 and len(server.requests) == 1 else Reply()

    with serving(answer) as server:
        secret = Credentials({"Authorization": "Bearer sekret"})
        asked = Client(parse(f"{server.url}/team-a/metrics"), secret, 5.0)
        with pytest.raises(Failure, match=r"redirects to another path .*, which is not followed"):
            asked.get("/team-a/metrics")
    assert [request.path for request in server.requests] == ["/team-a/metrics"]


@pytest.mark.parametrize(
    ("address", "requested", "location"),
    [
        ("", "/metrics", "/real/metrics"),
        ("/team-a/metrics", "/team-a/metrics", "real/metrics?x=1"),
        ("/team-a", "/team-a/metrics", "/team-a/x/../real"),
        ("/team-a/v1/chat/completions", "/team-a/metrics", "/team-a/metrics/"),
        ("/prom/", "/prom/api/v1/query", "/prom/login"),
    ],
)
def test_a_redirect_within_the_configured_prefix_or_the_requested_path_is_followed(
    address: str, requested: str, location: str
) -> None:
    def answer(request: Request) -> Reply:
        return Reply(b"", 307, {"Location": location}) if request.path == requested else Reply(b"there")

    with serving(answer) as server:
        assert client(server.url + address).get(requested).body == b"there"


def test_a_redirect_in_bytes_that_are_not_utf_8_is_refused() -> None:
    overlong = Reply(b"", 302, {"Location": "/team-a/%c0%ae%c0%ae/team-b"})
    with serving(lambda _: overlong) as server, pytest.raises(Failure, match="redirects to an invalid URL"):
        client(f"{server.url}/team-a").get("/team-a/metrics")


def test_page_is_uncompressed_on_request() -> None:
    with serving(lambda _: Reply()) as server:
        client(server.url, encoding="identity").get("/")
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


# Limits of time


def drip_headers(connection: socket.socket, over: threading.Event) -> None:
    bad.take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not over.wait(0.02):
        connection.sendall(b"#")


def stop_in_the_middle(connection: socket.socket, over: threading.Event) -> None:
    bad.take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n#")
    over.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("talk", "wait", "reason"),
    [
        (bad.hang, 1.0, "accepted the connection but sent nothing for 1 s"),
        (stop_in_the_middle, 1.0, "stopped sending for 1 s in the middle of its response"),
        (bad.drip, 1.0, "did not finish its response within 2 s"),
        (drip_headers, 1.0, "did not finish its response within 2 s"),
    ],
)
def test_slow_server_times_out(talk: Talk, wait: float, reason: str) -> None:
    with talking(talk) as server, pytest.raises(Failure, match=reason):
        client(server.url, wait).get("/")


def test_request_whose_time_is_over_is_too_long() -> None:
    with serving(lambda _: Reply()) as server, pytest.raises(Failure, match="did not finish its response"):
        client(server.url).post("/", {}, seconds=1e-9)


def test_server_that_is_silent_in_the_tls_handshake_is_given_up() -> None:
    with (
        talking(bad.hang) as server,
        pytest.raises(Failure, match=r"accepted the connection but sent nothing for 1 s"),
    ):
        client(f"https://127.0.0.1:{server.port}", wait=1.0).get("/")


# Proxies


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_no_proxy_is_used_unless_the_environment_names_one() -> None:
    assert proxy_for(parse("http://h:1")) is None


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_the_environment_names_the_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://me:p%40ss@proxy:3128")
    found = proxy_for(parse("http://h:1"))
    assert found == Proxy("proxy", 3128, {"Proxy-Authorization": "Basic " + base64.b64encode(b"me:p@ss").decode()})
    assert "p@ss" not in repr(found)


@pytest.mark.parametrize(
    ("exempt", "host"),
    [
        ("*", "h"),
        ("h", "h"),
        (".cluster.local", "vllm.cluster.local"),
        ("a, cluster.local", "vllm.cluster.local"),
        ("h:8000", "h"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("10.1.2.3", "10.1.2.3"),
        ("", "127.0.0.1"),
    ],
)
def test_exempt_hosts_are_contacted_without_the_proxy(monkeypatch: pytest.MonkeyPatch, exempt: str, host: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", exempt)
    assert proxy_for(parse(f"http://{host}:8000")) is None


@pytest.mark.parametrize(("exempt", "host"), [("10.0.0.0/8", "11.1.2.3"), ("ocal", "vllm.local"), ("10.0.0.0/8", "h")])
def test_other_hosts_are_not_exempt(monkeypatch: pytest.MonkeyPatch, exempt: str, host: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", exempt)
    assert proxy_for(parse(f"http://{host}:8000")) == Proxy("proxy", 3128)


def test_https_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    def talk(connection: socket.socket, over: threading.Event) -> None:
        heads.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

    with talking(talk) as server:
        monkeypatch.setenv("https_proxy", f"http://me:pass@127.0.0.1:{server.port}")
        with pytest.raises(Failure) as error:
            client("https://server.invalid").get("/")
    assert heads[0].startswith(b"CONNECT server.invalid:443 HTTP/1.")
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"me:pass") in heads[0]
    assert sentence("it", error.value) == (
        "it cannot be reached through the proxy; check http_proxy, https_proxy and no_proxy"
    )


@pytest.mark.parametrize("url", ["socks5://h:1", "https://h:1", "http://h:port", "http:///x"])
def test_a_proxy_that_cannot_be_used_is_a_failure(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(Failure, match="through the proxy"):
        client("http://server.invalid").get("/")


# Documents of Prometheus


@pytest.mark.parametrize(
    ("body", "problem"),
    [(b'{"data": {}}', ""), (b'{"error": "x"}', ""), (b'{"message": "x"}', NO_API), (b"[]", NO_API)],
)
def test_document_without_data_or_an_error_is_not_from_the_prometheus_api(body: bytes, problem: str) -> None:
    assert decoded(Response(500, body)).problem == problem


# Certificates


def test_certificate_for_the_server_name_of_the_kubeconfig_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = bad.certificate(tmp_path, "server")  # for 127.0.0.1
    by_host = Credentials(ca_file=str(cert))
    with serving(bad.pages(bad.PAGE), bad.server_context(cert, key)) as server:
        url = parse(f"https://localhost:{server.port}")
        with pytest.raises(Failure, match="is not trusted"):
            Client(url, by_host, 30).get("/metrics")
        named = replace(by_host, server_name="127.0.0.1")
        assert Client(url, named, 30).get("/metrics").status == 200
        assert Client(url, Credentials(unverified=True), 30).get("/metrics").status == 200
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))  # an authority of the system
        named = Credentials(server_name="127.0.0.1")
        assert Client(url, named, 30).get("/metrics").status == 200
