"""Which keys of ``kv_connector_extra_config`` a connector asks for: CONFIG_KEYS facts.

The dictionary stays vLLM's own, a plain one: a connector may write it as YAML, compare its type or hand it
to torch. What is asked of it is found in the connector's source (``code/config_source.py``), as it is made,
and again where more of its modules were imported since.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from kvtrace.agent.code import config_source, foreign, owners
from kvtrace.agent.state import AGENT
from kvtrace.trace.facts import ConfigKeysFact
from kvtrace.trace.format import Role
from kvtrace.trace.mask import mask_mapping

_ATTRIBUTE = config_source.DICTIONARY
_MAX_KEYS = 200
_MOST_LOOKS = 16
_MOST_CHARACTERS = 16 << 20
"""Of all source files together."""
_DYNAMIC = re.compile(r"import_module|__import__|exec\(|runpy")
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\S+)[ \t]+import|import[ \t]+([^\n#]+))", re.MULTILINE)


class _Given:
    """The keys that a connector was given, and what its source says of them."""

    def __init__(self, keys: tuple[str, ...], role: Role) -> None:
        self.keys = keys
        self.role = role
        self.index = 0
        """Of the connector, in this process."""
        self.cls: type = object
        self.seen = (0, 0)
        """Number of modules, and what was known of owners, when it was last asked for new ones."""
        self.newest = ""
        """Of these modules."""
        self.files: set[str] = set()
        self.looks = 0


_live: dict[Role, _Given] = {}
"""The connector made last, per role."""


def given(config: Any, role: Role) -> _Given | None:
    """Before a connector is made: what its KVTransferConfig holds. None where that is nothing."""
    _live.pop(role, None)
    value = getattr(getattr(config, "kv_transfer_config", None), _ATTRIBUTE, None)
    if not isinstance(value, dict) or not value:
        return None
    foreign.know_paths(value)
    return _Given(tuple(key for key in value if isinstance(key, str))[:_MAX_KEYS], role)


def made(keys: _Given | None, index: int, connector: Any) -> None:
    """The connector exists, under that index."""
    if keys is not None and index:
        keys.index, keys.cls = index, type(connector)
        _live[keys.role] = keys
        step_ended(keys.role)


def step_ended(role: Role) -> None:
    """Look again where modules of the connector's were imported since."""
    keys = _live.get(role)
    if keys is None or keys.seen == (len(sys.modules), owners.generation()):
        return
    try:
        if _more_of_its_own(keys):
            _look(keys)
    except Exception:
        AGENT.failed("config_keys")


def _more_of_its_own(keys: _Given) -> bool:
    """Whether there may be: vLLM imports on and on while it serves, mostly what is no connector's."""
    names, known, owner = list(sys.modules), keys.newest, owners.owner_of(keys.index)
    same = keys.seen[1] == owners.generation()
    keys.seen, keys.newest = (len(names), owners.generation()), names[-1]
    if owner is None or not same:
        return True
    new = names[names.index(known) + 1 :] if known in sys.modules else names
    return any(file and owner.owns(file) for file in map(_file_of, map(sys.modules.get, new)))


def _file_of(module: Any) -> str:
    file = str(getattr(module, "__file__", ""))
    return file if os.path.isabs(file) else ""


def _look(keys: _Given) -> None:
    texts = _sources(keys.cls, keys.index)
    if texts is not None and texts.keys() == keys.files:
        return
    keys.files = set(texts or ())
    keys.looks += 1
    if keys.looks >= _MOST_LOOKS:  # it imports on and on
        texts = None
        del _live[keys.role]
    asked: set[str] | None = None
    try:
        asked = config_source.keys_named(list(texts.values())) if texts is not None else None
    except (config_source.Hidden, SyntaxError, ValueError, RecursionError):
        pass
    fact = ConfigKeysFact(
        connector=keys.index,
        given=tuple(mask_mapping(dict.fromkeys(keys.keys))),
        read=tuple(key for key in keys.keys if key in (asked or ())),
        asked=tuple(sorted((asked or set()) - set(keys.keys))[:_MAX_KEYS]),
        hidden=asked is None,
    )
    AGENT.fact(fact, keys.role)


def _sources(cls: type, index: int) -> dict[str, str] | None:
    """Name -> text of the modules that may read the connector's configuration: those of its class and of what
    it holds, and of these what they import, as far as it is imported and the connector's own. None where one
    of them can't be read."""
    owner = owners.owner_of(index)
    if owner is None:
        return None
    loaded = {name: _file_of(module) for name, module in list(sys.modules.items())}
    own = {name: file for name, file in loaded.items() if file and owner.owns(file)}
    of_class = [base.__module__ for base in cls.__mro__]
    todo = [name for name in of_class if name in own or not owners.is_foreign(name)]
    todo += [name for name, file in own.items() if owner.holds(file)]
    texts: dict[str, str] = {}
    size = 0
    if not todo:
        return None
    while todo:
        name = todo.pop()
        if name in texts:
            continue
        texts[name] = _text(own.get(name, ""))
        size += len(texts[name])
        if not texts[name] or size > _MOST_CHARACTERS:
            return None
        todo += own if _DYNAMIC.search(texts[name]) else _imported(name, texts[name], own)
    return texts


def _text(file: str) -> str:
    """ "" where what it reads can't be known."""
    try:
        if file.endswith(".so"):
            return (
                "" if os.path.getsize(file) > _MOST_CHARACTERS or config_source.speaks_of_it(file) else "pass"
            )
        with open(file, encoding="utf-8") as source:
            return source.read() or "pass" if file.endswith(".py") else ""
    except OSError:
        return ""


def _imported(name: str, text: str, own: dict[str, str]) -> list[str]:
    """The connector's own modules that a module names in its imports, wherever these stand."""
    package = name if os.path.basename(own[name]) == "__init__.py" else name.rpartition(".")[0]
    named: set[str] = set()
    for source, names in _IMPORT.findall(text):
        if source:
            dots = len(source) - len(source.lstrip("."))
            above = package.rsplit(".", dots - 1)[0] if dots > 1 else package
            named.add(f"{above}.{source.lstrip('.')}".strip(".") if dots else source)
        else:
            named.update(part.split(" as ")[0].strip() for part in names.split(","))
    return [other for other in own if any(other == part or other.startswith(f"{part}.") for part in named)]
