"""`diag doctor --prometheus` of servers that misbehave and of questions that make no sense.

One sentence on standard error, the exit status that fits, in time, and no secret anywhere. The command runs in this
process; what can be asked of a real Prometheus is.
"""

import base64
import gzip
import json
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bad_servers as bad
from support import prometheus_server
from support.bad_servers import Answer, Reply, Request, serving, talking
from support.paths import RECORDINGS
from support.sampling import sampled

from diag.cli.app import main
from diag.commands import observe
from diag.diagnosis import fleet
from diag.http import prometheus_api
from diag.http.address import WAYS, Credentials, parse
from diag.knowledge import catalog
from diag.promql import Block
from diag.sources.prometheus.client import Prometheus
from diag.sources.recording.reader import read

SECRET = "s3cret"
BASIC = base64.b64encode(f"me:{SECRET}".encode()).decode()
NOW = 1_790_000_000
WHICH = "is this the address of a Prometheus, including its path (for example https://host/prometheus)?"
NOT_HERE = "are vLLM servers or `diag exporter` among its targets, and is the time range right?"
USAGE, UNREACHABLE = 64, 69
CATALOGUE = cache(catalog.load)


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    error: str

    @property
    def sentence(self) -> str:
        """Return the one line on standard error; standard output must be empty."""
        assert not self.out
        assert self.error.startswith("diag: ")
        assert self.error.count("\n") == 1
        return self.error[len("diag: ") : -1]

    @property
    def notes(self) -> list[str]:
        return list(json.loads(self.out)["observed"]["notes"])

    def state(self, incident: str) -> set[str]:
        return {each["state"] for each in json.loads(self.out)["diagnoses"] if each["incident"] == incident}


Diag = Callable[..., Said]


