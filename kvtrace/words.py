"""Numbers in words, the same in findings, reports and messages. Pure functions, one rounding each."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

MAX_TEXT = 2000
"""Longest string of a report that is printed whole."""


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """`text` on one line, with everything that a terminal would obey made visible.

    Control characters, direction overrides, line separators and lone surrogates become
    ``\\x1b``-like escapes; white space becomes one space.
    """
    cut = text[: limit + 1]
    if len(text) > limit:
        cut = cut[: limit - 1] + "…"
    out = []
    for char in cut:
        if char in "\n\t\r":
            out.append(" ")
        elif char.isprintable() or unicodedata.category(char) == "Zs":
            out.append(char)
        else:
            code = ord(char)
            out.append(
                f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
            )
    return "".join(out)


def count(value: float) -> str:
    """58720 -> ``58 720``; tokens that are no whole number get one decimal. Settings (a block size, a
    unit) are written as typed."""
    if abs(value - round(value)) < 0.05:
        return f"{round(value):,}".replace(",", " ")
    return f"{value:,.1f}".replace(",", " ")


def plural(number: float, noun: str) -> str:
    """``1 step``, ``212 steps``, ``3 processes``, ``2 properties``."""
    shown = count(number)
    if shown == "1":
        return f"1 {noun}"
    if noun.endswith("s"):
        return f"{shown} {noun}es"
    return f"{shown} {noun[:-1]}ies" if noun.endswith("ty") else f"{shown} {noun}s"


def percent(part: float, whole: float = 1.0) -> str:
    """0.879 -> ``87.9 %``, (1, 3) -> ``33.3 %``; never rounds a remainder away to none or to all."""
    share = part / whole if whole > 0 else 0.0
    if share <= 0:
        return "0 %"
    if share >= 1:
        return "100 %"
    if share < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if share >= 0.9995 else f"{share * 100:.1f} %"


def duration(seconds: float) -> str:
    """0.0123 -> ``12 ms``; 61.2 -> ``61 s``; 7300 -> ``2 h 1 min``."""
    if seconds <= 0:
        return "0 s"
    for unit, scale in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3)):
        value = seconds / scale
        if value < 9.95:
            return f"{value:.1f} {unit}"
        if value < 999.5:
            return f"{value:.0f} {unit}"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{count(whole // 3600)} h {whole % 3600 // 60} min"


def size(octets: int) -> str:
    """Bytes with a binary unit."""
    value = float(octets)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{count(round(value))} TiB"


def of_all(part: int, whole: int, noun: str) -> str:
    """``all 5 prompts``, ``the only prompt``, ``3 of 5 prompts``."""
    if part == whole:
        return f"all {count(whole)} {noun}s" if whole > 1 else f"the only {noun}"
    return f"{count(part)} of {count(whole)} {noun}s"


def listed(items: Iterable[str], most: int = 4) -> str:
    """``a, b, c and 2 more``, each once."""
    unique = list(dict.fromkeys(items))
    if len(unique) > most:
        return ", ".join(unique[: most - 1]) + f" and {len(unique) - most + 1} more"
    return ", ".join(unique)


def peer(name: str) -> str:
    """A peer as people name it: ``tcp 10.0.0.2:6379`` -> ``10.0.0.2:6379``."""
    return name.removeprefix("tcp ")


def capital(text: str) -> str:
    """With a capital letter, as a title begins; a name as vLLM keeps its own."""
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """With a capital letter where it begins with a word, and not with a name as it is typed (``kv_role``)."""
    return capital(text) if text.partition(" ")[0].rstrip(",:").isalpha() else text
