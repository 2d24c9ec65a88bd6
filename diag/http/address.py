"""Addresses of targets: what the user typed, as a URL for requests and as text that may be printed."""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, unquote, urlsplit

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.http.credentials import basic

PORTS = {"http": 80, "https": 443}
PAGE = "/metrics"
_LEVELS = 5
"""How many levels of a path are looked below, beside the server's root."""


@dataclass(frozen=True)
class Address:
    """A target's URL in parts; `authorization` and `query` may be secrets."""

    scheme: str
    host: str
    port: int
    path: str
    query: str = field(default="", repr=False)
    authorization: str = field(default="", repr=False)

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
        """What may be printed and recorded."""
        return self.origin + self.path

    @property
    def candidates(self) -> tuple[str, ...]:
        """Paths (with the query) where the page may be: that one, then below it and below what is above it.

        Of an API's address, http://gateway/model-a/v1/chat/completions, the page is at /model-a/metrics.
        """
        base = self.path.rstrip("/")
        paths = [base] if base.endswith(PAGE) else [base, *map(_metrics, _above(base))] if base else [PAGE]
        return tuple(f"{path}?{self.query}" if self.query else path for path in dict.fromkeys(paths))

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine, which no proxy may stand in front of."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")


def _above(path: str) -> list[str]:
    """A path, what is above it, and the root."""
    parts = path.split("/")
    return [*["/".join(parts[:end]) for end in range(len(parts), 1, -1)][:_LEVELS], ""]


def _metrics(path: str) -> str:
    return path if path.endswith(PAGE) else path + PAGE


def parse(text: str) -> Address:
    """Read a URL or host:port; BadUsage, without what may be a password in it, where it is not one."""
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        port = url.port or PORTS.get(url.scheme, 0)
    except ValueError as error:
        raise BadUsage(f"{_safe(text)} is not a URL: {error}") from error
    if url.scheme not in PORTS:
        raise BadUsage(f"{_safe(text)}: only http and https are supported")
    host = url.hostname or ""
    if not host or not host.isprintable() or set(host) & set(" \"'<>\\^`{|}*"):
        raise BadUsage(f"{_safe(text)} has no valid host name")
    return Address(url.scheme, host, port, url.path, url.query, _authorization(url))


def _authorization(url: SplitResult) -> str:
    if url.username is None:
        return ""
    return basic(f"{unquote(url.username)}:{unquote(url.password or '')}")


def _safe(text: str) -> str:
    scheme, separator, rest = text.rpartition("://")
    return printable(scheme + separator + rest.rpartition("@")[2].partition("?")[0], 80)


def parse_all(texts: Sequence[str]) -> dict[str, Address]:
    """The addresses by instance; one that is named twice counts once."""
    addresses = list(dict.fromkeys(parse(text) for text in texts))
    count = Counter(address.instance for address in addresses)
    named = {}
    for address in addresses:
        name = address.instance if count[address.instance] == 1 else address.instance + quote(address.path or "/")
        while name in named:
            name += "'"
        named[name] = address
    return named