@pytest.fixture
def diag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Diag:
    """The command line; whatever it prints is fit for a terminal and without a secret."""

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["diag", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, error = capsys.readouterr()
        assert not [secret for secret in (SECRET, BASIC) if secret in out + error]
        assert (out + error).replace("\n", "").isprintable()
        return Said(int(str(end.value.code)), out, error)

    return run


@pytest.fixture
def doctor(diag: Diag) -> Diag:
    return lambda url, *words: diag("doctor", "--prometheus", url, *words)


@pytest.fixture(autouse=True)
def _quickly_and_without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_api, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(observe, "load", CATALOGUE)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# Scripted servers


def document(http: int = 200, **content: Any) -> Reply:
    return Reply(json.dumps(content).encode(), http, {"Content-Type": "application/json"})


def found(*result: Any, **more: Any) -> Reply:
    return document(status="success", data={"resultType": "vector", "result": result}, **more)


def error(http: int, kind: str, sentence: str) -> Reply:
    return document(http, status="error", errorType=kind, error=sentence)


def clock(seconds: float) -> Reply:
    return found({"metric": {}, "value": [NOW, f"{seconds}"]})


def asked(request: Request) -> str:
    """The query, from the form or from the URL."""
    form = request.body.decode() or urllib.parse.urlsplit(request.path).query
    return urllib.parse.parse_qs(form).get("query", [""])[0]


def empty(request: Request) -> Reply:
    """A Prometheus that scrapes nothing of vLLM's."""
    if asked(request) == "vector(time())":
        return clock(NOW)
    return document(status="success", data=[]) if "/series" in request.path else found()


def then_empty(*replies: Reply) -> Answer:
    """These replies at first, then a Prometheus without servers."""
    left = list(replies)
    return lambda request: left.pop(0) if left else empty(request)


WITHOUT = f"has no vLLM metrics between 2026-09-21 13:58:20 UTC and 2026-09-21 14:13:20 UTC; {NOT_HERE}"
"""What is said of an empty one: whatever came before went well."""


def test_prometheus_without_vllm_metrics_is_reported(doctor: Diag) -> None:
    with serving(empty) as server:
        said = doctor(server.url)
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {WITHOUT}")


# Below HTTP


def sent(*parts: bytes, status: bytes = b"200 OK", stay: bool = False) -> Callable[[socket.socket, Any], None]:
    """A server that says this whatever it is asked, and then hangs up or stays."""

    def talk(connection: socket.socket, over: Any) -> None:
        bad.take(connection)
        connection.sendall(b"\r\n".join((b"HTTP/1.1 " + status, *parts)))
        if stay:
            over.wait()

    return talk


def drip_headers(connection: socket.socket, over: Any) -> None:
    bad.take(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not over.wait(0.05):
        connection.sendall(b"#")


@pytest.mark.parametrize(
    ("talk", "timeout", "reason"),
    [
        (bad.hang, 1, "accepted the connection but sent nothing for 1 s; is the server overloaded or stopped?"),
        (bad.drip, 2, "did not finish its response within 4 s; query fewer servers or a shorter time range"),
        (drip_headers, 2, "did not finish its response within 4 s; query fewer servers or a shorter time range"),
        (sent(b"Content-Length: 9", b"", b"{", stay=True), 1, "stopped sending for 1 s in the middle of its response"),
        (bad.break_off, 30, "closed the connection in the middle of its response"),
        (
            sent(b"Transfer-Encoding: chunked", b"", b"5", b'{"da'),
            30,
            "closed the connection in the middle of its response",
        ),
        (
            sent(b"Transfer-Encoding: chunked", b"", b"1", b"{", b""),
            30,
            "closed the connection in the middle of its response",
        ),
        (sent(b"Content-Encoding: gzip", b"", b"no gzip"), 30, "sent a damaged gzip body"),
        (sent(b"X: y\r\n" * 200), 30, f"sent something that is not HTTP; {WHICH}"),
        (bad.babble, 30, f"sent something that is not HTTP; {WHICH}"),
        (bad.slam, 30, "closed the connection without a response; is it https?"),
    ],
)
def test_a_server_that_does_not_answer_properly(
    doctor: Diag, talk: Callable[..., None], timeout: int, reason: str
) -> None:
    """Silent and slow servers stay so until the command has ended."""
    with talking(talk) as server:
        said = doctor(server.url, "--timeout", str(timeout))
    assert said.status == UNREACHABLE
    assert said.sentence.startswith(f"{server.url} {reason}")


def test_a_closed_port_is_reported(doctor: Diag) -> None:
    url = f"http://127.0.0.1:{bad.closed_port()}"
    said = doctor(url)
    reason = "connection refused; is the server up, is the port right?"
    assert (said.status, said.sentence) == (UNREACHABLE, f"cannot connect to {url}: {reason}")


def test_unknown_host_is_reported(doctor: Diag) -> None:
    said = doctor("http://no-such-host.invalid:9090")
    assert said.status == UNREACHABLE
    assert said.sentence == "cannot connect to http://no-such-host.invalid:9090: unknown host name; is the name right?"


def test_silent_name_server_is_given_up(doctor: Diag, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays silent until the command has ended."""
    ended = threading.Event()

    def silence(*_: Any, **__: Any) -> None:
        ended.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", silence)
    said = doctor("http://prometheus.example:9090", "--timeout", "0.2")
    ended.set()
    assert said.status == UNREACHABLE
    assert "no connection within 0.4 s; is the host up, does its name resolve?" in said.sentence


# Answers that are none


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b"", 401), f"requires credentials (HTTP 401); set {WAYS}"),
        (Reply(b"", 403), f"requires credentials (HTTP 403); set {WAYS}"),
        (Reply(b"404 page not found\n", 404), f'answered "404 page not found" instead of JSON (HTTP 404); {WHICH}'),
        (Reply(b"boom", 500), 'answered "boom" instead of JSON (HTTP 500); is it starting, or overloaded?'),
        (Reply(b"\x1b[2Jx", 400), f'answered "\\x1b[2Jx" instead of JSON (HTTP 400); {WHICH}'),
        (Reply(b"<!DOCTYPE html><title>Grafana</title>"), f"answered an HTML page instead of JSON (HTTP 200); {WHICH}"),
        (Reply(b""), f"answered nothing instead of JSON (HTTP 200); {WHICH}"),
        (Reply(b'{"status": "succ'), f'answered "{{"status": "succ" instead of JSON (HTTP 200); {WHICH}'),
        (Reply(b"[" * 100_000), f'answered "{"[" * 60}" instead of JSON (HTTP 200); {WHICH}'),
        (document(message="hello"), f"answered JSON that is not from the Prometheus API; {WHICH}"),
        (Reply(b"[1]"), f"answered JSON that is not from the Prometheus API; {WHICH}"),
        (document(500, data={}), "answered HTTP 500; is it starting, or overloaded?"),
        (document(404, data={}), f"answered HTTP 404; {WHICH}"),
        (error(400, "bad_data", "no \x1b[31mtenant"), "rejects queries: no \\x1b[31mtenant (HTTP 400)"),
        (error(422, "execution", "too many series"), "rejects queries: too many series (HTTP 422)"),
        (error(503, "timeout", "query timed out"), "rejects queries: query timed out (HTTP 503)"),
        (Reply(b"", 302, {"Location": "/login"}), f"redirects to /login, which is not followed; {WHICH}"),
        (Reply(b"", 302, {"Location": "http://[::1"}), f"redirects to http://[::1, which is not followed; {WHICH}"),
        (
            Reply(b"", 308, {"Location": f"https://me:{SECRET}@host:1/prom/api/v1/query?token={SECRET}#{SECRET}"}),
            f"redirects to https://host:1/prom, which is not followed; {WHICH}",
        ),
        (clock(float("nan")), f"returned an invalid time; {WHICH}"),
        (clock(1e300), f"returned an invalid time; {WHICH}"),
    ],
)
def test_unusable_first_response_is_reported(doctor: Diag, reply: Reply, reason: str) -> None:
    with serving(lambda _: reply) as server:
        said = doctor(server.url)
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {reason}")


SHAPES: list[Any] = [
    None, 1, "x", [], {}, {"result": None}, {"result": {}}, {"result": [1]}, {"result": [{}]},
    {"result": [{"value": 1}]}, {"result": [{"metric": {}, "value": [1]}]},
    {"result": [{"metric": {}, "value": [1, "x"]}]}, {"result": [{"metric": {}, "value": [10**400, "1"]}]},
    {"result": [{"metric": {"a": 1}, "value": [1, "1"]}]}, {"result": [{"metric": [], "value": [1, "1"]}]},
    {"result": [{"metric": {}, "values": [[1, "1"]]}]},
]  # fmt: skip


@pytest.mark.parametrize("data", SHAPES, ids=json.dumps)
@pytest.mark.parametrize("path", ["/query", "/series"])
def test_response_of_another_shape_is_reported(doctor: Diag, path: str, data: Any) -> None:
    """An empty list is none of another shape where labels are asked for: there are no servers."""

    def answer(request: Request) -> Reply:
        return document(status="success", data=data) if path in request.path else empty(request)

    with serving(answer) as server:
        said = doctor(server.url)
    right = f"answered JSON that is not from the Prometheus API; {WHICH}"
    assert said.status == UNREACHABLE
    assert said.sentence == f"{server.url} {WITHOUT if path == '/series' and data == [] else right}"


def test_huge_response_is_refused(doctor: Diag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_api, "MOST_BYTES", 1 << 20)
    with talking(bad.flood) as server:
        said = doctor(server.url)
    reason = "sent more than 1 MiB; query fewer servers or a shorter time range"
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {reason}")


def crowded(request: Request, labels: list[dict[str, str]]) -> Reply:
    """A Prometheus that answers each query with a series for each of these labels."""
    form = urllib.parse.parse_qs(request.body.decode() or urllib.parse.urlsplit(request.path).query)
    if "/series" in request.path:
        return document(status="success", data=[{"__name__": "vllm:num_requests_running", **each} for each in labels])
    if "vector" in (query := form["query"][0]):
        return clock(NOW)
    start, end = (float(form.get(name, [NOW - 60 if query.endswith("]") else NOW])[0]) for name in ("start", "end"))
    values = [[at, "1"] for at in np.arange(start, max(end, NOW) + 1, 15).tolist()]
    return found(*({"metric": each, "value": values[-1], "values": values} for each in labels))


@sampled("name", ["instance", "engine"])
def test_a_crowd_of_servers_or_engines_is_refused(doctor: Diag, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fleet, "MOST_SUBJECTS", 30)
    monkeypatch.setattr(fleet, "MOST_PARTS", 20)
    labels = [{"instance": "h:1", "engine": "0", "gpu": "0", name: f"{number}"} for number in range(40)]
    for many, status in ((labels, UNREACHABLE), (labels[:20], 2)):
        with serving(lambda request, many=many: crowded(request, many)) as server:
            said = doctor(server.url)
        assert said.status == status
        assert ("has 40 servers, engines or GPUs; at most 30, 20 of one server" in said.error) is (many is labels)


def test_a_gzip_bomb_is_not_unpacked(doctor: Diag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_api, "MOST_BYTES", 1 << 20)
    bomb = Reply(gzip.compress(b"#" * 50 * 2**20, 1), headers={"Content-Encoding": "gzip"})
    with serving(lambda _: bomb) as server:
        assert "sent more than 1 MiB" in doctor(server.url).sentence


def test_body_of_a_redirect_is_not_read(doctor: Diag) -> None:
    """Its body never ends, and is not waited for."""
    with talking(sent(b"Location: /login", b"", b"#", status=b"302 Found", stay=True)) as server:
        assert "redirects to /login" in doctor(server.url).sentence


def test_gzip_is_requested_and_unpacked(doctor: Diag) -> None:
    def packed(request: Request) -> Reply:
        assert "gzip" in request.headers["Accept-Encoding"]
        return Reply(gzip.compress(empty(request).body), headers={"Content-Encoding": "gzip"})

    with serving(packed) as server:
        assert doctor(server.url).sentence == f"{server.url} {WITHOUT}"


# Who is short of breath


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("times", [1, 2])
def test_overloaded_server_is_retried(doctor: Diag, status: int, times: int) -> None:
    with serving(then_empty(*[Reply(b"wait", status)] * times)) as server:
        assert doctor(server.url).sentence == f"{server.url} {WITHOUT}"


def test_status_429_is_retried_with_any_body(doctor: Diag) -> None:
    with serving(then_empty(error(429, "too_many_requests", "too many outstanding requests"))) as server:
        assert doctor(server.url).sentence == f"{server.url} {WITHOUT}"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_server_that_stays_overloaded_is_given_up(doctor: Diag, status: int) -> None:
    with serving(lambda _: Reply(b"Service Unavailable", status)) as server:
        said = doctor(server.url)
    reason = f'answered "Service Unavailable" instead of JSON (HTTP {status}); is it starting, or overloaded?'
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {reason}")
    assert len(server.requests) == 3


def test_server_without_post_is_queried_by_get_from_then_on(doctor: Diag) -> None:
    with serving(lambda request: Reply(b"", 405) if request.method == "POST" else empty(request)) as server:
        said = doctor(server.url)
    assert said.sentence == f"{server.url} {WITHOUT}"
    assert [each.method for each in server.requests] == ["POST", "GET", "GET"]


# Addresses


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://127.0.0.1:{port}", ""),
        ("http://127.0.0.1:{port}/", ""),
        ("127.0.0.1:{port}", ""),
        ("http://127.0.0.1:{port}/api/v1", ""),
        ("http://127.0.0.1:{port}/prom/", "/prom"),
        ("http://127.0.0.1:{port}/prom/api/v1/", "/prom"),
        (f"http://me:{SECRET}@127.0.0.1:{{port}}/prom", "/prom"),
        ("http://127.0.0.1:{port}/" + 40 * "a/long/path/" + "end", "/" + 40 * "a/long/path/" + "end"),
    ],
)
def test_the_api_is_found_below_an_address(doctor: Diag, given: str, base: str) -> None:
    with serving(empty) as server:
        said = doctor(given.format(port=server.port))
    assert {each.path.partition("?")[0] for each in server.requests} == {
        f"{base}/api/v1/query",
        f"{base}/api/v1/series",
    }
    assert WITHOUT in said.sentence


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"ftp://me:{SECRET}@host", "ftp://host is not a URL of a server: only http and https are supported"),
        ("http://", "http:// has no valid host name"),
        ("http://[::1", "http://[::1 has no valid host name"),
        (f"me:{SECRET}@host:port", "host:… has no valid port"),
        ("a b", "a b has no valid host name"),
        ("http://a..b:9090", "http://a..b:9090 has no valid host name"),
        (f"http://{'a' * 70}", f"http://{'a' * 70} has no valid host name"),
        ("ho\x1bst", "ho\\x1bst has no valid host name"),
        (
            f"http://host/prom?token={SECRET}",
            "http://host:80/prom has a query: leave out the question mark and what follows",
        ),
    ],
)
def test_invalid_address_is_refused(doctor: Diag, url: str, reason: str) -> None:
    said = doctor(url)
    assert said.status == USAGE
    assert said.sentence.startswith(reason)


# Credentials


def guarded(request: Request) -> Reply:
    ours = request.headers.get("Authorization") in (f"Bearer {SECRET}", f"Basic {BASIC}")
    return empty(request) if ours or request.headers.get("X-Scope-OrgID") == SECRET else Reply(b"", 401)


@pytest.fixture
def headers(tmp_path: Path) -> str:
    (tmp_path / "headers").write_text(f"X-Scope-OrgID: {SECRET}\n")
    return str(tmp_path / "headers")


@pytest.mark.parametrize("variable", ["DIAG_BEARER_TOKEN", "DIAG_BASIC_AUTH", "DIAG_HEADERS_FILE", ""])
def test_credentials_are_sent_with_every_request(
    doctor: Diag, monkeypatch: pytest.MonkeyPatch, headers: str, variable: str
) -> None:
    values = {"DIAG_BEARER_TOKEN": SECRET, "DIAG_BASIC_AUTH": f"me:{SECRET}", "DIAG_HEADERS_FILE": headers}
    if variable:
        monkeypatch.setenv(variable, values[variable])
    with serving(guarded) as server:
        said = doctor(f"http://{'' if variable else f'me:{SECRET}@'}127.0.0.1:{server.port}")
    assert said.sentence == f"{server.url} {WITHOUT}"


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_reported(doctor: Diag, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("DIAG_BEARER_TOKEN", SECRET)
    with serving(lambda _: error(status, "auth", f"{SECRET} is no token")) as server:
        said = doctor(server.url)
    assert said.sentence == f"{server.url} rejects the credentials (HTTP {status}); check {WAYS}"


def test_a_redirect_to_another_host_is_not_followed(
    doctor: Diag, monkeypatch: pytest.MonkeyPatch, headers: str
) -> None:
    monkeypatch.setenv("DIAG_BEARER_TOKEN", SECRET)
    monkeypatch.setenv("DIAG_HEADERS_FILE", headers)
    with (
        serving(empty) as other,
        serving(lambda _: Reply(b"", 307, {"Location": f"{other.url}/api/v1/query"})) as first,
    ):
        said = doctor(first.url)
    assert said.sentence == f"{first.url} redirects to {other.url}, which is not followed; {WHICH}"
    assert other.requests == []


@pytest.mark.parametrize("path", ["/a b", "/a/../b", "/%7eteam", "/ä"])
def test_every_query_is_sent_by_the_client_with_limits_whatever_the_path(doctor: Diag, path: str) -> None:
    with serving(lambda _: Reply(b"", 302, {"Location": "/elsewhere"})) as server:
        said = doctor(f"{server.url}{path}")
    assert "redirects to /elsewhere, which is not followed" in said.sentence
    assert {request.headers["User-Agent"].partition("/")[0] for request in server.requests} == {"diag"}


@pytest.mark.parametrize("token", [SECRET, ""])
def test_a_netrc_does_not_take_the_place_of_the_credentials(
    doctor: Diag, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    (tmp_path / "netrc").write_text("machine 0.0.0.0 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("DIAG_BEARER_TOKEN", token)
    with serving(empty) as server:
        doctor(f"http://0.0.0.0:{server.port}")  # the settings of a loopback address are nobody's else
    assert {each.headers.get("Authorization") for each in server.requests} == {f"Bearer {token}" if token else None}


def test_other_hosts_are_contacted_through_the_proxy(doctor: Diag, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(empty) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert doctor("http://server.invalid:9090").sentence == f"http://server.invalid:9090 {WITHOUT}"
    assert proxy.requests[0].path == "http://server.invalid:9090/api/v1/query"


@pytest.mark.parametrize("proxy", [f"http://me:{SECRET}@127.0.0.1:{{port}}", f"http:///{SECRET}"])
def test_unusable_proxy_is_reported(doctor: Diag, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy.format(port=bad.closed_port()))
    said = doctor("http://server.invalid:9090")
    reason = "cannot be reached through the proxy; check http_proxy, https_proxy and no_proxy"
    assert said.sentence == f"http://server.invalid:9090 {reason}"


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: bad.certificate(folder, name) for name in ("server", "client")}


Trust = Callable[..., None]


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch, certificates: dict[str, tuple[Path, Path]]) -> Trust:
    """Trust the server, and show it a client's certificate where asked to."""

    def set_variables(shown: str = "") -> None:
        monkeypatch.setenv("DIAG_CA_FILE", str(certificates["server"][0]))
        for name, file in zip(("DIAG_CLIENT_CERT", "DIAG_CLIENT_KEY"), certificates.get(shown, ()), strict=False):
            monkeypatch.setenv(name, str(file))

    return set_variables


def test_untrusted_certificate_is_refused(doctor: Diag, certificates: dict[str, tuple[Path, Path]]) -> None:
    with serving(empty, bad.server_context(*certificates["server"])) as server:
        said = doctor(server.url)
    reason = "has a certificate that is not trusted (self-signed certificate); set DIAG_CA_FILE"
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {reason}")


def test_own_certificate_authority_is_trusted(
    doctor: Diag, trust: Trust, certificates: dict[str, tuple[Path, Path]]
) -> None:
    trust()
    with serving(empty, bad.server_context(*certificates["server"])) as server:
        assert doctor(server.url).sentence == f"{server.url} {WITHOUT}"


def test_own_certificate_authority_overrides_that_of_the_environment(
    doctor: Diag, trust: Trust, certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trust()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates["client"][0]))
    with serving(empty, bad.server_context(*certificates["server"])) as server:
        said = doctor(f"https://0.0.0.0:{server.port}")  # trusted, but of another name
    assert "IP address mismatch" in said.sentence


def test_client_certificate_is_sent(doctor: Diag, trust: Trust, certificates: dict[str, tuple[Path, Path]]) -> None:
    trust(shown="client")
    context = bad.server_context(*certificates["server"], clients=certificates["client"][0])
    with serving(empty, context) as server:
        assert doctor(server.url).sentence == f"{server.url} {WITHOUT}"


def test_missing_client_certificate_is_reported(
    doctor: Diag, trust: Trust, certificates: dict[str, tuple[Path, Path]]
) -> None:
    trust()
    context = bad.server_context(*certificates["server"], clients=certificates["client"][0])
    with serving(empty, context) as server:
        said = doctor(server.url)
    # Whether the server's alert arrives before it closes the connection is a matter of luck.
    assert said.status == UNREACHABLE
    assert re.fullmatch(
        f"{server.url} (requires a client certificate that it trusts;|(reset|closed) the (encrypted )?connection;"
        " if it requires a client certificate,) set DIAG_CLIENT_CERT and DIAG_CLIENT_KEY",
        said.sentence,
    )


def test_https_to_an_http_server_is_reported(doctor: Diag) -> None:
    with serving(empty) as server:
        said = doctor(f"https://127.0.0.1:{server.port}")
    reason = "does not speak TLS; is it http instead of https?"
    assert said.sentence == f"https://127.0.0.1:{server.port} {reason}"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("DIAG_CA_FILE", "/no/file", "DIAG_CA_FILE /no/file cannot be used: No such file"),
        ("DIAG_CA_FILE", __file__, "cannot be used: not in PEM format"),
        ("DIAG_CLIENT_CERT", "/no/file", "DIAG_CLIENT_CERT /no/file cannot be used: No such file"),
        ("DIAG_CLIENT_KEY", "/no/file", "DIAG_CLIENT_KEY is set without DIAG_CLIENT_CERT"),
        ("DIAG_BEARER_TOKEN", f"{SECRET}\nX: y", "DIAG_BEARER_TOKEN contains a character that no HTTP header may have"),
        ("DIAG_HEADERS_FILE", "/no/file", "DIAG_HEADERS_FILE /no/file cannot be read: No such file"),
    ],
)
def test_unusable_setting_is_refused(
    doctor: Diag, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    said = doctor("https://127.0.0.1:1")
    assert said.status == USAGE
    assert reason in said.sentence


# A real Prometheus: two servers and one with an evil name, an hour ago

END = round(time.time()) - 3600
STEP = 15
EVIL, SHOWN = "e\x1b[2Jvil:8000", "e\\x1b[2Jvil:8000"


def page(instance: str, model: str, job: str = "vllm") -> Block:
    """A busy server over twenty minutes."""
    engine = {"engine": "0", "model_name": model}
    each = np.arange(81.0)
    series: list[tuple[str, dict[str, str], Any]] = [
        ("up", {}, each * 0 + 1),
        ("vllm:num_requests_running", engine, each * 0 + 2),
        ("vllm:num_requests_waiting", engine, each * 0),
        ("vllm:generation_tokens_total", engine, each * 500),
        ("vllm:prompt_tokens_total", engine, each * 100),
        ("vllm:kv_cache_usage_perc", engine, each * 0 + 0.2),
        ("vllm:request_success_total", {**engine, "finished_reason": "stop"}, each),
    ]
    labels = tuple({"__name__": name, "instance": instance, "job": job, **more} for name, more, _ in series)
    times = 1000 * (END - STEP * np.arange(80, -1, -1, dtype=np.int64))
    return Block(labels, times, np.array([values for *_, values in series]))


@pytest.fixture(scope="module")
def prometheus() -> Iterator[str]:
    """Its URL."""
    held = [page("a:8000", "tiny"), page("b:8000", "large"), page(EVIL, "m\x07odel", "j\x1b[31mob")]
    with prometheus_server.serving(prometheus_server.program(prometheus_server.ANY), held) as server:
        yield server.url


THEN = ("--at", f"{END}")
REAL = pytest.mark.prometheus


def front(url: str, twist: Callable[[Request, str], Reply | None]) -> Answer:
    """A server that answers as this Prometheus does, except where `twist` of a request and its query does."""

    def answer(request: Request) -> Reply:
        twisted = twist(request, asked(request))
        if twisted:
            return twisted
        headers = {"Content-Type": request.headers.get("Content-Type", "")}
        passed = urllib.request.Request(url + request.path, request.body or None, headers, method=request.method)
        try:
            with urllib.request.urlopen(passed, timeout=30) as response:
                return Reply(response.read())
        except urllib.error.HTTPError as error:
            return Reply(error.read(), error.code)

    return answer


def refusing(pattern: str, reply: Callable[[str], Reply]) -> Callable[[Request, str], Reply | None]:
    """Answer the queries with this in them so."""
    return lambda _, query: reply(query) if re.search(pattern, query) else None


@REAL
@pytest.mark.parametrize("timeout", ["2.5", "3600"])
def test_a_good_server_is_judged_whatever_the_timeout(doctor: Diag, prometheus: str, timeout: str) -> None:
    """The server is told the limit in a form that it can read."""
    said = doctor(prometheus, *THEN, "--instance", "a:.*", "--json", "--timeout", timeout)
    assert (said.status, said.error) == (0, "")
    assert not [note for note in said.notes if "rejected" in note]


@REAL
@sampled("form", [[], ["--markdown"], ["--json"]])
def test_labels_cannot_send_escape_sequences_to_the_terminal(doctor: Diag, prometheus: str, form: list[str]) -> None:
    said = doctor(prometheus, *THEN, "--match", f'instance="{EVIL}"', *form)
    assert (said.status, said.error) == (0, "")
    assert "[2Jvil:8000" in said.out


@REAL
def test_missing_data_in_the_window_is_reported(doctor: Diag, prometheus: str) -> None:
    said = doctor(prometheus)
    assert said.status == UNREACHABLE
    who = f"{prometheus}: a:8000, b:8000, {SHOWN} were scraped on the day before, but not between "
    assert said.sentence.startswith(who)
    assert said.sentence.endswith(" UTC; is the time range right?")


@REAL
@pytest.mark.parametrize("at", ["-30d", "86400", "-10000d"])
def test_missing_data_at_that_time_is_reported(doctor: Diag, prometheus: str, at: str) -> None:
    said = doctor(prometheus, "--at", at)
    assert said.status == UNREACHABLE
    assert said.sentence.startswith(f"{prometheus} has no vLLM metrics between ")
    assert said.sentence.endswith(NOT_HERE)


@REAL
@pytest.mark.parametrize(
    "words", [("--instance", "c:.*"), ("--job", "other"), ("--model", "huge"), ("--match", 'cluster="x"')]
)
def test_unmatched_servers_are_named(doctor: Diag, prometheus: str, words: tuple[str, str]) -> None:
    said = doctor(prometheus, *THEN, *words)
    there = "a:8000 (job vllm, model tiny), b:8000 (job vllm, model large), "
    assert said.status == UNREACHABLE
    assert f"{prometheus} has no matching vLLM server between " in said.sentence
    assert said.sentence.endswith(f"; it has {there}{SHOWN} (job j\\x1b[31mob, model m\\x07odel)")


@REAL
@pytest.mark.parametrize("words", [("--instance", "["), ("--instance", "a", "--job", "(?=x)"), ("--model", "*")])
def test_invalid_regular_expression_is_refused(doctor: Diag, prometheus: str, words: tuple[str, ...]) -> None:
    said = doctor(prometheus, *THEN, *words)
    assert said.status == USAGE
    assert said.sentence.startswith(f"{prometheus} cannot parse this --instance, --model, --job or --match: ")
    assert "error parsing regexp" in said.sentence


# Clocks


@REAL
@sampled(
    ("ahead", "words"),
    [
        (0, []),
        (86_400, ["--at", "-1d"]),
        (-600, ["--window", "5m"]),
    ],
    2,
)
def test_times_are_relative_to_the_clock_of_the_server(
    doctor: Diag, prometheus: str, ahead: int, words: list[str]
) -> None:
    """It is an hour behind ours where it shows when the samples end."""
    with serving(front(prometheus, refusing(r"^vector\(time", lambda _: clock(END + ahead)))) as server:
        said = doctor(server.url, *words, "--instance", "a:.*", "--json")
    assert (said.status, said.error) == (0, "")


def test_no_future_time_is_queried_from_a_server_that_is_behind(doctor: Diag) -> None:
    with serving(empty) as server:
        said = doctor(server.url, "--from", f"{NOW + 60}", "--to", f"{NOW + 120}")
    future = "2026-09-21 14:14:20 UTC is in the future: the Prometheus clock says 2026-09-21 14:13:20 UTC"
    assert (said.status, said.sentence) == (USAGE, future)


# Refused in the middle

TOO_LONG = "too long query; got 1234 bytes; mustn't exceed `-search.maxQueryLen=1000` bytes"
LATE = "query timed out in expression evaluation"
GIVEN_UP = "select fewer servers or a shorter --window"


def quoting(why: str) -> Callable[[str], Reply]:
    """VictoriaMetrics' sentence, the query and all."""
    return lambda query: error(
        422, "422", f'error when executing query="{query}" for (time=1790000, step=15000): {why}'
    )


@REAL
@sampled(
    ("reply", "reason"),
    [
        (lambda _: error(422, "execution", "too many samples"), "too many samples (HTTP 422)"),
        (lambda _: error(400, "bad_data", "\x1b[2Jno"), "\\x1b[2Jno (HTTP 400)"),
        (quoting("too many points"), "too many points (HTTP 422)"),
        (lambda _: error(422, "422", TOO_LONG), f"{TOO_LONG} (HTTP 422)"),
    ],
    2,
)
def test_refused_queries_are_unknown_and_the_rest_is_judged(
    doctor: Diag, prometheus: str, reply: Callable[[str], Reply], reason: str
) -> None:
    with serving(front(prometheus, refusing("num_requests_waiting{", reply))) as server:
        said = doctor(server.url, *THEN, "--instance", "a:.*", "--json")
    count = sum("num_requests_waiting{" in asked(each) for each in server.requests)
    of_the_vital_signs = 1  # is asked once the report and its notes are there
    assert f"Prometheus rejected {count - of_the_vital_signs} queries: {reason}" in said.notes
    assert said.state("queue_saturation") == {"unknown"}
    assert said.state("kv_pool_saturated") == {"absent"}


@REAL
def test_many_refusals_become_a_few_notes(doctor: Diag, prometheus: str) -> None:
    refused = refusing("vllm:", lambda query: error(422, "execution", f"no {query[:60]}"))
    with serving(front(prometheus, refused)) as server:
        said = doctor(server.url, *THEN, "--instance", "a:.*", "--json")
    notes = [note for note in said.notes if "rejected" in note]
    assert len(notes) == 4
    assert notes[-1].endswith(" queries for other reasons")


@REAL
def test_refusals_that_differ_only_in_numbers_are_one_note(doctor: Diag, prometheus: str) -> None:
    refused = refusing("vllm:", lambda query: error(422, "422", TOO_LONG.replace("1234", str(len(query)))))
    with serving(front(prometheus, refused)) as server:
        said = doctor(server.url, *THEN, "--instance", "a:.*", "--json")
    assert sum("rejected" in note for note in said.notes) == 1


@REAL
@sampled(
    ("reply", "reason"),
    [
        (lambda _: error(503, "timeout", LATE), f"{LATE} (HTTP 503)"),
        (lambda _: error(503, "503", "too many concurrent requests"), "too many concurrent requests (HTTP 503)"),
        (quoting("timeout exceeded: 30.000 seconds"), "timeout exceeded: 30.000 seconds (HTTP 422)"),
        (
            lambda query: error(422, "execution", f"{hash(query)}: context deadline exceeded"),
            "context deadline exceeded",
        ),
    ],
    2,
)
def test_server_is_given_up_after_three_query_timeouts(
    doctor: Diag, prometheus: str, reply: Callable[[str], Reply], reason: str
) -> None:
    with serving(front(prometheus, refusing("vllm:", reply))) as server:
        said = doctor(server.url, *THEN)
    assert said.status == UNREACHABLE
    assert said.sentence.startswith(f"{server.url} times out on queries: ")
    assert f"{reason}" in said.sentence
    assert said.sentence.endswith(GIVEN_UP)
    assert 3 <= sum("vllm:" in asked(each) for each in server.requests) < 3 + fleet.AT_ONCE


@REAL
def test_silent_server_costs_one_timeout(doctor: Diag, prometheus: str) -> None:
    """All concurrent queries wait in vain; the server stays silent until the command has ended."""
    ended = threading.Event()

    def silent(_: str) -> Reply:
        ended.wait()
        return Reply()

    with serving(front(prometheus, refusing("vllm:", silent))) as server:
        said = doctor(server.url, *THEN, "--timeout", "2")
        ended.set()
    reason = "accepted the connection but sent nothing for 2 s; is the server overloaded or stopped?"
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {reason}")
    assert 1 <= sum("vllm:" in asked(request) for request in server.requests) <= fleet.AT_ONCE


@REAL
def test_server_that_becomes_overloaded_is_retried(doctor: Diag, prometheus: str) -> None:
    seen: set[str] = set()

    def first(request: Request, query: str) -> Reply | None:
        new = query not in seen
        seen.add(query)
        return Reply(b"<html>Bad Gateway</html>", 502) if new else None

    with serving(front(prometheus, first)) as server:
        said = doctor(server.url, *THEN, "--instance", "a:.*", "--json")
    assert (said.status, said.error) == (0, "")
    assert not [note for note in said.notes if "rejected" in note]


@REAL
def test_warnings_of_the_server_are_noted_but_not_its_infos(doctor: Diag, prometheus: str) -> None:
    missing = "store \x1b[31m10.0.0.9:10901 is not available"

    def warned(request: Request, _: str) -> Reply:
        reply = front(prometheus, lambda *_: None)(request)
        assert reply
        said = {"warnings": [missing, "PromQL info: metric might not be a counter"]}
        return Reply(json.dumps(json.loads(reply.body) | said).encode())

    with serving(front(prometheus, warned)) as server:
        said = doctor(server.url, *THEN, "--instance", "a:.*", "--json")
    partial = "Prometheus warns that results may be partial: store \\x1b[31m10.0.0.9:10901 is not available"
    assert [note for note in said.notes if "warns" in note] == [partial]


@REAL
@pytest.mark.parametrize("data", [None, [1], {"result": 1}, {"result": [{"metric": {}, "values": [["x", "1"]]}]}])
def test_later_response_of_another_shape_is_unknown(doctor: Diag, prometheus: str, data: Any) -> None:
    odd = refusing("vllm:", lambda _: document(status="success", data=data))
    with serving(front(prometheus, odd)) as server:
        said = doctor(server.url, *THEN)
    reason = f"answered JSON that is not from the Prometheus API; {WHICH}"
    assert (said.status, said.sentence) == (UNREACHABLE, f"{server.url} {reason}")


def test_native_histograms_are_left_out() -> None:
    number = {"metric": {"a": "1"}, "value": [NOW, "1"]}
    with serving(lambda _: found({"metric": {}, "histogram": [NOW, {"count": "1"}]}, number)) as server:
        assert Prometheus(parse(server.url), Credentials()).instant("x", 1000 * NOW) == [number]


# Questions that make no sense


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--at", "yesterday"], "'yesterday' is not a time: write 2026-11-20T03:12:00Z"),
        (["--at", "2026-13-01"], "'2026-13-01' is not a time"),
        (["--at", "nan"], "'nan' is not a time"),
        (["--at", "1e300"], "'1e300' is not a time"),
        (["--at", "1790000000000"], "'1790000000000' is not a time"),
        (["--to", "inf"], "'inf' is not a time"),
        (["--from", "-5 minutes"], "'5 minutes' is not a duration: write 90s, 15m, 24h or 7d"),
        (["--from", "-1y"], "'1y' is not a duration"),
        (["--at", "\x1b[2J"], "'\\x1b[2J' is not a time"),
        (["--window", "15"], "'15' is not a duration"),
        (["--window", "-5m"], "'-5m' is not a duration"),
        (["--window", "9" * 400 + "d"], f"'{'9' * 39}…' is not a duration"),
        (["--window", "0s"], "the time range is empty: from"),
        (["--at", "-2h", "--from", "-1h"], "--at (with --window) and --from/--to are alternatives: choose one"),
        (["--at", "-2h", "--to", "-1h"], "--at (with --window) and --from/--to are alternatives: choose one"),
        (
            ["--from", "-1h", "--to", "-2h"],
            "the time range is empty: from 2026-09-21 13:13:20 UTC to 2026-09-21 12:13:20 UTC",
        ),
        (["--from", "2026-09-21T14:14:20Z"], "2026-09-21 14:14:20 UTC is in the future: the Prometheus clock says"),
        (["--at", "2027-01-01"], "2026-12-31 23:45:00 UTC is in the future: the Prometheus clock says"),
        (["--match", "nonsense"], '--match nonsense is not a matcher: write cluster="eu"'),
        (["--match", ""], "--match  is not a matcher"),
        (["--match", 'a="b"} or up{c="d"'], '--match a="b"} or up{c="d" is not a matcher'),
        (["--match", 'a=~"["'], '--match a=~"[" is not a matcher'),
        (["--match", 'a="\x1b[2J'], '--match a="\\x1b[2J is not a matcher'),
        (["http://a:8000"], "with --prometheus, select servers by --instance, --model, --job or --match, not by URL"),
    ],
)
def test_invalid_time_range_is_refused(doctor: Diag, words: list[str], reason: str) -> None:
    with serving(empty) as server:
        said = doctor(server.url, *words)
    assert said.status == USAGE
    assert said.sentence.startswith(reason)


