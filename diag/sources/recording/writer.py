"""Recording live servers: pages are written as they come in, without secrets, and judged just as they are written."""

import json
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from diag import __version__
from diag.core.errors import BadRecording, BadUsage
from diag.core.formatting import printable
from diag.exposition.lines import CUT, is_cut
from diag.sources.live.scrape import ScrapePlan, Watch
from diag.sources.observation import Observation
from diag.sources.recording.reader import ABOUT, PAGES
from diag.vllm.command.secrets import hidden, redact
from diag.vllm.server.config import ServerFacts

_HOME = re.compile(rb"(?:/home|/Users)/[^/\s'\"]+")
_HEADER = re.compile(rb"^# scrape", re.MULTILINE)
_GZIP = 31


def record(targets: Sequence[str], folder: Path, plan: ScrapePlan) -> Observation:
    """Watch live servers and write their pages to a folder, which must be new or empty.

    Raises BadUsage for such a folder, BadRecording where it cannot be written, Unreachable where nothing answers.
    """
    with Recorder(folder) as recorder:
        watch = Watch(targets, plan, recorder)
        observation = watch.run()
        recorder.about(observation, watch, plan.every)
        return observation


class Recorder:
    """Writes a recording, a `Sink`; every page is flushed, so that a killed process leaves what it has scraped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gzip = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._made = not folder.exists()
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise BadUsage(f"{self._folder} already exists: name a new or empty folder")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return (self._folder / PAGES[0]).open("xb")
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; leave nothing behind where nothing was recorded."""
        with suppress(OSError):
            self._file.write(self._gzip.flush())
            self._file.close()
        if kind is not None and not issubclass(kind, BadRecording):
            self._remove()

    def _remove(self) -> None:
        if self._made:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            (self._folder / PAGES[0]).unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> BadRecording:
        return BadRecording(f"the recording cannot be written to {self._folder}: {error.strerror}")

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Write a page; return it as it was written."""
        kept = _fit(page)
        self._write(f"# scrape {at / 1000:.3f} {instance}\n".encode() + kept)
        return kept

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Write a failed scrape, and what stands beside the server as it is returned."""
        kept = _fit(beside)
        self._write(f"# scrape-failed {at / 1000:.3f} {instance} {printable(reason)}\n".encode() + kept)
        return kept

    def _write(self, text: bytes) -> None:
        try:
            self._file.write(self._gzip.compress(text) + self._gzip.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def about(self, observation: Observation, watch: Watch, every: float) -> None:
        """Write recording.toml."""
        text = "\n".join(_toml(observation, watch, every)) + "\n"
        try:
            (self._folder / ABOUT).write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error


def _fit(page: bytes) -> bytes:
    """A page without names of home folders, without what a reader would take for the next scrape, and with an end."""
    page = _HEADER.sub(b"# (scrape)", _HOME.sub(b"~", page))
    whole, newline, rest = page.rpartition(b"\n")
    return whole + newline + (CUT + b"\n" if is_cut(rest) else b"")


def _toml(observation: Observation, watch: Watch, every: float) -> Iterator[str]:
    """Only what is known to be harmless: versions, model names, and flags of an allow-list."""
    span = float(observation.instants[-1] - observation.instants[0]) / 1000
    yield "measured = true"
    yield f"date = {_string(datetime.fromtimestamp(time.time(), UTC).strftime('%Y-%m-%d'))}"
    yield f"diag = {_string(__version__)}"
    yield f"scrape_interval_seconds = {every!r}"
    yield f"span_seconds = {span!r}"
    yield f"remarks = {_strings(watch.remarks)}"
    for instance, facts in watch.facts.items():
        yield ""
        yield f"[config.{_string(instance)}]"
        yield from _server(facts)


def _server(facts: ServerFacts) -> Iterator[str]:
    if facts.version:
        yield f"version = {_string(hidden(facts.version))}"
    if facts.models:
        yield f"models = {_strings([hidden(model) for model in facts.models])}"
    if facts.max_model_len is not None:
        yield f"max_model_len = {facts.max_model_len!r}"
    if facts.launch:
        yield f"launch = {_string(redact(facts.launch))}"
    if facts.process:
        yield f"process = {_string(redact(facts.process))}"
    if facts.server_info:
        flags = ", ".join(f"{name} = {value!r}" for name, value in facts.server_info.items())
        yield f"server_info = {{ {flags} }}"


def _strings(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_string, texts))}]"


def _string(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, but for DEL."""
    clean = text.encode("utf-8", "replace").decode()
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")
