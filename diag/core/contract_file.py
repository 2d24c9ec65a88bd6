"""diag.toml: read, and refused in one sentence that names the place. What it does not say keeps its default.

[contract]    ttft_seconds = 2.5    ...      the entries of `Contract`
[limits.kv_eviction_cascade]                 by the signal's name, as `diag explain` prints it; or "escalates"
"preemptions / finished request" = 0.3
[site]        labels = ["cluster", "pod"]    the entries of `Site`
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from diag.core.contract import Contract, Site, names
from diag.core.errors import BadContract


def find(explicit: Path | None) -> Contract:
    """The contract named on the command line, else ./diag.toml where there is one, else the defaults."""
    here = Path("diag.toml")
    if explicit is None and not here.is_file():
        return Contract()
    return read(explicit or here)


def read(path: Path) -> Contract:
    """The contract in a diag.toml; raises BadContract in one sentence that names the place."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadContract(f"{path}: cannot be read as TOML: {error}") from error
    return _File(path, text, tables).contract()


@dataclass(frozen=True)
class _File:
    """A diag.toml: what it says, and where it says it."""

    path: Path
    text: str
    tables: Mapping[str, Any]

    def contract(self) -> Contract:
        for name in self.tables:
            self._known(name, ("contract", "limits", "site"), "", "table")
        stated = self._table("contract")
        buckets = self._buckets(stated.pop("buckets", []))
        entries = {name: self._entry(name, value, buckets) for name, value in stated.items()}
        return Contract(
            **entries, site=self._site(), limits=self._limits(), origin=str(self.path), stated=frozenset(entries)
        )

    def bad(self, table: str, key: str, says: str) -> BadContract:
        """The refusal, with the line that it is about."""
        return BadContract(f"{self.path}{self._line(table, key)}: [{table}] {says}")

    def _line(self, table: str, key: str) -> str:
        """The line of a key, ":3"; empty where the key is written in a way that only a parser finds."""
        now = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[([^]]*)\]", line)
            now = header[1].strip() if header else now
            if (now == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line)) or (header and now == key):
                return f":{number}"
        return ""

    def _table(self, name: str, inside: Mapping[str, Any] | None = None) -> dict[str, Any]:
        above, _, key = name.rpartition(".")
        found = (self.tables if inside is None else inside).get(key, {})
        if not isinstance(found, dict):
            raise BadContract(f"{self.path}{self._line(above, key)}: [{name}] must be a table")
        return dict(found)

    def _known(self, name: str, those: tuple[str, ...] | list[str], table: str, kind: str = "entry") -> None:
        if name not in those:
            says = f"has no {kind} '{name}'; it may have {', '.join(those)}"
            raise self.bad(table, name, says) if table else BadContract(f"{self.path}{self._line('', name)}: {says}")

    def _number(self, table: str, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.bad(table, key, f"{key} must be a number above 0, not {value!r}")
        return float(value)

    def _buckets(self, value: object) -> list[float]:
        if not isinstance(value, list):
            raise self.bad("contract", "buckets", f"buckets must be a list of numbers, not {value!r}")
        return [self._number("contract", "buckets", each) for each in value]

    def _entry(self, name: str, value: object, buckets: list[float]) -> float:
        self._known(name, [*names(), "buckets"], "contract")
        number = self._number("contract", name, value)
        edges = next(each.metadata["edges"] for each in fields(Contract) if each.name == name)
        if edges and number not in (*edges, *buckets):
            every = ", ".join(f"{each:g}" for each in edges)
            says = f"{name} must be an edge of vLLM's histogram, {every}, or one of `buckets`, not {number:g}"
            raise self.bad("contract", name, says)
        if name in ("objective", "kv_pool_fill") and number >= 1:
            raise self.bad("contract", name, f"{name} must be a share below 1, not {number:g}")
        return number

    def _limits(self) -> dict[str, dict[str, float]]:
        limits = self._table("limits")
        tables = {incident: self._table(f"limits.{incident}", limits) for incident in limits}
        return {
            incident: {signal: self._limit(f"limits.{incident}", signal, value) for signal, value in table.items()}
            for incident, table in tables.items()
        }

    def _limit(self, table: str, signal: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise self.bad(table, signal, f"{signal} must be a number, not {value!r}")
        return float(value)

    def _site(self) -> Site:
        table = self._table("site")
        for name in table:
            self._known(name, [each.name for each in fields(Site)], "site")
        checks: dict[str, Callable[[str, object], Any]] = {"labels": self._labels, "gpu_join": self._labels}
        return Site(**{name: checks.get(name, self._url)(name, value) for name, value in table.items()})

    def _labels(self, name: str, value: object) -> tuple[str, ...]:
        if not (isinstance(value, list) and value and all(_is_label(each) for each in value)):
            raise self.bad("site", name, f"{name} must be a list of label names, not {value!r}")
        if len(set(value)) < len(value) or {"engine", "gpu", "le"} & set(value):
            raise self.bad("site", name, f"{name} must name each label once, and neither engine, gpu nor le")
        return tuple(value)

    def _url(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s\"'{}]+", value):
            raise self.bad("site", name, f"{name} must be a URL that begins with http:// or https://, not {value!r}")
        return value.rstrip("/")


def _is_label(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", value))
