"""What ``--help`` of each verb shows as examples. A test reads every one of them as a command line."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": (
        "kvtrace run -- vllm serve MODEL --kv-transfer-config '{...}'",
        "kvtrace explain reports/RUN/report.json",
        "kvtrace why reports/RUN --request ID",
    ),
    "run": (
        "kvtrace run -- vllm serve MODEL --kv-transfer-config '{...}'",
        "kvtrace run -o traces/r1 --name nightly -- python bench.py",
        "kvtrace run --metadata-adapter mine.kv:kv_entries -- vllm serve MODEL",
        "kvtrace run --stuck-after 60 -- vllm serve MODEL",
    ),
    "doctor": (
        "kvtrace doctor -- vllm serve MODEL --kv-transfer-config '{...}'",
        "kvtrace doctor --connector mine.kv:MyConnector",
        "kvtrace doctor --format json -- vllm serve MODEL | jq .lines",
    ),
    "verify": (
        "kvtrace verify -- vllm serve MODEL --kv-transfer-config '{...}'",
        "kvtrace verify --connector mine.kv:MyConnector --config '{...}'",
        "kvtrace verify --case 'a96 ; a96' --connector mine.kv:MyConnector",
    ),
    "explain": (
        "kvtrace explain reports/RUN",
        "kvtrace explain -v reports/RUN/report.json | less",
        "kvtrace explain reports/RUN --format markdown",
        "kvtrace explain reports/RUN --format html -o report.html",
    ),
    "requests": (
        "kvtrace requests reports/RUN",
        "kvtrace requests reports/RUN --verdict first-chunk-only --limit 10",
    ),
    "why": (
        "kvtrace why reports/RUN --request cmpl-90",
        "kvtrace why reports/RUN --request cmpl-90 --token 512 --layer 0",
    ),
    "top": ("kvtrace top", "kvtrace top reports/RUN --every 5", "kvtrace top reports/RUN --once"),
    "metrics": ("kvtrace metrics --port 9464", "kvtrace metrics reports/RUN --once"),
    "merge": (
        "kvtrace merge reports/PREFILL reports/DECODE",
        "kvtrace merge reports/HOST-A reports/HOST-B -o reports/both --clock-error 5",
    ),
    "export": (
        "kvtrace export reports/RUN --format perfetto -o run.pftrace",
        "kvtrace export reports/RUN --format perfetto --steps 100:200 --layers 0,5-8",
        "kvtrace export reports/RUN --format parquet -o fleet",
    ),
    "baseline": ("kvtrace baseline reports/RUN", "kvtrace baseline reports/RUN -o good.json --force"),
    "check": (
        "kvtrace check reports/RUN --baseline kvtrace-baseline.json",
        "kvtrace check reports/RUN --min-saved-tokens 0.95 --forbid fault",
        "kvtrace check reports/RUN --junit kvtrace.xml --github",
    ),
    "diff": ("kvtrace diff reports/BEFORE reports/AFTER",),
    "docs": ("kvtrace docs", "kvtrace docs below-save-granularity"),
    "scenario": ("kvtrace scenario list", "kvtrace scenario run flagship"),
    "scenario list": ("kvtrace scenario list", "kvtrace scenario list --dir scenarios"),
    "scenario run": ("kvtrace scenario run", "kvtrace scenario run flagship --out runs"),
}
"""Verb, "" for the command alone -> its examples."""


def epilog(verb: str) -> str:
    """The end of a verb's help: its examples, a line each, which the formatter leaves alone."""
    return "\b\nExamples:\n" + "".join(f"  {line}\n" for line in EXAMPLES[verb])
