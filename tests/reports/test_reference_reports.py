"""The committed reference reports: valid, as expected, naming no machine; and the pages made of them."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtrace.report.load import read_report
from kvtrace.terms import SAVED
from kvtrace.words import sentence

ROOT = Path(__file__).resolve().parents[2]
import reference_reports as reference
from judge import judge
from spec import load, names

VERSIONS = reference.committed()
ALL = [(version, name) for version, reports in VERSIONS.items() for name in reports]
LATEST = VERSIONS[reference.newest(VERSIONS)] if VERSIONS else {}
CLAIMS = (ROOT / "reports" / "claims.md").read_text(encoding="utf-8")


def test_there_are_some() -> None:
    assert "vllm-0.32.0-cpu" in VERSIONS and len(LATEST) >= 20


@pytest.mark.parametrize(("version", "name"), ALL)
def test_a_reference_report_is_valid_small_and_nameless(version: str, name: str) -> None:
    path = ROOT / "reports" / version / f"{name}.json"
    text = path.read_text(encoding="utf-8")
    report = read_report(path)
    assert path.stat().st_size < 60_000
    assert report["run"]["host"] == "" and report["run"]["started"] is None and report["run"]["seconds"] == 0
    assert all(process["pid"] < 100 for process in report["run"]["processes"])
    assert all(engine["tag"] < 100 for engine in report["run"]["engines"])
    assert all(row["total_ns"] == 0 for row in report["timing"])
    if report["run"]["engines"]:  # an engine that was not traced tells no platform
        assert reference.version_folder(report) == version  # type: ignore[arg-type]
    else:
        assert version.startswith(f"vllm-{report['run']['vllm']}-")
    absolute = re.findall(r'(?:^|[\s"\'=(])(/[a-z][^\s"]*)', text)
    assert not absolute, absolute[:3]
    assert not re.search(r"\b\d+-[0-9a-f]{8}\b", text)
    assert not re.search(r"-\d{3,}[-.][\w.-]*kvt", text)
    assert (
        reference.normalise(json.loads(text))["findings"] == report["findings"]
    )  # nothing left to normalise


@pytest.mark.parametrize("name", sorted(LATEST))
def test_a_reference_report_says_what_todays_kvtrace_says(name: str) -> None:
    """As far as a report tells without its run: the words of each request, its findings, how their remedies begin."""
    from kvtrace.causes.registry import CATALOGUE

    report = LATEST[name]
    for row in report["requests"]["rows"]:
        whole = row["not_saved"] == 0 and not row["not_observed"]
        word, _, kept = row["verdict"].rpartition("-")
        if kept == SAVED and word in ("", "partly", "prompt"):
            assert whole == (word == ""), row
    for finding in report["findings"]:
        cause = CATALOGUE[finding["id"]]
        assert finding["versions"] == cause.versions and finding["stage"] == cause.stage
        assert all(one == sentence(one) or one.startswith("or ") for one in finding["remedy"])


@pytest.mark.parametrize("name", sorted(set(names()) & set(LATEST)))
def test_a_reference_report_is_what_its_scenario_expects(name: str) -> None:
    assert judge(load(name), LATEST[name]) == []


def test_the_readme_quotes_the_accuracy_of_the_reports() -> None:
    page = reference.matrix_page(VERSIONS)
    (said,) = re.findall(r"^\d+ of \d+ labelled runs .*fault\.$", page, re.MULTILINE)
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_matrix_page_is_what_the_reports_give() -> None:
    page = (ROOT / "reports" / "README.md").read_text(encoding="utf-8")
    assert page == reference.matrix_page(VERSIONS), "run: python scripts/reference_reports.py --pages"
    row = next(line for line in page.splitlines() if line.startswith("| [flagship]("))
    assert "limit [below-save-granularity]" in row and "1 024 / 14 050" in row


def test_a_scenario_that_was_not_run_on_a_version_is_said() -> None:
    two = {"vllm-0.32.0-cpu": LATEST, "vllm-0.33.0-cpu": {"flagship": LATEST["flagship"]}}
    page = reference.matrix_page(two)
    assert "not run" in page and page.count("| limit [below-save-granularity]") >= 2
    matrix = page.partition("## Accuracy")[0]
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in matrix.splitlines() if line.startswith("|")}
    assert columns == {1 + 1 + 2 * 4}
    assert reference.newest(two) == "vllm-0.33.0-cpu"
    assert reference.newest({"vllm-0.9.2-cpu": {}, "vllm-0.32.0-cpu": {}}) == "vllm-0.32.0-cpu"


def test_the_accuracy_of_a_version_is_of_its_own_reports() -> None:
    page = reference.matrix_page({"vllm-0.33.0-cpu": {"flagship": LATEST["flagship"]}})
    assert "1 of 1 labelled runs have the right first finding; 0 of 0 healthy runs" in page
    assert "| below-save-granularity | 1 | below-save-granularity 1 |" in page
    assert "Without a reference report: aborted-before-save, " in page


def test_normalising_hides_the_machine_and_keeps_the_numbers() -> None:
    raw: Any = copy.deepcopy(LATEST["flagship"])
    raw["run"].update(host="box7", started="2026-01-01T00:00:00+00:00", seconds=61.0)
    raw["run"]["processes"][0].update(pid=4242, spool="spool/front-4242-8141a9c7.kvt")
    command = ["/a/b/.venv/bin/python3.11", "/a/b/scenarios/drive.py", "--store", "/tmp/x/_store"]
    raw["run"]["command"] = command
    raw["findings"][0]["evidence"] = [
        "request 12-9e3cb755, pid 4242: /a/b/scenarios/connectors/chunk_store.py:12, 792/792 calls",
        "see /usr/lib/python3.11/site-packages/vllm/v1/x.py and /home/someone/secret/plan.txt",
    ]
    raw["findings"].append({**raw["findings"][0], "id": "hook-slow", "severity": "note"})
    raw["timing"][0].update(p50_ns=5, p99_ns=6, total_ns=7, share_of_steps=0.5)
    made = reference.normalise(raw, ("/a/b", "/tmp/x"))
    text = json.dumps(made)
    for secret in ("box7", "4242", "someone", "/a/b", "9e3cb755", "8141a9c7", "2026-01-01", "hook-slow"):
        assert secret not in text, secret
    assert made["run"]["command"] == ["python", "scenarios/drive.py", "--store", "_store"]
    assert made["findings"][0]["evidence"] == [
        "request 12, pid 1: scenarios/connectors/chunk_store.py:12, 792/792 calls",
        "see vllm/v1/x.py and plan.txt",
    ]
    assert made["ledger"] == raw["ledger"] and made["coverage"] == raw["coverage"]


# ------------------------------------------------------------------------------ the claims


def test_the_claims_page_is_its_text_with_the_reports_numbers() -> None:
    template = reference.TEMPLATE.read_text(encoding="utf-8")
    assert reference.claims_page(template, LATEST) == CLAIMS, (
        "run: python scripts/reference_reports.py --pages"
    )
    assert "{{" not in CLAIMS
    # no number of a run stands in the text by hand
    by_hand = re.sub(r"\{\{[^}]*\}\}", "", template)
    for figure in ("14 050", "1 024", "560", "1 472", "2 688"):
        assert figure not in by_hand


def verdicts() -> dict[int, str]:
    """Claim -> true | false | depends."""
    found = {}
    for number, body in re.findall(r"^### (\d+)\. (.*?)(?=^##|\Z)", CLAIMS, re.M | re.S):
        word = re.search(r"^- \*\*(True|False|Depends on)\*\*", body, re.M)
        assert word, f"claim {number} has no verdict"
        assert "- Shown" in body, f"claim {number} shows nothing"
        found[int(number)] = word[1].split()[0].lower()
    return found


def test_the_verdicts_are_counted() -> None:
    found = list(verdicts().values())
    assert list(verdicts()) == list(range(1, len(found) + 1)) and len(found) >= 12
    for word, label in (("true", "true"), ("false", "false"), ("depends", "depends on something")):
        assert f"| {label} | {found.count(word)} |" in CLAIMS


def tokens(name: str, account: str, ledger: str = "saves") -> float:
    return reference.tokens(LATEST[name], account, ledger)


def fired(name: str, hook: str = "save_kv_layer", column: str = "fired") -> int:
    return reference.hook(LATEST[name], hook, column)


def complete(name: str) -> bool:
    return fired(name) == fired(name, column="eligible") > 0


def cached(name: str) -> bool:
    return any(engine["prefix_caching"] for engine in LATEST[name]["run"]["engines"])


def ruled_out(name: str) -> set[str]:
    return {item["id"] for item in LATEST[name]["ruled_out"]}


def op(name: str, op: str, column: str = "fired") -> int:
    return reference.op(LATEST[name], op, column)


BODY = "unified_attention_with_output"
CLAIM_HOLDS = {
    1: lambda: op("flagship", BODY) == op("flagship", BODY, "eligible") and complete("flagship"),
    2: lambda: (
        not any(row["direct"] for report in LATEST.values() for row in report["coverage"]["ops"])
        and "direct-call-bypass" in ruled_out("flagship") & ruled_out("healthy-example")
    ),
    3: lambda: complete("flagship") and tokens("flagship", "saved") < tokens("flagship", "total") / 10,
    4: lambda: all(fired(name) == op(name, BODY) > 0 for name in ("flagship", "healthy-example")),
    5: lambda: fired("flagship", "start_load_kv") * 4 == fired("flagship"),
    6: lambda: op("flagship", "unified_kv_cache_update") == op("flagship", BODY) > 0,
    7: lambda: complete("healthy-chunk-store"),
    8: lambda: complete("flagship") and "full-cudagraph-replay" in ruled_out("flagship"),
    9: lambda: (
        not any(map(cached, ("flagship", "healthy-chunk-store", "healthy-reuse")))
        and complete("flagship")
        and tokens("healthy-chunk-store", "saved") == tokens("healthy-chunk-store", "total")
        and tokens("healthy-reuse", "loaded", "loads") > 0
    ),
    10: lambda: (
        cached("healthy-prefix-cache")
        and tokens("healthy-prefix-cache", "local-hit") > 0
        and not cached("healthy-chunk-store")
        and tokens("healthy-chunk-store", "saved") == tokens("healthy-chunk-store", "total")
    ),
    11: lambda: (
        len(LATEST["healthy-chunk-store"]["run"]["processes"]) == 1
        and tokens("healthy-chunk-store", "saved") == tokens("healthy-chunk-store", "total")
        and tokens("flagship-healthy", "saved") > 0.8 * tokens("flagship-healthy", "total")
    ),
    12: lambda: complete("flagship") and 0 < fired("flagship", column="with_work") < fired("flagship") / 10,
    13: lambda: (
        tokens("already-stored", "not-saved:already-stored") > tokens("already-stored", "saved") > 0
        and tokens("healthy-reuse", "loaded") > 0
    ),
    14: lambda: (
        tokens("healthy-chunk-store", "saved") == tokens("healthy-chunk-store", "total")
        and not any("preempt" in one["id"] for one in LATEST["healthy-chunk-store"]["findings"])
    ),
    15: lambda: (
        len({tuple(p) for part in load("flagship").rounds for p in part.prompts})
        == LATEST["flagship"]["requests"]["total"]
        and tokens("false-already-stored", "saved") == 0
    ),
    16: lambda: (
        tokens("decode-not-offered", "not-saved:decode-not-offered") > tokens("decode-not-offered", "saved")
        and tokens("healthy-save-decode", "saved") == tokens("healthy-save-decode", "total")
    ),
    17: lambda: (
        0 < tokens("flagship", "saved") < tokens("flagship", "not-saved:below-save-granularity")
        and tokens("below-save-granularity", "saved") > 0
    ),
    18: lambda: fired("no-connector-configured") == 0 and reference.first_finding(
        LATEST["no-connector-configured"]) == "no-connector-configured",
    19: lambda: fired("connector-not-created") == 0 and tokens("connector-not-created", "saved") == 0,
}  # fmt: skip


@pytest.mark.parametrize("claim", sorted(verdicts()))
def test_what_a_verdict_rests_on_is_so(claim: int) -> None:
    assert CLAIM_HOLDS[claim](), f"claim {claim}: the reference reports no longer show it"


OF_THE_THREAD = (
    "maybe_setup_kv_connector", "ensure_kv_transfer_shutdown", "maybe_wait_for_kv_save",
    "get_finished_kv_transfers", "kv_connector_no_forward", "maybe_get_kv_connector_output",
    "_get_kv_connector_output", "get_kv_connector_stats", "use_uniform_kv_cache",
    "allocate_uniform_kv_caches",
    "unified_kv_cache_update", "forward_includes_kv_cache_update", "do_kv_cache_update",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_THREAD)
def test_every_method_and_hook_of_the_thread_has_a_row(name: str) -> None:
    rows = [line.split("|")[1] for line in CLAIMS.splitlines() if line.startswith("|")]
    assert len([row for row in rows if f"`{name}`" in row]) == 1


def test_the_rows_name_what_is_there() -> None:
    from kvtrace.agent.targets import TARGETS
    from kvtrace.causes.registry import CATALOGUE
    from kvtrace.trace import hooks

    targets = {target.id for target in TARGETS}
    for name in ("op-registration", "attention-direct-call", "attention-decorator"):
        assert name in targets and f"`{name}`" in CLAIMS
    for name in ("no-forward", "load-failed", "metadata-cleared-early"):
        assert name in CATALOGUE and f"`{name}`" in CLAIMS
    assert hooks.BY_NAME["register_cross_layers_kv_cache"].code == 22
