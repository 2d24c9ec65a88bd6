"""A corpus of secrets where people and programs write them: places, names and kinds of values, the same at each run."""

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
POSITIONS = (
    "{name}={value} was read",
    "export {name}='{value}'; vllm serve m",
    'environment: {name}="{value}" TERM=dumb',
    "{name} = {value}",
    "> {name}: {value}",
    "curl -s -H '{name}: {value}' http://h:8000/v1/models",
    'curl -H"{name}: {value}" http://h:8000/v1/models',
    "  {name}: {value}",
    "non-default args: {{'port': 8000, '{name}': '{value}', 'model': 'm'}}",
    '{{"model": "m", "{name}": "{value}", "port": 8000}}',
    '{{"{name}":"{value}","port":8000}}',
    '{{"body": "{{\\"{name}\\": \\"{value}\\", \\"port\\": 8000}}"}}',
    "Namespace(port=8000, {name}=['{value}', 'b'], model='m')",
    "{{'{name}': ['a', '{value}'], 'port': 8000}}",
    "TypeError: __init__() got {name}='{value}', port=8000",
    "Settings({name}=SecretStr('{value}'), port=8000)",
    '[("{name}", "{value}"), ("port", "8000")]',
    "headers=[(b'host', b'h'), (b'{name}', b'{value}')]",
    "os.environ['{name}'] = '{value}'",
    '"GET /v1/models?page=2&{name}={value}&limit=3 HTTP/1.1" 401',
    "Failed: https://h:8443/v1/models?{name}={value}: timeout",
    "Failed: https://h:8443/callback#{name}={value}",
    "Set-Cookie: theme=dark; {name}={value}; Path=/; HttpOnly",
    "<{name}>{value}</{name}>",
    "{name} -> {value}",
)
"""Where a value has a name; braces are doubled."""
FLAG_POSITIONS = (
    "vllm serve m {name} {value} --port 8000",
    "vllm serve m {name}={value} --port 8000",
    "vllm serve m {name} '{value}' --port 8000",
    "['vllm', 'serve', 'm', '{name}', '{value}', '--port', '8000']",
    '["vllm","serve","m","{name}","{value}","--port","8000"]',
    "Popen(['vllm', 'serve', 'm', '{name}={value}', '--port=8000'])",
)
ALONE = (
    "rejected Bearer {value}",
    "Failed: https://me:{value}@h:8443/v1: timeout",
    "cannot resolve me:{value}@h",
    "https:/me:{value}@h/x does not exist",
    "redis://:{value}@cache:6379/0",
    "curl -u me:{value} http://h:8000",
    "machine h login me password {value}",
    "Server=h;Uid=me;Pwd={value};Database=d",
    "-----BEGIN PRIVATE KEY-----\\n{value}\\n-----END PRIVATE KEY----- could not be read",
)
"""Where a value has a place instead of a name."""
IN_A_PATH = "POST /services/T00/B00/{value}/x"
UNNAMED = ("the client sent {value}", "'{value}' is unknown", "[{value}]", "a={value},b=2", IN_A_PATH)
"""Where nothing but the value itself says what it is."""


class Secret(NamedTuple):
    """A text with a secret."""

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
    "short": lambda random: random.choice(("pw1", "x7q", "v9z")),
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


def placed(secret: str) -> Iterator[str]:
    """Yield the texts in which one secret stands at each place that has a name or says what it is."""
    for templates, names in ((POSITIONS, NAMES), (FLAG_POSITIONS, FLAGS), (ALONE, ("",))):
        for number, template in enumerate(templates):
            yield template.format(name=names[number % len(names)], value=secret)


def corpus(count: int = 300, seed: int = 31) -> Iterator[Secret]:
    """Yield so many texts, each place and each kind of value about as often."""
    random = Random(seed)
    places = [(template, NAMES) for template in POSITIONS]
    places += [(template, FLAGS) for template in FLAG_POSITIONS]
    places += [(template, ("",)) for template in (*ALONE, *UNNAMED)]
    for number in range(count):
        template, names = places[number % len(places)]
        kinds = RANDOM if template in UNNAMED else {**RANDOM, **CHOSEN}
        if template == IN_A_PATH:  # a slash would part it, and a hash is the name of a file
            kinds = {kind: draw for kind, draw in kinds.items() if kind not in ("base64", "hex")}
        secret = random.choice(list(kinds.values()))(random)
        yield Secret(template.format(name=random.choice(names), value=secret), secret)
