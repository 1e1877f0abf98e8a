"""Masking of secrets in command lines, environments and nested settings.

Standard library only: the agent uses it inside vLLM's processes. What looks like a secret
is known by its *name* (option, variable, JSON key), by its place (``user:password@`` of a
URL, ``Authorization`` headers) or by a well-known shape (``hf_...``, ``sk-...``). Masking a
harmless value costs a reader one number; leaking a key costs more: in doubt it is masked.
``max_tokens``, ``num_tokens``, ``tokenizer``, ``eos_token_id`` and their like stay readable.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from kvtrace.trace.secret_shapes import SHAPES

MASK = "***"

# fmt: off
_STRONG = (
    "password", "passwd", "passphrase", "passcode", "secret", "credential", "authorization", "apikey",
    "accesskey", "privatekey", "accountkey", "signingkey", "encryptionkey", "masterkey", "sharedkey",
    "storagekey", "sessionkey", "authkey", "licensekey", "clientkey", "bearer", "jwt",
    "connectionstring", "connstr", "webhook",
)
"""In a name without its separators: the value is a secret."""
_TOKEN_KINDS = {"api", "hf", "auth", "access", "refresh", "bearer", "secret", "session"}
_NO_SECRET_TOKENS = {
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "per", "in", "last", "first", "next", "stop", "start",
    "end", "special", "image", "video", "audio", "think", "tool", "new", "num", "max", "min", "by",
}
"""``<word>_token`` that is a piece of text or a unit, not a key."""
_LAST = {
    "auth", "salt", "cookie", "pw", "creds", "cred", "sk", "ak", "pat", "sig", "signature", "sid", "sessid",
    "dsn",
}
"""As a name's last word: the value is a secret, unless it is a number."""
_LAST_STRONG = {"pin", "otp", "totp", "psk"}
"""The same, numbers too."""
_KEY_OF = {
    "", "ssh", "s3", "kms", "gpg", "pgp", "rsa", "dsa", "tls", "ssl", "aes", "hmac", "cipher", "crypto",
    "service", "vault", "aws", "gcp", "azure", "openai", "hf", "wandb", "app", "host", "server", "admin",
    "root",
}
"""``<word>_key`` that is a secret. A ``cache_key`` or ``block_key`` is none."""
_PASS_OF = {
    "", "user", "db", "redis", "http", "proxy", "smtp", "mysql", "postgres", "ftp", "admin", "root", "login",
    "account", "store", "storage", "s3", "valkey", "kv", "cache",
}
_NO_PASS = {"bypass", "compass", "encompass", "overpass", "underpass", "surpass", "trespass"}
# fmt: on
_HINT = re.compile(
    r"(?i)pass|pw|secret|token|key|cred|auth|salt|cookie|jwt|bearer|conn|sess|sid|sig|psk|otp|pin|pat|ak|sk|dsn|webhook"
)
"""What every name with a strength has in it: names without it are not looked at more closely."""
_MAX_DEPTH = 64

