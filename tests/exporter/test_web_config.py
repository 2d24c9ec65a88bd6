"""`--web.config.file`: TLS and users of the exporter's page, by the rules of Prometheus' own exporters."""

import base64
import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import bcrypt
import pytest
from support.bad_servers import certificate
from support.cli import diag
from support.exporter_server import listening, vllms_page
from support.prometheus_server import ANY, Server, program, serving
from support.waiting import until

from diag.core.errors import BadUsage
from diag.exporter.http_server import CONTENT_TYPE, Answer, Listen
from diag.exporter.web_config import Users, read

SALT = b"$2b$04$tkA8ojxc1D.959y4p5lQC."  # the same in every process that collects these tests
HASH, OTHER = (bcrypt.hashpw(password, SALT).decode() for password in (b"opensesame", b"another"))


def written(folder: Path, text: str) -> str:
    file = folder / "web.yml"
    file.write_text(text)
    return str(file)


def status(url: str, user: str = "", context: ssl.SSLContext | None = None) -> int:
    headers = {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()} if user else {}
    try:
        return int(urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context).status)
    except urllib.error.HTTPError as error:
        return error.code


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


@pytest.mark.parametrize(
    ("user", "code"),
    [("", 401), ("prom:opensesame", 200), ("prom:wrong", 401), ("prom:", 401), ("other:opensesame", 401), (":", 401)],
)
def test_only_users_of_the_file_get_an_answer(tmp_path: Path, user: str, code: int) -> None:
    config = written(tmp_path, f"basic_auth_users:\n  prom: {HASH}\n  other: {OTHER}\n")
    with listening(Listen("127.0.0.1", 0, web_config=config)) as url:
        assert [status(f"{url}{path}", user) for path in ("/metrics", "/metrics")] == [code] * 2
        assert status(f"{url}/", user) == code


@pytest.mark.parametrize(
    "header", ["Basic", "Basic !", "Bearer cHJvbTpvcGVuc2VzYW1l", "Basic cHJvbQ==", "Basic /w==", ""]
)
def test_request_without_a_user_is_refused_at_once(header: str) -> None:
    assert not Users({"prom": HASH}).accept(header)


