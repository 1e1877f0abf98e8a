"""What of a user's texts is kept: of settings what is known to be harmless, of text what is no credential.

Standard library only: the agent uses it inside vLLM's processes.

**Settings** (command lines, the connector's configuration, engine arguments): numbers, booleans, null,
paths, the names of options and keys, and of vLLM's own options (``options.py``) the words they take. Every
other string becomes its length and a digest under the run's key, unless ``--keep-settings`` was given.
**Free text** (messages, names of threads) is kept but for the values of assignments, what stands behind a
word for a secret, credentials of URLs, and words that look like a key. Of a long text the first 64 KiB are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
from typing import Any

from kvtrace.trace.options import COMMANDS, SHELLS, SHORT, WORDS

MASK = "***"
"""Of free text."""
_MOST_TEXT = 1 << 16
_MOST_DEPTH = 64
_MOST_ITEMS = 20_000
_salt, _keep = os.urandom(16), False


def use(salt: bytes, keep: bool = False) -> None:
    """From now on. ``salt``: of digests; ``keep``: settings are kept as free text is."""
    global _salt, _keep
    _salt, _keep = salt, keep


def digest(text: str) -> str:
    """What stands for a string that is not kept: equal ones of a run have the same."""
    data = text.encode("utf-8", "surrogatepass")
    characters = "1 character" if len(text) == 1 else f"{len(text)} characters"
    return f"<string of {characters}, {hashlib.blake2b(data, key=_salt, digest_size=3).hexdigest()}>"


# --- settings --------------------------------------------------------------------------------

_HARMLESS = re.compile(
    r"(?i:|[-+]?(?:\d{1,24}|(?=\.))(?:\.\d{0,24}){0,3}(?:e[-+]?\d{1,4})?(?:[kmgt]i?b?|b|[mun]?s|min|h|d|%)?"
    r"|true|false|none|null|nan|inf|on|off|yes|no|auto|default|always|never|enabled?|disabled?|all"
    r"|fp8|fp16|bf16|fp32|u?int\d{1,2}|b?float\d{1,2}|half|cpu|cuda(?::\d{1,3})?|gpu|hip|xpu|tpu"
    r"|\d{1,5}:\d{1,5}|(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[[\da-f:.]{2,45}\]|\*)?:\d{1,5}|localhost|\*|…)\Z"
)
_PATH = re.compile(r"(?:~?/|\.{1,2}/|\.{1,2}\Z)[^\s\"'<>|?*;&=@#$`\\]{0,4096}\Z")
_FILE = re.compile(
    r"(?:[\w.-]{1,200}/){0,20}[\w-]{1,200}\.(?:py|sh|jsonl?|ya?ml|toml|jinja|txt|csv|db|gguf|safetensors)\Z"
)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)(.{0,2000})\Z", re.DOTALL)
_HOST = re.compile(r"[\w.*-]{0,200}(?::\d{1,5})?\Z|\[[\da-fA-F:.]{2,45}\](?::\d{1,5})?\Z")
_WORD = re.compile(r"[\w.:,/+~*-]{1,300}\Z")
_NAME = re.compile(
    r"(?:[A-Za-z]{0,40}\d{0,9}[A-Za-z]{0,40}\d{0,9}[._/-]{1,2}){0,12}[A-Za-z]{0,40}\d{0,9}[A-Za-z]{0,40}\d{0,9}\Z"
)
_OF_A_PATH = re.compile(r"(?i)(?:path|dir|directory|folder|file|root)\Z")
_OPTION = re.compile(r"(--[A-Za-z][\w.-]{0,200}|-[A-Za-z]{1,3}(?:\.\w{1,99})*)(?:(=)(.*))?\Z", re.DOTALL)
_SHORT = re.compile(r"(-[A-Za-z])(.+)\Z", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_][\w.]{0,200})=(.*)\Z", re.DOTALL)
_SECRET = re.compile(
    r"(?i)pass(?:word|wd|phrase|code)|pwd|secret|credential|(?:api|access|private|master|enc\w{0,9})[_-]?key"
    r"|(?:\A|[_.-])(?:pin|t?otp|psk|pw|pass)\Z"
)
"""Names under which not even a number is harmless."""


def mask_argv(argv: list[str]) -> list[str]:
    """A command line of the same length, with what is known to be harmless."""
    masked: list[str] = []
    name = ""  # of the option whose value may come next
    for at, arg in enumerate(argv):
        if at == 0:
            masked.append(_program(arg))
        elif arg.startswith("-") and not _HARMLESS.match(arg) and len(arg) > 1:
            shown, name = _option(arg)
            masked.append(shown)
            continue
        elif not name and argv[at - 1] in ("serve", "throughput", "latency") and _WORD.match(arg):
            masked.append(_value(arg, "model"))
        elif not name and arg in COMMANDS:
            masked.append(arg)
        elif name == "c" and any(os.path.basename(word) in SHELLS for word in argv[:at]):
            masked.append(_line(arg))
        elif not name and (variable := _VARIABLE.match(arg)) and _NAME.match(variable[1]):
            masked.append(f"{variable[1]}={_value(variable[2], variable[1])}")
        else:
            masked.append(_value(arg, name))
        name = ""
    return masked


def mask_mapping(value: Any) -> Any:
    """A copy of a JSON-like value (dict, list, tuple, str, numbers), with what is known to be harmless.

    Tuples and sets come back as lists; other objects are returned as they are.
    """
    return _Copy().of(value, "", 0)


class _Copy:
    """Of one value; what is too deep or too much is left out."""

    def __init__(self) -> None:
        self._items = 0

    def of(self, value: Any, name: str, depth: int) -> Any:
        self._items += 1
        if depth >= _MOST_DEPTH or self._items > _MOST_ITEMS:
            return MASK
        if isinstance(value, dict):
            return {_key(key): self.of(item, str(key), depth + 1) for key, item in self._some(value.items())}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.of(item, name, depth + 1) for item in self._some(value)]
        if isinstance(value, str):
            return _value(value, name, depth)
        if isinstance(value, (bytes, bytearray)):
            return digest(value.hex())
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return digest(str(value)) if number and not _keep and _SECRET.search(name) else value

    def _some(self, values: Any) -> Any:
        for value in values:
            if self._items > _MOST_ITEMS:
                return
            yield value


def _key(key: Any) -> Any:
    return key if not isinstance(key, str) or _NAME.match(key) else _value(key, "")


def _value(text: str, name: str, depth: int = 0) -> str:
    """A string under the name of an option or key."""
    if len(text) > _MOST_TEXT:
        return digest(text)
    if text.lstrip()[:1] in ("{", "[") and depth < _MOST_DEPTH:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return mask_text(text) if _keep else digest(text)
        masked = _Copy().of(value, name, depth + 1)
        return text if masked == value else json.dumps(masked)
    if _keep:
        return mask_text(text)
    if text and _SECRET.search(name):
        return digest(text)
    name = name.rpartition(".")[2].replace("-", "_")
    if all(map(_HARMLESS.match, text.split(","))):
        return text
    if url := _URL.match(text):
        return _url(url)
    if _PATH.match(text) or _FILE.match(text):
        return _path(text)
    if _WORD.match(text) and not _random(text):
        if name in WORDS or (name == "module" and _NAME.match(text)):
            return text
        if _OF_A_PATH.search(name):
            return _path(text)
    return digest(text)


def _program(arg: str) -> str:
    if _WORD.match(arg):
        return _path(arg)
    return " ".join(mask_argv(words)) if len(words := arg.split()) > 1 else _value(arg, "")


def _option(arg: str) -> tuple[str, str]:
    """An option as it is kept, and its name where its value comes next."""
    option = _OPTION.match(arg)
    if arg == "--":
        return arg, ""
    if option and _NAME.match(option[1].lstrip("-")):
        shown, equals, value = option.groups()
        name = SHORT.get(shown, shown.lstrip("-").rpartition(".")[2].replace("-", "_"))
        if not shown.startswith("--") and shown.endswith("c") and len(shown) < 4:
            name = "c"  # of a shell: -lc, -ec
        return (f"{shown}={_value(value, name)}", "") if equals else (shown, name)
    short = _SHORT.match(arg)
    return (f"{short[1]}{_value(short[2], SHORT.get(short[1], ''))}" if short else _value(arg, "")), ""


def _line(text: str) -> str:
    """A shell's command line."""
    try:
        words = shlex.split(text) if len(text) <= _MOST_TEXT else []
    except ValueError:
        words = []
    if not words:
        return digest(text) if text else text
    masked: list[str] = []
    for first in [0, *(at + 1 for at, word in enumerate(words) if word in _BETWEEN)]:
        end = next((at for at in range(first, len(words)) if words[at] in _BETWEEN), len(words))
        part = words[first:end]
        # what comes before the program: NAME=value
        before = next((at for at, word in enumerate(part) if not _VARIABLE.match(word)), len(part))
        masked += mask_argv(["env", *part[:before]])[1:] + mask_argv(part[before:]) + words[end : end + 1]
    return text if masked == words else " ".join(masked)


