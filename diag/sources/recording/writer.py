"""Recording live servers: each page is written as it arrives, without secrets, and judged as it is written."""

import json
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from diag import __version__
from diag.core.errors import BadRecording, BadUsage
from diag.core.files import exists, only_writer, written_whole
from diag.core.formatting import printable
from diag.exposition import CUT, is_cut
from diag.http.address import Address
from diag.log.files import PAGES
from diag.sources.live.scrape import ScrapePlan, ScrapeProgress, Scraper, on_interrupt
from diag.sources.observation import Observation
from diag.sources.recording.reader import ABOUT
from diag.vllm.command.free_text import hidden
from diag.vllm.command.shown import shown
from diag.vllm.running_config import ServerFacts

_HOME = re.compile(rb"(?:/home|/Users)/[^/\s'\"]+")
_HEADER = re.compile(rb"^# scrape", re.MULTILINE)
_GZIP = 31


def record(targets: Sequence[str] | Mapping[str, Address], folder: Path, plan: ScrapePlan) -> Observation:
    """Scrape live servers, given as for `scrape`, and write their pages to a new or empty folder.

    Raises BadUsage for another folder, BadRecording if it cannot be written, Unreachable if no server answers.
    """
    recorder = Recorder(folder)

    def after_scrape(progress: ScrapeProgress) -> None:
        recorder.note(scraper.facts, scraper.remarks, plan.every)
        plan.on_progress(progress)

    scraper = Scraper(targets, replace(plan, on_progress=after_scrape), recorder)
    with on_interrupt(scraper.stop), recorder:  # however often it is pressed, the recording is completed
        observation = scraper.run()
        recorder.about(scraper.facts, scraper.remarks, plan.every)
    return observation


class Recorder:
    """A `Sink` that writes a recording; every page is flushed, so that a killed process leaves all its scrapes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gzip = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._open = ExitStack()
        self._holds_pages = self._torn = False
        self._first = self._last = 0
        self._noted: object = None

    def __enter__(self) -> "Recorder":
        """Make the folder and its file of pages, and lock the folder against other writers."""
        taken = f"{self._folder} already exists: name a new or empty folder"
        if exists(self._folder) and not self._folder.is_dir():
            raise BadUsage(taken)
        with self._open:
            try:
                self._made = not exists(self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._open.enter_context(only_writer(self._folder))
                if any(self._folder.iterdir()):
                    raise BadUsage(taken)
                self._file = self._open.enter_context((self._folder / PAGES[0]).open("xb", buffering=0))
            except OSError as error:
                raise self._unwritable(error) from error
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; after an error without any page, remove everything that was made, and nothing else."""
        with self._open:
            with suppress(OSError):
                self._write(self._gzip.flush())
            if kind is not None and not self._holds_pages:
                with suppress(OSError):
                    (self._folder / ABOUT).unlink(missing_ok=True)
                    (self._folder / PAGES[0]).unlink(missing_ok=True)
                    if self._made:
                        self._folder.rmdir()

    def _unwritable(self, error: OSError) -> BadRecording:
        return BadRecording(f"the recording cannot be written to {self._folder}: {error.strerror}")

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Write a page; return the page as it is written."""
        kept = fit(page)
        self._holds_pages = True
        self._write_scrape(at, f"# scrape {at / 1000:.3f} {instance}\n".encode() + kept)
        return kept

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Write a failed scrape and the page about the server's host; return that page as it is written."""
        kept = fit(beside)
        self._holds_pages = self._holds_pages or bool(kept)
        self._write_scrape(at, f"# scrape-failed {at / 1000:.3f} {instance} {printable(reason)}\n".encode() + kept)
        return kept

    def _write_scrape(self, at: int, text: bytes) -> None:
        self._first, self._last = self._first or at, at
        try:
            self._write(self._gzip.compress(text) + self._gzip.flush(zlib.Z_SYNC_FLUSH))
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self, text: bytes) -> None:
        """Write all bytes; after an incomplete write, write nothing more."""
        if self._torn:
            return
        self._torn, rest = True, memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._torn = False

    def note(self, facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float) -> None:
        """Write recording.toml if facts or remarks have changed, so that a killed process leaves them, too."""
        if (facts, remarks) != self._noted:
            self._noted = (facts, remarks)
            self.about(facts, remarks, every)

    def about(self, facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float) -> None:
        """Write recording.toml, all of it free of secrets: versions, model names, allow-listed flags."""
        lines = [
            "measured = true",
            f"date = {_string(datetime.fromtimestamp(time.time(), UTC).strftime('%Y-%m-%d'))}",
            f"diag = {_string(__version__)}",
            f"scrape_interval_seconds = {every!r}",
            f"span_seconds = {(self._last - self._first) / 1000!r}",
            f"remarks = {_strings(remarks)}",
        ]
        for instance, server in facts.items():
            flags = ", ".join(f"{name} = {value!r}" for name, value in server.server_info.items())
            entries = {
                "version": server.version and _string(hidden(server.version)),
                "models": server.models and _strings([hidden(model) for model in server.models]),
                "max_model_len": "" if server.max_model_len is None else repr(server.max_model_len),
                "launch": server.launch and _string(shown(server.launch)),
                "process": server.process and _string(shown(server.process)),
                "server_info": flags and f"{{ {flags} }}",
            }
            lines += ["", f"[config.{_string(instance)}]"]
            lines += [f"{name} = {text}" for name, text in entries.items() if text]
        try:
            with written_whole(self._folder / ABOUT) as out:
                out.write("\n".join(lines) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error


def fit(page: bytes) -> bytes:
    """Redact home folders, quote lines that look like the header of a scrape, and end a page with a newline."""
    page = _HEADER.sub(b"# (scrape)", _HOME.sub(b"~", page))
    whole, newline, rest = page.rpartition(b"\n")
    return whole + newline + (CUT + b"\n" if is_cut(rest) else b"")


def _strings(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_string, texts))}]"


def _string(text: str) -> str:
    """Quote a TOML basic string; its escapes are those of JSON, and that of DEL."""
    clean = text.encode("utf-8", "replace").decode()
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")