# Every repeat that could be tried at each position is bounded: masking stays linear.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_URL_PASSWORD = re.compile(
    r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s/?#:@\"']{0,200}):(?!\d{1,5}[/?#])([^\s\"'@]{0,300})@"
)
_URL_USER = re.compile(
    r"(?i)\b((?:rediss?|valkeys?|https?|amqps?|mongodb(?:\+srv)?|mysql|postgres(?:ql)?|nats|mqtts?|wss?|ftps?|tcp|etcd)"
    r"://)[^\s/?#:@\"']{1,300}@"
)
_USER = re.compile(r"(?<![\w-])(-u|-U|--user|--proxy-user)(\s{1,9}|=)([^\s:\"']{1,200}):[^\s\"']{1,300}")
_SHORT = re.compile(r"(?<![\w-])-p\s{1,9}(?![\d./~-])[^\s\"']{1,300}")
_PEM = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
_WEBHOOK = re.compile(
    r"(?i)\b(https://(?:hooks\.slack\.com|(?:\w{1,9}\.)?discord(?:app)?\.com/api/webhooks)/)[\w/.+=-]{8,}"
)
_URL_TOKEN = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#:@\"']{16,1000}@")
_HEADER = re.compile(r"(?i)(authorization\\{0,9}[\"']?\s{0,9}[:=]\s{0,9}\\{0,9}[\"']?)[^\"'\\\r\n]+")
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s{1,9}[A-Za-z0-9._~+/=-]{4,}")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|A(?:KIA|SIA)[0-9A-Z]{12,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|AIza[\w-]{20,}|ya29\.[\w-]{10,}|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}"
    r"|[spr]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[\w+/=]{16,}|hvs\.[\w-]{16,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|nvapi-[\w-]{16,}|gsk_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}|dop_v1_[0-9a-f]{16,}|gl(?:sa|c)_[\w=]{16,}|lin_api_\w{16,})"
)
_LEAST_SHAPE = 16
_KEY = re.compile(r"(?<![\w.-])-{0,2}([A-Za-z_][\w.-]{0,120})(?:\\{0,9}[\"'])?\s{0,9}[=:]\s{0,9}")
_OPTION = re.compile(r"(?<![\w-])--?([A-Za-z][\w.-]{0,120})\s{1,9}(?!--)")
_VALUE = re.compile(r"(\\{0,9}[\"'])((?:(?!\1).)*)(?:\1)?|()([^\s,;&\"'{}\[\]]+)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?\.?\Z")


def mask_argv(argv: list[str]) -> list[str]:
    """A command line of the same length, its secrets replaced by ``***``."""
    masked: list[str] = []
    after = ""  # the option whose secret may come next
    for arg in argv:
        if after and not arg.startswith("--"):
            masked.append(MASK)
            # `--api-key K1 K2`: vLLM takes several
            after = after if _takes_several(after) and not arg.startswith("-") else ""
            continue
        before = masked[-1] if masked else ""
        after = ""
        if before in ("-u", "-U", "--user", "--proxy-user", "-p") and _short_option(before, arg) != arg:
            masked.append(_short_option(before, arg))
            continue
        if arg.startswith("-") and "=" not in arg:
            after = arg if _strength(arg) else ""
            masked.append(arg if not re.search(r"\s", arg) else mask_text(arg))
            continue
        masked.append(_mask_argument(arg))
    return masked


def mask_mapping(value: Any) -> Any:
    """A copy of a JSON-like value (dict, list, tuple, str, numbers) without its secrets.

    Tuples and sets come back as lists; other objects are returned as they are.
    """
    return _mask_value(value, 0)