_BETWEEN = {"&&", "||", ";", "|", "&"}


def _url(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    who, at, place = rest.rpartition("@")
    host = re.split(r"[/?#]", place, maxsplit=1)[0]
    path = place[len(host) :]
    if not _HOST.match(host):
        return scheme + digest(rest)
    if path not in ("", "/"):
        # of the web a path may be a key itself, as of webhooks
        kept = _PATH.match(path) and not scheme.lower().startswith(("http", "ws"))
        path = _path(path) if kept else f"/{digest(path)}"
    return scheme + (digest(who) if who else "") + at + host + path


def _path(text: str) -> str:
    return "".join(digest(part) if _random(part) else part for part in re.split(r"([/:])", text))


# --- free text -------------------------------------------------------------------------------

# Every repeat that could be tried at each position is bounded: masking stays linear.
_PEM = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
_OF_URL = re.compile(r"(://)[^\s\"'<>]{1,300}@")
_USER = re.compile(r"(?<![\w/~.@:-])[\w.+-]{1,64}[:/](?!/)[^\s@\"'<>]{1,200}@(?=[\w\[])")
_WEBHOOK = re.compile(
    r"(?i)\b(https?://[^\s\"'<>/]{0,200}(?:slack|discord|hook)[^\s\"'<>/]{0,100}/)[^\s\"'<>]{8,500}"
)
_TELLTALE = re.compile(
    r"(?i)pass|pwd|secret|token|cred|auth|cookie|sess(?:ion)?_?id|jwt|bearer|licen[cs]e|signature|webhook|salt|conn\w{0,9}str"
    r"|key\Z|(?:\A|[_.-])(?:pw|sk|ak|pat|pin|t?otp|psk|sig|sid|dsn|key\w?)\Z|\A[A-Za-z]{1,20}(?:-[A-Za-z]{1,20}){1,4}\Z"
)
"""A word for a secret at the end of a name, or the name of a header."""
_BARE = r"[^\s,;&\"'{}\[\]()<>]{1,2000}"
_ASSIGNED = re.compile(
    r"(?<![\w.-])((?:\\{0,9}[\"'])?)-{0,2}([A-Za-z_][\w.-]{0,100})((?:\\{0,9}[\"'])?)\s{0,3}(=(?!=)|:)\s{0,3}"
    rf"(?:(\\{{0,9}}[\"'])((?:(?!\5).){{0,2000}})|({_BARE}))",
    re.DOTALL,
)
_BEHIND = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w.-]{{0,60}})(\s{{1,9}})(?!-)([\"']?)({_BARE})")
_SAID = re.compile(
    rf"(?i)\b((?:pass(?:word|wd|phrase|code)|secret|credentials?|token|bearer|basic)\s{{1,9}})(?=\S{{0,99}}[\d$!%^*+=])({_BARE})"
)
_SHAPES = re.compile(
    r"\b(?:hf_|sk-|[spr]k_(?:live|test|prod)_|gh[pousr]_|github_pat_|gl[a-z]{2,6}-|gl(?:sa|c)_|xox[a-z]-|xapp-|npm_|pypi-"
    r"|whsec_|hv[sb]\.|SG\.|nvapi-|gsk_|lin_api_|sntrys_|sm_[aps]at_|fm[12]_|ops_eyJ|dp\.\w{2,5}\.|AIza|ya29\.|A[A-Z]{3}(?=[A-Z0-9]{16}\b)|eyJ)"
    r"[\w.+/=-]{8,}"
)
_RUN = re.compile(r"(?<![\w/~.-])[\w+.~=-]{9,}")
_ALNUM = re.compile(r"[A-Za-z0-9]{9,}")
_PIECES = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LETTERS = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]+(?![A-Za-z0-9])")
_IDS = {"cmpl", "chatcmpl", "embd", "pool", "score", "req", "request", "block", "engine", "run", "sha", "md"}
"""What stands before a number in hexadecimal digits that is an id or a checksum."""
_HEX = re.compile(r"(?:0x)?(?:[0-9a-f]+|[0-9A-F]+)\Z")


