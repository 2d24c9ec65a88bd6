"""Decompression in small steps: no input, however hostile, is expanded in memory as a whole."""

import zlib
from collections.abc import Iterable, Iterator

STEP = 256 * 1024
FLUSHED = b"\x00\x00\xff\xff"
"""zlib's mark of a flush: everything before it can be decompressed completely."""
_BITE = 4096
_GZIP = 31  # zlib's wbits for a gzip header


class Gunzip:
    """Decompresses gzip, also several members in a row, and yields at most `STEP` bytes at a time.

    Raises zlib.error if the data are not gzip.
    """

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompress further input; if it is damaged, the content before the damage is yielded first."""
        for start in range(0, len(data), _BITE):
            rest = data[start : start + _BITE]
            while rest:
                if self._member.eof:
                    self._member = zlib.decompressobj(_GZIP)
                self._begun = True
                yield self._member.decompress(rest, STEP)
                rest = self._member.unconsumed_tail or self._member.unused_data

    @property
    def complete(self) -> bool:
        """Return True if the input so far ends where a member ends."""
        return self._member.eof or not self._begun


def cut_at_flushes(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split compressed bytes into pieces that end after each mark of a flush."""
    rest = b""
    for chunk in chunks:
        *flushed, rest = (rest + chunk).split(FLUSHED)
        yield from (piece + FLUSHED for piece in flushed)
        yield rest[:-3]
        rest = rest[-3:]  # a mark may begin here
    yield rest
