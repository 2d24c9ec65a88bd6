"""Files: read and decompressed within bounds, written whole or not at all, and folders with one writer at a time.

JSON, TOML and YAML are foreign text, and bounded before and after they are parsed. This is the only file that imports
PyYAML, when YAML is read or written.
"""

import errno
import fcntl
import json
import os
import re
import select
import stat
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from diag.core.errors import BadUsage
from diag.core.formatting import MIB, printable

PIPE_SECONDS = 60.0
MOST_TOML_BYTES = 2**20
MOST_TOML_PARTS = 32
"""Parts of one key, and levels of nested tables and lists."""
MOST_JSON_LEVELS = 100
"""Levels of nested objects and lists of a JSON document."""
MOST_YAML_BYTES = 2**20
MOST_YAML_VALUES, MOST_YAML_LEVELS = 100_000, 64
"""Keys and values with their aliases written out, and how deep they may be nested."""
LONGEST_YAML_NUMBER = 64
_LARGEST_INTEGER = 2**63
_LONG_KEY = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MOST_TOML_PARTS}}}")
_PIPE = re.compile(r"/dev/fd/(\d{1,6})", re.ASCII)
_KINDS = {stat.S_IFDIR: "it is a folder", stat.S_IFIFO: "it is a pipe", stat.S_IFSOCK: "it is a socket"}
STEP = 256 * 1024
FLUSHED = b"\x00\x00\xff\xff"
"""zlib's mark of a flush: everything before it can be decompressed completely."""
_BITE = 4096
_GZIP = 31  # zlib's wbits for a gzip header


@contextmanager
def opened(file: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; OSError, with the reason in `strerror`, if it is missing or no regular file."""
    try:
        _refuse_others(Path(file).stat(), file)
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can have a name with a NUL in it", str(file)) from error
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as stream:
        _refuse_others(os.fstat(stream.fileno()), file)  # another one may have replaced it
        yield stream


def read_bytes(file: str | Path, most: int, piped: bool = False) -> bytes:
    """Read the whole content; OSError if it cannot be read or is larger than `most` bytes.

    `piped`: the file may be a pipe that a shell has opened for this program, as in `--contract <(...)`.
    """
    pipe = piped_descriptor(file) if piped else None
    if pipe is not None:
        content, until = b"", time.monotonic() + PIPE_SECONDS
        while len(content) <= most:
            if not select.select([pipe], [], [], max(0, until - time.monotonic()))[0]:
                raise OSError(errno.ETIMEDOUT, f"its writer has not ended within {PIPE_SECONDS:g} s", str(file))
            part = os.read(pipe, most + 1 - len(content))
            if not part:
                break
            content += part
    else:
        with opened(file) as stream:
            content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most / MIB:g} MiB", str(file))
    return content


def piped_descriptor(file: str | Path) -> int | None:
    """Return the descriptor of a pipe that a shell has opened for this program, `<(...)`; None for any other file."""
    descriptor = _PIPE.fullmatch(str(file))
    with suppress(OSError, OverflowError):
        if descriptor and stat.S_ISFIFO(os.fstat(int(descriptor[1])).st_mode):
            return int(descriptor[1])
    return None


def read_text(file: str | Path, most: int, piped: bool = False) -> str:
    """Read a file as `read_bytes` does and decode it; UnicodeDecodeError, a ValueError, if it is not UTF-8."""
    return read_bytes(file, most, piped).decode("utf-8")


def read_ends(file: str | Path, first: int, last: int) -> tuple[bytes, bytes]:
    """Read the first and the last bytes of a file; if it is not larger than both together, all of it and nothing."""
    with opened(file) as stream:
        if os.fstat(stream.fileno()).st_size <= first + last:
            return stream.read(first + last), b""
        beginning = stream.read(first)
        stream.seek(-last, os.SEEK_END)
        return beginning, stream.read(last)


def exists(file: str | Path) -> bool:
    """Return True if there is anything of that name; False for a name that no file can have."""
    try:
        return Path(file).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def expanded(file: str | Path) -> Path:
    """Return a path with the home folder for a ~ at its beginning; the ~ of an unknown user stays.

    Path.expanduser raises RuntimeError for it.
    """
    return Path(os.path.expanduser(file))  # noqa: PTH111


def is_folder(name: str | Path) -> bool:
    """Return True if a folder of that name exists; False for a text that cannot be a path."""
    try:
        return expanded(name).is_dir()
    except (OSError, ValueError):  # too long, NUL
        return False


def _refuse_others(status: os.stat_result, file: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "it is a device")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(file))


def parse_json(text: str | bytes, deepest: int = MOST_JSON_LEVELS) -> Any:
    """Parse JSON that is foreign; ValueError, in words, for any other text and for one that is nested too deep."""
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {deepest} deep") from error
    level = [document]
    for _ in range(deepest):
        level = [
            inside
            for outer in level
            for inside in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inside, dict | list)
        ]
    if level:
        raise ValueError(f"it is nested more than {deepest} deep")
    return document


def read_json(file: str | Path, most: int) -> Any:
    """Read a JSON file of at most `most` bytes; OSError if it cannot be read, ValueError if it is no bounded JSON."""
    return parse_json(read_bytes(file, most))


def read_toml(file: Path) -> tuple[str, dict[str, Any]]:
    """Read the text of a TOML file and its tables; OSError if it cannot be read, ValueError if it is no bounded TOML.

    tomllib itself takes any size, and quadratic time for a key of very many parts.
    """
    text = read_text(file, MOST_TOML_BYTES, piped=True)
    return text, parse_toml(text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse the tables of a TOML text; ValueError if it is no bounded TOML."""
    import tomllib  # noqa: PLC0415  # most runs read no such file

    if len(text) > MOST_TOML_BYTES:
        raise ValueError(f"it has more than {MOST_TOML_BYTES:,} characters")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_TOML_PARTS} parts")
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MOST_TOML_PARTS} deep") from error
    except ValueError as error:
        raise ValueError(printable(str(error))) from error
    _check_toml(tables, MOST_TOML_PARTS)
    return tables