def mask_text(text: str) -> str:
    """Free text (a message, a name) without its credentials."""
    if len(text) > _MOST_TEXT:
        whole = text[:_MOST_TEXT].rsplit(None, 1)  # a part of a key would not be known
        text = f"{whole[0] if len(whole) > 1 else MASK} … ({len(text)} characters)"
    text = _PEM.sub(MASK, text)
    text = _WEBHOOK.sub(rf"\1{MASK}", text)
    text = _OF_URL.sub(rf"\1{MASK}@", text)
    text = _USER.sub(f"{MASK}@", text)
    text = _assigned(text)
    text = _BEHIND.sub(_behind, text)
    text = _SAID.sub(rf"\1{MASK}", text)
    text = _SHAPES.sub(MASK, text)
    return _RUN.sub(lambda word: MASK if _random(word[0]) else word[0], text)


def _assigned(text: str) -> str:
    parts: list[str] = []
    done = at = 0
    while found := _ASSIGNED.search(text, at):
        before, name, after, sign, quote, quoted, bare = found.groups()
        begin, end = found.span(6 if quote else 7)
        in_path = text[found.start(2) - 1 : found.start(2)] == "/"  # /store/dt=2024/
        if in_path and not quote:
            end = begin + len(bare.partition("/")[0])
        at = end
        told = bool(_TELLTALE.search(name))
        place = sign == ":" and "." in name  # file.py:12
        told = told and name.replace("-", "_") not in WORDS and not place
        if not (told or (sign == "=" and not in_path) or (before and after)):
            at = found.end(4)
            continue
        value = quoted if quote else text[begin:end]
        if _harmless(value.rstrip("."), name, told):
            continue
        if told and sign == ":" and not quote:  # Authorization: Bearer ...
            stop = re.compile(r"[\"'\r\n,;&}\\]").search(text, end)
            end = at = stop.start() if stop else len(text)
        parts += [text[done:begin], MASK]
        done = end
    return "".join(parts) + text[done:]


