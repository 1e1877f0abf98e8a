"""Runs generated connectors one after another in this process: ``python runner.py SPEC``.

SPEC is a JSON file: ``{"out": DIR, "model": DIR, "trace": bool, "verify": bool, "device_memory": bool,
"cuda": bool, "runs": [{"seed": N, "fault": NAME}]}``. NAME is a fault or a deliberate choice; null: the
seed's own. ``verify``: what is stored is asked for again, in engines of its own (harness/verified.py).
``device_memory``: the agent takes every KV tensor for device memory. ``cuda``: vLLM runs on a GPU. Of each
run DIR/<name>/ gets ``src`` (the connector), ``store``, ``trace`` (the run directory) and, last,
``outcome.json`` (what the engine and the store say).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
LIMIT_BYTES = 256 << 20
_AFTER_SECONDS = 2.0
"""A connector's threads may take so long to end."""
COPIES = 512
"""Blocks that verify keeps to compare with, of the process in which the engine runs."""
_OF_FULL = frozenset({"flat", "store-conditions"})
CHILD_SEED = 500_000_000  # of kvgen.plan, which is not imported before the agent is set up


def name_of(seed: int, fault: str | None) -> str:
    return f"{seed}" if fault is None else f"{seed}-{fault or 'healthy'}"


def _suite(plan: Any) -> str:
    """Of verify: the quick one, unless the planted fault breaks what the full one asks for."""
    return "full" if plan.planted is not None and plan.breaks & _OF_FULL else "quick"


def _goes_on(source: Path) -> bool:
    """Whether a thread of a connector is at work after its engine: not one that waits for work."""
    deadline = time.monotonic() + _AFTER_SECONDS
    while time.monotonic() < deadline:
        if not any(_works_in(frame, source) for frame in sys._current_frames().values()):
            return False
        time.sleep(0.05)  # a thread that goes on tells nobody when it ends
    return True


def _works_in(frame: FrameType | None, source: Path) -> bool:
    waits = frame is not None and frame.f_code.co_filename == threading.__file__
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(source)):
            return not waits
        frame = frame.f_back
    return False


class Part:
    """One connector of a run: its source, written below the run's folder, and its store."""

    def __init__(self, plan: Any, folder: Path, tag: str, store: str = "store") -> None:
        from kvgen.source import generate

        from harness.storeview import StoreView

        self.plan, self.made = plan, generate(plan)
        for path, text in self.made.files.items():
            target = folder / "src" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        second = "-2" if plan.seed >= CHILD_SEED else ""
        self.view = StoreView(plan, folder / f"{store}{second}", tag + second)

    def opened(self) -> Any:
        """The store, with the connector's own memory where that is the store."""
        memory = self.made.memory
        if memory is not None and memory[0] in sys.modules:
            self.view.use_memory(getattr(importlib.import_module(memory[0]), memory[1]))
        return self.view

    def close(self) -> None:
        self.view.close()
        if self.view.kind == "shm":
            self.view.forget_segments()


