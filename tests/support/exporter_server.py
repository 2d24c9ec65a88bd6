"""A server that serves pages as the exporter does, and a real page of vLLM's."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.paths import RECORDINGS

from diag.exporter.http_server import CONTENT_TYPE, Answer, Listen, PageServer, Responder


class Saying:
    """Answers the seconds it was given, and something at its root."""

    def answer(self, path: str, seconds: float) -> Answer:
        found = {"/metrics": Answer(200, b"seconds %.2f\n" % seconds, CONTENT_TYPE), "/": Answer(200, b"hello\n")}
        return found.get(path, Answer(404, b"it has /metrics\n"))


ANYWHERE = Listen("127.0.0.1", 0)


SAYING = Saying()


@contextmanager
def listening(listen: Listen = ANYWHERE, answering: Responder = SAYING, limit: float = 8.0) -> Iterator[str]:
    """The server while it runs; its URL."""
    with PageServer(listen, answering, limit) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"{'https' if server.files.access().context else 'http'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def vllms_page() -> bytes:
    """The first page of a recording of a real server."""
    text = gzip.decompress((RECORDINGS / "kv_cascade" / "metrics.prom.gz").read_bytes())
    return text.split(b"# scrape ")[1].partition(b"\n")[2]
