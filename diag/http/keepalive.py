"""A page of this very host over one connection that is kept, by the standard library: a fifth of the CPU of a Fetcher.

Only what is as it always is comes from here; whatever is odd is left to the Fetcher, which knows what to say of it.
"""

import http.client
import ssl
import threading
import time
from collections.abc import Mapping

from diag import __version__
from diag.http.address import Address
from diag.http.failure import Failure

_CHUNK = 2**18


class KeepAlive:
    """Asks one server; each wait may take `timeout` seconds, a whole page twice as much."""

    def __init__(self, address: Address, headers: Mapping[str, str], context: ssl.SSLContext, timeout: float) -> None:
        self._headers = {"User-Agent": f"diag/{__version__}", **headers}
        self._timeout = timeout
        self.sent = threading.Event()
        """Set from the moment a request is out until its answer is in."""
        if address.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=timeout, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)

    def get(self, path: str, accept: str, most: int) -> bytes | None:
        """The body of a whole, plain answer, None for anything else; Failure where none comes in time."""
        body = None
        try:
            self._connection.request("GET", path, headers={**self._headers, "Accept": accept})
            self.sent.set()
            body = self._body(self._connection.getresponse(), most)
        except TimeoutError as error:
            hint = "is the server overloaded or stopped?"
            raise Failure(f"took the connection and sent nothing for {self._timeout:g} s", hint) from error
        except (http.client.HTTPException, OSError):
            pass
        finally:
            self.sent.clear()
            if body is None:
                self._connection.close()
        return body

    def _body(self, response: http.client.HTTPResponse, most: int) -> bytes | None:
        if response.status != 200 or response.getheader("Content-Encoding"):
            return None
        body, end = bytearray(), time.monotonic() + 2 * self._timeout
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > most or time.monotonic() > end:
                return None
        whole = not response.length
        response.close()  # only then the connection takes the next request
        return bytes(body) if whole else None