@pytest.mark.parametrize(
    "words",
    [
        ("--window", "99999999d"),
        ("--from", "0", "--to", "1"),
        ("--from", "-99999999d"),
        ("--to", "0001-02-03", "--at", ""),
    ],
)
def test_times_at_the_edge_end_in_one_sentence(doctor: Diag, words: tuple[str, ...]) -> None:
    with serving(empty) as server:
        said = doctor(server.url, *words)
    assert said.status in (UNREACHABLE, USAGE)
    assert said.sentence


@pytest.mark.parametrize("command", ["doctor", "export"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--at", "-2h"),
        ("--window", "24h"),
        ("--from", "-2h"),
        ("--to", "-1h"),
        ("--instance", "a"),
        ("--model", "m"),
        ("--job", "j"),
        ("--match", 'a="b"'),
    ],
)
def test_options_that_need_a_prometheus_are_refused_without_one(
    diag: Diag, command: str, option: str, value: str
) -> None:
    said = diag(command, "http://127.0.0.1:1", option, value)
    only = f"{option} needs --prometheus URL: only a Prometheus has other times and servers"
    assert (said.status, said.sentence) == (USAGE, only)


@REAL
@pytest.mark.parametrize(("refused", "status"), [("no such text", 2), ("num_preemptions", 1)])
def test_a_cascade_whose_queries_are_refused_is_not_healthy(doctor: Diag, refused: str, status: int) -> None:
    seen = read(RECORDINGS / "kv_cascade")
    span = ("--from", f"{seen.instants[0] / 1000}", "--to", f"{seen.instants[-1] / 1000}")
    limit = error(422, "execution", "query processing would load too many samples into memory")
    program = prometheus_server.program(prometheus_server.ANY)
    with (
        prometheus_server.serving(program, seen.samples.select([])) as real,
        serving(front(real.url, refusing(refused, lambda _: limit))) as server,
    ):
        said = doctor(server.url, *span)
    assert said.status == status
    assert ("queries refused: 3 incidents unknown" in " ".join(said.out.split())) is (status == 1)
