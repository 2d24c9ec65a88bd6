"""Labels within a command that is shown to be pasted: each is one word of a shell, or the reader has to fill it in."""

import re
import shlex

from diag.core.lazy_regex import lazy

MOST = 255
"""Characters of a label in a command: as many as a host or a file may have."""
_MAY_BE = {
    "gpu": lazy(r"\d{1,4}|(?:GPU|MIG)-[\w/-]{1,100}|[0-9A-Fa-f]{4,8}(?::[0-9A-Fa-f]{2}){2}\.[0-7]", re.ASCII),
    "pid": lazy(r"[1-9]\d{0,9}", re.ASCII),
    "rank": lazy(r"\d{1,6}", re.ASCII),
    "engine": lazy(r"\d{1,6}", re.ASCII),
    "host": lazy(r"\w[\w.:-]{0,254}|its host", re.ASCII),
}
"""What a label of that name is, nothing of it special to a shell: an index, a UUID, a PCI address, a number, a host."""


def word(name: str, value: str) -> str:
    """The value of a label, quoted for a shell; `"${GPU:?}"`, which a shell refuses to run, for what it cannot be."""
    if name in _MAY_BE:
        return value if _MAY_BE[name].fullmatch(value) else _to_fill_in(name)
    is_plain = 0 < len(value) <= MOST and value.isprintable() and not value.startswith("-")
    return shlex.quote(value) if is_plain else _to_fill_in(name)


def _to_fill_in(name: str) -> str:
    return f'"${{{re.sub(r"[^A-Z0-9]", "_", name.upper())}:?}}"'
