"""On two real engines that are there at once: what one computes the other one loads is told across both."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from side_by_side import KVTRACE, Place, Ran, Script
from vllm_env import vllm_env

from kvtrace.merge.build import merge
from kvtrace.merge.merged import Joined

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("prefill_decode.py")
ROLES = ("kv_producer", "kv_consumer")
LENGTHS = (600, 200)
ANSWER = "prefill_decode: "


class Engine:
    """A traced engine that answers one request after the other."""

    def __init__(self, place: Place, role: str, env: dict[str, str]) -> None:
        self._errors = place.folder / f"{role}.log"
        words = [role, str(place.model), str(place.store)]
        with open(self._errors, "w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [*KVTRACE, "run", "-o", str(place.folder / role), "--", sys.executable, str(SCRIPT), *words],
                env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def ask(self, prompt: list[int], params: Any) -> Any:
        """The kv_transfer_params that come back."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"prompt": prompt, "params": params}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(self._errors.read_text()[-3000:])

    def kill(self) -> None:
        """Where it has not ended by itself."""
        assert self._process.stdin
        self._process.stdin.close()  # ends what run has started, too
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.communicate()  # closes stdin
        assert self._process.returncode == 0, self._errors.read_text()[-3000:]


@contextmanager
def engine(place: Place, role: str, env: dict[str, str]) -> Iterator[Engine]:
    started = Engine(place, role, env)
    try:
        yield started
        started.end()
    finally:
        started.kill()


def handed_over(place: Place) -> list[Path]:
    """The runs of an engine that computes and one that loads, both there from the first request to the last.
    What the second request stored is gone when the other engine asks for it."""
    env = vllm_env() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    store = place.store
    store.mkdir()
    rng = random.Random(1)
    with ExitStack() as stack:
        computes, loads = (stack.enter_context(engine(place, role, env)) for role in ROLES)
        for number, length in enumerate(LENGTHS):
            prompt = [rng.randrange(10, 500) for _ in range(length)]
            before = set(store.iterdir())
            params = computes.ask(prompt, {"do_remote_decode": True})
            if number:
                for folder in set(store.iterdir()) - before:
                    shutil.rmtree(folder)
            loads.ask(prompt, params)
    return [place.folder / role for role in ROLES]


SCRIPTS = (handed_over,)


@pytest.fixture
def pair(ran: Mapping[Script, Ran]) -> list[Path]:
    found: list[Path] = ran[handed_over].done
    return found


def test_what_was_sent_received_and_computed_again(pair: list[Path], tmp_path: Path) -> None:
    answer = merge([str(run) for run in pair], 10**8, tmp_path)
    whole, evicted = answer.requests
    assert isinstance(whole, Joined) and isinstance(evicted, Joined)
    assert [(one.how, one.key) for one in (whole, evicted)] == [("returned", "remote_request_id")] * 2
    assert [end.prompt for end in (whole.there, whole.here, evicted.there)] == [600, 600, 200]
    # both were there at once: each request here came after the one there and before the next one there
    order = [whole.there, whole.here, evicted.there, evicted.here]
    assert [end.at_ns for end in order] == sorted(end.at_ns for end in order)
    assert len(answer.merged.clocks) == 1 and whole.sure and whole.after_ns > 0
    # ExampleConnector stores whole blocks of 32 of all tokens but the last
    assert (whole.computed, whole.sent, whole.received, whole.computed_here) == (600, 576, 576, 24)
    assert (whole.again, whole.lost, whole.unsent) == (0, 0, 0)
    assert set(whole.sent_by) <= {"proved", "written", "read"} and whole.sent_by
    assert set(whole.received_by) <= {"proved", "written", "read"} and whole.received_by
    assert (evicted.computed, evicted.received, evicted.computed_here) == (200, 0, 200)
    assert evicted.again == evicted.sent


def test_its_pages(pair: list[Path], tmp_path: Path, shell: Callable[..., tuple[int, str, str]]) -> None:
    place = tmp_path / "both"
    code, out, err = shell("merge", *pair, "-o", place)
    assert (code, err) == (0, "") and "an id that the connector returned there" in " ".join(out.split())
    code, out, _ = shell("requests", place, "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 2
    code, out, err = shell("why", place, "--request", rows[0]["there"]["id"])
    told = " ".join(out.split())
    assert (code, err) == (0, "") and "In run 1" in told and "In run 2" in told
    assert "10.0.0.1" not in "".join(file.read_text() for file in place.iterdir())