def _harmless(value: str, name: str, told: bool) -> bool:
    if _SECRET.search(name):
        return not value or "…" in value or value == MASK
    if not value or value == MASK or all(map(_HARMLESS.match, value.split(","))):
        return True
    return not told and (name.replace("-", "_") in WORDS or bool(_PATH.match(value)))


def _behind(found: re.Match[str]) -> str:
    option, space, quote, value = found.groups()
    if option in ("-p", "-u", "-U") or option in ("--user", "--proxy-user"):
        kept = ":" not in value if option != "-p" else value[0] in "/.~" or value[0].isdigit()
    else:
        kept = not _TELLTALE.search(option.lstrip("-").replace("-", "_")) or _harmless(value, option, True)
    return found[0] if kept else f"{option}{space}{quote}{MASK}"


@functools.lru_cache(4096)
def _random(text: str) -> bool:
    """Whether a part of it looks made up: letters and digits in turn. Ids and checksums do not."""
    for part in _ALNUM.findall(text[:2000]):
        if _HEX.match(part):
            if len(part) > 19 and any(word.lower() not in _IDS for word in _LETTERS.findall(text)):
                return True
            continue
        pieces = _PIECES.findall(part)
        numbers = sum(piece[0].isdigit() for piece in pieces)
        long, mean = len(part) > 15, len(part) / len(pieces)
        if numbers and (mean < (5 if long and numbers > 1 else 3 if long else 2.5 if numbers > 1 else 0)):
            return True
        if len(part) > 21 and part.islower() and part.isalpha():
            return True
    return False
