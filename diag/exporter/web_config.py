"""Access to the exporter's page: TLS and users, from Prometheus' `--web.config.file` or from options.

The format is that of Prometheus' own exporters: https://prometheus.io/docs/prometheus/latest/configuration/https/. As
in these, passwords are bcrypt hashes, and a file that has changed is read again. Only this file imports bcrypt, and
only if a configuration names users.
"""

import base64
import hashlib
import hmac
import logging
import re
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import read_yaml
from diag.core.formatting import listed, printable

log = logging.getLogger("diag.exporter")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_KEYS = ("tls_server_config", "http_server_config", "basic_auth_users")
_TLS_KEYS = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version")
_HASH = re.compile(r"\$2[aby]\$(?:0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
"""A bcrypt hash."""
_LONGEST = 72
"""Bytes of a password that bcrypt uses."""


class Users:
    """Users and the hashes of their passwords; BadUsage if bcrypt is not installed.

    A password that was right is not hashed again. Others are hashed one at a time with a pause as long, so that
    guessing takes half a core at most. An unknown user takes as long as a known one.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        try:
            from bcrypt import checkpw
        except ImportError as error:
            raise BadUsage("basic_auth_users needs the package bcrypt: pip install 'diag[web]'") from error
        self._check = checkpw
        self._hashes = {user: text.encode() for user, text in hashes.items()}
        self._right: dict[str, bytes] = {}
        self._one = threading.Lock()

    def accept(self, authorization: str) -> bool:
        """Return True if the value of an Authorization header names a user with the right password."""
        scheme, _, text = authorization.partition(" ")
        try:
            name, colon, password = base64.b64decode(text.strip(), validate=True).partition(b":")
        except ValueError:
            return False
        user = name.decode("utf-8", "replace")
        if scheme.lower() != "basic" or not colon:
            return False
        if self._was_right(user, password):
            return True
        with self._one:
            if self._was_right(user, password):
                return True
            begin = time.monotonic()
            some = next(iter(self._hashes.values()))
            if self._check(password[:_LONGEST], self._hashes.get(user, some)) and user in self._hashes:
                self._right[user] = hashlib.sha256(password).digest()
                return True
            time.sleep(time.monotonic() - begin)
            return False

    def _was_right(self, user: str, password: bytes) -> bool:
        return hmac.compare_digest(self._right.get(user, b""), hashlib.sha256(password).digest())


@dataclass(frozen=True)
class TlsFiles:
    """Files in PEM format ("" for none), the check of client certificates, and the versions of TLS."""

    cert: str
    key: str = ""
    client_ca: str = ""
    clients: ssl.VerifyMode = ssl.CERT_NONE
    oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    newest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED


@dataclass(frozen=True)
class WebConfig:
    """Settings of a web configuration file; the hashes are secrets."""

    tls: TlsFiles | None = None
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Access:
    """TLS context and users; None for no TLS and for any client."""

    context: ssl.SSLContext | None
    users: Users | None


class AccessFiles:
    """Access by a web configuration file, or by TLS files alone; a file that has changed is read again."""

    def __init__(self, file: str, tls: TlsFiles | None) -> None:
        self._file, self._tls = file, tls
        self._lock = threading.Lock()
        self._watched: tuple[str, ...] = ()
        self._access = self._read()
        self._stamp = self._stamped()

    def access(self) -> Access:
        """Return the current access; the previous one if a file can no longer be used."""
        with self._lock:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._access = self._read()
                    self._stamp = self._stamped()
                    log.info("the web configuration has changed and was read again")
                except BadUsage as error:
                    log.error("the web configuration has changed and cannot be used; the old one stays: %s", error)
            return self._access

    def _read(self) -> Access:
        config = read(Path(self._file)) if self._file else WebConfig(self._tls)
        tls = config.tls
        self._watched = tuple(filter(None, (self._file, *((tls.cert, tls.key, tls.client_ca) if tls else ()))))
        users = Users(config.hashes) if config.hashes else None
        if tls is None:
            return Access(None, users)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(tls.cert, tls.key or None, password="")
            if tls.client_ca:
                context.load_verify_locations(tls.client_ca)
        except OSError as error:
            files = ", ".join(file for file in (tls.cert, tls.key, tls.client_ca) if file)
            why = "not PEM, encrypted, or not a pair" if isinstance(error, ssl.SSLError) else error.strerror
            raise BadUsage(f"the TLS files {files} cannot be used: {why}") from error
        context.verify_mode = tls.clients
        context.minimum_version, context.maximum_version = tls.oldest, tls.newest
        return Access(context, users)

    def _stamped(self) -> list[tuple[int, int, int] | None]:
        stamps: list[tuple[int, int, int] | None] = []
        for file in self._watched:
            try:
                status = Path(file).stat()
                stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                stamps.append(None)
        return stamps


def read(file: Path) -> WebConfig:
    """Read a web configuration; BadUsage, whose message has no hash in it, if it is not one."""
    try:
        content = read_yaml(file)
    except OSError as error:
        raise BadUsage(f"--web.config.file {file} cannot be read: {error.strerror}") from error
    try:
        top = _mapping(content, "the file", _KEYS)
        _mapping(top.get("http_server_config"), "http_server_config", ("http2",))
        tls = _mapping(top.get("tls_server_config"), "tls_server_config", _TLS_KEYS)
        users = _mapping(top.get("basic_auth_users"), "basic_auth_users")
        wrong = [printable(user, 40) for user, text in users.items() if not _HASH.fullmatch(str(text))]
        if wrong:
            raise BadUsage(f"the password of {listed(wrong)} is not a bcrypt hash: htpasswd -nBC 10 USER makes one")
        return WebConfig(_tls(tls, file.parent) if tls else None, users)
    except BadUsage as error:
        raise BadUsage(f"--web.config.file {file}: {error}") from error


def _mapping(node: Any, name: str, keys: Collection[str] | None = None) -> dict[str, Any]:
    """Check a part of the file; {} if the file lacks it."""
    if not isinstance(node, dict | None):
        raise BadUsage(f"{name} should have keys and values")
    content = {str(key): value for key, value in (node or {}).items()}
    unknown = [printable(key, 40) for key in content if keys is not None and key not in keys]
    if unknown and keys is not None:
        raise BadUsage(f"{listed(unknown)} in {name} is not supported: use {', '.join(keys)}")
    return content


def _tls(node: Mapping[str, Any], folder: Path) -> TlsFiles:
    """Check `tls_server_config`; file names are relative to the folder of the web configuration."""
    wrong = next((key for key, value in node.items() if not isinstance(value, str | None)), "")
    if wrong:
        raise BadUsage(f"{wrong} should be a text")
    names = [node.get(key) or "" for key in ("cert_file", "key_file", "client_ca_file")]
    cert, key, client_ca = (str(folder / name) if name else "" for name in names)
    if not cert or not key:
        raise BadUsage("tls_server_config needs cert_file and key_file")
    clients = _choice("client_auth_type", node, _CLIENTS, ssl.CERT_NONE)
    if bool(client_ca) != (clients != ssl.CERT_NONE):
        raise BadUsage("client_ca_file and a client_auth_type that verifies certificates need each other")
    oldest = _choice("min_version", node, _VERSIONS, ssl.TLSVersion.TLSv1_2)
    newest = _choice("max_version", node, _VERSIONS, ssl.TLSVersion.MAXIMUM_SUPPORTED)
    if newest == ssl.TLSVersion.TLSv1_2 < oldest:
        raise BadUsage("min_version is above max_version")
    return TlsFiles(cert, key, client_ca, clients, oldest, newest)


def _choice(key: str, node: Mapping[str, Any], choices: Mapping[str, Any], otherwise: Any) -> Any:
    choice = node.get(key) or ""
    if choice and choice not in choices:
        raise BadUsage(f"{key} {printable(choice, 40)} is not supported: choose {', '.join(choices)}")
    return choices.get(choice, otherwise)
