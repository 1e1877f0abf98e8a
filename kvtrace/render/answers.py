"""What a report answers in one sentence each: where things were stored, whether vLLM did its part (attention,
hooks, prefix cache, CUDA graphs), what was loaded. In the terms of vLLM alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtrace.gate.layers import index_of, ranges
from kvtrace.gate.lost import least_saved
from kvtrace.gate.mute import may_hide_work
from kvtrace.gate.shares import grade_of, whole
from kvtrace.labels import label
from kvtrace.render.layout import names
from kvtrace.terms import LOADED, NOT_OBSERVED, PENDING, SAVED, outcome_order
from kvtrace.words import clean, count, listed, peer, percent, plural, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrace.report.model import EngineRow, HookRow, LedgerRow, OpRow, PlaceRow, Report

_SHOWN_PLACES = 3
_SAVE_LAYER, _WAIT_SAVE = "save_kv_layer", "wait_for_save"
_ATTENTION = "attention"
"""In the names of attention ops, and not in those that update the KV cache."""


# --------------------------------------------------------------------------------- where


def where(report: Report) -> str:
    """``In /mnt/kv: 16 files, 4.2 MiB.``"""
    saved = tokens_of(report["ledger"]["saves"], SAVED)
    written = report["places"]
    there = [one for one in written if one["kind"] != "configured"]
    least = "at least " if report["limits"].get("partly_watched") else ""
    shown = [_place(one, least) for one in there[:_SHOWN_PLACES]]
    more = f" and {len(there) - len(shown)} more places" if len(there) > len(shown) else ""
    configured = listed((clean(one["name"], 100) for one in written if one not in there), 2)
    if saved:
        if shown:
            return f"Stored in {'; '.join(shown)}{more}."
        asked = f" Configured is {configured}: no write to it was seen." if configured else ""
        return f"Where to was not seen: no file, no database, no socket.{asked}"
    nothing = _nothing(report)
    if shown:  # of a database it is not seen whether anything was written
        verb = "Opened" if {one["kind"] for one in there} == {"database"} else "Written to"
        return f"{nothing} {verb} {'; '.join(shown)}{more}."
    return f"{nothing} Configured is {configured}." if configured else nothing


def _nothing(report: Report) -> str:
    """Where no token is counted as stored."""
    ledger = report["ledger"]["saves"]
    if ledger["accounts"].get(NOT_OBSERVED) or not ledger["total"]:
        return "No token was seen to be stored."
    if ledger["accounts"].get(SAVED):
        return "No token was stored whole."
    return "Nothing was stored."


def watched(report: Report) -> str:
    """How many steps were watched, where not all were; "" else."""
    few = report["limits"].get("partly_watched")
    if few is None:
        return ""
    share = f"{count(few['watched'])} of {plural(few['steps'], 'step')} with prompt tokens were watched"
    return f"{share}: of the others only what vLLM is told is known (--watch full, or a larger --budget)."


def _place(one: PlaceRow, least: str) -> str:
    name, amount = clean(one["name"], 100), size(one["size"])
    if one["kind"] == "directory" and not one["files"]:
        return f"{name} (no file of it is there any more)"
    if one["kind"] == "directory":
        older = f"; {count(one['older'])} more from before this run" if one.get("older") else ""
        return f"{name} ({least}{plural(one['files'], 'file')}, {amount}{older})"
    if one["kind"] == "peer":
        return f"{peer(name)} ({least}{amount} sent)"
    return f"{name} ({one['kind']}, {amount})" if one["size"] else f"{name} ({one['kind']})"


# ------------------------------------------------------------------------- vLLM's own part


def engine_facts(engine: EngineRow) -> list[str]:
    """How attention and the hooks are reached, and what else people suspect: each in a few words."""
    facts = []
    if backends := engine.get("attention", []):
        facts.append(names(backends, 3))
    direct = engine.get("direct_calls")
    if direct is not None:
        every = direct >= engine["pairs"]
        facts.append(
            "no direct call" if not direct else "direct call" if every
            else f"direct call in {direct} of {engine['pairs']} layers"
        )  # fmt: skip
    if engine["prefix_caching"] is not None:
        facts.append(f"prefix cache {'on' if engine['prefix_caching'] else 'off'}")
    if graphs := graph_words(engine):
        facts.append(graphs)
    return facts


def graph_words(engine: EngineRow) -> str:
    """``eager: no CUDA graphs``, ``CUDA graphs PIECEWISE``; "" where that is not known."""
    if engine["enforce_eager"]:
        return "eager: no CUDA graphs"
    if engine["platform"] and engine["platform"] not in ("cuda", "rocm"):
        return "no CUDA graphs here"
    used = clean(engine.get("graphs_used", "") or engine["cudagraph_mode"], 40)
    asked = clean(engine.get("graphs_asked", ""), 40)
    if not used:
        return ""
    changed = f" ({asked} was asked for)" if asked not in ("", "default", used) else ""
    return ("no CUDA graphs" if used == "NONE" else f"CUDA graphs {used}") + changed


def attention(report: Report) -> str:
    """``unified_attention_with_output ran in Python in all 560 layer-steps``; "" where nothing ran."""
    rows = [row for row in report["coverage"]["ops"] if _ATTENTION in row["op"] and row["layer"]]
    due = sum(row["eligible"] for row in rows)
    if not due:
        return ""
    ran = sum(row["fired"] for row in rows)
    called = names(dict.fromkeys(row["op"] for row in rows if row["fired"]), 2) or names(
        dict.fromkeys(row["op"] for row in rows), 2
    )
    steps = sum(engine["real_steps"] for engine in report["run"]["engines"])
    often = (
        f"in every layer in {'all ' if steps > 1 else ''}{plural(steps, 'step')}"
        if ran >= due
        else f"for {count(ran)} of {count(due)} (layer, step) pairs"
    )
    return f"{called} ran in Python {often}{_missing(rows)}{_direct(rows, ran)}"


def _direct(rows: list[OpRow], ran: int) -> str:
    direct = sum(row["direct"] for row in rows)
    if not direct:
        return ""
    return ", called directly" if direct >= ran else f", {count(direct)} of them called directly"


def saving(report: Report) -> str:
    """``save_kv_layer was called in all 560, with something to save in 16``."""
    parts: list[str] = []
    idle = {row["hook"] for row in report["coverage"]["summary"] if row.get("idle")}
    for hook in (_SAVE_LAYER, _WAIT_SAVE):
        rows = [row for row in report["coverage"]["hooks"] if row["hook"] == hook]
        due, fired = sum(row["eligible"] for row in rows), sum(row["fired"] for row in rows)
        work = sum(row["with_work"] for row in rows)
        if not due:
            continue
        if hook == _WAIT_SAVE and parts and _SAVE_LAYER not in idle:
            continue
        if hook in idle:
            did = "and does nothing"
        elif may_hide_work(report):  # the connector's metadata does not say all of it
            did = (
                f"at least {count(work)} of them with KV to save" if work else "with how much KV is not known"
            )
        else:
            did = f"{count(work)} of them with KV to save" if work else "never with KV to save"
        parts.append(f"{hook} was called {count(fired)} of {count(due)} times, {did}{_missing(rows)}")
    return "; ".join(parts)


def _missing(rows: list[OpRow] | list[HookRow]) -> str:
    """Names the layers in which it did not run as often as it was due, where these are few."""
    layers = dict.fromkeys(row["layer"] for row in rows if row["fired"] < row["eligible"] and row["layer"])
    every = {row["layer"] for row in rows}
    if not layers or len(layers) == len(every):
        return ""
    return f" (less in {_layer_names([one for one in layers if one])})"


def layer_name(layer: str) -> str:
    """``layer 3, model.layers.3``: its number in the model, and its name without what all have."""
    number = index_of(layer)
    short = clean(layer, 80)
    for tail in (".self_attn.attn", ".attn"):
        short = short.removesuffix(tail)
    return f"layer {number}, {short}" if number else short


def _layer_names(layers: Sequence[str]) -> str:
    """``layer 3, model.layers.3``; ``layers 0-2, 5``."""
    if len(layers) == 1 or not all(map(index_of, layers)):
        return listed(map(layer_name, layers), 2)
    return f"layers {listed(ranges(map(index_of, layers)), 4)}"


def uneven(report: Report) -> str:
    """Where KV was saved in some layers or on some ranks alone: ``0 prompt tokens saved in layer 3, ...``."""
    worst, layers, ranks = least_saved(report)
    if not worst:
        return ""
    of = next((one for one in report["run"]["engines"] if one["tag"] == worst[0]["engine"]), None)
    every_layer, every_rank = (of["kv_layers"], len(of["ranks"])) if of else (0, 0)
    if len(worst) != len(layers) * len(ranks) or (len(layers) < every_layer and len(ranks) < every_rank):
        first = f"{layer_name(worst[0]['layer'])}, rank {worst[0]['rank']}"
        pairs = of["pairs"] if of else len(worst)
        where = f"{len(worst)} of {plural(pairs, '(layer, rank) pair')} (the first: {first})"
    elif len(layers) == every_layer:
        where = listed((f"rank {rank}" for rank in ranks), 3)
    else:
        where = _layer_names(layers)
    amount, most = plural(worst[0]["tokens"], "prompt token"), count(worst[0]["most"])
    between = "up to " * (len(report["layers"]) > len(worst))
    return f"{amount} saved in {where}; elsewhere {between}{most}."


SAVED_WORDS = (
    (("proved", "written"), "stored"),
    (("read",), "read by the connector, no more seen"),
    (("declared", "not observed", ""), "announced, no more seen"),
)
"""What tokens are called that count as saved, by how well that is seen: as in the verdict."""


def generated(report: Report) -> str:
    """``34 generated tokens: never offered for saving.``; "" where there are none."""
    ledger = report["ledger"]["saves"]
    saved = next(words for grades, words in SAVED_WORDS if grade_of(ledger) in grades)
    prompts, of = ledger["prompts"], dict[str, int]()
    loads = tokens_of(report["ledger"]["loads"], NOT_OBSERVED)
    for name in ledger["accounts"]:
        if name in (SAVED, PENDING, NOT_OBSERVED) or name.startswith("not-saved:"):
            words = saved if name == SAVED else label(name)
            others = sum(prompts.get(name, {}).values()) + (loads if name == NOT_OBSERVED else 0)
            of[words] = max(0, tokens_of(ledger, name) - others)
    found = sorted(((n, words) for words, n in of.items() if round(n)), reverse=True)
    told = [f"{count(n)} {words}" if len(found) > 1 else words for n, words in found]
    return f"{plural(sum(of.values()), 'generated token')}: {', '.join(told)}." if told else ""


# ---------------------------------------------------------------------------------- loads


_ALTERED = "not-loaded:kv-altered"
_MISS = "lookup-miss"
"""Among the causes ruled out where there was nothing to find."""


def loaded(report: Report) -> str:
    """``Loaded: 512 of 1 024 prompt tokens; 512 not found``."""
    ledger = report["ledger"]["loads"]
    if ledger["total"] <= 0:
        return "Loaded: nothing was looked up or offered."
    whole = ledger["total_tokens"]
    other_numbers = tokens_of(ledger, _ALTERED)  # fewer bits by design, or a fault: written all the same
    came = tokens_of(ledger, LOADED) + other_numbers
    rest = [
        f"{count(tokens_of(ledger, name))} {label(name)}"
        for name in sorted(ledger["accounts"], key=lambda name: -ledger["accounts"][name])
        if name not in (LOADED, _ALTERED) and ledger["accounts"][name] and tokens_of(ledger, name)
    ]
    share = f" ({percent(came, whole)})" if came else ""
    numbers = f", {count(other_numbers)} as other numbers than were computed" if other_numbers else ""
    seen = _how_loads_were_seen(ledger) if came else ""
    said = f"Loaded: {count(came)} of {plural(whole, 'prompt token')}{share}{seen}{numbers}"
    new = [one["evidence"] for one in report["ruled_out"] if one["id"] == _MISS] if not came else []
    if new and len(rest) == 1:
        rest = [f"{rest[0]} ({clean(new[0], 200)})"]
    return f"{said}; {', '.join(rest)}." if rest else f"{said}."


def _how_loads_were_seen(ledger: LedgerRow) -> str:
    """What of the loaded tokens was not held against what they compute to."""
    grades = ledger.get("grades", {}).get(LOADED, {})
    pairs = max(1, ledger["pairs"] or 1)
    told = round(grades.get("declared", 0) / pairs)
    # Of tokens that came in some layers alone, which are no loaded ones, these layers have a grade, too.
    taken = round(tokens_of(ledger, LOADED) - told - grades.get("proved", 0) / pairs) if grades else 0
    parts = [(told, "by the connector's report alone"), (taken, "not compared with what was computed")]
    said = [f"{'' if len(grades) == 1 else f'{count(n)} of them '}{how}" for n, how in parts if n > 0]
    return f", {', '.join(said)}" if said else ""


def tokens_of(ledger: LedgerRow, name: str) -> int:
    """Whole tokens with one outcome (older reports have parts of them)."""
    return round(whole(ledger, name))


class OutcomeRow(NamedTuple):
    """What tokens of a ledger had: the share is of its tokens, the grade the least of them."""

    name: str
    tokens: float
    share: float
    grade: str


def outcomes(ledger: LedgerRow) -> list[OutcomeRow]:
    """The outcomes that any token had: what went well first, then the largest loss."""
    accounts, total = ledger["accounts"], ledger["total_tokens"]
    rows = []
    present = {name for of in (accounts, ledger["tokens"]) for name, amount in of.items() if amount}
    for name in sorted(present, key=lambda name: (outcome_order(name), -accounts.get(name, 0), name)):
        tokens = whole(ledger, name)
        share = min(tokens / total if total else accounts[name] / ledger["total"], 1.0)
        rows.append(OutcomeRow(name, tokens, share, clean(grade_of(ledger, name), 20)))
    return rows
