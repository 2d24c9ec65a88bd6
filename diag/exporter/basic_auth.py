"""Users with a password for the exporter's page: bcrypt hashes, as Prometheus' own exporters take them.

The only file that imports bcrypt, and only if a file names users.
"""

import base64
import hashlib
import hmac
import re
import threading
import time
from collections.abc import Mapping

from diag.core.errors import BadUsage

_HASH = re.compile(r"\$2[aby]\$(?:0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_LONGEST = 72
"""Bytes of a password that bcrypt uses."""


def is_hash(text: object) -> bool:
    """Return True for a bcrypt hash."""
    return isinstance(text, str) and bool(_HASH.fullmatch(text))


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
        return (
            scheme.lower() == "basic" and bool(colon) and (self._known(user, password) or self._checked(user, password))
        )

    def _known(self, user: str, password: bytes) -> bool:
        return hmac.compare_digest(self._right.get(user, b""), hashlib.sha256(password).digest())

    def _checked(self, user: str, password: bytes) -> bool:
        with self._one:
            if self._known(user, password):
                return True
            begin = time.monotonic()
            some = next(iter(self._hashes.values()))
            if self._check(password[:_LONGEST], self._hashes.get(user, some)) and user in self._hashes:
                self._right[user] = hashlib.sha256(password).digest()
                return True
            time.sleep(time.monotonic() - begin)
            return False
