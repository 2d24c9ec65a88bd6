"""The page over HTTP and HTTPS: its content type, its time-outs, and clients that misbehave."""

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.bad_servers import certificate
from support.exporter_server import Saying, listening

from diag.core.errors import BadUsage
from diag.exporter.http_server import CONTENT_TYPE, Listen, PageServer, parse


def get(url: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, str, bytes]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
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
def test_the_content_type_is_the_same_whatever_is_asked_for(accept: str) -> None:
    with listening() as url:
        assert get(f"{url}/metrics", Accept=accept)[:2] == (200, CONTENT_TYPE)


@pytest.mark.parametrize(("header", "seconds"), [("10", "8.00"), ("5", "4.00"), ("junk", "8.00"), ("-1", "8.00")])
def test_the_parts_get_less_time_than_the_scrape(header: str, seconds: str) -> None:
    with listening() as url:
        body = get(f"{url}/metrics", X_Prometheus_Scrape_Timeout_Seconds=header)[2]
    assert body == f"seconds {seconds}\n".encode()


def test_one_connection_serves_many_scrapes() -> None:
    with listening() as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        for _ in range(3):
            connection.request("GET", "/metrics")
            assert connection.getresponse().read() == b"seconds 8.00\n"
        connection.close()


def test_the_root_says_where_the_page_is_and_all_else_is_not_found() -> None:
    with listening() as url:
        assert b"/metrics" in get(url)[2]
        assert get(f"{url}/config")[0] == 404


def test_a_request_that_would_change_something_is_refused() -> None:
    with listening() as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        connection.request("POST", "/metrics", body="x")
        assert connection.getresponse().status == 501
        connection.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_clients_that_say_nothing_hold_up_nobody(tmp_path: Path, encrypted: bool) -> None:
    cert, key = certificate(tmp_path, "server")
    listen = Listen("127.0.0.1", 0, str(cert), str(key)) if encrypted else Listen("127.0.0.1", 0)
    with listening(listen) as url:
        silent = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(20)]
        context = ssl.create_default_context(cafile=str(cert)) if encrypted else None
        assert get(f"{url}/metrics", context)[0] == 200
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
def test_where_nothing_can_listen_is_one_sentence(listen: Listen, reason: str) -> None:
    with pytest.raises(BadUsage, match=reason):
        PageServer(listen, Saying(), 1)


def test_a_key_that_is_none_is_one_sentence(tmp_path: Path) -> None:
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
def test_where_to_listen(text: str, place: tuple[str, int]) -> None:
    assert parse(text) == place


@pytest.mark.parametrize("text", ["9400", "host:", "host:port", "host:70000", ""])
def test_a_place_that_is_none_is_one_sentence(text: str) -> None:
    with pytest.raises(BadUsage, match="--listen takes host:port"):
        parse(text)
