"""A regular expression that is compiled at its first use is one like any other."""

import re

import pytest

from diag.core.lazy_regex import lazy


def test_lazy_regex_matches_like_a_compiled_one() -> None:
    ours, theirs = lazy(r"(?P<word>a+)b", re.IGNORECASE), re.compile(r"(?P<word>a+)b", re.IGNORECASE)
    for text in ("AAB", "xaab", ""):
        for ask in ("match", "search", "fullmatch", "findall"):
            assert repr(getattr(ours, ask)(text)) == repr(getattr(theirs, ask)(text))
    assert (ours.pattern, ours.groups, ours.sub("-", "xab")) == (theirs.pattern, theirs.groups, "x-")


def test_invalid_lazy_regex_fails_at_its_first_use() -> None:
    bad = lazy("(")
    with pytest.raises(re.error):
        bad.match("")