def test_a_user_that_is_not_there_takes_as_long_as_one_that_is_and_guesses_come_one_by_one() -> None:
    users, hashed, at_once = Users({"prom": HASH}), [], []
    check = users._check

    def counted(password: bytes, text: bytes) -> bool:
        at_once.append(threading.get_ident())
        hashed.append(list(at_once))
        time.sleep(0.01)
        at_once.pop()
        return check(password, text)

    users._check = counted
    tries = ["prom:opensesame", "prom:opensesame", "prom:wrong", "nobody:opensesame", "prom:" + "x" * 100]
    texts = ["Basic " + base64.b64encode(text.encode()).decode() for text in tries]
    assert [users.accept(text) for text in texts] == [True, True, False, False, False]
    assert len(hashed) == 4
    threads = [threading.Thread(target=users.accept, args=(texts[2],)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(each) for each in hashed} == {1}


def test_tls_and_client_certificates_by_file_names_beside_it(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "server")
    client, client_key = certificate(tmp_path, "client")
    config = written(
        tmp_path,
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  min_version: TLS13\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: client.pem\n"
        "http_server_config: {http2: true}\n",
    )
    with listening(Listen("127.0.0.1", 0, web_config=config)) as url:
        context = trusting(cert)
        with pytest.raises((urllib.error.URLError, OSError, http.client.HTTPException)):
            status(f"{url}/metrics", context=context)
        context.load_cert_chain(client, client_key)
        assert status(f"{url}/metrics", context=context) == 200
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((urllib.error.URLError, OSError)):
            status(f"{url}/metrics", context=context)


def test_a_file_that_changes_is_read_again_and_a_broken_one_is_not_used(tmp_path: Path) -> None:
    config = written(tmp_path, f"basic_auth_users:\n  prom: {HASH}\n")
    with listening(Listen("127.0.0.1", 0, web_config=config)) as url:
        assert status(url, "prom:opensesame") == 200
        written(tmp_path, f"basic_auth_users:\n  new: {HASH}\n")
        assert (status(url, "prom:opensesame"), status(url, "new:opensesame")) == (401, 200)
        written(tmp_path, "basic_auth_users: [\n")
        assert status(url, "new:opensesame") == 200
        (tmp_path / "web.yml").unlink()
        assert (status(url, "new:opensesame"), status(url)) == (200, 401)


TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: b\n", "a in the file is not supported: use tls_server_config, "),
        ("- a\n", "the file should have keys and values"),
        ("a: [\n", "line 2: this is no YAML"),
        (TLS + "  cipher_suites: [x]\n", "cipher_suites in tls_server_config is not supported"),
        (TLS + "  min_version: SSL3\n", "min_version SSL3 is not supported: choose TLS12, TLS13"),
        (TLS + "  client_auth_type: RequestClientCert\n", "client_auth_type RequestClientCert is not supported"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", "client_ca_file and a client_auth_type"),
        (TLS + "  client_ca_file: server.pem\n", "client_ca_file and a client_auth_type"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12\n", "min_version is above max_version"),
        ("tls_server_config:\n  cert_file: server.pem\n", "tls_server_config needs cert_file and key_file"),
        ("tls_server_config:\n  cert_file: 7\n", "cert_file should be a text"),
        ("basic_auth_users:\n  prom: opensesame\n", "the password of prom is not a bcrypt hash: htpasswd -nBC 10"),
        (f"basic_auth_users:\n  prom: {HASH}x\n", "the password of prom is not a bcrypt hash"),
    ],
)
def test_invalid_web_config_is_refused_without_its_secrets(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(BadUsage) as error:
        read(Path(written(tmp_path, text)))
    assert reason in str(error.value)
    assert "opensesame" not in str(error.value) and HASH not in str(error.value)


def test_the_hashes_are_in_no_representation(tmp_path: Path) -> None:
    assert HASH not in repr(read(Path(written(tmp_path, f"basic_auth_users: {{prom: {HASH}}}"))))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--web.config.file", "/no/file"], "--web.config.file /no/file cannot be read: No such file"),
        (["--web.config.file", "f", "--tls-cert", "c"], "--web.config.file sets TLS"),
    ],
)
def test_invalid_option_is_one_sentence(words: list[str], reason: str) -> None:
    done = diag("exporter", "--listen", "127.0.0.1:0", *words)
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert reason in done.stderr


class Page:
    def answer(self, path: str, seconds: float) -> Answer | None:
        return Answer(200, vllms_page(), CONTENT_TYPE) if path == "/metrics" else None


@pytest.mark.prometheus
def test_a_prometheus_and_the_doctor_read_the_page_over_tls_with_a_password(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "server")
    config = written(tmp_path, TLS + f"basic_auth_users:\n  prom: {HASH}\n")
    with listening(Listen("127.0.0.1", 0, web_config=config), Page()) as url:
        jobs = "".join(
            f"""
  - job_name: {name}
    scheme: https
    scrape_interval: 1s
    scrape_timeout: 1s
    static_configs: [{{targets: ["{url.removeprefix("https://")}"]}}]
    tls_config: {{ca_file: {cert}}}
    basic_auth: {{username: prom, password: {password}}}"""
            for name, password in (("right", "opensesame"), ("wrong", "guess"))
        )
        with serving(program(ANY), [], f"scrape_configs:{jobs}") as server:
            found = until(lambda: len(up := _up(server)) == 2 and up)
        assert found == {"right": 1, "wrong": 0}
        secrets = {"DIAG_BASIC_AUTH": "prom:opensesame", "DIAG_CA_FILE": str(cert)}
        judged = diag("doctor", url.replace("//", "//prom@"), "--for", "0", "--json", **secrets)
        assert "verdict" in json.loads(judged.stdout), judged.stderr
        refused = diag("doctor", url, "--for", "0", DIAG_CA_FILE=str(cert))
        assert (refused.returncode, "requires credentials (HTTP 401)" in refused.stderr) == (69, True)


def _up(server: Server) -> dict[str, float]:
    try:
        return {dict(series)["job"]: value for series, value in server.query("up", round(time.time() * 1000)).items()}
    except OSError:
        return {}