def _check_toml(value: object, deeper: int) -> None:
    """Raise ValueError for whole numbers of more than 64 bits and too many levels, which tomllib accepts."""
    if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
        raise ValueError("it has a whole number of more than 64 bits")
    if not deeper:
        raise ValueError(f"it is nested more than {MOST_TOML_PARTS} deep")
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_toml(inside, deeper - 1)


def read_yaml(file: Path) -> Any:
    """Read the only document of a YAML file; BadUsage if it is no bounded YAML, OSError if it cannot be read."""
    documents = parse_yaml(read_bytes(file, MOST_YAML_BYTES), printable(str(file)))
    if len(documents) > 1:
        raise BadUsage(f"{printable(str(file))}: expected one YAML document, found {len(documents):,}")
    return documents[0] if documents else None


def parse_yaml(content: bytes | str, name: str) -> list[Any]:
    """Parse the documents of a text, of which a Kubernetes manifest has several; `name` is what a BadUsage calls it.

    A few hundred bytes with nested aliases stand for billions of values, and deep nesting takes quadratic time: the
    events of a text are counted before it is loaded.
    """
    import yaml  # noqa: PLC0415  # heavy

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the one in C is optional
        """A loader that refuses numbers that Python itself refuses to print."""

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            if len(node.value) > LONGEST_YAML_NUMBER:
                raise ValueError(f"a number has more than {LONGEST_YAML_NUMBER} digits")
            return int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        anchors: dict[str, int] = {}
        open_nodes: list[tuple[str | None, int]] = []
        values = 0
        for event in yaml.parse(content, Loader=Loader):
            if isinstance(event, yaml.AliasEvent):  # it counts as all values that it stands for
                if event.anchor not in anchors:
                    raise ValueError(f"the alias *{event.anchor} has no value yet")
                values += anchors[event.anchor]
            elif isinstance(event, yaml.CollectionStartEvent):
                anchors.pop(event.anchor or "", None)  # an alias inside would be part of itself
                open_nodes.append((event.anchor, values))
                values += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                anchors |= {anchor: values - before} if anchor else {}
            elif isinstance(event, yaml.ScalarEvent):
                values += 1
                anchors |= {event.anchor: 1} if event.anchor else {}
            if values > MOST_YAML_VALUES:
                raise ValueError(f"it has more than {MOST_YAML_VALUES:,} values")
            if len(open_nodes) > MOST_YAML_LEVELS:
                raise ValueError(f"it is nested more than {MOST_YAML_LEVELS} deep")
        return list(yaml.load_all(content, Loader=Loader))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = printable(str(getattr(error, "problem", None) or "not readable"))
        raise BadUsage(f"{name}{line}: this is no YAML: {problem}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadUsage(f"{name}: this YAML is not read: {printable(str(error))}") from error


def dump_yaml(head: str, content: Mapping[str, Any]) -> str:
    """Write YAML as people do: long texts as blocks, keys in their order, `head` as comments above."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    import yaml  # noqa: PLC0415  # heavy

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # the one in C is optional
        """A dumper without references to earlier values."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, block)
    return comment + yaml.dump(content, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)


@contextmanager
def written_bytes(file: Path, is_new: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `file` once all of it is on the disk; until then, and on an error, `file` stays.

    OSError if it cannot be written, or if it `is_new` and has come meanwhile. A device, a pipe, or a file in a folder
    without write permission is written directly.
    """
    if not is_new and file.exists() and not (file.is_file() and os.access(file.resolve().parent, os.W_OK)):
        with file.open("wb") as out:
            yield out
        return
    goal = file if is_new else file.resolve()  # a link stays a link
    new = goal.with_name(f".diag-{os.urandom(8).hex()}.tmp")  # nobody else has it: no file and no link is written
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(new, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as out:
            if goal.exists():
                os.fchmod(descriptor, goal.stat().st_mode & 0o777)
            yield out
            out.flush()
            os.fsync(descriptor)
        if is_new and os.path.lexists(goal):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(goal))
        try:
            new.replace(goal)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            goal.write_bytes(new.read_bytes())  # a file that is mounted by itself, as containers have it
            new.unlink()
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def written_whole(file: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file that replaces `file` as `written_bytes` does; names that are not UTF-8 are escaped."""
    with written_bytes(file) as out:
        text = TextIOWrapper(out, encoding="utf-8", errors="backslashreplace", newline=newline, write_through=True)
        yield text
        text.detach()


@contextmanager
def refused_in_words(file: Path) -> Iterator[None]:
    """Raise BadUsage with the reason if this file of the user cannot be written; BrokenPipeError passes unchanged."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BadUsage(f"{printable(str(file))} cannot be written: {error.strerror}") from error


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers of diag; BadUsage if one holds the lock already.

    The lock ends with the process. On a file system without locks there is none.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise BadUsage(f"another diag is writing to {folder}: wait for it, or name another folder") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(held)


def discard_output() -> None:
    """Discard standard output from now on, what is buffered included: its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
