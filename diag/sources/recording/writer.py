"""Recording live servers: pages are written as they come in, without secrets, and judged just as they are written."""

import json
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import current_thread, main_thread

from diag import __version__
from diag.core.errors import BadRecording, BadUsage
from diag.core.files import exists, only_writer, written_whole
from diag.core.formatting import printable
from diag.exposition.lines import CUT, is_cut
from diag.sources.live.scrape import ScrapePlan, Watch, WatchProgress
from diag.sources.observation import Observation
from diag.sources.recording.about import ABOUT
from diag.sources.recording.reader import PAGES
from diag.vllm.command.secrets import hidden
from diag.vllm.command.shown import shown
from diag.vllm.server.config import ServerFacts

_HOME = re.compile(rb"(?:/home|/Users)/[^/\s'\"]+")
_HEADER = re.compile(rb"^# scrape", re.MULTILINE)
_GZIP = 31


def record(targets: Sequence[str], folder: Path, plan: ScrapePlan) -> Observation:
    """Watch live servers and write their pages to a folder, which must be new or empty.

    Raises BadUsage for such a folder, BadRecording where it cannot be written, Unreachable where nothing answers.
    """
    recorder = Recorder(folder)

    def after_scrape(progress: WatchProgress) -> None:
        recorder.note(watch.facts, watch.remarks, plan.every)
        plan.on_progress(progress)

    watch = Watch(targets, replace(plan, on_progress=after_scrape), recorder)
    with _on_interrupt(watch.stop), recorder:
        observation = watch.run()
        recorder.about(watch.facts, watch.remarks, plan.every)
    return observation


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C only stops the watch, however often it is pressed: what was recorded is finished in order."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Recorder:
    """Writes a recording, a `Sink`; every page is flushed, so that a killed process leaves what it has scraped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gzip = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._open = ExitStack()
        self._holds_pages = self._torn = False
        self._first = self._last = 0
        self._noted: object = None

    def __enter__(self) -> "Recorder":
        """Make the folder, and the file of the pages in it; nobody else may write there until the end."""
        if exists(self._folder) and not self._folder.is_dir():
            raise self._taken()
        with self._open:
            try:
                self._made = not exists(self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._open.enter_context(only_writer(self._folder))
                if any(self._folder.iterdir()):
                    raise self._taken()
                self._file = self._open.enter_context((self._folder / PAGES[0]).open("xb", buffering=0))
            except OSError as error:
                raise self._unwritable(error) from error
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file. What was recorded stays, whatever happened; where that is no page, nothing is left behind."""
        with self._open:
            with suppress(OSError):
                self._write(self._gzip.flush())
            if kind is not None and not self._holds_pages:
                self._remove()

    def _remove(self) -> None:
        """Remove what was made here, and nothing else."""
        with suppress(OSError):
            (self._folder / ABOUT).unlink(missing_ok=True)
            (self._folder / PAGES[0]).unlink(missing_ok=True)
            if self._made:
                self._folder.rmdir()

    def _taken(self) -> BadUsage:
        return BadUsage(f"{self._folder} already exists: name a new or empty folder")

    def _unwritable(self, error: OSError) -> BadRecording:
        return BadRecording(f"the recording cannot be written to {self._folder}: {error.strerror}")

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Write a page; return it as it was written."""
        kept = fit(page)
        self._holds_pages = True
        self._scrape(at, f"# scrape {at / 1000:.3f} {instance}\n".encode() + kept)
        return kept

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Write a failed scrape, and what stands beside the server as it is returned."""
        kept = fit(beside)
        self._holds_pages = self._holds_pages or bool(kept)
        self._scrape(at, f"# scrape-failed {at / 1000:.3f} {instance} {printable(reason)}\n".encode() + kept)
        return kept

    def _scrape(self, at: int, text: bytes) -> None:
        self._first, self._last = self._first or at, at
        try:
            self._write(self._gzip.compress(text) + self._gzip.flush(zlib.Z_SYNC_FLUSH))
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self, text: bytes) -> None:
        """Write all of it; after what could not be written whole, nothing more is."""
        if self._torn:
            return
        self._torn, rest = True, memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._torn = False

    def note(self, facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float) -> None:
        """Write recording.toml where it says something new, so that a killed process leaves that too."""
        if (facts, remarks) != self._noted:
            self._noted = (facts, remarks)
            self.about(facts, remarks, every)

    def about(self, facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float) -> None:
        """Write recording.toml."""
        span = (self._last - self._first) / 1000
        try:
            with written_whole(self._folder / ABOUT) as out:
                out.write("\n".join(_toml(facts, remarks, every, span)) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error


def fit(page: bytes) -> bytes:
    """A page without names of home folders, without what a reader would take for the next scrape, and with an end."""
    page = _HEADER.sub(b"# (scrape)", _HOME.sub(b"~", page))
    whole, newline, rest = page.rpartition(b"\n")
    return whole + newline + (CUT + b"\n" if is_cut(rest) else b"")


def _toml(facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float, span: float) -> Iterator[str]:
    """Only what is known to be harmless: versions, model names, and flags of an allow-list."""
    yield "measured = true"
    yield f"date = {_string(datetime.fromtimestamp(time.time(), UTC).strftime('%Y-%m-%d'))}"
    yield f"diag = {_string(__version__)}"
    yield f"scrape_interval_seconds = {every!r}"
    yield f"span_seconds = {span!r}"
    yield f"remarks = {_strings(remarks)}"
    for instance, server in facts.items():
        yield ""
        yield f"[config.{_string(instance)}]"
        yield from _server(server)


def _server(facts: ServerFacts) -> Iterator[str]:
    if facts.version:
        yield f"version = {_string(hidden(facts.version))}"
    if facts.models:
        yield f"models = {_strings([hidden(model) for model in facts.models])}"
    if facts.max_model_len is not None:
        yield f"max_model_len = {facts.max_model_len!r}"
    if facts.launch:
        yield f"launch = {_string(shown(facts.launch))}"
    if facts.process:
        yield f"process = {_string(shown(facts.process))}"
    if facts.server_info:
        flags = ", ".join(f"{name} = {value!r}" for name, value in facts.server_info.items())
        yield f"server_info = {{ {flags} }}"


def _strings(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_string, texts))}]"


def _string(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, but for DEL."""
    clean = text.encode("utf-8", "replace").decode()
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")
