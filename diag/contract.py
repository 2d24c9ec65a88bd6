"""The measurement contract: what this site tolerates, from diag.toml.

A limit that depends on what users were promised is a name in a declaration and a number here. Whatever diag.toml does
not say keeps its default, and the report prints it as one.
"""

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from diag.errors import BadContract


@dataclass(frozen=True)
class Contract:
    """One entry per placeholder that an expression may use; `origin` says where it was read, "" for the defaults."""

    freeze_seconds: float = field(
        default=1.0,
        metadata={"says": "a gap between two tokens that users call a freeze; an edge of vLLM's histograms"},
    )
    queue_seconds: float = field(
        default=1.0, metadata={"says": "the mean wait for one's turn from which on users call it a queue"}
    )
    kv_pool_fill: float = field(
        default=0.9, metadata={"says": "the share of the KV pool that a proposed --max-num-seqs may fill"}
    )
    origin: str = ""
    stated: frozenset[str] = frozenset()

    def values(self) -> dict[str, float]:
        """Every entry by its placeholder's name."""
        return {name: getattr(self, name) for name in names()}

    def limit(self, limit: float | str) -> float:
        """A condition's limit as a number: itself, or the entry of that name."""
        return self.values()[limit] if isinstance(limit, str) else limit

    def lines(self) -> list[str]:
        """One line per entry, a default printed as a default."""
        marks = {name: self.origin if name in self.stated else "default" for name in names()}
        return [f"{name} = {value:g} ({marks[name]})" for name, value in self.values().items()]


def names() -> list[str]:
    """The entries that diag.toml may have."""
    return [each.name for each in fields(Contract) if each.metadata]


def read(path: Path) -> Contract:
    """The contract in a diag.toml; raises BadContract in one sentence."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("contract", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadContract(f"{path}: cannot be read as TOML: {error}") from error
    if not isinstance(table, dict):
        raise BadContract(f"{path}: [contract] must be a table")
    return Contract(
        **{name: _entry(path, name, value) for name, value in table.items()}, origin=str(path), stated=frozenset(table)
    )


def find(explicit: Path | None) -> Contract:
    """The contract named on the command line, else ./diag.toml where there is one, else the defaults."""
    here = Path("diag.toml")
    if explicit is None and not here.is_file():
        return Contract()
    return read(explicit or here)


def _entry(path: Path, name: str, value: object) -> float:
    if name not in names():
        raise BadContract(f"{path}: [contract] has no entry '{name}'; it may have {', '.join(names())}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadContract(f"{path}: [contract] {name} must be a number above 0, not {value!r}")
    return float(value)
