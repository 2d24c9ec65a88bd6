"""Credentials and TLS files: from the environment and from files, never from the command line, and never printed."""

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import read_text

MOST_BYTES = 2**20
"""Size limit of a file with a token or headers."""
WAYS = "DIAG_BEARER_TOKEN, DIAG_BASIC_AUTH or DIAG_HEADERS_FILE"


@dataclass(frozen=True)
class Credentials:
    """Headers and TLS files for every request; the headers are secrets.

    unverified: accept any certificate. server_name: the name in the certificate, if it differs from the host. Only a
    kubeconfig can set these two.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: str = ""
    client_cert: str = ""
    client_key: str = ""
    unverified: bool = False
    server_name: str = ""


def from_environment(environment: Mapping[str, str]) -> Credentials:
    """Read DIAG_*; BadUsage if a file cannot be read or two settings conflict."""
    bearer = _secret("DIAG_BEARER_TOKEN", environment)
    basic_auth = _secret("DIAG_BASIC_AUTH", environment)
    if bearer and basic_auth:
        raise BadUsage("both a bearer token and DIAG_BASIC_AUTH are set: choose one")
    if basic_auth and ":" not in basic_auth:
        raise BadUsage("DIAG_BASIC_AUTH must be user:password")
    headers = {"Authorization": f"Bearer {bearer}" if bearer else basic(basic_auth)} if bearer or basic_auth else {}
    file = environment.get("DIAG_HEADERS_FILE", "")
    for number, line in enumerate(_read("DIAG_HEADERS_FILE", file).splitlines() if file else (), 1):
        name, colon, value = line.partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not colon or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            raise BadUsage(f'DIAG_HEADERS_FILE line {number} is not "Name: value"')
        headers[name] = _fit_for_a_header(value.strip(), f"DIAG_HEADERS_FILE line {number}")
    return Credentials(
        headers=headers,
        ca_file=environment.get("DIAG_CA_FILE", ""),
        client_cert=environment.get("DIAG_CLIENT_CERT", ""),
        client_key=environment.get("DIAG_CLIENT_KEY", ""),
    )


def basic(user_and_password: str) -> str:
    """Return the Authorization header for "user:password"."""
    return "Basic " + base64.b64encode(user_and_password.encode("utf-8", "surrogateescape")).decode()


def tls(credentials: Credentials) -> ssl.SSLContext:
    """Return the context that verifies servers by the system's authorities, or by DIAG_CA_FILE alone."""
    given = credentials
    return _context(given.ca_file, given.client_cert, given.client_key, given.unverified, given.server_name)


class _NamedContext(ssl.SSLContext):
    """Requests and verifies `server_name` instead of the host's name."""

    server_name = ""

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, **(options | {"server_hostname": self.server_name}))


@lru_cache(maxsize=8)  # loading the system's authorities takes longer than a scrape
def _context(ca_file: str, client_cert: str, client_key: str, unverified: bool, server_name: str) -> ssl.SSLContext:
    if client_key and not client_cert:
        raise BadUsage("DIAG_CLIENT_KEY is set without DIAG_CLIENT_CERT")
    try:
        context = (
            _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
            if server_name
            else ssl.create_default_context(cafile=ca_file or None)
        )
        if isinstance(context, _NamedContext):
            context.server_name = server_name
            if ca_file:
                context.load_verify_locations(ca_file)
            else:
                context.load_default_certs()
    except OSError as error:
        raise BadUsage(f"DIAG_CA_FILE {ca_file} cannot be used: {_why(error)}") from error
    if unverified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if client_cert:
        try:
            # An empty password prevents a prompt, which an unattended run cannot answer.
            context.load_cert_chain(client_cert, client_key or None, password="")
        except OSError as error:
            raise BadUsage(f"DIAG_CLIENT_CERT {client_cert} cannot be used: {_why(error)}") from error
    return context


def _why(error: OSError) -> str:
    return "not in PEM format, or encrypted" if isinstance(error, ssl.SSLError) else error.strerror or str(error)


def _secret(name: str, environment: Mapping[str, str]) -> str:
    file = environment.get(f"{name}_FILE", "")
    text = _read(f"{name}_FILE", file) if file else environment.get(name, "")
    return _fit_for_a_header(text.strip(), f"{name}_FILE" if file else name)


def _read(variable: str, file: str) -> str:
    try:
        return read_text(file, MOST_BYTES, piped=True)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise BadUsage(f"{variable} {file} cannot be read: {why}") from error


def _fit_for_a_header(text: str, where: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise BadUsage(f"{where} contains a character that no HTTP header may have (for example a line break)")
    return text