def mask_text(text: str) -> str:
    """Free text (a message, a shell line, JSON) without its secrets."""
    text = _PEM.sub(MASK, text)
    text = _WEBHOOK.sub(rf"\1{MASK}", text)
    text = _URL_PASSWORD.sub(rf"\1\2:{MASK}@", text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    text = _URL_TOKEN.sub(rf"\1{MASK}@", text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _SCHEME.sub(rf"\1 {MASK}", text)
    text = _mask_values(text, _KEY)
    text = _mask_values(text, _OPTION)
    text = _USER.sub(rf"\1\2\3:{MASK}", text)
    text = _SHORT.sub(f"-p {MASK}", text)
    return _SHAPES.sub(MASK, _mask_shapes(text))


def _mask_shapes(text: str) -> str:
    """What has the shape of a key that a service gives out, by the table of a well-kept detector."""
    lowered = text.lower()
    if len(text) < _LEAST_SHAPE or not _any_word().search(lowered):
        return text
    for number in dict.fromkeys(
        n for n, (_, words, _) in enumerate(SHAPES) for word in words if word in lowered
    ):
        text = _shape(number).sub(MASK, text)
    return text


@functools.cache
def _any_word() -> re.Pattern[str]:
    """Finds one of the table's words: what most texts have none of, in a fraction of the time."""
    words = sorted({word for _, of_rule, _ in SHAPES for word in of_rule})
    firsts = dict.fromkeys(word[0] for word in words)
    return re.compile(
        "|".join(
            re.escape(first)
            + "(?:" + "|".join(re.escape(word[1:]) for word in words if word[0] == first) + ")"
            for first in firsts
        )
    )  # fmt: skip


@functools.cache
def _shape(number: int) -> re.Pattern[str]:
    # with the rest of the word: a key that is longer than the table knows is masked as a whole
    return re.compile(SHAPES[number][2] + r"[\w-]{0,400}")


def _short_option(option: str, value: str) -> str:
    """What follows ``-u`` (user:password) or ``-p`` (password; also a port, a path)."""
    text = f"{option} {value}"
    return (_SHORT if option == "-p" else _USER).sub(
        lambda match: f"{option} {MASK}" if option == "-p" else f"{option} {match.group(3)}:{MASK}", text
    )[len(option) + 1 :]


@functools.lru_cache(4096)
def _strength(name: str) -> int:
    """0: no secret. 1: probably (a number under it is none). 2: surely."""
    if name in ("PWD", "OLDPWD") or not _HINT.search(name):
        return 0
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return 0
    squeezed = "".join(words)
    if any(part in squeezed for part in _STRONG):
        return 2
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    if last.endswith("token"):
        return 0 if last == "token" and before in _NO_SECRET_TOKENS else 1
    if last == "tokens":
        return 1 if before in _TOKEN_KINDS else 0
    if last in _LAST_STRONG:
        return 2
    if last == "key":
        return 1 if before in _KEY_OF or squeezed[:-3] in _KEY_OF else 0
    if last == "pass":
        return 1 if before in _PASS_OF else 0
    ends = last.endswith(("pwd", "pass")) and last not in _NO_PASS
    return 1 if last in _LAST or ends or squeezed.endswith("sessionid") else 0


def _takes_several(option: str) -> bool:
    return "apikey" in re.sub(r"[^a-z]", "", option.lower())


def _mask_argument(arg: str) -> str:
    """One argument that is no bare option: JSON, ``NAME=value``, ``--opt=value``, text."""
    head, equals, tail = arg.partition("=")
    if equals and re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", head):
        return f"{head}={MASK}" if tail and _strength(head) else f"{head}={_mask_string(tail, 0)}"
    return _mask_string(arg, 0)


def _mask_string(text: str, depth: int) -> str:
    """JSON stays JSON (and byte for byte what it was where it holds no secret)."""
    if depth < _MAX_DEPTH and text.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return mask_text(text)
        masked = _mask_value(value, depth + 1)
        return text if masked == value else json.dumps(masked)
    return mask_text(text)


def _mask_value(value: Any, depth: int) -> Any:
    if depth >= _MAX_DEPTH:
        return MASK
    if isinstance(value, dict):
        return {key: _mask_item(key, item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_mask_value(item, depth + 1) for item in value]
    if isinstance(value, str):
        return _mask_string(value, depth)
    if isinstance(value, (bytes, bytearray)):
        return MASK
    return value


def _mask_item(key: object, value: Any, depth: int) -> Any:
    strength = _strength(key) if isinstance(key, str) else 0
    if not strength or value is None or isinstance(value, bool) or value == "":
        return _mask_value(value, depth + 1)
    if strength == 1 and isinstance(value, (int, float)):
        return value
    return MASK


def _mask_values(text: str, names: re.Pattern[str]) -> str:
    """Replace what stands behind each name that tells of a secret."""
    parts: list[str] = []
    done = at = 0
    while match := names.search(text, at):
        at = match.end()
        strength = _strength(match.group(1))
        value = _VALUE.match(text, at) if strength else None
        if value is None:
            continue
        quote = value.group(1) or ""
        bare = value.group(2) if quote else value.group(4)
        if not bare or (strength == 1 and _NUMBER.match(bare)):
            continue  # "next token: 5" is no key
        parts += [text[done:at], quote, MASK, quote]
        done = at = value.end()
    return "".join(parts) + text[done:]
