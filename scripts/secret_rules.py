#!/usr/bin/env python3
"""Write kvtrace/trace/secret_shapes.py anew: the shapes of keys and tokens that gitleaks knows.

python scripts/secret_rules.py GITLEAKS_CHECKOUT VERSION    (config/gitleaks.toml and LICENSE are read)

Only rules that know a secret by its own shape are taken. Those that need a name beside it
(``adafruit_api_key = ...``) are left out: kvtrace masks by the name whatever the value looks like.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "kvtrace" / "trace" / "secret_shapes.py"

LEFT_OUT = {
    "airtable-personnal-access-token": "needs the word airtable somewhere near it",
    "clickhouse-cloud-api-secret-key": "any 42 letters and digits that begin with 4b1d",
    "curl-auth-header": "a place, not a shape: headers are masked wherever they stand",
    "curl-auth-user": "a place, not a shape: -u and --user are masked wherever they stand",
    "facebook-access-token": "needs the word facebook somewhere near it",
    "freemius-secret-key": "a name and a value: masked by the name",
    "gitlab-session-cookie": "a name and a value: masked by the name",
    "kubernetes-secret-yaml": "several lines of YAML",
    "nuget-config-password": "a name and a value: masked by the name",
    "private-key": "masked as a whole, also where its end is cut off",
    "sidekiq-sensitive-url": "user and password of a URL: masked in every URL",
    "sourcegraph-access-token": "any 40 hexadecimal digits: every commit is one",
    "vault-service-token": "its older form is any word of 24 letters after 's.'; hvs. is known without it",
}
_BY_NAME = (r"[\w.-]{0,50}?", r"[ \t\w.-]{0,20}")
"""What the rules that need a name beside the secret begin with."""
_END = re.compile(r"\(\?:\[\\x60'\"\\s;\]\|\\\\\[nr\]\|\$(?:\|\\b)?\)\Z|\(\?:\[\^[^\]]+\]\|\\z\)\Z")
_PARTS = re.compile(r"\\.|\[\]?(?:\\.|[^\]\\])*\]|\{\d+,\}|.", re.DOTALL)
"""An escaped character, a class of characters, a repeat without end, or one character."""
_MOST = 400
_INSTEAD = {
    # without the characters around it, which stay
    "azure-ad-client-secret": r"(?<![\w~.])[a-zA-Z0-9_~.]{3}\dQ~[a-zA-Z0-9_~.-]{31,34}",
}


def python_pattern(pattern: str) -> str:
    """A pattern of RE2 for Python's re: flags in groups, no end of token asked for, every repeat bounded."""
    pattern = _END.sub("", pattern).replace("[[:alnum:]]", "[A-Za-z0-9]").replace(r"\z", r"\Z")
    pattern = "".join(map(_bounded, _PARTS.findall(_scoped(pattern))))
    re.compile(pattern)
    return pattern


def _bounded(part: str) -> str:
    """One part of a pattern; a repeat without end gets one, so that no text takes longer than its length."""
    if part in ("+", "*"):
        return f"{{{'01'[part == '+']},{_MOST}}}"
    least = re.fullmatch(r"\{(\d+),\}", part)
    return f"{{{least[1]},{max(_MOST, 2 * int(least[1]))}}}" if least else part


def _scoped(pattern: str) -> str:
    """``a(?i)b`` -> ``a(?i:b)``, up to the end of the group that it stands in."""
    while (at := pattern.find("(?i)")) >= 0:
        depth, end = 0, at + 4
        while end < len(pattern):
            char = pattern[end]
            if char == "\\":
                end += 2
                continue
            if char == "[":
                end = pattern.index("]", end + 2)
            depth += (char == "(") - (char == ")")
            if depth < 0:
                break
            end += 1
        pattern = f"{pattern[:at]}(?i:{pattern[at + 4 : end]}){pattern[end:]}"
    return pattern


def table(rules: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...], str]]:
    """(id, words of which one is in every such text in lower case, pattern) of each rule that is taken."""
    known = {rule["id"] for rule in rules}
    unknown = sorted(set(LEFT_OUT) - known)
    assert not unknown, f"left out, and not there: {unknown}"
    found = []
    for rule in rules:
        pattern = rule.get("regex", "")
        if not pattern or rule["id"] in LEFT_OUT or any(part in pattern for part in _BY_NAME):
            continue
        pattern = _INSTEAD.get(rule["id"], pattern)
        found.append((rule["id"], tuple(rule["keywords"]), python_pattern(pattern)))
    return found


def text(rows: list[tuple[str, tuple[str, ...], str]], version: str, licence: str) -> str:
    """The module."""
    notice = "\n".join(f"# {line}".rstrip() for line in licence.strip().splitlines())
    lines = [
        '"""Shapes of keys and tokens that many services give out, for Python\'s re: the rules of gitleaks',
        f"({version}, https://github.com/gitleaks/gitleaks, config/gitleaks.toml) without a name beside it.",
        "",
        'Made by scripts/secret_rules.py; do not edit. Standard library only: the agent uses it."""',
        "",
        notice,
        "",
        "from __future__ import annotations",
        "",
        f"SOURCE = {f'gitleaks {version}'!r}".replace("'", '"'),
        "# fmt: off",
        "# ruff: noqa: E501",
        "SHAPES: tuple[tuple[str, tuple[str, ...], str], ...] = (",
        *(f"    ({_quoted(id)}, {_words(words)}, {_raw(pattern)})," for id, words, pattern in rows),
        ")",
        '"""(id of the rule, words of which such a text has one in lower case, pattern)"""',
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _words(words: tuple[str, ...]) -> str:
    return "(" + ", ".join(map(_quoted, words)) + ("," if len(words) == 1 else "") + ")"


def _raw(pattern: str) -> str:
    assert "'''" not in pattern and not pattern.endswith(("'", "\\"))
    return f'r"{pattern}"' if '"' not in pattern else f"r'''{pattern}'''"


def main(checkout: str, version: str) -> None:
    import tomllib  # Python 3.11

    folder = Path(checkout)
    rules = tomllib.loads((folder / "config" / "gitleaks.toml").read_text())["rules"]
    rows = table(rules)
    TARGET.write_text(text(rows, version, (folder / "LICENSE").read_text()))
    print(f"{TARGET.relative_to(ROOT)}: {len(rows)} of {len(rules)} rules")


if __name__ == "__main__":
    main(*sys.argv[1:3])
