"""Why a request gave no usable answer, in words."""

import socket
import ssl
from collections.abc import Iterator, Sequence

from diag.core.formatting import printable
from diag.http.credentials import WAYS

MUTUAL = "set DIAG_CLIENT_CERT and DIAG_CLIENT_KEY"


class Failure(Exception):
    """A request without a usable answer: the reason, what to try, and whether somebody answered at all."""

    def __init__(self, reason: str, hint: str = "", answered: bool = True) -> None:
        super().__init__(reason)
        self.hint = hint
        self.answered = answered


def sentence(shown: str, error: Failure) -> str:
    """What the user reads: who, what, and what to try."""
    who = f"{shown} {error}" if error.answered else f"nothing answers at {shown}: {error}"
    return f"{who}; {error.hint}" if error.hint else who


def of_credentials(status: int, were_given: bool) -> Failure:
    """What HTTP 401 and 403 mean."""
    if were_given:
        return Failure(f"refuses the credentials it was given (HTTP {status})", f"check {WAYS}")
    return Failure(f"wants credentials (HTTP {status})", f"set {WAYS}")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and everything that led to it: a library's own errors hide what the system said."""
    while error is not None:
        yield error
        for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from causes(each)
        error = error.__cause__ or error.__context__


def of_tls(errors: Sequence[BaseException]) -> Failure | None:
    """What went wrong with TLS, if it was that."""
    certificate = next((each for each in errors if isinstance(each, ssl.SSLCertVerificationError)), None)
    if certificate:
        why = printable(certificate.verify_message, 80)
        return Failure(f"has a certificate that is not trusted ({why})", "set DIAG_CA_FILE")
    if not any(isinstance(each, ssl.SSLError) for each in errors):
        return None
    text = " ".join(map(str, errors)).upper().replace(" ", "_")
    if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
        return Failure("wants a client certificate that it trusts", MUTUAL)
    if "UNKNOWN_CA" in text:
        return Failure("does not trust the client certificate", "check DIAG_CLIENT_CERT")
    return Failure("does not speak TLS as expected", "is it http instead of https?")


def of_network(errors: Sequence[BaseException], reset_hint: str) -> Failure | None:
    """What went wrong with the connection, if the system said so."""
    if any(isinstance(each, socket.gaierror) for each in errors):
        return Failure("no host of that name is known", "is the name right?", answered=False)
    broken = next((each for each in errors if isinstance(each, OSError) and each.errno), None)
    if isinstance(broken, ConnectionRefusedError):
        return Failure("connection refused", "is the server up, is the port right?", answered=False)
    if isinstance(broken, ConnectionResetError | BrokenPipeError):
        return Failure("reset the connection", reset_hint)
    if broken is not None:
        return Failure((broken.strerror or str(broken)).lower(), "is the host up?", answered=False)
    return None
