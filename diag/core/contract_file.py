"""Reads diag.toml; an invalid one is refused in one sentence that names the line. A missing key keeps its default.

[contract]    ttft_seconds = 2.5    ...      SLOs: the entries of `Contract`
[limits.kv_eviction_cascade]                 thresholds, by the signal that `diag explain` names, or "escalates"
"preemptions / finished request" = 0.3
[site]        labels = ["cluster", "pod"]    the entries of `Site`
[lint]        ignore = ["no_model"]          ids of the rules whose findings `diag lint` drops
[baseline]    file = "normal.json"           what is normal here, by `diag baseline save`; beside diag.toml
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.contract import Contract, Site, names
from diag.core.errors import BadContract
from diag.core.files import exists
from diag.core.formatting import printable
from diag.core.metric_prefix import ANY
from diag.core.toml import load


def find(explicit: Path | None) -> Contract:
    """The file named on the command line, else ./diag.toml where there is one, else the defaults."""
    here = Path("diag.toml")
    if explicit is None and not exists(here):
        return Contract()
    return read(explicit or here)


def read(path: Path) -> Contract:
    """The SLOs, thresholds and names in a diag.toml; BadContract, with the line, where it is invalid."""
    try:
        text, tables = load(path)
    except OSError as error:
        raise BadContract(f"{printable(str(path))} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadContract(f"{path} is not valid TOML: {error}") from error
    return _File(path, text, tables).contract()


class _File(NamedTuple):
    """A diag.toml: its tables, and its text to find the line of a mistake."""

    path: Path
    text: str
    tables: Mapping[str, Any]

    def contract(self) -> Contract:
        for name in self.tables:
            self._known(name, ("contract", "limits", "site", "lint", "baseline"), "")
        stated = self._table("contract")
        buckets = self._buckets(stated.pop("buckets", []))
        entries = {name: self._entry(name, value, buckets) for name, value in stated.items()}
        return Contract(
            **entries,
            site=self._site(),
            limits=self._limits(),
            ignored_rules=self._ignored_rules(),
            baseline=self._baseline(),
            origin=str(self.path),
            stated=frozenset(entries),
        )

    def bad(self, table: str, key: str, reason: str) -> BadContract:
        """The refusal, with the line of the key."""
        return BadContract(f"{self.path}{self._line(table, key)}: [{table}] {reason}")

    def _line(self, table: str, key: str) -> str:
        """The line of a key, ":3"; empty where the key is written in a way that only a parser finds."""
        current = ""
        assignment = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[([^]]*)\]", line)
            current = header[1].strip() if header else current
            if (current == table and assignment.match(line)) or (header and current == key):
                return f":{number}"
        return ""

    def _table(self, name: str, inside: Mapping[str, Any] | None = None) -> dict[str, Any]:
        above, _, key = name.rpartition(".")
        found = (self.tables if inside is None else inside).get(key, {})
        if not isinstance(found, dict):
            raise BadContract(f"{self.path}{self._line(above, key)}: [{name}] must be a table")
        return dict(found)

    def _known(self, name: str, known: Sequence[str], table: str) -> None:
        if name in known:
            return
        if table:
            raise self.bad(table, name, f"has no key '{name}'; its keys are {', '.join(known)}")
        tables = ", ".join(f"[{table}]" for table in known)
        raise BadContract(f"{self.path}{self._line('', name)}: there is no table [{name}]; the tables are {tables}")

    def _number(self, table: str, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.bad(table, key, f"{key} must be a number above 0, not {_shown(value)}")
        return float(value)

    def _buckets(self, value: object) -> list[float]:
        if not isinstance(value, list):
            raise self.bad("contract", "buckets", f"buckets must be a list of numbers, not {_shown(value)}")
        return [self._number("contract", "buckets", bucket) for bucket in value]

    def _entry(self, name: str, value: object, buckets: list[float]) -> float:
        self._known(name, [*names(), "buckets"], "contract")
        number = self._number("contract", name, value)
        entry = next(field.metadata for field in fields(Contract) if field.name == name)
        if entry["buckets"] and number not in (*entry["buckets"], *buckets):
            known = ", ".join(f"{bucket:g}" for bucket in entry["buckets"])
            reason = f"{name} must be a bucket of vLLM's histogram ({known}) or listed in `buckets`, not {number:g}"
            raise self.bad("contract", name, reason)
        if entry["unit"] == "share" and number >= 1:
            raise self.bad("contract", name, f"{name} must be a fraction below 1 (0.99 is 99 %), not {number:g}")
        return number

    def _limits(self) -> dict[str, dict[str, float]]:
        limits = self._table("limits")
        tables = {incident: self._table(f"limits.{incident}", limits) for incident in limits}
        return {
            incident: {signal: self._limit(f"limits.{incident}", signal, value) for signal, value in table.items()}
            for incident, table in tables.items()
        }

    def _limit(self, table: str, signal: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.bad(table, signal, f"{signal} must be a number, not {_shown(value)}")
        return float(value)

    def _ignored_rules(self) -> dict[str, str]:
        table = self._table("lint")
        for name in table:
            self._known(name, ("ignore",), "lint")
        ignored = table.get("ignore", [])
        if not (isinstance(ignored, list) and all(isinstance(rule, str) for rule in ignored)):
            raise self.bad("lint", "ignore", f"ignore must be a list of lint rules, not {_shown(ignored)}")
        return dict.fromkeys(ignored, f"{self.path}{self._line('lint', 'ignore')}")

    def _baseline(self) -> str:
        """The file, as it is found from the folder of this one."""
        table = self._table("baseline")
        for name in table:
            self._known(name, ("file",), "baseline")
        name = table.get("file", "")
        if not isinstance(name, str):
            raise self.bad("baseline", "file", f"file must be the name of a file, not {_shown(name)}")
        return str(self.path.parent / name) if name else ""

    def _site(self) -> Site:
        table = self._table("site")
        for name in table:
            self._known(name, Site._fields, "site")
        checks: dict[str, Callable[[str, object], Any]] = {
            "labels": self._labels,
            "gpu_join": self._labels,
            "prefix": self._prefix,
        }
        return Site(**{name: checks.get(name, self._url)(name, value) for name, value in table.items()})

    def _labels(self, name: str, value: object) -> tuple[str, ...]:
        if not (isinstance(value, list) and value and all(_is_label(label) for label in value)):
            raise self.bad("site", name, f"{name} must be a list of label names, not {_shown(value)}")
        if len(set(value)) < len(value) or {"engine", "gpu", "le"} & set(value):
            raise self.bad("site", name, f"{name} must list each label once, and none of engine, gpu and le")
        return tuple(value)

    def _prefix(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(ANY, value):
            raise self.bad(
                "site", name, f'{name} must end in vllm: or vllm_, such as "kserve_vllm:", not {_shown(value)}'
            )
        return value

    def _url(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s\"'{}]+", value):
            raise self.bad("site", name, f"{name} must be a URL with http:// or https://, not {_shown(value)}")
        return value.rstrip("/")


def _is_label(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", value))


def _shown(value: object) -> str:
    return printable(repr(value), 60)
