"""On two real engines: a request that one computes and the other one loads is told across both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtrace.merge.build import merge
from kvtrace.merge.model import Joined

from .server import KVTRACE

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("prefill_decode.py")
ROLES = ("kv_producer", "kv_consumer")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[Path]:
    """The runs of the engine that computes and, after it, of the one that loads."""
    from vllm_env import vllm_env

    place = tmp_path_factory.mktemp("merge")
    env = vllm_env() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for role in ROLES:
        words = [role, str(tiny_model), str(place / "store"), str(place / "handed-over.json")]
        done = subprocess.run(
            [*KVTRACE, "run", "-o", str(place / role), "--", sys.executable, str(SCRIPT), *words],
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    return [place / role for role in ROLES]


def test_what_was_sent_received_and_computed_again(runs: list[Path], tmp_path: Path) -> None:
    answer = merge([str(run) for run in runs], 10**8, tmp_path)
    whole, evicted = answer.requests
    assert isinstance(whole, Joined) and isinstance(evicted, Joined)
    assert [(one.how, one.key) for one in (whole, evicted)] == [("returned", "remote_request_id")] * 2
    assert [end.prompt for end in (whole.there, whole.here, evicted.there)] == [600, 600, 200]
    assert len(answer.merged.clocks) == 1 and whole.sure and whole.after_ns > 0
    # ExampleConnector stores whole blocks of 32 of all tokens but the last
    assert (whole.computed, whole.sent, whole.received, whole.computed_here) == (600, 576, 576, 24)
    assert (whole.again, whole.lost, whole.unsent) == (0, 0, 0)
    assert set(whole.sent_by) <= {"proved", "written", "read"} and whole.sent_by
    assert set(whole.received_by) <= {"proved", "written", "read"} and whole.received_by
    assert (evicted.computed, evicted.received, evicted.computed_here) == (200, 0, 200)
    assert evicted.again == evicted.sent


def test_its_pages(runs: list[Path], tmp_path: Path, shell: Callable[..., tuple[int, str, str]]) -> None:
    place = tmp_path / "both"
    code, out, err = shell("merge", *runs, "-o", place)
    assert (code, err) == (0, "") and "an id that the connector returned there" in " ".join(out.split())
    code, out, _ = shell("requests", place, "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 2
    code, out, err = shell("why", place, "--request", rows[0]["there"]["id"])
    told = " ".join(out.split())
    assert (code, err) == (0, "") and "In run 1" in told and "In run 2" in told
    assert "10.0.0.1" not in "".join(file.read_text() for file in place.iterdir())
