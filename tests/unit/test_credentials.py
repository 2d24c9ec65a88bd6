"""Credentials and addresses: taken from where they belong, and shown nowhere."""

import base64
import os
from pathlib import Path

import pytest

from diag.core.errors import BadUsage
from diag.http.address import Credentials, from_environment, parse, parse_all
from diag.http.tls import tls


def test_a_bearer_token_is_a_header() -> None:
    assert from_environment({"DIAG_BEARER_TOKEN": "abc"}).headers == {"Authorization": "Bearer abc"}


def test_a_token_file_may_end_in_a_newline(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    access = from_environment({"DIAG_BEARER_TOKEN_FILE": str(tmp_path / "token")})
    assert access.headers == {"Authorization": "Bearer abc"}


@pytest.mark.parametrize("variable", ["DIAG_BASIC_AUTH", "DIAG_BASIC_AUTH_FILE"])
def test_basic_authentication_is_a_header(variable: str, tmp_path: Path) -> None:
    (tmp_path / "auth").write_text("me:pass word\n")
    value = str(tmp_path / "auth") if variable.endswith("FILE") else "me:pass word"
    expected = base64.b64encode(b"me:pass word").decode()
    assert from_environment({variable: value}).headers == {"Authorization": f"Basic {expected}"}


def test_more_headers_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("# ours\nX-Scope: a: b\n\nAuthorization: Custom xyz\n")
    access = from_environment({"DIAG_HEADERS_FILE": str(tmp_path / "headers"), "DIAG_BEARER_TOKEN": "abc"})
    assert access.headers == {"Authorization": "Custom xyz", "X-Scope": "a: b"}


def test_without_settings_nothing_is_sent() -> None:
    assert from_environment({}) == Credentials()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"DIAG_BEARER_TOKEN": "a", "DIAG_BASIC_AUTH": "b:c"}, "choose one"),
        ({"DIAG_BASIC_AUTH": "secret"}, "must be user:password"),
        ({"DIAG_BEARER_TOKEN": "secret\nX: y"}, "DIAG_BEARER_TOKEN contains a character that no HTTP header may have"),
        ({"DIAG_BEARER_TOKEN": "secretö"}, "DIAG_BEARER_TOKEN contains a character that no HTTP header may have"),
        ({"DIAG_BEARER_TOKEN_FILE": "/no/file"}, "DIAG_BEARER_TOKEN_FILE /no/file cannot be read: No such file"),
        ({"DIAG_HEADERS_FILE": "{folder}/headers"}, 'DIAG_HEADERS_FILE line 2 is not "Name: value"'),
    ],
)
def test_invalid_setting_is_refused_without_its_secret(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "headers").write_text("A: b\nsecret\n")
    with pytest.raises(BadUsage) as error:
        from_environment({name: value.replace("{folder}", str(tmp_path)) for name, value in environment.items()})
    assert reason in str(error.value)
    assert "secret" not in str(error.value)


def test_secrets_are_not_in_the_representation() -> None:
    assert "abc" not in repr(from_environment({"DIAG_BEARER_TOKEN": "abc"}))
    assert "abc" not in repr(parse("http://me:abc@h/metrics?token=abc"))


@pytest.mark.parametrize(
    ("access", "reason"),
    [
        (Credentials(client_key="k.pem"), "DIAG_CLIENT_KEY is set without DIAG_CLIENT_CERT"),
        (Credentials(ca_file="/no/file"), "DIAG_CA_FILE /no/file cannot be used: No such file"),
        (Credentials(ca_file=__file__), "cannot be used: not in PEM format"),
        (Credentials(client_cert="/no/file"), "DIAG_CLIENT_CERT /no/file cannot be used: No such file"),
        (Credentials(client_cert=__file__), "cannot be used: not in PEM format"),
    ],
)
def test_a_tls_file_that_cannot_be_used_is_refused(access: Credentials, reason: str) -> None:
    with pytest.raises(BadUsage, match=reason):
        tls(access)


