"""Hide secrets in launch commands by an allow-list of words; `free_text` hides them in a line of a log.

harmless.json lists the names whose values may be shown. Every other value in a command is hidden.
"""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from diag.vllm.command.command import NOTATIONS, Given
from diag.vllm.command.free_text import hidden, is_secret
from diag.vllm.command.shell import HIDDEN, PLACEHOLDER, compiled, default, placeholder
from diag.vllm.flags.registry import known, understood

CONTENT = json.loads((Path(__file__).parent / "harmless.json").read_text(encoding="utf-8"))

FLAGS = frozenset[str](CONTENT["flags"])
"""Flags of vLLM that take a name, a folder, a host or a URL; of others only numbers, switches and choices are shown.

Left out, since they hold secrets or anything at all: --api-key, --hf-token, --ssl-*, --additional-config,
--model-loader-extra-config and their like.
"""
VARIABLES = frozenset[str](CONTENT["variables"])
"""Whole names from vLLM's envs.py of the known releases, and the documentation of NCCL, RCCL, CUDA, PyTorch, OpenMP,
UCX, Triton and Hugging Face. Left out: keys, tokens, URLs, and texts that people make up.
"""
KEYS = frozenset[str](CONTENT["keys"])
"""Keys of the JSON objects that flags take: the fields of vllm/config, rope scaling, generation and media."""
NAMED_KEYS = frozenset[str](CONTENT["named_keys"])
"""Keys whose value is a name or a folder; of the others only numbers and switches are shown."""


_SECRETS = compiled(r"--(?:api-key|hf-token|ssl-.*)")
_PLAIN = compiled(CONTENT["patterns"]["plain"])
_LISTED = compiled(r"[\d.,:|-]{1,60}")
_NAME = compiled(r"(?:[\w./~:+,*^=| -]|\$\w|\$\{\w{1,60}\}|\$\([A-Z][A-Z0-9_]{0,60}\)|%[hi])*")
_MOST = 256
_URL = compiled(r"([a-z][a-z0-9+.-]{0,20}://)(?:[^/?#@]*@)?([^/?#@]*)([^?#@]*)(?:[?#].*)?", re.DOTALL)
_VARIABLE = compiled(CONTENT["patterns"]["variable"])
_DEFAULT = compiled(r"\$\{[A-Za-z_]\w{0,60}:?-[\"']?([^{}$\"']*)[\"']?\}", re.ASCII)
_TOKEN = compiled(CONTENT["patterns"]["token"])
"""Tokens by their beginning, and long words of letters and digits, which no person writes."""
_COMMIT = compiled(r"(?:(?<=snapshots/)|^)[0-9a-f]{40}(?![0-9a-zA-Z])|(?<=\w)@[0-9a-f]{40}$")
_REVISIONS = {"--revision", "--code-revision", "--tokenizer-revision"}
_FORMAT = r"(?:mx|nv|b|u)?(?:fp|nf|int|f)\d{1,2}|v\d|w\da\d{1,2}"
_WORDS = compiled(rf"--(?:[a-z]{{2,12}}|{_FORMAT})(?:[-_](?:[a-z]{{1,12}}|{_FORMAT}))*")
_SWITCH = compiled(r"[a-z]{2,12}(?:_[a-z]{1,12}){1,3}")
_READ = {"--api-key": "vllm_api_key"}
"""Flags that have a variable of vLLM's own under another name."""
_LIKE = 0.8
"""Similarity to a flag of vLLM from which an unknown flag may be shown."""
_LONGER = 2
"""Characters by which an unknown flag may be longer than the flag that it is like: a key may stand behind the flag.

A word without digits may be longer by more, unless the flag is a secret's.
"""


def name(text: str, revision: bool = False) -> str:
    """Return a name, a folder or a URL without user, query and fragment; "" if it may not be shown."""
    url = _URL.fullmatch(text)
    text = f"{url[1]}{url[2]}{url[3]}" if url else text
    is_pinned = re.fullmatch(r"(?:hf://)?[\w.-]+/[\w.-]+@\w+", text)  # a model of the Hub at a commit
    rest = _COMMIT.sub("", text) if revision or is_pinned or "snapshots/" in text else text
    is_token = _TOKEN.search(rest) or hidden(text) not in (text, re.sub(r"/(?:home|Users)/[^/]+", "~", text))
    if not text or len(text) > _MOST or not _NAME.fullmatch(rest) or is_token or HIDDEN in text:
        return ""
    return hidden(text)


def image(text: str) -> str:
    """Return the image of a container; "" if it may not be shown."""
    tag, _, digest = text.partition("@sha256:")
    usual = _DEFAULT.sub(r"\1", tag)
    is_known = re.fullmatch(r"(?:[0-9a-f]{64})?", digest) and name(usual) == usual
    return text if is_known else ""


def is_variable(text: str) -> bool:
    """Return True if a word is nothing but a shell variable."""
    return bool(_VARIABLE.fullmatch(text))


def variable(key: str, text: str) -> str:
    """Return the value of an environment variable; "" if it may not be shown.

    One that is called as a flag of vLLM may have what the flag may.
    """
    key, value = re.sub(r"^(?:APPTAINER|SINGULARITY)ENV_", "", key), default(text)
    spelled = f"--{NOTATIONS['worker'].get(key, key)}".lower().replace("_", "-")
    mention = Given(spelled, (value,), understood(spelled) if spelled in known() else None)
    if "://" in text or takes_secret(mention):
        return name(value) if key in VARIABLES and "://" not in text else ""
    return _shown(mention, value) or ""


