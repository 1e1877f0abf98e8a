"""What a test asks: one traced run's report, its numbers, and assertions that show the finding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace.errors import KvtraceError
from kvtrace.pytest_plugin.measured import Measured
from kvtrace.terms import FAULT, LOADED, NOTE, SAVED, SEVERITIES, severity_order, severity_word
from kvtrace.words import plural

if TYPE_CHECKING:
    from kvtrace.causes.diagnosis import JudgedRequest
    from kvtrace.ledger.run import Run
    from kvtrace.report.model import FindingRow, Report

_MAX_SHORT = 3
"""Pytest shows eight lines of an explanation: the finding must be among them."""
_NO_ENGINE = (
    "no step of a vLLM engine was recorded in this test",
    "make the LLM inside the test, after the fixture (not in a module or session fixture), and generate",
)


class TraceError(KvtraceError):
    """A question that this trace cannot answer: one line, what and what to do."""


class Trace:
    """The recording of one test. Reports are made when asked for, and anew when the engine went on.

    Attributes:
        run_dir: the run directory; kept where the test fails or ``keep`` is set to True.
        keep: see above.
    """

    def __init__(self, run_dir: Path, name: str, command: list[str], started_ns: int) -> None:
        self.run_dir = run_dir
        self.keep = False
        self._name, self._command, self._started_ns = name, command, started_ns
        self._open = True
        self._made: tuple[object, Run, Report, Sequence[JudgedRequest]] | None = None

    # --- the report --------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """``kvtrace.report/2`` of all that was recorded up to now.

        Raises:
            KvtraceError: the spools cannot be read.
        """
        return self._analysed()[2]

    @property
    def findings(self) -> list[FindingRow]:
        """The findings of the report, worst first: dicts with ``id``, ``severity``, ``title``, ..."""
        return self.report["findings"]

    def explain(self, width: int = 100) -> str:
        """The page that ``kvtrace explain`` prints, without colour."""
        from kvtrace.render.page import Screen
        from kvtrace.render.report import report_page
        from kvtrace.render.terminal import terminal

        where = str(self.run_dir)
        return terminal(report_page(self.report, where, where), Screen(width))

    # --- numbers -----------------------------------------------------------------------------

    def coverage(self, hook: str, layer: str | int | None = None, rank: int | None = None) -> float:
        """The share of due calls that came, 0 to 1, of a connector hook or an attention op.

        Args:
            hook: ``save_kv_layer``, ``wait_for_save``, ``unified_attention_with_output``, ...
            layer: a layer's name, a pattern (``model.layers.*``) or its number; None: all layers.
            rank: None: all ranks.

        A hook that was never due counts 0.

        Raises:
            TraceError: no engine ran, or there is no such hook, layer or rank.
        """
        from kvtrace.gate.cells import cells
        from kvtrace.trace import hooks, ops

        if hook not in hooks.BY_NAME and hook not in ops.BY_NAME:
            known = ", ".join([*hooks.NAMES, *ops.NAMES])
            raise TraceError(f"kvtrace knows no hook or op {hook!r}", f"one of {known}")
        self._require_engine()
        seen = cells(self.report)
        matched = [cell for cell in seen if cell.name == hook]
        if layer is not None:
            _one_of("layer", layer, [cell.layer for cell in seen], lambda name: _is_layer(name, layer))
            matched = [cell for cell in matched if _is_layer(cell.layer, layer)]
        if rank is not None:
            _one_of("rank", rank, [cell.rank for cell in seen], lambda number: number == rank)
            matched = [cell for cell in matched if cell.rank == rank]
        due = sum(cell.eligible for cell in matched)
        fired = sum(min(cell.fired, cell.eligible) for cell in matched)
        what = f"{hook}: {fired} of {due} calls due"
        return Measured(fired / due if due else 0.0, what, lambda: self._about_calls(hook))

    def saved_tokens(self, request: object = None) -> float:
        """Tokens whose KV the connector saved, on every layer and rank (a part counts as a part).

        Args:
            request: a request id, an answer of ``llm.generate`` or a list of these; None: all.

        Raises:
            TraceError: no engine ran, or it had no such request.
        """
        self._require_engine()
        _, _, report, requests = self._analysed()
        if request is None:
            tokens = report["ledger"]["saves"]["tokens"].get(SAVED, 0.0)
        else:
            tokens = sum(row.tokens.saved for row in _rows(requests, request))
        return Measured(_even(tokens), "tokens saved", lambda: self._about_ledger("saves"))

    def loaded_tokens(self, request: object = None) -> float:
        """Prompt tokens whose KV came from the connector instead of being computed; as `saved_tokens`."""
        from kvtrace.ledger.ends import LoadEnd

        self._require_engine()
        _, run, report, requests = self._analysed()
        if request is None:
            tokens = report["ledger"]["loads"]["tokens"].get(LOADED, 0.0)
        else:
            pairs = {engine.tag: max(1, engine.pairs) for engine in run.engines}
            wanted = {(row.request.engine, row.request.id) for row in _rows(requests, request)}
            tokens = sum(
                one.ends.get(LoadEnd.LOADED, 0) / pairs.get(one.engine, 1)
                for one in run.load_rows
                if (one.engine, one.id) in wanted
            )
        return Measured(_even(tokens), "tokens loaded", lambda: self._about_ledger("loads"))

    # --- assertions --------------------------------------------------------------------------

    def assert_no_findings(self, allow: Iterable[str] = (), severity: str = FAULT) -> None:
        """Fails where the report has a finding at least this severe that is not allowed.

        Args:
            allow: ids of causes (``kvtrace docs`` lists them).
            severity: ``fault``, ``limit`` (limits and faults) or ``note`` (all).

        Raises:
            AssertionError: with the findings; also where no engine ran, as that proves nothing.
            TraceError: an id or severity that kvtrace does not know.
        """
        __tracebackhide__ = True
        from kvtrace.causes.registry import CATALOGUE

        allowed = {allow} if isinstance(allow, str) else set(allow)
        if unknown := sorted(allowed - set(CATALOGUE)):
            raise TraceError(f"kvtrace knows no cause {', '.join(unknown)}", "kvtrace docs lists them")
        if severity not in SEVERITIES:
            raise TraceError(f"no severity {severity!r}", f"one of {', '.join(SEVERITIES)}")
        if not self._ran():
            raise AssertionError(": ".join(_NO_ENGINE))
        bad = [
            one["id"]
            for one in self.findings
            if severity_order(one["severity"]) <= severity_order(severity) and one["id"] not in allowed
        ]
        if bad:
            head = f"{plural(len(bad), 'finding')} that the test does not allow"
            raise AssertionError("\n".join([f"{head}: {', '.join(bad)}", *self._lines(set(bad))]))

    def assert_coverage(
        self, hook: str, minimum: float = 1.0, layer: str | int | None = None, rank: int | None = None
    ) -> None:
        """Fails where :meth:`coverage` is below `minimum`, and says which layers and ranks fell short."""
        __tracebackhide__ = True
        share = self.coverage(hook, layer, rank)
        if share < minimum:
            what = getattr(share, "what", hook)
            head = f"coverage {share:.4g} is below {minimum:.4g} ({what})"
            raise AssertionError("\n".join([head, *self._about_calls(hook)]))

    def summary(self) -> str:
        """Verdict and findings, for a failing test's output. Never raises."""
        try:
            report = self.report
            ran = [] if self._ran() else [": ".join(_NO_ENGINE)]
            lines = [*ran, report["verdict"], *self._lines({one["id"] for one in report["findings"]})]
        except Exception as error:  # the test's own failure must come through
            lines = [f"no report: {type(error).__name__}: {error}"]
        return "\n".join([*lines, f"more: kvtrace explain {self.run_dir}"])

    # --- inside ------------------------------------------------------------------------------

    def close(self) -> None:
        """No more of this run is recorded. The report stays as it would be now."""
        self._flush()
        self._write_run()
        self._open = False

    def _flush(self) -> None:
        from kvtrace.agent.state import AGENT

        if self._open:
            AGENT.flush()

    def _analysed(self) -> tuple[object, Run, Report, Sequence[JudgedRequest]]:
        from kvtrace import causes, ledger
        from kvtrace.report.build import assemble
        from kvtrace.trace.format import SPOOL_DIR

        self._flush()
        spools = sorted((self.run_dir / SPOOL_DIR).glob("*"))
        state = [(one.name, one.stat().st_size) for one in spools]
        if self._made is None or self._made[0] != state:
            self._write_run()
            run = ledger.read_run(self.run_dir)
            diagnosis = causes.diagnose(run)
            # the report lists at most 200 requests; a test may ask for any
            self._made = (state, run, assemble(run, diagnosis), diagnosis.requests)
        return self._made

    def _write_run(self) -> None:
        """run.json, so that the directory reads like one of ``kvtrace run``."""
        from kvtrace.launch.own_process import write_run

        more = {"command": self._command, "processes": [], "notes": ["recorded by the pytest plugin"]}
        try:
            write_run(self.run_dir, self._name, self._started_ns, **more)
        except OSError:
            pass  # the report does without

    def _ran(self) -> bool:
        # without a platform nothing but steps is known: the engine was made before the recording
        return any(engine["real_steps"] and engine["platform"] for engine in self.report["run"]["engines"])

    def _require_engine(self) -> None:
        if not self._ran():
            raise TraceError(*_NO_ENGINE)

    def _lines(self, ids: set[str]) -> list[str]:
        from kvtrace.render.report import event_words, finding_facts

        lines = []
        for one in self.findings:
            if one["id"] in ids:
                facts = finding_facts(one, self.report["requests"]["total"])
                lines.append(" · ".join([f"{severity_word(one['severity'])}  {one['id']}", *facts]))
                lines.append(f"  {one['title']}")
                lines += [f"  Remedy    {text}" for text in one["remedy"]]
                lines += [
                    f"  Evidence  {text}" for text in (*one["evidence"], *map(event_words, one["events"]))
                ]
        return lines

    def _about_calls(self, hook: str) -> list[str]:
        """Which layers and ranks fell short, and the finding that explains it."""
        from kvtrace.gate.cells import cells
        from kvtrace.gate.covered import shortfalls
        from kvtrace.gate.explain import Findings

        lines = []
        matched = [cell for cell in cells(self.report) if cell.name == hook]
        all_short = shortfalls(matched, lambda cell: cell.share < 1)
        for short in all_short[:_MAX_SHORT]:
            where = [short.layers] if short.layers else []
            where += [] if short.rank is None else [f"rank {short.rank}"]
            place = ", ".join(where) or "all ranks"
            lines.append(f"{hook} on {place}: {short.fired} of {short.eligible} calls due")
        if len(all_short) > _MAX_SHORT:
            lines[-1] += f" (and {len(all_short) - _MAX_SHORT} more groups of layers)"
        cause = Findings(self.report, {}).for_calls()
        lines += self._lines({cause} if cause else set())
        return lines or [f"verdict: {self.report['verdict']}"]

    def _about_ledger(self, side: str) -> list[str]:
        from kvtrace.causes.registry import CATALOGUE

        ids = {one["id"] for one in self.findings if one["severity"] != NOTE}
        ours = {one for one in ids if one in CATALOGUE and CATALOGUE[one].ledger == side}
        return self._lines(ours) or [f"verdict: {self.report['verdict']}"]