@pytest.mark.parametrize(
    ("text", "shown", "instance"),
    [
        ("host:8000", "http://host:8000", "host:8000"),
        ("host", "http://host:80", "host:80"),
        ("https://host/", "https://host:443/", "host:443"),
        ("HTTP://Host:8000/a/metrics", "http://host:8000/a/metrics", "host:8000"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
        ("http://me:pa%40ss@host:8000/x?key=secret#f", "http://host:8000/x", "host:8000"),
        ("me:pass@host:8000", "http://host:8000", "host:8000"),
    ],
)
def test_an_address_is_read_and_shown_without_secrets(text: str, shown: str, instance: str) -> None:
    assert (parse(text).shown, parse(text).instance) == (shown, instance)


def test_a_user_in_the_address_is_a_header() -> None:
    expected = base64.b64encode(b"me:pa@ss").decode()
    assert parse("http://me:pa%40ss@host").authorization == f"Basic {expected}"


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("h", ("/metrics",)),
        ("h/", ("/metrics",)),
        ("h/metrics", ("/metrics",)),
        ("h/a/metrics/", ("/a/metrics",)),
        ("h/v1", ("/v1", "/v1/metrics", "/metrics")),
        ("h/x?y=1", ("/x?y=1", "/x/metrics?y=1", "/metrics?y=1")),
        ("h/metrics/x", ("/metrics/x", "/metrics/x/metrics", "/metrics")),
        (
            "h/a/v1/models",
            ("/a/v1/models", "/a/v1/models/metrics", "/a/v1/metrics", "/a/metrics", "/metrics"),
        ),
        ("h/" + "x/" * 50, ("/x" * 50, *("/x" * n + "/metrics" for n in (50, 49, 48, 47, 46)), "/metrics")),
    ],
)
def test_metrics_page_is_searched_at_likely_paths(text: str, paths: tuple[str, ...]) -> None:
    assert parse(text).candidates == paths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "ftp://h",
        "unix:///run/x",
        "h:port",
        "h:99999",
        "http://[::1",
        "a b",
        "*",
        "h\x1b[2J",
        "file:///x",
    ],
)
def test_invalid_address_is_refused_in_a_printable_sentence(text: str) -> None:
    with pytest.raises(BadUsage) as error:
        parse(text)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "ftp://me:secret@host/?token=secret",
        "http://u:sec/ret@h",
        "http://u:80/secret@h",
        "http://u:p/secret@h:8000/metrics",
        "http://u:p#secret@h",
        "http://u:secret?x@h",
        "http://u:a://secret@h",
        "u:secret/x@h",
        "//u:secret/x@h",
        "http:/u:secret@h",
        "http:u:secret@h",
        "https//u:secret@h",
        "http://u:secret",
        "http://u:99secret",
        "http://u:secret@",
        "http://u:secret@h:port",
        "http://u:secret@[::1",
        "http://u:secret@h/a@b",
        "http://h:99999?token=secret",
    ],
)
def test_a_refused_address_does_not_show_its_password(text: str) -> None:
    with pytest.raises(BadUsage) as error:
        parse(text)
    assert "sec" not in str(error.value)
    assert "ret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" ", "the address of a server is empty: write http://HOST:PORT"),
        ("h:0", "h:0 has no valid port: a port is a number from 1 to 65535"),
        ("h:８０", "h:… has no valid port: a port is a number from 1 to 65535"),
        ("http://h:80:90", "http://h:… has no valid port: a port is a number from 1 to 65535"),
        ("fe80::1", "fe80::1 is an IPv6 address: put it into brackets, http://[ADDRESS]:PORT"),
        ("[::1]x:80", "[::1]x:80 has no valid host name"),
        ("h\tx", "h\\tx has no valid host name"),
        ("http://a..b", "http://a..b has no valid host name"),
        ("http://ex℀mple", "http://ex℀mple has no valid host name"),
        ("http//h", "http//h is not a URL: write http://HOST:PORT"),
        ("http:/h:8000", "http:…/h:8000 is not a URL: write http://HOST:PORT"),
        (
            "h/a@b",
            "… has an @ behind its host: in a password write %2F for /, %3F for ?, %23 for #, in a path %40 for @",
        ),
    ],
)
def test_refused_address_error_names_the_fault(text: str, reason: str) -> None:
    with pytest.raises(BadUsage) as error:
        parse(text)
    assert str(error.value) == reason


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8:1", True),
        ("[::1]", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("h", False),
    ],
)
def test_addresses_of_this_host_are_local(text: str, loopback: bool) -> None:
    assert parse(text).is_loopback == loopback


def test_repeated_address_is_scraped_once() -> None:
    assert list(parse_all(["h:8000", "http://h:8000"])) == ["h:8000"]


def test_two_pages_of_one_server_are_distinguished() -> None:
    assert list(parse_all(["h:8000/a/metrics", "h:8000/b c/metrics"])) == ["h:8000/a/metrics", "h:8000/b%20c/metrics"]


def test_password_of_bytes_that_are_no_utf8_is_sent_as_it_was_typed() -> None:
    typed = os.fsdecode(b"http://u:\xff@h:1")
    assert parse(typed).authorization == "Basic " + base64.b64encode(b"u:\xff").decode()
    assert "\udcff" not in parse(typed).shown