def harmless(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables whose values may replace them in a command."""
    return {key: default(text) for key, text in environment.items() if not is_secret(key)}


def takes_secret(mention: Given) -> bool:
    return mention.option is None or bool(_SECRETS.fullmatch(mention.option.flag.name))


def flag(mention: Given) -> str:
    """Return a flag as it was spelled; "" if it is no flag of vLLM, nor close to one."""
    if mention.option is None:
        is_known = is_like_a_flag(mention.spelled) or (mention.words and is_plain_name(mention.spelled))
        return mention.spelled if is_known else ""
    if re.match(r"-O[^.]", mention.spelled):
        return "-O" if "".join(mention.values).isdigit() else ""
    keys = mention.spelled.split(".")[1:]
    return mention.spelled if all(key in KEYS for key in keys) else ""


@lru_cache(maxsize=4096)
def is_like_a_flag(spelled: str) -> bool:
    """Return True if a word is a vLLM flag, the beginning of one, or a misspelt one, and so no secret."""
    if re.fullmatch(r"--?[A-Za-z]{1,2}|--help", spelled):
        return True
    if understood(spelled.partition(".")[0]):
        return "." not in spelled or KEYS.issuperset(spelled.split(".")[1:])
    begun = spelled.replace("_", "-")
    if spelled.startswith("--") and any(name.startswith(begun) for name in known()):
        return True
    near = get_close_matches(begun.lower(), known(), 1, _LIKE) if len(spelled) < 60 else []
    is_plain = bool(_WORDS.fullmatch(spelled)) and not any(map(is_secret, near))
    return bool(near) and (is_plain or len(spelled) <= len(near[0]) + _LONGER)


def is_plain_name(spelled: str) -> bool:
    """Return True if a word is the name of an option of any program: words of lower-case letters, no key behind it."""
    is_glued = any(spelled.replace("_", "-").startswith(name) and is_secret(name) for name in known())
    return bool(_WORDS.fullmatch(spelled)) and not is_glued


def value(mention: Given, text: str, place: int = 1) -> str:
    """Return a flag's value, or the variable that replaces it if it may not be shown."""
    if PLACEHOLDER.fullmatch(text):
        return text
    visible = None if takes_secret(mention) or HIDDEN in text else _shown(mention, text)
    return _variable(mention, place) if visible is None else visible


def listed(mention: Given, words: Sequence[str]) -> list[str]:
    """Return the values of a flag that takes several.

    After a value that may not be shown none is shown: a later one may be a misspelt flag.
    """
    done = list[str]()
    for place, word in enumerate(words, 1):
        is_behind = any(kept != before for kept, before in zip(done, words, strict=False))
        done.append(_variable(mention, place) if is_behind else value(mention, word, place))
    return done


def quoted_values(mention: Given) -> str:
    """Quote a flag's values for a sentence; "its value" if one may not be shown."""
    texts = [value(mention, text) for text in mention.values]
    return "its value" if list(mention.values) != texts else repr(" ".join(texts)[:60])


def number(text: str) -> str:
    """Quote a number for a sentence; "" if the text is no number and may be a secret."""
    return repr(text[:40]) if _PLAIN.fullmatch(text) or _LISTED.fullmatch(text) else ""


def _variable(mention: Given, place: int) -> str:
    if mention.option is None and not is_like_a_flag(mention.spelled):
        return placeholder(f"word_{mention.words.start + place + 1}")
    flag = mention.option.flag.name if mention.option else mention.spelled
    number = f"_{place}" if place > 1 else ""
    return placeholder(f"{_READ.get(flag, flag.lstrip('-'))}{number}")


def _shown(mention: Given, text: str) -> str | None:
    """Return the value of a flag; None if it may not be shown."""
    option, fallback = mention.option, _DEFAULT.fullmatch(text)
    if option is None:
        return None
    if is_variable(text) or (fallback and _shown(mention, fallback[1]) == fallback[1]):
        return text
    if text[:1] in ("{", "["):
        try:
            return json.dumps(_part(json.loads(text, object_pairs_hook=lambda pairs: pairs), ""))
        except (ValueError, RecursionError):
            return None
    if mention.spelled.startswith("-O") and not option.key:
        return text if text.isdigit() else None

    flag, key = option.flag, option.key.rpartition(".")[2]
    if flag.takes == "none" and not option.key:
        is_plain = text.lower() in ("true", "false", "0", "1")
    else:
        choices = [choice for form in (flag, *(older for _, older in flag.until)) for choice in form.choices]
        may_be_number = flag.value != "text" or option.key or flag.name[2:] in FLAGS
        is_plain = text in choices or bool(may_be_number and (_PLAIN.fullmatch(text) or _LISTED.fullmatch(text)))
    if is_plain:
        return text

    takes_name = key in NAMED_KEYS if key else flag.name[2:] in FLAGS and flag.value not in ("json", "object")
    kept = name(text, flag.name in _REVISIONS) if takes_name else ""
    return None if "://" in text and kept != text else kept or None  # no URL is shown in part


def _part(content: Any, key: str) -> Any:
    """Return JSON with known keys or switches, and numbers, switches or names; ValueError if it has more.

    An object comes as a list of pairs, so that a repeated key is seen.
    """
    if isinstance(content, list) and content and all(isinstance(part, tuple) for part in content):
        keys = [name for name, _ in content]
        able = {key for key, on in content if isinstance(on, bool) and _SWITCH.fullmatch(key) and not is_secret(key)}
        if len({*keys}) < len(keys) or not KEYS.issuperset({*keys} - able):
            raise ValueError
        return {name: _part(part, name) for name, part in content}
    if isinstance(content, list):
        return [_part(part, key) for part in content]
    if not isinstance(content, str):
        return content
    kept = content if _PLAIN.fullmatch(content) else name(content) if key in NAMED_KEYS else ""
    if kept != content:
        raise ValueError
    return content
