"""An amount of memory between two bounds."""

from dataclasses import dataclass
from typing import Self

from diag.core.formatting import GIB


@dataclass(frozen=True)
class ByteRange:
    """Bytes, at least and at most."""

    low: int
    high: int

    @classmethod
    def gib(cls, bounds: tuple[float, float]) -> Self:
        """Of numbers in GiB."""
        return cls(round(bounds[0] * GIB), round(bounds[1] * GIB))

    @classmethod
    def of(cls, size: int) -> Self:
        """A size that is known."""
        return cls(size, size)

    def plus(self, *others: "ByteRange") -> "ByteRange":
        """Together with others."""
        return ByteRange(self.low + sum(other.low for other in others), self.high + sum(other.high for other in others))

    def less(self, *others: "ByteRange") -> "ByteRange":
        """What is left after others were taken."""
        return ByteRange(self.low - sum(other.high for other in others), self.high - sum(other.low for other in others))