class Runs:
    """The runs of one process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.out, self.model, self.trace = Path(spec["out"]), spec["model"], bool(spec["trace"])
        self.verify, self.cuda = bool(spec.get("verify")), bool(spec.get("cuda"))
        self.agent: dict[str, Any] = {"as_device": True} if spec.get("device_memory") else {}
        if self.verify:
            self.agent |= {"copies": COPIES, "budget": 1.0}
        self.runs = [(int(run["seed"]), run["fault"]) for run in spec["runs"]]
        if self.trace:
            self._configure(self._trace_dir(*self.runs[0]))

    def _trace_dir(self, seed: int, fault: str | None) -> Path:
        return self.out / name_of(seed, fault) / "trace"

    def _configure(self, first: Path) -> None:
        """As ``kvtrace run`` does it: the agent waits for vLLM, since the truth of a consumer's run imports
        parts of it before the engine does. It is told of each later run directory."""
        from kvtrace import CONFIG_VARIABLE
        from kvtrace.agent.bootstrap import wait_for_vllm
        from kvtrace.trace.config import AgentConfig, new_salt

        os.environ[CONFIG_VARIABLE] = AgentConfig(
            first, new_salt(), "accuracy", LIMIT_BYTES, **self.agent
        ).to_text()
        wait_for_vllm()

    def all(self) -> None:
        from harness.reference import Reference

        reference = None
        for number, (seed, fault) in enumerate(self.runs):
            folder = self.out / name_of(seed, fault)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            print(f"run {name_of(seed, fault)}", flush=True)
            try:
                if reference is None:
                    reference = Reference(self.model)
                document = self._one(seed, fault, folder, number, reference)
            except Exception as error:
                traceback.print_exc()
                document = {"broken": f"{type(error).__name__}: {error}"[:500]}
            part = folder / "outcome.part"
            part.write_text(json.dumps(document), encoding="utf-8")
            part.rename(folder / "outcome.json")
            print(f"done {name_of(seed, fault)}", flush=True)
            if _goes_on(folder / "src"):
                return  # what it raises from now on would be told of the next one: that gets another process

    def _one(self, seed: int, fault: str | None, folder: Path, number: int, reference: Any) -> dict[str, Any]:
        from kvgen.plan import draw

        from harness import engine, truth
        from harness.declared import Declarations

        began = time.monotonic()
        plan = self._here(draw(seed, fault))
        parts = [
            Part(one, folder, f"{os.getpid()}x{number}") for one in (plan, plan.child) if one is not None
        ]
        outcome = engine.Outcome()
        declared = Declarations([(part.plan, part.made) for part in parts])
        sys.path.insert(0, str(folder / "src"))
        try:
            if plan.filled:
                truth.fill(plan, parts[0].view, reference, LAYERS)
            transfers = [engine.transfer_config(part.plan, part.made, part.view.place) for part in parts]
            arguments = engine.engine_arguments(plan, transfers, self.model)
            trace_dir = self._trace_dir(seed, fault)
            self._traced(trace_dir, number)
            wall = time.time_ns()
            engine.run(plan, arguments, outcome, declared.listen)
            self._untraced(trace_dir, plan.describe(), wall, bool(outcome.error))
            ran = time.monotonic()
            readers = [truth.Reader(part.plan, part.opened(), reference, LAYERS) for part in parts]
            found = truth.establish(plan, outcome, readers)
            established = time.monotonic()
            verified = self._verified(parts, folder, found.problem)
        finally:
            sys.path.remove(str(folder / "src"))
            for part in parts:
                part.close()
            reference.forget()
        return {
            "seed": seed,
            "fault": plan.fault,
            "plan": plan.describe(),
            "outcome": outcome.document(),
            "truth": found.document(),
            **verified,
            "declared": declared.document(),
            "seconds": {
                "engine": round(ran - began, 2),
                "truth": round(established - ran, 2),
                "verify": round(time.monotonic() - established, 2),
            },
        }

    def _here(self, plan: Any) -> Any:
        """The plan as this machine and its vLLM run it: an older one (0.20.2) hands no connector the block
        tables of a step, so that it keeps the requests."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        choice = dict(plan.choice)
        if choice["tracker"] in ("manager", "blockstate") and not hasattr(
            KVConnectorBase_V1, "bind_kv_cache_manager"
        ):
            choice["tracker"] = "requests"
        child = self._here(plan.child) if plan.child is not None else None
        return replace(plan, choice=choice, child=child, cuda=self.cuda)

    def _verified(self, parts: list[Part], folder: Path, problem: str) -> dict[str, Any]:
        """What verify answers on each property, of the same connector and an empty store; {}: not run."""
        if not self.verify or problem or len(parts) > 1:
            return {}
        from harness.verified import restarted, verify_generated

        plan = parts[0].plan
        part = Part(plan, folder, f"{os.getpid()}v{plan.seed}", "verify-store")
        try:
            found = verify_generated(part, folder / "verify", self.model, _suite(plan))
        finally:
            part.close()
        if "restart" in plan.breaks - plan.unpromised and part.made.place == "path":
            part = Part(plan, folder, "", "restart-store")
            found["says"]["restart"] = restarted(part, folder / "restart", self.model)
            found["verified"]["restart"] = found["says"]["restart"][0]
        return found

    def _traced(self, trace_dir: Path, number: int) -> None:
        if not self.trace:
            return
        trace_dir.mkdir(mode=0o700)
        if number:
            from kvtrace.agent.plugin import retarget

            retarget(str(trace_dir))

    def _untraced(self, trace_dir: Path, title: str, began_ns: int, failed: bool) -> None:
        if not self.trace:
            return
        from kvtrace.agent.plugin import retarget

        retarget(None)
        from kvtrace.launch.own_process import write_run
        from kvtrace.launch.rest import write_rest

        note = f"one process: scheduler and worker side by side, several engines in turn; {title}"
        write_run(trace_dir, "accuracy", began_ns, exit_code=int(failed), notes=[note])
        write_rest(trace_dir)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from harness.engine import ENV, GPU_ENV

    os.environ.update(ENV | (GPU_ENV if spec.get("cuda") else {}))
    Runs(spec).all()
    sys.stdout.flush()
    # what a connector left in its buffers stays there, as in a worker that is killed
    os._exit(0)


if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)
    main()
