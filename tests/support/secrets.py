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
SIBLINGS = (
    '{{"name": "{name}", "value": "{value}"}}, {{"name": "PORT", "value": "8000"}}',
    "{{'name': '{name}', 'value': '{value}', 'value_from': None}}",
    '{{"value": "{value}", "name": "{name}"}}',
    "- name: PORT\n  value: '8000'\n- name: {name}\n  value: {value}\n- name: HOST\n  value: '0.0.0.0'",
    "V1EnvVar(name='{name}', value='{value}', value_from=None)",
    "Header(name=b'{name}', value=b'{value}')",
    'name={name} value="{value}" port=8000',
    "env: name: {name}, value: {value}",
    '{{\\"name\\": \\"{name}\\", \\"value\\": \\"{value}\\"}}',
    '[{{"key": "{name}", "value": "{value}", "type": "text"}}]',
    "<header><name>{name}</name><value>{value}</value></header>",
    "EnvVar {{ name: {name} value: {value} }}",
)
"""Where a name and its value are two fields."""
NEXT_LINE = (
    "{name}: >-\n  {value}\nport: 8000",
    "{name}: |\n    {value}",
    "{name}:\n  {value}",
    '{{\n  "{name}":\n    "{value}",\n  "port": 8000\n}}',
    "{name}=\\\n{value}",
    "{name} = (\n    '{value}'\n)",
    "'{name}':\n'{value}',",
    "1 validation error for S\n{name}\n  Input should be shorter [type=x, input_value='{value}', input_type=str]",
)
FLAG_NEXT_LINE = (
    "vllm serve m \\\n  {name} \\\n  {value} \\\n  --port 8000",
    "- {name}\n- {value}\n- --port",
    "{name}\n{value}\n--port",
)
"""Where a value stands in the next line."""
SEPARATED = (
    "{name} - {value}",
    "| {name} | {value} |",
    "| `{name}` | `{value}` |",
    "%7B%22{name}%22%3A%22{value}%22%7D",
    "{name}%3D{value}%26port",
    "{name}\uff1a{value}",
)
"""Signs that few programs write between a name and its value."""
CAPITALS = ("VLLM_API_KEY", "API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY")
LANGUAGES = (
    *("Passwort", "Kennwort", "contraseña", "mot de passe", "senha", "hasło", "wachtwoord", "parola", "lösenord"),
    *("jelszó", "heslo", "salasana", "adgangskode", "clave", "mật khẩu", "κωδικός", "كلمة المرور", "סיסמה"),
    *("пароль", "密码", "密碼", "パスワード", "비밀번호"),
)
PROGRAMS = (
    "docker login -u me -p {value} registry.example",
    "podman login -p {value} -u me quay.io",
    "sshpass -p {value} ssh me@h",
    "sshpass -p{value} ssh me@h",
    "mysql -u me -p{value} db",
    "mysqldump -h h -p{value} db",
    "redis-cli -h h -a {value} ping",
    "ldapsearch -x -D cn=me -w {value} -b dc=x",
    "wandb login {value}",
    "wandb login --relogin {value}",
    "openssl rsa -passin pass:{value} -in x",
    "unzip -P {value} x.zip",
    "mongosh -u me -p {value} h",
    "aws configure set aws_secret_access_key {value}",
    "smbclient //h/x -U me%{value}",
    "az login --service-principal -u app -p {value} --tenant t",
    "setx VLLM_API_KEY {value}",
    "ENV HF_TOKEN {value}",
    "set -gx DB_PASSWORD {value}",
    "Incorrect API key provided: {value}. You can find your key at",
    "POST https://hooks.slack.com/services/T00/B00/{value} failed",
    "POST https://discord.com/api/webhooks/123/{value} failed",
    "GET https://api.telegram.org/bot123:{value}/getMe failed",
)
"""Short options, words and addresses of programs that have a password behind them."""
FLAG_OF_TWO_WORDS = ("vllm serve m {name}=part {value} --port 8000",)
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
TOKENS: dict[str, Draw] = {
    "databricks": lambda random: f"dapi{random.randbytes(16).hex()}",
    "langsmith": lambda random: f"lsv2_pt_{random.randbytes(16).hex()}_{random.randbytes(5).hex()}",
    "slack app": lambda random: f"xapp-1-A0{random.randrange(10**9)}-{random.randbytes(32).hex()}",
    "twilio": lambda random: f"SK{random.randbytes(16).hex()}",
    "digitalocean": lambda random: f"dop_v1_{random.randbytes(32).hex()}",
    "docker": lambda random: f"dckr_pat_{_of(string.ascii_letters + string.digits, 27)(random)}",
    "vault": lambda random: f"hvs.{_of(string.ascii_letters + string.digits, 24)(random)}",
    "grafana": lambda random: f"glsa_{_of(string.ascii_letters, 32)(random)}_{random.randbytes(4).hex()}",
    "replicate": lambda random: f"r8_{_of(string.ascii_letters + string.digits, 37)(random)}",
    "groq": lambda random: f"gsk_{_of(string.ascii_letters + string.digits, 52)(random)}",
    "tailscale": lambda random: f"tskey-auth-k{_of(string.ascii_letters + string.digits, 12)(random)}",
    "gitlab": lambda random: f"glptt-{random.randbytes(20).hex()}",
    "slack cookie": lambda random: f"xoxc-1-{random.randbytes(16).hex()}",
    "cloudflare": lambda random: f"v1.0-{random.randbytes(15).hex()}",
    "rubygems": lambda random: f"rubygems_{random.randbytes(24).hex()}",
    "jina": lambda random: f"jina_{random.randbytes(16).hex()}",
    "basic": lambda random: base64.b64encode(b"me:%06d" % random.randrange(10**6)).decode(),
    "shopify": lambda random: f"shpat_{random.randbytes(16).hex()}",
}
"""Tokens of known services, hidden by their form."""
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


def rarer(count: int = 300, seed: int = 54) -> Iterator[Secret]:
    """Yield so many texts of the forms that fewer programs write: siblings, next lines, short options, languages."""
    random = Random(seed)
    places: list[tuple[str, tuple[str, ...]]] = [(template, NAMES) for template in (*SIBLINGS, *NEXT_LINE)]
    places += [(template, FLAGS) for template in (*FLAG_NEXT_LINE, *FLAG_OF_TWO_WORDS)]
    places += [(template, CAPITALS) for template in SEPARATED]
    places += [(template, ("",)) for template in PROGRAMS]
    places += [(f"{{name}}{sign}{{value}}", LANGUAGES) for sign in (": ", "=", "\uff1a")]
    places += [("the client sent {value} for it", ("",))] * 3
    for number in range(count):
        template, names = places[number % len(places)]
        kinds = TOKENS if template.startswith("the client") else {**RANDOM, **CHOSEN}
        if template in PROGRAMS:
            kinds = {kind: draw for kind, draw in kinds.items() if kind != "signs"}
        secret = random.choice(list(kinds.values()))(random)
        yield Secret(template.format(name=random.choice(names), value=secret), secret)
