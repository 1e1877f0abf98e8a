"""``kvtrace verify`` on an engine in this process: of one connector each property and its answer."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtrace.verify.answers import Answered, VerifyError
from kvtrace.verify.drive import Driver
from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.evidence import Evidence, read
from kvtrace.verify.observed import Settings
from kvtrace.verify.property import judged
from kvtrace.verify.registry import of_suite
from kvtrace.verify.suite import ask, observed
from kvtrace.verify.usage import DESCRIPTORS, MEMORY, THREADS
from kvtrace.verify.workload import Streams

_STUCK_STEPS = 400
"""Engine steps in a row with nothing to show for, a few milliseconds each."""
_TURNS = 60
HOOK_SHARE = 0.8
"""Of a sound generated connector on the tiny model up to 0.65, and 0.78 beside much other work (177 runs of
seeds 192000 to 198199); of one that saves slowly 0.72 to 0.96 (five of them)."""
LONGEST = 1024
"""Tokens of the longest sequence, at least: verify's prompts have three units."""


class InProcess:
    """An engine of kvtrace's verify.

    Args:
        start: makes the LLM; stop ends it.
        trace: its run directory: the agent writes there.
    """

    def __init__(self, start: Callable[[], Any], stop: Callable[[Any], None], trace: Path) -> None:
        self._start, self._stop, self._trace = start, stop, trace
        self._llm: Any = None
        self._why = ""

    adapters = 0
    other_model = False

    def start(self) -> None:
        """Raises VerifyError: it does not start."""
        try:
            self._llm = self._start()
        except Exception as error:
            with suppress(Exception):
                self._stop(None)  # else the next engine of this process takes over its connector
            raise VerifyError("the engine does not start", f"{type(error).__name__}: {error}"[:300]) from None
        self._why = ""

    def stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            try:
                self._stop(llm)
            except Exception as error:  # it may have ended by itself
                self._why = self._why or f"{type(error).__name__}: {error}"[:300]

    def restart(self, other: bool = False) -> None:
        self.stop()
        self.start()

    def gone(self) -> str:
        return self._why

    def look(self) -> Evidence:
        from kvtrace.agent.state import AGENT

        if AGENT.recorder is not None:
            AGENT.recorder.flush()
        return read([self._trace])

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        from vllm import SamplingParams

        engine, began = self._llm.llm_engine, time.monotonic()
        found = {one.id: Reply() for one in requests}
        open_ = {one.id: one for one in requests}
        try:
            for one in requests:
                sampling = SamplingParams(
                    temperature=0.0, max_tokens=one.generate, ignore_eos=True, detokenize=False, logprobs=5
                )
                prompt: dict[str, Any] = {"prompt_token_ids": list(one.tokens)}
                engine.add_request(one.id, prompt | ({"cache_salt": one.salt} if one.salt else {}), sampling)
            idle = 0
            while open_ and engine.has_unfinished_requests() and idle < _STUCK_STEPS:
                outputs = engine.step()
                idle = 0 if outputs else idle + 1
                for output in outputs:
                    self._take(output, open_, found)
                if not outputs:
                    time.sleep(0.003)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"[:300]
            return [self._ended(found[one.id], one.id in open_) for one in requests]
        if open_:
            engine.abort_request(list(open_))
            engine.step()
        seconds = time.monotonic() - began
        return [self._late(found[one.id], one.id in open_, seconds) for one in requests]

    def _take(self, output: Any, open_: dict[str, RequestToMake], found: dict[str, Reply]) -> None:
        request = open_.get(output.request_id)
        if request is None:
            return
        one = output.outputs[0]
        logprobs = tuple(
            (
                float(place[token].logprob),
                {int(other): float(value.logprob) for other, value in place.items()},
            )
            for token, place in zip(one.token_ids, one.logprobs or (), strict=False)
        )
        first = not found[request.id].tokens and bool(one.token_ids)
        error = "the engine ended it with an error" if one.finish_reason == "error" else ""
        found[request.id] = Reply(tuple(one.token_ids), logprobs, error)
        if output.finished:
            del open_[request.id]
        elif first and request.leaves:
            self._llm.llm_engine.abort_request([request.id])
            del open_[request.id]
        elif first and request.preempted:
            with suppress(RuntimeError):  # a transfer holds blocks still; a served engine says so and goes on
                self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def _ended(self, reply: Reply, open_: bool) -> Reply:
        return Reply(reply.tokens, reply.logprobs, self._why) if open_ else reply

    @staticmethod
    def _late(reply: Reply, open_: bool, seconds: float) -> Reply:
        error = "no answer, and no step gave anything" if open_ else reply.error
        return Reply(reply.tokens, reply.logprobs, error, open_, seconds)

    def reset(self, patience: float) -> bool | None:
        """Lets asynchronous transfers come to their end, as a server between two requests would."""
        try:
            core = self._llm.llm_engine.engine_core.engine_core
            last = time.monotonic() + min(patience, 3.0)
            for turn in itertools.count():
                came_about = bool(self._llm.llm_engine.reset_prefix_cache())
                over = time.monotonic() > last and turn > _TURNS
                if (came_about and not core.scheduler.has_requests()) or over:
                    return came_about
                self._llm.llm_engine.step()
                time.sleep(0.002)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"[:300]
        return False


