"""A snapshot as OpenMetrics. Labels are names of hooks, processes, outcomes, causes and grades: bounded, and
never a request's id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace.errors import KvtraceError
from kvtrace.live.counts import EDGES_S
from kvtrace.live.look import Snapshot
from kvtrace.words import clean

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MOST_PROCESSES = 256
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def check_installed() -> None:
    """Raises KvtraceError where prometheus_client is not there."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise KvtraceError(
            "kvtrace metrics needs prometheus-client", "install it: pip install 'kvtrace[metrics]'"
        ) from None


def exposition(look: Snapshot) -> str:
    """The text that Prometheus reads."""
    from prometheus_client.openmetrics import exposition as openmetrics

    generate_latest: Any = openmetrics.generate_latest  # without types
    return str(generate_latest(_Once(look)), "utf-8")


class _Once:
    """A registry of one snapshot."""

    def __init__(self, look: Snapshot) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        # names come from the run: nothing that a terminal obeys, or that no encoding knows
        for metric in metrics(self._look):
            for sample in metric.samples:
                sample.labels.update({name: clean(value) for name, value in sample.labels.items()})
            yield metric


def metrics(look: Snapshot) -> Iterator[Metric]:
    """Every metric family of a snapshot."""
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    run = look.analysis.report["run"] if look.analysis else None
    engine = run["engines"][0] if run and run["engines"] else None
    connector = engine["connector"] if engine else None
    facts = {
        "run": Path(look.directory).resolve().name,
        "vllm": (run["vllm"] if run else "") or look.vllm,
        "connector": (connector["class"] or connector["name"]) if connector else look.connector,
    }
    yield InfoMetricFamily("kvtrace_run", "What runs.", facts)
    yield GaugeMetricFamily("kvtrace_run_active", "1 while the run goes on.", look.state == "running")
    yield from _sums(look)
    yield from _hook_times(look)
    yield from _processes(look)
    yield from _answer(look)


def _sums(look: Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield CounterMetricFamily("kvtrace_steps", "Scheduler steps with tokens.", look.steps)
    yield CounterMetricFamily("kvtrace_requests_arrived", "Requests that came to a scheduler.", look.arrived)
    yield CounterMetricFamily("kvtrace_requests_finished", "Requests that left a scheduler.", look.finished)
    yield CounterMetricFamily("kvtrace_preemptions", "Preemptions of requests.", look.preempted)
    yield CounterMetricFamily("kvtrace_records", "Records of the trace.", look.records)
    yield GaugeMetricFamily(
        "kvtrace_requests_unfinished", "Requests that have not finished.", look.unfinished
    )
    yield GaugeMetricFamily(
        "kvtrace_spool_size_bytes", "Size of the trace on disk.", look.spool_bytes, unit="bytes"
    )


def _hook_times(look: Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    times = HistogramMetricFamily(
        "kvtrace_hook_duration_seconds", "Host time of the connector's hook calls.", labels=["hook"],
        unit="seconds",
    )  # fmt: skip
    raised = CounterMetricFamily("kvtrace_hook_raised", "Hook calls that raised.", labels=["hook"])
    for name, one in look.hooks.items():
        buckets: list[tuple[str, float]] = []
        below = 0
        for edge, calls in zip((*(str(edge) for edge in EDGES_S), "+Inf"), one.buckets, strict=True):
            below += calls
            buckets.append((edge, below))
        times.add_metric([name], buckets, one.total_ns / 1e9)
        raised.add_metric([name], one.raised)
    yield times
    yield raised


def _processes(look: Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    labels = ["process", "pid"]
    silence = GaugeMetricFamily(
        "kvtrace_process_silence_seconds", "Since a process's last record.", labels=labels, unit="seconds"
    )
    steps = GaugeMetricFamily(
        "kvtrace_worker_open_steps",
        "Steps that were scheduled and that a worker has not ended.",
        labels=labels,
    )
    open_s = GaugeMetricFamily(
        "kvtrace_worker_open_step_seconds", "Since the oldest of these was scheduled; 0 for none.",
        labels=labels, unit="seconds",
    )  # fmt: skip
    for one in look.processes[:MOST_PROCESSES]:
        values = [one.name, str(one.pid)]
        if one.silent_s is not None:
            silence.add_metric(values, one.silent_s)
        steps.add_metric(values, one.open_steps)
        open_s.add_metric(values, one.open_s or 0.0)
    hook_s = GaugeMetricFamily(
        "kvtrace_open_hook_seconds", "A hook that has not come back is open for so long at least.",
        labels=["process", "pid", "hook"], unit="seconds",
    )  # fmt: skip
    for hook in look.open_hooks[:MOST_PROCESSES]:
        hook_s.add_metric([hook.process, str(hook.pid), hook.what], hook.least_s)
    yield silence
    yield hook_s
    yield steps
    yield open_s


def _answer(look: Snapshot) -> Iterator[Metric]:
    """What the report of the run so far says; nothing where there is none yet."""
    from prometheus_client.core import GaugeMetricFamily

    if look.analysis is None:
        return
    report = look.analysis.report
    tokens = GaugeMetricFamily(
        "kvtrace_ledger_tokens", "Tokens by what became of them, for which cause, and how well that is seen.",
        labels=["ledger", "outcome", "cause", "grade"],
    )  # fmt: skip
    for name, ledger in (("saves", report["ledger"]["saves"]), ("loads", report["ledger"]["loads"])):
        for account, layers in ledger["accounts"].items():
            outcome, _, cause = account.partition(":")
            # Whole tokens, with the grade of the least seen of them: as everywhere else.
            grade = ([one for one, n in ledger.get("grades", {}).get(account, {}).items() if n] or [""])[-1]
            whole = ledger["tokens"].get(account, layers / (ledger["pairs"] or 1))
            tokens.add_metric([name, outcome, cause, grade], whole)
    yield tokens
    findings = GaugeMetricFamily(
        "kvtrace_finding_tokens", "Findings so far, with the tokens that each explains.",
        labels=["id", "severity"],
    )  # fmt: skip
    found: dict[tuple[str, str], float] = {}
    for one in report["findings"]:
        found[one["id"], one["severity"]] = found.get((one["id"], one["severity"]), 0.0) + one["tokens"]
    for labels, value in found.items():
        findings.add_metric(list(labels), value)
    yield findings
    yield GaugeMetricFamily(
        "kvtrace_report_age_seconds", "Since the ledger and the findings were made.",
        look.analysis.made_s, unit="seconds",
    )  # fmt: skip
    yield GaugeMetricFamily(
        "kvtrace_report_build_seconds", "How long that took.", look.analysis.took_s, unit="seconds"
    )
