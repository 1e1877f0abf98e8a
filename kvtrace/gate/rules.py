"""The rules of a gate: what they are, and how they are read from options and from a configuration."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvtrace.causes.registry import CATALOGUE
from kvtrace.gate.baseline import TOLERANCE, GateError
from kvtrace.terms import FAULT
from kvtrace.trace import hooks, ops

NAMES = (*hooks.NAMES, *ops.NAMES)
KEYS = ("baseline", "min", "min-saved-tokens", "forbid", "allow", "tolerance")


@dataclass(frozen=True)
class Rules:
    """What a gate asks for besides a baseline. `source` names where a rule comes from, for messages."""

    baseline: str | None = None
    minimum: Mapping[str, float] = field(default_factory=dict)
    """Hook or op -> least share of its due calls, in every layer and on every rank."""
    min_saved_tokens: float | None = None
    forbid: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()
    tolerance: float | None = None
    source: str = ""

    @property
    def any(self) -> bool:
        """True where something is asked for; allowances alone only soften another gate."""
        return bool(self.minimum or self.forbid or self.min_saved_tokens is not None)

    @property
    def slack(self) -> float:
        return TOLERANCE if self.tolerance is None else self.tolerance


def from_options(
    minimum: Iterable[str] = (),
    min_saved_tokens: float | None = None,
    forbid: Iterable[str] = (),
    allow: Iterable[str] = (),
    tolerance: float | None = None,
    baseline: str | None = None,
) -> Rules:
    """Rules of the command line; `minimum` holds ``HOOK=SHARE`` words.

    Raises:
        GateError: an unknown name or cause, or a number out of range.
    """
    if baseline is not None and not baseline.strip():
        raise GateError("--baseline", "the name is empty", "name a file, or leave the option out")
    shares = {}
    for word in minimum:
        name, equals, share = word.partition("=")
        if not equals:
            raise GateError(f"--min {ascii(word)[1:-1]}", "write HOOK=SHARE, for example save_kv_layer=1.0")
        shares[name.strip()] = share.strip()
    given = {
        "baseline": baseline, "min": shares, "min-saved-tokens": min_saved_tokens,
        "forbid": list(forbid), "allow": list(allow), "tolerance": tolerance,
    }  # fmt: skip
    return from_table({key: value for key, value in given.items() if value is not None}, "command line")


def from_table(table: object, where: str) -> Rules:
    """Rules of a configuration table; `where` names it in errors.

    Raises:
        GateError: an unknown key, cause or hook (with the nearest that is known), or a wrong type.
    """
    if not isinstance(table, dict):
        raise GateError(where, "check should be a table of rules")
    values: dict[str, object] = {}
    for key, value in table.items():
        name = str(key).replace("_", "-")
        if name not in KEYS:
            raise GateError(
                f"unknown key {key!a}", where, nearest(name, KEYS, f"known keys: {', '.join(KEYS)}")
            )
        values[name] = value
    minimum = values.get("min", {})
    if not isinstance(minimum, dict):
        raise GateError(where, "min should be a table, for example {save_kv_layer = 1.0}")
    baseline = values.get("baseline")
    if baseline is not None and (not isinstance(baseline, str) or not baseline):
        raise GateError(where, "baseline should be the path of a baseline")
    tolerance, saved = values.get("tolerance"), values.get("min-saved-tokens")
    return checked(
        Rules(
            baseline,
            {
                hook_name(str(name), where): number(share, f"{where}: min.{name}")
                for name, share in minimum.items()
            },
            None if saved is None else number(saved, f"{where}: min-saved-tokens"),
            frozenset(
                cause_id(one, where, fault=True) for one in _words(values.get("forbid", []), "forbid", where)
            ),
            frozenset(cause_id(one, where) for one in _words(values.get("allow", []), "allow", where)),
            None if tolerance is None else number(tolerance, f"{where}: tolerance"),
            where,
        )
    )


def _words(value: object, key: str, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise GateError(where, f'{key} should be an array of causes, for example ["hook-raised"]')
    return value


def merged(config: Rules, options: Rules) -> Rules:
    """Both together: options win over the configuration where they speak of the same thing.

    Raises:
        GateError: a cause that is forbidden and allowed.
    """
    return checked(
        replace(
            options,
            baseline=config.baseline if options.baseline is None else options.baseline,
            minimum={**config.minimum, **options.minimum},
            min_saved_tokens=config.min_saved_tokens
            if options.min_saved_tokens is None
            else options.min_saved_tokens,
            forbid=(config.forbid - options.allow) | options.forbid,
            allow=(config.allow - options.forbid) | options.allow,
            tolerance=config.tolerance if options.tolerance is None else options.tolerance,
            source=config.source,
        )
    )


def checked(rules: Rules) -> Rules:
    both = sorted(rules.forbid & rules.allow)
    if both:
        raise GateError(f"{both[0]} is both forbidden and allowed", rules.source, "leave one of the two out")
    return rules


def number(value: object, what: str) -> float:
    """A share of 0 to 1."""
    share = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            share = float(value)
        except (ValueError, OverflowError):
            pass
    if not 0.0 <= share <= 1.0:
        shown = ascii(value) if isinstance(value, (int, float, str)) else type(value).__name__
        raise GateError(what, f"{shown[:40]} is not a share", "write a number of 0 to 1, for example 0.95")
    return share


def hook_name(name: str, where: str) -> str:
    if name not in NAMES:
        raise GateError(
            f"{where}: no hook or op is named {ascii(name)[:60]}",
            nearest(
                name, NAMES, "hooks are named as in vLLM's KVConnectorBase_V1, for example save_kv_layer"
            ),
        )
    return name


def cause_id(name: str, where: str, fault: bool = False) -> str:
    """A cause; with `fault` also that word, which stands for every finding that is one."""
    if name in CATALOGUE or (fault and name == FAULT):
        return name
    raise GateError(
        f"{where}: no such cause {ascii(name)[:60]}", nearest(name, CATALOGUE, "kvtrace docs lists them")
    )


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
