"""Failures in words: the one table from what goes wrong with a request to what a user reads."""

import http.client
import socket
import ssl
import zlib
from dataclasses import dataclass, replace

from diag.core.formatting import printable
from diag.http.credentials import WAYS

MUTUAL = "set DIAG_CLIENT_CERT and DIAG_CLIENT_KEY"


class Failure(Exception):
    """A request without a usable response: the reason, what to try, and whether a server was reached at all."""

    def __init__(self, reason: str, hint: str = "", reached: bool = True) -> None:
        super().__init__(reason)
        self.hint = hint
        self.reached = reached


class WrongAnswer(Failure):
    """Something answers there, but not with what was asked for: an HTTP status, a missing page."""


class UnknownName(Failure):
    """No host of that name is known."""


@dataclass(frozen=True)
class Hints:
    """What to try, where that depends on the server; `cut` is for a connection that ends before the response."""

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


def for_server(hints: Hints, encrypted: bool, has_certificate: bool) -> Hints:
    """The hints for one server: who closes an encrypted connection may miss a client certificate."""
    mutual = "" if has_certificate else f"if it requires a client certificate, {MUTUAL}"
    return replace(hints, cut=mutual if encrypted else "is it https?")


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
"""Exception, reason, hint, whether the server was reached; special ones before general ones."""
_NAMES = (socket.gaierror, UnicodeError)
EXCEPTIONS = (OSError, http.client.HTTPException, UnicodeError, zlib.error)
"""What a request may raise."""


def from_exception(error: Exception, hints: Hints) -> Failure:
    """What an exception means."""
    tls = _of_tls(error) if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError) else None
    if tls:
        return tls
    for kind, reason, hint, reached in _MEANINGS:
        if isinstance(error, kind):
            failure = UnknownName if kind in _NAMES else Failure
            return failure(reason, hint.format(cut=hints.cut, address=hints.address), reached)
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Failure(printable(text.lower(), 80), "is the host up?", reached=False)


def _of_tls(error: ssl.SSLError) -> Failure:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = printable(error.verify_message, 80)
        return Failure(f"has a certificate that is not trusted ({why})", "set DIAG_CA_FILE")
    text = str(error).upper().replace(" ", "_")
    if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
        return Failure("requires a client certificate that it trusts", MUTUAL)
    if "UNKNOWN_CA" in text:
        return Failure("does not trust the client certificate", "check DIAG_CLIENT_CERT")
    return Failure("does not speak TLS", "is it http instead of https?")


def no_connection(seconds: float) -> Failure:
    """The connection took too long."""
    return Failure(f"no connection within {seconds:g} s", "is the host up, does its name resolve?", reached=False)


def silent(seconds: float) -> Failure:
    """Connected, but not a byte came back."""
    return Failure(
        f"accepted the connection but sent nothing for {seconds:g} s", "is the server overloaded or stopped?"
    )


def stopped(seconds: float) -> Failure:
    """A response that began and did not go on."""
    return Failure(
        f"stopped sending for {seconds:g} s in the middle of its response", "is the server overloaded or stopped?"
    )


def too_long(seconds: float, hints: Hints) -> Failure:
    """A response that keeps coming but does not end."""
    return Failure(f"did not finish its response within {seconds:g} s", hints.too_long)


def too_large(most_bytes: int, hints: Hints) -> Failure:
    """A response of a size that is refused."""
    return Failure(f"sent more than {most_bytes >> 20} MiB", hints.too_large)


def of_proxy() -> Failure:
    """The proxy that the environment names is of no use."""
    return Failure("cannot be reached through the proxy", "check http_proxy, https_proxy and no_proxy")


def of_credentials(status: int, were_given: bool) -> Failure:
    """What HTTP 401 and 403 mean."""
    if were_given:
        return WrongAnswer(f"rejects the credentials (HTTP {status})", f"check {WAYS}")
    return WrongAnswer(f"requires credentials (HTTP {status})", f"set {WAYS}")


def sentence(shown: str, error: Failure) -> str:
    """What the user reads: which server, what went wrong, and what to try."""
    what = f"{shown} {error}" if error.reached else f"cannot connect to {shown}: {error}"
    return f"{what}; {error.hint}" if error.hint else what
