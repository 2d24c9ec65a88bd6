"""Targets of requests: a typed URL, parsed, redacted for display and checked for being on this host; and credentials.

Credentials and TLS files come from the environment and from files, never from the command line, and are never printed.
"""

import base64
import ipaddress
import posixpath
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from diag.core.errors import BadUsage, NoHostName
from diag.core.files import read_text
from diag.core.formatting import printable

PORTS = {"http": 80, "https": 443}
PAGE = "/metrics"
_PARTS = re.compile(r"(?:([^/?#@]*)://)?([^/?#]*)([^?#]*)(.*)", re.DOTALL)
"""Groups: scheme; user, host and port; path; query and fragment. It matches any text."""
_HOST = re.compile(r"(?:.*@)?(?P<name>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[^@]*))?", re.DOTALL)
_LEVELS = 5
"""Path levels below which the page is searched, besides the server's root."""
_DECODINGS = 5
MOST_BYTES = 2**20
"""Size limit of a file with a token or headers."""
WAYS = "DIAG_BEARER_TOKEN, DIAG_BASIC_AUTH or DIAG_HEADERS_FILE"


@dataclass(frozen=True)
class Address:
    """A target's URL in parts; `authorization` and `query` may be secrets.

    If the URL has a user without a password, credentials from the environment take precedence.
    """

    scheme: str
    host: str
    port: int
    path: str
    query: str = field(default="", repr=False)
    authorization: str = field(default="", repr=False)
    has_password: bool = False

    @property
    def instance(self) -> str:
        """host:port, as Prometheus names a target."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        """The URL up to the path, without credentials."""
        return f"{self.scheme}://{self.instance}"

    @property
    def shown(self) -> str:
        """The URL without credentials and query, safe to print and record."""
        return self.origin + self.path

    @property
    def candidates(self) -> tuple[str, ...]:
        """Paths (with the query) where the page may be: the given one, then /metrics below it and below its parents.

        For the URL of an API, http://gateway/model-a/v1/chat/completions, the page is at /model-a/metrics.
        """
        base = self.path.rstrip("/")
        paths = [base or PAGE]
        if base and not base.endswith(PAGE):
            parts = base.split("/")
            above = ["/".join(parts[:end]) for end in range(len(parts), 1, -1)][:_LEVELS]
            paths += [path if path.endswith(PAGE) else path + PAGE for path in (*above, "")]
        return tuple(f"{path}?{self.query}" if self.query else path for path in dict.fromkeys(paths))

    @property
    def is_loopback(self) -> bool:
        """Return True for a loopback address, which is never reached through a proxy."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")


def parse(text: str) -> Address:
    """Parse a URL or host:port; BadUsage, without a possible password, if it is invalid."""
    if not text.strip():
        raise BadUsage("the address of a server is empty: write http://HOST:PORT")
    scheme, authority, path, query = _parts(text)
    host = _HOST.fullmatch(authority)
    name, digits = (host["name"], host["port"] or "1") if host else ("", "1")
    is_port = _is_number(digits) and 0 < int(digits[:6]) < 2**16
    why = ""
    if _is_ipv6(text):
        why = "is an IPv6 address: put it into brackets, http://[ADDRESS]:PORT"
    elif scheme and scheme.lower() not in PORTS:
        why = "is not a URL of a server: only http and https are supported (a recording is named by its path)"
    elif "@" in path or ("@" in query and not is_port):
        why = "has an @ behind its host: in a password write %2F for /, %3F for ?, %23 for #, in a path %40 for @"
    elif not _is_host(name):
        raise NoHostName(f"{without_user(text)} has no valid host name")
    elif not is_port:
        why = "has no valid port: a port is a number from 1 to 65535"
    elif name.lower() in PORTS or (not scheme and text.lower().startswith(("http:", "https:"))):
        why = "is not a URL: write http://HOST:PORT"
    if why:
        raise BadUsage(f"{without_user(text)} {why}")
    url = urlsplit(text if "://" in text else f"http://{text}")
    port = PORTS[url.scheme] if url.port is None else url.port
    user = None if url.username is None else f"{unquote(url.username)}:{unquote(url.password or '')}"
    authorization = "" if user is None else basic(user)
    return Address(url.scheme, url.hostname or "", port, url.path, url.query, authorization, url.password is not None)


def _parts(text: str) -> Sequence[str]:
    match = _PARTS.fullmatch(text)
    return match.groups("") if match else ("",) * 4


def _is_host(name: str) -> bool:
    if name.startswith("["):
        return name.endswith("]") and _is_ipv6(name[1:-1])
    try:
        urlsplit(f"//{name}")
        name.encode("idna")
    except ValueError:
        return False
    return bool(name.strip(".-")) and name.isprintable() and not set(name) & set(" \"'<>\\^`{|}*[]%")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def without_user(text: str) -> str:
    """Redact a URL, valid or not, for display: remove everything that may be a user, a password or a query."""
    scheme, separator, rest = text.partition("://")
    if not scheme.isalnum():
        scheme, separator, rest = "", "", text
    _, authority, path, query = _parts(f"x://{rest}")
    host = authority.rpartition("@")[2]
    if "@" in path + query:  # the password contains /, ? or #, so its rest was split off into path or query
        host, path = "…", ""
    name, colon, port = host.partition(":")
    if colon and not (_is_number(port) and len(port) < 6) and not _is_ipv6(host) and not name.startswith("["):
        host = f"{name}:…"  # if the host is missing, this is the password
    return printable(scheme + separator + host + path, 80)


def is_within(path: str, prefix: str) -> bool:
    """Return True if a path stays at or below a prefix, however often a server decodes it before it resolves `..`.

    Backslashes count as slashes, and what follows a semicolon is left out, as some servers do. ValueError for bytes
    that are not UTF-8: some servers read other characters in them.
    """

    def resolved(path: str) -> str:
        """Return an absolute path that ends with a slash, without `.`, `..` and empty parts."""
        parts = re.sub(r";[^/]*", "", path.replace("\\", "/"))
        return posixpath.normpath("/" + parts.lstrip("/")).rstrip("/") + "/"

    for _ in range(_DECODINGS):
        if not resolved(path).startswith(resolved(prefix)):
            return False
        before, path, prefix = path, unquote(path, errors="strict"), unquote(prefix, errors="strict")
        if path == before:
            return True
    return False


def parse_all(texts: Sequence[str]) -> dict[str, Address]:
    """Parse addresses and return them by instance, without duplicates."""
    addresses = list(dict.fromkeys(parse(text) for text in texts))
    count = Counter(address.instance for address in addresses)
    named = {}
    for address in addresses:
        name = address.instance if count[address.instance] == 1 else address.instance + quote(address.path or "/")
        while name in named:
            name += "'"
        named[name] = address
    return named


def is_here(address: Address) -> bool:
    """Return True if the address belongs to this host: a socket can be bound to it."""
    if address.is_loopback:
        return True
    try:
        places = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown or invalid name
        return False
    for family, _, _, _, place in places:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((place[0], 0))
            return True
    return False


@dataclass(frozen=True)
class Credentials:
    """Headers and TLS files for every request; the headers are secrets.

    unverified: accept any certificate. server_name: the name in the certificate, if it differs from the host. Only a
    kubeconfig can set these two.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
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
