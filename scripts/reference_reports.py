#!/usr/bin/env python3
"""Make the reference reports: every scenario on the vLLM of this Python, and the pages made of them.

    python scripts/reference_reports.py                  run all scenarios (about 4 minutes)
    python scripts/reference_reports.py --from DIR ...   take runs that scenarios/run.py left in DIR
    python scripts/reference_reports.py --pages          only the pages, from the reports that are there

Writes reports/vllm-<version>-<platform>/<scenario>.json, reports/README.md (the matrix) and
reports/claims.md (its text: scripts/claims.template.txt). A run that is not what its scenario
expects makes no reference report. Reports are normalised: they name no machine, and say the same
when they are made again on another one (as far as the schedule of several processes allows).

Exit codes: 0 fine, 1 a scenario is not as expected or did not run, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"
TEMPLATE = ROOT / "scripts" / "claims.template.txt"
sys.path[:0] = [str(ROOT), str(ROOT / "scenarios")]

Report = dict[str, Any]

_NOTE_BEGINS = "a reference report:"
NOTE = (
    f"{_NOTE_BEGINS} host, process ids, paths, request ids, times and sizes are normalised; "
    "performance notes are left out where the scenario is not about one"
)


# ------------------------------------------------------------------------------ normalise


def normalise(report: Report, folders: tuple[str, ...] = ()) -> Report:
    """A copy of a report that names no machine.

    Args:
        folders: absolute folders under which paths are shown relative, longest first.
    """
    from kvtrace.report.digest import seal

    pids = {p["pid"]: i for i, p in enumerate(report["run"]["processes"], 1)}
    tags = {e["tag"]: i for i, e in enumerate(report["run"]["engines"], 1)}
    words = _Words(pids, tags, folders)
    new: Report = words.of(report)
    run = new["run"]
    run.update(host="", started=None, seconds=0.0)
    run["command"] = _command(run["command"], run["name"])
    for process in run["processes"]:
        process["pid"] = pids[process["pid"]]
    for engine in run["engines"]:
        engine["tag"] = tags[engine["tag"]]
    for row in new["requests"]["rows"]:
        row["engine"] = tags.get(row["engine"], row["engine"])
    for row in new["timing"]:
        row.update(p50_ns=0, p99_ns=0, total_ns=0, share_of_steps=None)
    from judge import TIMED

    left_out = set(TIMED) - {_cause_of(run["name"])}
    for part in ("findings", "ruled_out", "not_observed"):
        new[part] = [item for item in new[part] if item["id"] not in left_out]
    tracer = new["limits"]["tracer"]
    tracer["spool_bytes"] = tracer["records"] * 64
    notes = [note for note in new["limits"]["notes"] if not note.startswith(_NOTE_BEGINS)]
    new["limits"]["notes"] = [*notes, NOTE]
    return seal(new)


def _cause_of(name: str) -> str | None:
    """What the scenario of this name is about: a note about time stays in the report of its own scenario."""
    from spec import load, names

    return load(name).cause if name in names() else None


def _command(command: list[str], name: str) -> list[str]:
    """One process runs many scenarios in turn: the command of this one alone."""
    if any(part.endswith("scenarios/run.py") for part in command):
        return ["python", "scenarios/run.py", name, "--out", "out"]
    return command


class _Words:
    """Rewrites the strings of a report."""

    def __init__(self, pids: dict[int, int], tags: dict[int, int], folders: tuple[str, ...]) -> None:
        self.pids, self.tags = pids, tags
        self.folders = [folder.rstrip("/") + "/" for folder in folders]
        self.spools: dict[str, str] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        text = re.sub(r"(?<![\w.])/[^\s'\":,;)]*/python[\d.]*(?![\w/.])", "python", text)
        for folder in self.folders:
            text = text.replace(folder, "")
        text = re.sub(r"[^\s'\"]*/site-packages/", "", text)
        # any other absolute path: its last name
        text = re.sub(r"(?<![\w./>-])/(?:[\w.+@-]+/)*([\w.+@-]+)", r"\1", text)
        text = re.sub(r"[\w-]+\.kvt\b", self._spool, text)
        text = re.sub(r"\b(\d+)-[0-9a-f]{8}\b", r"\1", text)  # vLLM adds a random part to the client's id
        text = re.sub(r"\b(pid|process) (\d+)", self._pid, text)
        for tag, number in self.tags.items():
            text = re.sub(rf"\b{tag}\b", str(number), text)
        return text

    def _spool(self, match: re.Match[str]) -> str:
        name = match[0]
        if name not in self.spools:
            base = re.sub(r"-\d+-[0-9a-f]+$", "", name.removesuffix(".kvt"))
            again = sum(1 for known in self.spools.values() if known.split(".")[0] == base)
            self.spools[name] = f"{base}.{again + 1}.kvt" if again else f"{base}.kvt"
        return self.spools[name]

    def _pid(self, match: re.Match[str]) -> str:
        pid = int(match[2])
        return f"{match[1]} {self.pids.get(pid, pid)}"


# ------------------------------------------------------------------------------ the reports


def from_runs(places: list[Path]) -> tuple[dict[str, Report], list[str]]:
    """(scenario -> normalised report, what is wrong) of the run directories in `places`."""
    from judge import judge
    from spec import load, names

    from kvtrace.errors import KvtraceError
    from kvtrace.report.build import build_report

    found: dict[str, Report] = {}
    wrong: list[str] = []
    for name in names():
        place = next((place for place in places if (place / name / "spool").is_dir()), None)
        if place is None:
            wrong.append(f"{name}: no run of it")
            continue
        try:
            report: Any = build_report(place / name)
        except (KvtraceError, AssertionError) as error:
            wrong.append(f"{name}: no report: {error}")
            continue
        differences = judge(load(name), report)
        if differences:
            wrong.append(f"{name}: not as expected: {'; '.join(differences)}")
            continue
        found[name] = normalise(report, (str(place), str(place.resolve()), str(ROOT)))
    return found, wrong


def version_folder(report: Report) -> str:
    platform = next((engine["platform"] for engine in report["run"]["engines"]), "") or "unknown"
    return f"vllm-{report['run']['vllm']}-{platform}"


def write(reports: dict[str, Report]) -> None:
    from kvtrace.report.load import check_report

    # A run whose engine was kept from being traced does not know its platform: the others' is its own.
    folders = {r["run"]["vllm"]: version_folder(r) for r in reports.values() if r["run"]["engines"]}
    for name, report in reports.items():
        check_report(report, name)
        folder = folders.get(report["run"]["vllm"]) or version_folder(report)
        path = REPORTS / folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def committed() -> dict[str, dict[str, Report]]:
    """Version folder -> scenario -> report, as they lie in reports/."""
    return {
        folder.name: {
            path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
        }
        for folder in sorted(REPORTS.glob("vllm-*"))
        if folder.is_dir()
    }


# ------------------------------------------------------------------------------ numbers


def number(value: float) -> str:
    """14798 -> ``14 798``, 6.92 -> ``6.9``."""
    return f"{value:,.0f}".replace(",", " ") if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def hook(report: Report, name: str, column: str) -> int:
    return sum(row[column] for row in report["coverage"]["hooks"] if row["hook"] == name)


def op(report: Report, name: str, column: str) -> int:
    return sum(row[column] for row in report["coverage"]["ops"] if row["op"] == name)


def tokens(report: Report, account: str, ledger: str = "saves") -> float:
    book = report["ledger"][ledger]
    return float(book["total_tokens"] if account == "total" else book["tokens"].get(account, 0.0))


def first_finding(report: Report) -> str:
    return report["findings"][0]["id"] if report["findings"] else "none"


def value(report: Report, key: str) -> str:
    """What a placeholder of the claims' text stands for.

    ``saved``, ``total`` or ``saves:ACCOUNT`` and ``loads:ACCOUNT`` (tokens), ``share`` (saved, %),
    ``fired:HOOK``, ``due:HOOK``, ``work:HOOK``, ``op:OP``, ``op-due:OP``, ``direct``, ``first``,
    ``requests``, ``stored-requests``, ``steps``, ``idle`` (steps without a token), ``pairs``, ``ranks``,
    ``calls:HOOK`` (all calls, those outside real steps too), ``mode``, ``cached``.

    Raises:
        KeyError: no such key.
    """
    kind, _, name = key.partition(":")
    engines = report["run"]["engines"]
    if kind in ("saves", "loads") or key in ("saved", "total"):
        return number(tokens(report, name or key, kind if name else "saves"))
    if kind == "share":
        return number(100 * tokens(report, "saved") / tokens(report, "total"))
    if kind in ("fired", "due", "work"):
        return number(hook(report, name, {"fired": "fired", "due": "eligible", "work": "with_work"}[kind]))
    if kind in ("op", "op-due"):
        return number(op(report, name, "fired" if kind == "op" else "eligible"))
    if kind == "direct":
        return number(sum(row["direct"] for row in report["coverage"]["ops"]))
    if kind == "calls":
        return number(sum(row["count"] for row in report["timing"] if row["hook"] == name))
    if kind == "steps":
        return number(sum(engine["real_steps"] for engine in engines))
    if kind == "idle":
        return number(sum(engine["steps"] - engine["real_steps"] for engine in engines))
    if kind == "pairs":
        return number(sum(engine["pairs"] for engine in engines))
    return {
        "first": first_finding(report),
        "requests": number(report["requests"]["total"]),
        "stored-requests": number(sum(1 for row in report["requests"]["rows"] if row["saved"] > 0)),
        "ranks": number(len({rank for engine in engines for rank in engine["ranks"]})),
        "mode": engines[0]["cudagraph_mode"],
        "cached": "on" if engines[0]["prefix_caching"] else "off",
    }[key]


# ------------------------------------------------------------------------------ pages


def matrix_page(versions: dict[str, dict[str, Report]]) -> str:
    """reports/README.md."""
    scenarios = sorted({name for reports in versions.values() for name in reports})
    lines = [
        "# Reference reports",
        "",
        "What kvtrace finds in every scenario of [`scenarios/`](../scenarios/README.md), run on a real vLLM.",
        "Made by `python scripts/reference_reports.py`. The reports are normalised (no host, process ids,",
        "absolute paths or times), so that they can be compared. They settle the claims about KV connectors",
        "in [claims.md](claims.md).",
        "",
        "`kvtrace explain reports/VERSION/SCENARIO.json` shows one. The columns, in the words of",
        "[concepts.md](../docs/concepts.md#glossary): calls / due are layer-steps of all ranks in which",
        "`save_kv_layer` was called, of those in which it was due; with work: how many of them had something",
        "to store. Tokens are of prompts and outputs.",
        "",
    ]
    head, rule = ["scenario"], ["---"]
    for version in versions:
        head += [f"{version}: first finding", "`save_kv_layer` calls / due", "with work"]
        head.append("tokens saved / total")
        rule += ["---", "---:", "---:", "---:"]
    lines += [f"| {' | '.join(head)} |", f"| {' | '.join(rule)} |"]
    for name in scenarios:
        cells = [f"[{name}](../scenarios/{name}.toml)"]
        for version, reports in versions.items():
            cells += _cells(version, name, reports.get(name))
        lines.append(f"| {' | '.join(cells)} |")
    for version, reports in versions.items():
        lines += ["", *accuracy(version, reports)]
    return "\n".join(lines) + "\n"


def accuracy(version: str, reports: dict[str, Report]) -> list[str]:
    """Expected cause x first finding, over the reports of one version."""
    import confusion
    from spec import load, names

    known = names()
    verdicts = [confusion.verdict(load(name), reports[name]) for name in known if name in reports]
    lines = [
        f"## Accuracy on {version}",
        "",
        "The cause that each scenario was made to show (expected; none: a healthy run) and the first finding",
        "of its report. What the scenario allows as well, and notes about time, are left out.",
        "`make test` prints this table for a fresh run at its end, and fails below 100 %.",
        "",
        *confusion.markdown(verdicts),
    ]
    missing = [name for name in known if name not in reports]
    if missing:
        lines += ["", f"Without a reference report: {', '.join(missing)}."]
    return lines


def _cells(version: str, name: str, report: Report | None) -> list[str]:
    if report is None:
        return ["not run", "", "", ""]
    cause = "none"
    if report["findings"]:
        first = report["findings"][0]
        cause = f"{first['severity']} [{first['id']}](../docs/causes/{first['id']}.md)"
    due = hook(report, "save_kv_layer", "eligible")
    calls = f"{number(hook(report, 'save_kv_layer', 'fired'))} / {number(due)}" if due else "no connector"
    work = number(hook(report, "save_kv_layer", "with_work")) if due else ""
    saved = f"{number(tokens(report, 'saved'))} / {number(tokens(report, 'total'))}"
    return [f"{cause} ([report]({version}/{name}.json))", calls, work, saved]


def claims_page(template: str, reports: dict[str, Report]) -> str:
    """reports/claims.md: the template with its ``{{scenario key}}`` filled in.

    Raises:
        KeyError: a placeholder names a scenario or a key that is not there.
    """

    def fill(match: re.Match[str]) -> str:
        return value(reports[match[1]], match[2])

    return re.sub(r"\{\{([\w-]+) ([\w:-]+)\}\}", fill, template)


def write_pages() -> None:
    versions = committed()
    (REPORTS / "README.md").write_text(matrix_page(versions), encoding="utf-8")
    if TEMPLATE.is_file() and versions:
        latest = versions[newest(versions)]
        (REPORTS / "claims.md").write_text(
            claims_page(TEMPLATE.read_text(encoding="utf-8"), latest), encoding="utf-8"
        )


def newest(versions: dict[str, dict[str, Report]]) -> str:
    """The version folder whose numbers the claims quote."""
    return max(versions, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def run_all(place: Path) -> None:
    command = [sys.executable, str(ROOT / "scenarios" / "run.py"), "--out", str(place)]
    subprocess.run(command, check=False)  # what did not run is seen by its missing run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--from", dest="places", type=Path, action="append", help="folder of runs")
    parser.add_argument("--pages", action="store_true", help="make the pages only")
    args = parser.parse_args()
    wrong: list[str] = []
    if not args.pages:
        with tempfile.TemporaryDirectory(prefix="kvtrace-reference-") as scratch:
            places = args.places or [Path(scratch) / "runs"]
            if not args.places:
                run_all(places[0])
            reports, wrong = from_runs(places)
            write(reports)
            print(f"reference_reports.py: {len(reports)} reports written", file=sys.stderr)
    write_pages()
    for line in wrong:
        print(f"reference_reports.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
