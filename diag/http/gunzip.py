"""Decompression in small steps: no input, however hostile, is held in memory as a whole."""

import zlib
from collections.abc import Iterable, Iterator

STEP = 256 * 1024
FLUSHED = b"\x00\x00\xff\xff"
"""zlib's mark of a flush: what stands before it can be decompressed whole."""
_BITE = 4096
_GZIP = 31  # zlib's wbits for a gzip header


class Gunzip:
    """Decompresses gzip, several members in a row included, and yields at most `STEP` bytes at a time.

    Raises zlib.error where the data are not gzip.
    """

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what this much more input gives; where it is damaged, what stands before the damage comes first."""
        for start in range(0, len(data), _BITE):
            yield from self._feed(data[start : start + _BITE])

    def _feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP)
            self._begun = True
            yield self._member.decompress(data, STEP)
            data = self._member.unconsumed_tail or self._member.unused_data

    @property
    def complete(self) -> bool:
        """Whether the input so far ended where a member ends."""
        return self._member.eof or not self._begun


def cut_at_flushes(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The compressed bytes; a piece ends behind every mark of a flush."""
    rest = b""
    for chunk in chunks:
        *flushed, rest = (rest + chunk).split(FLUSHED)
        yield from (piece + FLUSHED for piece in flushed)
        yield rest[:-3]
        rest = rest[-3:]  # a mark may begin here
    yield rest
