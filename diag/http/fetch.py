"""One request to one server, bounded in time and size (the only importer of httpx)."""

import asyncio
import ssl
import time
import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urljoin, urlsplit

import httpx

from diag import __version__
from diag.core.formatting import printable
from diag.exposition.lines import MOST_BYTES
from diag.http import failure
from diag.http.address import Address
from diag.http.credentials import Credentials
from diag.http.failure import Failure
from diag.http.gunzip import Gunzip

_HOPS = 5
_BROKEN = (httpx.HTTPError, httpx.InvalidURL, zlib.error, OSError)  # httpx lets some errors of TLS through as they are
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Answer:
    """A whole answer, decoded; `first_chunk` is when its body began, in seconds from the request on."""

    status: int
    body: bytes
    first_chunk: float | None = None


class Fetcher:
    """Asks one server. Connecting and each wait may take `timeout` seconds, a whole request twice as much.

    Every request has its own connection: one that is kept may be closed by the server just as it is used again.
    """

    def __init__(self, address: Address, access: Credentials, context: ssl.SSLContext, timeout: float) -> None:
        self._origin = address.origin
        self._timeout = timeout
        headers = dict(access.headers) | ({"Authorization": address.authorization} if address.authorization else {})
        self._has_credentials = bool(headers)
        mutual = address.scheme == "https" and not access.client_cert
        self._reset_hint = f"if it wants a client certificate, {failure.MUTUAL}" if mutual else ""
        self._client = httpx.AsyncClient(
            headers={"User-Agent": f"diag/{__version__}", "Accept-Encoding": "gzip", **headers},
            verify=context,
            trust_env=not address.is_loopback,
            timeout=timeout,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def get(self, path: str, accept: str = "*/*", most: int = MOST_BYTES) -> Answer:
        """Get a path and follow redirects on the same server; Failure where there is no whole answer."""
        return await self._ask("GET", path, most, 2 * self._timeout, headers={"Accept": accept})

    async def post(self, path: str, body: object, seconds: float, most: int = MOST_BYTES) -> Answer:
        """Post JSON; it may take so many seconds."""
        return await self._ask("POST", path, most, seconds, json=body, timeout=seconds)

    def refusal(self, status: int) -> Failure:
        """What an answer with an error status means."""
        if status in (401, 403):
            return failure.of_credentials(status, self._has_credentials)
        return Failure(f"answered HTTP {status}", "is this the address of a vLLM server?")

    async def _ask(self, method: str, path: str, most: int, seconds: float, **how: Any) -> Answer:
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(method, path, most, how)
        except TimeoutError as error:
            raise Failure(f"was still answering after {seconds:g} s", "is the server overloaded?") from error
        except _BROKEN as error:
            raise self._failure(error) from error

    async def _follow(self, method: str, path: str, most: int, how: dict[str, Any]) -> Answer:
        start = time.monotonic()
        for _ in range(_HOPS):
            async with self._client.stream(method, self._origin + path, **how) as response:
                if response.status_code not in _REDIRECTS or "location" not in response.headers:
                    body, began = await _body(response, most)
                    return Answer(response.status_code, body, began and began - start)
                path = self._same_server(path, response.headers["location"])
        raise Failure("redirects in circles", "give the address where it ends")

    def _same_server(self, path: str, location: str) -> str:
        """The path of a redirect; credentials must not follow it to another server."""
        try:
            here, there = urlsplit(self._origin), urlsplit(urljoin(self._origin + path, location))
            same = (here.scheme, here.hostname) == (there.scheme, there.hostname) and _port(here) == _port(there)
        except ValueError as error:
            raise Failure("redirects to something that is no URL") from error
        if not same:
            where = printable(f"{there.scheme}://{there.netloc.rpartition('@')[2]}", 80)
            raise Failure(f"redirects to another server ({where}), which is not followed", "ask that one")
        return there.path + (f"?{there.query}" if there.query else "")

    def _failure(self, error: Exception) -> Failure:
        causes = list(failure.causes(error))
        return failure.of_tls(causes) or failure.of_network(causes, self._reset_hint) or self._protocol_failure(error)

    def _protocol_failure(self, error: Exception) -> Failure:
        seconds = f"{self._timeout:g} s"
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            return Failure(f"no connection within {seconds}", "is the host up?", answered=False)
        if isinstance(error, httpx.ReadTimeout):
            hint = "is the server overloaded or stopped?"
            return Failure(f"took the connection and sent nothing for {seconds}", hint)
        if isinstance(error, zlib.error):
            return Failure("sent damaged gzip")
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error):
            broke = "peer closed" in str(error)
            return Failure("broke off in the middle of its answer" if broke else "answered something that is not HTTP")
        return Failure("closed the connection without an answer", "is it https?")


def _port(url: Any) -> int:
    return url.port or {"http": 80, "https": 443}.get(url.scheme, 0)


async def _body(response: httpx.Response, most: int) -> tuple[bytes, float | None]:
    """The decoded body and when it began; a small page that unpacks to a huge one stops at the limit."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip"):
        raise Failure(f"answered in an encoding that was not asked for ({printable(encoding, 20)})")
    gunzip = Gunzip() if "gzip" in encoding else None
    body, began = bytearray(), None
    async for chunk in response.aiter_raw():
        began = began or time.monotonic()
        for part in gunzip.feed(chunk) if gunzip else (chunk,):
            body += part
            if len(body) > most:
                raise Failure(f"answered a page of more than {most >> 20} MiB")
    if gunzip and not gunzip.complete:
        raise Failure("broke off in the middle of its answer")
    return bytes(body), began
