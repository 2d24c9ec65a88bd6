"""Hide secrets in free text, such as a line of a log.

The expressions of `secret_search` take longer to compile than the rest of a start: they are read with the first text
that may hold a secret.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

_TOO_SHORT = re.compile(r"\w{0,10}", re.ASCII)
"""A word shorter than any secret that is known by its form alone."""


@lru_cache(maxsize=1024)  # findings of one file repeat their texts
def hidden(text: str) -> str:
    """Replace every text that is a secret by its place, its form or its randomness, anywhere in a free text.

    In addresses, user, password, query and fragment are dropped; a home folder becomes ~.
    """
    if _TOO_SHORT.fullmatch(text):
        return text
    from diag.vllm.command import secret_search

    return secret_search.hidden(text)


def hidden_lines(lines: Iterable[str]) -> Iterator[str]:
    """Hide the secrets of a log's lines one by one; the value of a name may stand in one of the next lines."""
    from diag.vllm.command import secret_search

    return secret_search.hidden_lines(lines)


def is_secret(name: str) -> bool:
    """Return True if the value of an option, a variable or a field of that name is hidden."""
    from diag.vllm.command import secret_search

    return secret_search.is_secret(name)
