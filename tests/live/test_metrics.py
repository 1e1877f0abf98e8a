"""The metrics are OpenMetrics as Prometheus' own parser reads it; the dashboard asks for what is served."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from synth import Sim

from kvtrace.live import server as server_module
from kvtrace.live.analysis import Analyses
from kvtrace.live.exposition import CONTENT_TYPE, exposition
from kvtrace.live.look import OpenHook, ProcessLook
from kvtrace.live.server import MetricsServer
from kvtrace.live.watch import LiveRun

Shell = Callable[..., tuple[int, str, str]]
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "kvtrace.json"
DOCS = DASHBOARD.parents[1] / "live.md"


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample's name -> labels -> value; raises where the text is no OpenMetrics."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    return found


def test_the_metrics_are_the_numbers_of_the_run(run: Path, shell: Shell) -> None:
    code, out, err = shell("metrics", run, "--once")
    assert (code, err) == (0, "")
    found = samples(out)
    look = LiveRun(run).look(wait=True)
    assert look.analysis is not None
    assert found["kvtrace_steps_total"][()] == look.steps
    assert found["kvtrace_requests_arrived_total"][()] == 2
    assert found["kvtrace_run_active"][()] == 0
    for name, one in look.hooks.items():
        assert found["kvtrace_hook_duration_seconds_count"][("hook", name),] == one.calls
    saves = look.analysis.report["ledger"]["saves"]
    given = sum(v for labels, v in found["kvtrace_ledger_tokens"].items() if ("ledger", "saves") in labels)
    assert given == pytest.approx(saves["total_tokens"])
    assert all(value == round(value) for value in found["kvtrace_ledger_tokens"].values())
    kinds = {(labels["outcome"], labels["cause"]) for labels in map(dict, found["kvtrace_ledger_tokens"])}
    assert ("not-saved", "below-save-granularity") in kinds and ("saved", "") in kinds


def test_no_label_holds_a_request(run: Path, shell: Shell) -> None:
    out = shell("metrics", run, "--once")[1]
    assert "cmpl-" not in out
    labels = {key for rows in samples(out).values() for row in rows for key, _ in row}
    assert labels == {
        "hook", "le", "process", "pid", "ledger", "outcome", "cause", "grade", "id", "severity", "run",
        "vllm", "connector",
    }  # fmt: skip


def test_a_run_without_anything_gives_metrics(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    found = samples(exposition(LiveRun(tmp_path).look()))
    assert found["kvtrace_steps_total"][()] == 0
    assert "kvtrace_ledger_tokens" not in found


class NoneYet(Analyses):
    """The first analysis takes its time."""

    def refresh(self, state: object, wait: bool = False) -> None:
        return


def test_the_first_scrape_names_the_run_vllm_and_connector(tmp_path: Path) -> None:
    """No report is made yet: they are in the command and in the first spool."""
    sim = Sim(tmp_path / "20261120-serve")
    sim.scheduler.write()
    file = sim.dir / "run.json"
    words = ["vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector": "ChunkStore"}']
    file.write_text(json.dumps({"schema": "kvtrace.run/1", "command": words}), encoding="utf-8")
    look = LiveRun(sim.dir, NoneYet(sim.dir)).look()
    assert look.analysis is None
    (labels,) = map(dict, samples(exposition(look))["kvtrace_run_info"])
    assert labels == {"run": "20261120-serve", "vllm": look.vllm, "connector": "ChunkStore"}


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[int]:
    """Its port."""
    with MetricsServer("127.0.0.1", 0, CONTENT_TYPE, text) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, head: str, then: Callable[[socket.socket], object] = lambda _: None) -> bytes:
    """What comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        client.sendall(head.encode())
        then(client)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_the_server_answers_a_scrape(run: Path) -> None:
    watch = LiveRun(run)
    watch.look(wait=True)
    with serving(lambda: exposition(watch.look())) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert "kvtrace_ledger_tokens" in samples(answer.read().decode())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", b"200"), ("localhost", b"200"), ("[::1]:9464", b"200"), ("10.1.2.3", b"200"),
        ("evil.example:9464", b"421"), ("127.0.0.1.evil.example", b"421"), ("", b"421"),
    ],
)  # fmt: skip
def test_who_comes_under_somebody_elses_name_is_not_answered(host: str, status: bytes) -> None:
    """A page in a browser on this machine, by a name that its owner lets lead here."""
    with serving(lambda: "x") as port:
        assert ask(port, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n").split()[1] == status


def test_silent_connections_take_no_threads_nor_stop_a_scrape() -> None:
    with serving(lambda: "text") as port, ExitStack() as stack:
        before = threading.active_count()
        for number in range(300):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: lo" if number % 2 else b"")
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert answer.read() == b"text"
        assert time.monotonic() - began < server_module.SECONDS
        assert threading.active_count() <= before + 1  # the one that makes the text


def test_who_asks_too_slowly_or_too_much_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SECONDS", 0.2)
    with serving(lambda: "x") as port:
        assert ask(port, "GET / HTTP/1.1\r\nHost: l") == b""
        assert ask(port, "POST / HTTP/1.1\r\n\r\n").split()[1] == b"405"
        for _ in range(3):
            with suppress(ConnectionError):
                assert ask(port, "GET / HTTP/1.1\r\n" + "a: b\r\n" * 10_000) == b""
        assert ask(port, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").split()[1] == b"200"


def test_a_client_that_hangs_up_leaves_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: "x" * 30_000_000) as port:
        for _ in range(5):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.recv(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # with a reset
        assert ask(port, "GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n").split()[1] == b"404"
    assert capfd.readouterr() == ("", "")


def test_a_name_from_the_run_is_plain_text_in_a_label(run: Path) -> None:
    names = ("\x1b]0;x\x07", 'a"b', "\u202eabc", "\ud800")
    looks = tuple(ProcessLook(name, 1, 1.0, False, 0, None, None) for name in names)
    text = exposition(replace(LiveRun(run).look(), processes=looks))
    assert all(char == "\n" or char.isprintable() for char in text)
    assert len(samples(text)["kvtrace_process_silence_seconds"]) == len(names)


def test_a_port_that_is_taken_is_one_clear_line(run: Path, shell: Shell) -> None:
    with MetricsServer("127.0.0.1", 0, CONTENT_TYPE, lambda: "") as taken:
        code, out, err = shell("metrics", run, "--port", str(taken.server_address[1]))
    assert (code, out) == (2, "")
    assert err.startswith("kvtrace: cannot listen on 127.0.0.1:") and err.count("\n") == 1


def test_without_the_extra_the_way_to_it_is_said(
    run: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    code, _, err = shell("metrics", run)
    assert code == 2
    assert (
        err
        == "kvtrace: kvtrace metrics needs prometheus-client: install it: pip install 'kvtrace[metrics]'\n"
    )


def test_the_dashboard_and_the_page_name_what_is_served(run: Path) -> None:
    worker = ProcessLook("Worker-0", 4711, 61.0, False, 2, 41, 60.0)
    hook = OpenHook("Worker-0", 4711, "wait_for_save", "recv (net.py:3)", 41.0, 61.0)
    look = replace(LiveRun(run).look(wait=True), processes=(worker,), open_hooks=(hook,))
    served = samples(exposition(look))
    assert list(served["kvtrace_open_hook_seconds"].values()) == [41.0]
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"kvtrace_\w+", target["expr"])
    }
    assert asked and asked <= set(served)
    documented = set(re.findall(r"`(kvtrace_\w+)`", DOCS.read_text()))
    plain = {re.sub(r"_(bucket|count|sum)$", "", name) for name in served}
    assert documented == plain