def _said(done: int, total: int, what: str) -> None:
    """Now and then a line: a process that says nothing is given up."""
    if done % 50 == 0:
        print(f"verify: {done} of {total} requests, {what}", flush=True)


def _usage() -> dict[str, int]:
    """Of this process, as ``kvtrace.verify.usage`` says it of a server's."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors = len(os.listdir("/proc/self/fd"))
    return {MEMORY: resident, DESCRIPTORS: descriptors, THREADS: threading.active_count()}


def verify(
    engine: InProcess, suite: str = "quick", seed: int | None = None, all_units: bool = False
) -> list[Answered]:
    """The answers for a connector whose engine can be started.

    Raises:
        VerifyError: it does not start, or has no connector.
    """
    engine.start()
    driver = Driver(engine, Streams(secrets.randbits(32) if seed is None else seed), engine.look, _said)
    driver.usage = _usage
    try:
        _, facts = ask(driver, suite)
        what = observed(driver, facts, Settings(share=HOOK_SHARE, all_units=all_units))
    finally:
        engine.stop()
    return judged(of_suite(suite), what)


def fit(arguments: dict[str, Any]) -> dict[str, Any]:
    """The longest sequence, and the blocks for it, made fit for verify's prompts."""
    longest = max(LONGEST, arguments["max_model_len"])
    blocks = max(arguments["num_gpu_blocks_override"], longest // arguments["block_size"] + 16)
    return arguments | {"max_model_len": longest, "num_gpu_blocks_override": blocks}


def verify_generated(
    arguments: dict[str, Any],
    trace: Path,
    suite: str = "quick",
    seed: int | None = None,
    salted: bool = True,
    all_units: bool = False,
) -> dict[str, tuple[str, ...]]:
    """{property: (answer, what it says, ...)} of a generated connector.

    Args:
        arguments: of ``harness.engine.engine_arguments``; its source has to be importable.
        trace: the run directory that the agent writes to (``retarget``), its configuration with ``copies``.
        all_units: it promises to take every whole unit of a prompt.
        salted: its keys tell salts apart; without, they are of tokens alone, and promise nothing of salts.

    An engine that does not start fails nothing but ``transfers``.
    """
    from harness.engine import _stop

    def start() -> Any:
        from vllm import LLM

        return LLM(**fit(arguments))

    engine = InProcess(start, _stop, trace)
    try:
        answers = verify(engine, suite, seed, all_units)
    except VerifyError as error:
        return {"transfers": ("failed", str(error))}
    return {
        one.id: (one.verdict.answer.value, one.verdict.says, *one.verdict.evidence)
        for one in answers
        if salted or one.id != "other-salt"
    }
