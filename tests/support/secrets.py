"""A corpus of secrets where people and programs write them: positions x names x kinds of values, the same at each run."""

import base64
import string
import uuid
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

NAMES = (
    *(
        "api_key",
        "API_KEY",
        "VLLM_API_KEY",
        "X-Api-Key",
        "apiKey",
        "key",
        "token",
        "HF_TOKEN",
        "access_token",
        "hf-token",
    ),
    *("secret", "client_secret", "AWS_SECRET_ACCESS_KEY", "password", "DB_PASSWORD", "passwd", "pwd", "passphrase"),
    *(
        "Authorization",
        "Proxy-Authorization",
        "Cookie",
        "session",
        "sessionid",
        "sid",
        "sig",
        "signature",
        "jwt",
        "otp",
    ),
    *("X-Amz-Signature", "X-Amz-Security-Token", "credential", "credentials", "bearer", "auth", "oauth", "AccountKey"),
)
FLAGS = (
    "--api-key",
    "--api_key",
    "--hf-token",
    "--ssl-keyfile-password",
    "--auth-token",
    "--password",
    "--s3.secret-key",
)
POSITIONS = {
    "assignment": "{name}={value} was read",
    "export": "export {name}='{value}'; vllm serve m",
    "double quotes": 'environment: {name}="{value}" TERM=dumb',
    "spaced": "{name} = {value}",
    "header": "> {name}: {value}",
    "header of curl": "curl -s -H '{name}: {value}' http://h:8000/v1/models",
    "header joined": 'curl -H"{name}: {value}" http://h:8000/v1/models',
    "yaml": "  {name}: {value}",
    "dict": "non-default args: {{'port': 8000, '{name}': '{value}', 'model': 'm'}}",
    "json": '{{"model": "m", "{name}": "{value}", "port": 8000}}',
    "compact json": '{{"{name}":"{value}","port":8000}}',
    "json in json": '{{"body": "{{\\"{name}\\": \\"{value}\\", \\"port\\": 8000}}"}}',
    "list": "Namespace(port=8000, {name}=['{value}', 'b'], model='m')",
    "list in a dict": "{{'{name}': ['a', '{value}'], 'port': 8000}}",
    "keyword": "TypeError: __init__() got {name}='{value}', port=8000",
    "secret type": "Settings({name}=SecretStr('{value}'), port=8000)",
    "pair": '[("{name}", "{value}"), ("port", "8000")]',
    "pair of bytes": "headers=[(b'host', b'h'), (b'{name}', b'{value}')]",
    "item": "os.environ['{name}'] = '{value}'",
    "query": '"GET /v1/models?page=2&{name}={value}&limit=3 HTTP/1.1" 401',
    "query of a URL": "Failed: https://h:8443/v1/models?{name}={value}: timeout",
    "fragment": "Failed: https://h:8443/callback#{name}={value}",
    "cookie": "Set-Cookie: theme=dark; {name}={value}; Path=/; HttpOnly",
    "element": "<{name}>{value}</{name}>",
    "arrow": "{name} -> {value}",
}
"""Where a value has a name; braces are doubled."""
FLAG_POSITIONS = {
    "flag": "vllm serve m {name} {value} --port 8000",
    "flag joined": "vllm serve m {name}={value} --port 8000",
    "flag in quotes": "vllm serve m {name} '{value}' --port 8000",
    "command as a list": "['vllm', 'serve', 'm', '{name}', '{value}', '--port', '8000']",
    "command as JSON": '["vllm","serve","m","{name}","{value}","--port","8000"]',
    "joined in a list": "Popen(['vllm', 'serve', 'm', '{name}={value}', '--port=8000'])",
}
ALONE = {
    "bearer": "rejected Bearer {value}",
    "user of a URL": "Failed: https://me:{value}@h:8443/v1: timeout",
    "user of an address": "cannot resolve me:{value}@h",
    "user of a Path": "https:/me:{value}@h/x does not exist",
    "connection": "redis://:{value}@cache:6379/0",
    "user of curl": "curl -u me:{value} http://h:8000",
    "netrc": "machine h login me password {value}",
    "connection string": "Server=h;Uid=me;Pwd={value};Database=d",
    "PEM": "-----BEGIN PRIVATE KEY-----\\n{value}\\n-----END PRIVATE KEY----- could not be read",
}
"""Where a value has a place instead of a name."""
IN_A_PATH = "POST /services/T00/B00/{value}/x"
UNNAMED = ("the client sent {value}", "'{value}' is unknown", "[{value}]", "a={value},b=2", IN_A_PATH)
"""Where nothing but the value itself says what it is."""