def _is_layer(name: str | None, wanted: str | int) -> bool:
    if name is None:
        return False
    if isinstance(wanted, int):
        from kvtrace.gate.layers import index_of

        return index_of(name) == str(wanted)
    return name == wanted or fnmatchcase(name, wanted)


def _one_of(what: str, wanted: object, seen: Iterable[object], matches: Any) -> None:
    present = list(dict.fromkeys(one for one in seen if one is not None))
    if not any(matches(one) for one in present):
        shown = ", ".join(str(one) for one in present[:8]) or "none at all"
        raise TraceError(f"no {what} {wanted!r} in this run", f"seen: {shown}")


def _rows(requests: Sequence[JudgedRequest], wanted: object) -> list[JudgedRequest]:
    """The rows of a request id (the engine's or the client's), of an answer, or of several."""
    if isinstance(wanted, (list, tuple, set, frozenset)):
        return [row for one in wanted for row in _rows(requests, one)]
    ident = wanted if isinstance(wanted, str) else getattr(wanted, "request_id", None)
    if not isinstance(ident, str):
        raise TraceError(f"{wanted!r} is not a request", "give its id, or what llm.generate returned")
    found = [row for row in requests if row.request.id == ident]
    found = found or [row for row in requests if row.request.client == ident]
    if len(found) > 1:
        ids = ", ".join(row.request.id for row in found)
        raise TraceError(f"{len(found)} requests of this test were called {ident!r}", f"give one of {ids}")
    if not found:
        ids = ", ".join(row.request.client or row.request.id for row in requests[:8]) or "none at all"
        raise TraceError(f"no request {ident!r} in this run", f"seen: {ids}")
    return found


def _even(tokens: float) -> float:
    """Without the dust of dividing by pairs: 96 layers of 96 are 96 tokens."""
    return round(float(tokens), 3)
