"""Failures in words: the sentence that the user reads for each way in which a request can fail."""

import http.client
import socket
import ssl
import zlib
from dataclasses import dataclass

from diag.core.formatting import printable

MUTUAL = "set DIAG_CLIENT_CERT and DIAG_CLIENT_KEY"


class Failure(Exception):
    """A request without a usable response: the reason, a hint, and whether a server was reached at all."""

    def __init__(self, reason: str, hint: str = "", reached: bool = True) -> None:
        super().__init__(reason)
        self.hint = hint
        self.reached = reached


class WrongAnswer(Failure):
    """A server answers, but not with the requested content: an HTTP status, a missing page."""


SCALES = "answered HTTP 503: it changes the number of its engines (elastic expert parallelism)"
"""The reason of a failed scrape of such a vLLM: it refuses every request in these words until it has switched."""


class UnknownName(Failure):
    """The host name cannot be resolved."""


@dataclass(frozen=True)
class Hints:
    """Hints that depend on the server; `cut` is for a connection that ends before the response."""

    address: str
    too_long: str = "is the server overloaded?"
    too_large: str = ""
    cut: str = ""


VLLM = Hints("is this the address of a vLLM server?")
PROMETHEUS = Hints(
    "is this the address of a Prometheus, including its path (for example https://host/prometheus)?",
    too_long="query fewer servers or a shorter time range",
    too_large="query fewer servers or a shorter time range",
)


_MEANINGS: tuple[tuple[type[Exception], str, str, bool], ...] = (
    (socket.gaierror, "unknown host name", "is the name right?", False),
    (UnicodeError, "invalid host name", "is the name right?", False),
    (ConnectionRefusedError, "connection refused", "is the server up, is the port right?", False),
    (http.client.RemoteDisconnected, "closed the connection without a response", "{cut}", True),
    (ssl.SSLEOFError, "closed the encrypted connection", "{cut}", True),
    (ConnectionError, "reset the connection", "{cut}", True),
    (http.client.IncompleteRead, "closed the connection in the middle of its response", "", True),
    (http.client.HTTPException, "sent something that is not HTTP", "{address}", True),
    (zlib.error, "sent a damaged gzip body", "", True),
)
"""Exception, reason, hint, whether the server was reached; subclasses come first."""
EXCEPTIONS = (OSError, http.client.HTTPException, UnicodeError, zlib.error)
"""Exceptions that a request may raise."""


def from_exception(error: Exception, hints: Hints) -> Failure:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = printable(error.verify_message, 80)
        return Failure(f"has a certificate that is not trusted ({why})", "set DIAG_CA_FILE")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        text = str(error).upper().replace(" ", "_")
        if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
            return Failure("requires a client certificate that it trusts", MUTUAL)
        if "UNKNOWN_CA" in text:
            return Failure("does not trust the client certificate", "check DIAG_CLIENT_CERT")
        return Failure("does not speak TLS", "is it http instead of https?")
    for kind, reason, hint, reached in _MEANINGS:
        if isinstance(error, kind):
            failure = UnknownName if kind in (socket.gaierror, UnicodeError) else Failure
            return failure(reason, hint.format(cut=hints.cut, address=hints.address), reached)
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Failure(printable(text.lower(), 80), "is the host up?", reached=False)


def no_connection(seconds: float) -> Failure:
    return Failure(f"no connection within {seconds:g} s", "is the host up, does its name resolve?", reached=False)


def silent(seconds: float, has_begun: bool = False) -> Failure:
    """The server accepted the connection and sent no byte, or its response has begun, then stalled."""
    nothing = f"accepted the connection but sent nothing for {seconds:g} s"
    stalled = f"stopped sending for {seconds:g} s in the middle of its response"
    return Failure(stalled if has_begun else nothing, "is the server overloaded or stopped?")


def too_long(seconds: float, hints: Hints) -> Failure:
    """The response was still arriving at the deadline."""
    return Failure(f"did not finish its response within {seconds:g} s", hints.too_long)


def too_large(most_bytes: int, hints: Hints) -> Failure:
    return Failure(f"sent more than {most_bytes >> 20} MiB", hints.too_large)


def unusable_proxy() -> Failure:
    return Failure("cannot be reached through the proxy", "check http_proxy, https_proxy and no_proxy")


def sentence(shown: str, error: Failure) -> str:
    """Format a failure for the user: the server, the reason and the hint."""
    what = f"{shown} {error}" if error.reached else f"cannot connect to {shown}: {error}"
    return f"{what}; {error.hint}" if error.hint else what
