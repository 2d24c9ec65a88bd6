"""`recording.toml` of a recording: what is known of its servers beside their pages, and the time zone of their log."""

import math
from collections.abc import Mapping
from datetime import UTC, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any, TypeVar

from diag.core.errors import BadRecording
from diag.core.files import exists, read_toml
from diag.core.formatting import printable
from diag.vllm.server.config import ServerFacts, settings
from diag.vllm.server.launch import FLAGS

ABOUT = "recording.toml"
_T = TypeVar("_T")


def read(file: Path) -> Mapping[str, Any]:
    """Its tables, none where there is no such file; BadRecording where it cannot be read."""
    if not exists(file):
        return {}
    try:
        return read_toml(file)[1]
    except OSError as error:
        raise BadRecording(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadRecording(f"{file} is not valid TOML: {error}") from error


def facts(about: Mapping[str, Any], instance: str, launch: str, file: Path) -> ServerFacts:
    """What `recording.toml` says of one server; [config] is about all of them, [config."host:port"] about one."""
    config = typed(dict, about.get("config", {}), file)
    own = typed(dict, config.get(instance, {}), file)
    longest = own.get("max_model_len")
    flags = {name: value for name, value in config.items() if name in FLAGS}
    server_info = flags | typed(dict, own.get("server_info", {}), file)
    return ServerFacts(
        version=typed(str, own.get("version", about.get("vllm", "")), file),
        models=tuple(str(model) for model in typed(list, own.get("models", []), file)),
        max_model_len=None if longest is None else typed(float, longest, file),
        server_info=settings(server_info),
        launch=launch or typed(str, own.get("launch", about.get("launch", "")), file),
        process=typed(str, own.get("process", ""), file),
    )


def log_zone(about: Mapping[str, Any], file: Path) -> tzinfo:
    """Of the log; UTC where the file does not say."""
    try:
        return _zone(about.get("log_utc_offset"))
    except (ValueError, OverflowError) as error:
        raise BadRecording(f"{file.parent / ABOUT}: log_utc_offset should be hours from UTC") from error


def _zone(offset: object) -> tzinfo:
    """`log_utc_offset` of recording.toml: hours, or text like "+02:00"; UTC if missing; ValueError if invalid."""
    if isinstance(offset, int | float):
        return timezone(timedelta(hours=offset))
    text = str(offset or "+00:00").removeprefix("UTC") or "+00:00"
    hours, _, minutes = text.lstrip("+-").partition(":")
    size = timedelta(hours=int(hours), minutes=int(minutes or 0))
    return timezone(-size if text.startswith("-") else size) if size else UTC


def typed(kind: type[_T], value: object, file: Path) -> _T:
    """A value of this kind; BadRecording where it is of another one."""
    if kind is float and isinstance(value, int):
        value = float(value)
    if isinstance(value, float) and not 0 <= value < math.inf:
        raise BadRecording(f"{file.parent / ABOUT}: {value} should be a number from 0 on")
    if not isinstance(value, kind):
        raise BadRecording(f"{file.parent / ABOUT}: {printable(repr(value), 60)} should be a {kind.__name__}")
    return value