class Secret(NamedTuple):
    """A text with a secret, and where the secret stands."""

    place: str
    text: str
    secret: str


Draw = Callable[[Random], str]


def _of(alphabet: str, length: int) -> Draw:
    return lambda random: "".join(random.choices(alphabet, k=length))


RANDOM: dict[str, Draw] = {
    "base62": _of(string.ascii_letters + string.digits, 32),
    "base64": lambda random: base64.b64encode(random.randbytes(33)).decode(),
    "base64url": lambda random: base64.urlsafe_b64encode(random.randbytes(32)).decode().rstrip("="),
    "base36": _of(string.ascii_lowercase + string.digits, 36),
    "base32": lambda random: base64.b32encode(random.randbytes(20)).decode(),
    "hex": lambda random: random.randbytes(32).hex(),
    "letters": _of(string.ascii_letters, 40),
    "hf": lambda random: "hf_" + _of(string.ascii_letters, 34)(random),
    "openai": lambda random: "sk-proj-" + _of(string.ascii_letters + string.digits + "_-", 40)(random),
    "aws": lambda random: "AKIA" + _of(string.ascii_uppercase + string.digits, 16)(random),
    "github": lambda random: "ghp_" + _of(string.ascii_letters + string.digits, 36)(random),
    "jwt": lambda random: ".".join(
        [
            base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("="),
            *(base64.urlsafe_b64encode(random.randbytes(30)).decode() for _ in range(2)),
        ]
    ),
}
"""Values that are hidden wherever they stand."""
CHOSEN: dict[str, Draw] = {
    "word": lambda random: random.choice(("swordfish", "correcthorse", "letmein-please", "hunter2hunter")),
    "short": lambda random: random.choice(("pw1", "x7q", "abc")),
    "number": _of(string.digits, 6),
    "uuid": lambda random: str(uuid.UUID(bytes=random.randbytes(16))),
    "signs": lambda random: random.choice(("pa$$w0rd!", "tr0ub4dor&3%", "a.b-c_d~e+f", "p^ss*w|rd", "ünïcödé-pw")),
    "commit": lambda random: random.randbytes(20).hex(),
}
"""Values that are hidden where the name or the place says so."""
PIECE = 8


def is_shown(secret: str, text: str) -> bool:
    """Return True if a text has the secret, or a part of it that gives away something."""
    return any(secret[at : at + PIECE] in text for at in range(max(1, len(secret) - PIECE + 1)))


def corpus(count: int = 300, seed: int = 31) -> Iterator[Secret]:
    """Yield so many texts, each place and each kind of value about as often."""
    random = Random(seed)
    named = [(place, template, NAMES) for place, template in POSITIONS.items()]
    flags = [(place, template, FLAGS) for place, template in FLAG_POSITIONS.items()]
    alone = [(place, template, ("",)) for place, template in ALONE.items()]
    unnamed = [(f"unnamed {template}", template, ("",)) for template in UNNAMED]
    places = [*named, *flags, *alone, *unnamed]
    for number in range(count):
        place, template, names = places[number % len(places)]
        kinds = RANDOM if template in UNNAMED else {**RANDOM, **CHOSEN}
        if template == IN_A_PATH:  # a slash would part it, and a hash is the name of a file
            kinds = {kind: draw for kind, draw in kinds.items() if kind not in ("base64", "hex")}
        secret = random.choice(list(kinds.values()))(random)
        yield Secret(place, template.format(name=random.choice(names), value=secret), secret)
