"""Numbers and lists for titles and evidence."""

from __future__ import annotations

from collections.abc import Iterable


def count(number: float) -> str:
    """1234567 -> ``1 234 567``, as in the tables. Settings (a block size, a unit) are written as typed."""
    return f"{round(number):,}".replace(",", " ")


def plural(number: float, noun: str) -> str:
    return f"{count(number)} {noun}{'' if round(number) == 1 else 's'}"


def percent(part: float, whole: float) -> str:
    """Whole percents that never call a remainder all or nothing."""
    if whole <= 0 or part <= 0:
        return "0 %"
    share = part / whole * 100
    if share >= 100:
        return "100 %"
    if share < 1:
        return "less than 1 %"
    return "more than 99 %" if share > 99 else f"{round(share)} %"


def of_all(part: int, whole: int, noun: str) -> str:
    """``all 5 prompts``, ``the only prompt``, ``3 of 5 prompts``."""
    if part == whole:
        return f"all {count(whole)} {noun}s" if whole > 1 else f"the only {noun}"
    return f"{count(part)} of {count(whole)} {noun}s"


def capital(text: str) -> str:
    """With a capital letter, as a title begins."""
    return text[:1].upper() + text[1:]


def listed(items: Iterable[str], most: int = 4) -> str:
    unique = list(dict.fromkeys(items))
    if len(unique) > most:
        return ", ".join(unique[: most - 1]) + f" and {len(unique) - most + 1} more"
    return ", ".join(unique)
