#!/usr/bin/env python3
"""A connector's smoke test under kvtrace, on vLLM's CPU build with a tiny model: what the GitHub action runs.

    python3.11 scripts/connector_ci.py --install . --baseline kvtrace-baseline.json -- python tests/smoke.py

Stages: the environment (.venv of this clone: vLLM CPU build and kvtrace; at no cost where it is there), the
project into it, the tiny model (its path is in KVTRACE_TINY_MODEL, and {model} in the command), the command
under `kvtrace run`, then `kvtrace check` with annotations. Beside the run, in --out, lie junit.xml,
check.sarif and kvtrace-baseline.json: the contract of this run, to be committed if the run is good.

Standard library only. Exit codes: 0 passed, 1 the gate or the command failed, 2 not set up or unreadable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bootstrap
from vllm_env import CACHE, vllm_env

SCRIPTS = Path(__file__).resolve().parent
SETUP = 2


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands after ``--`` is the command."""
    own, dashes, command = list(argv), [], []
    if "--" in own:
        at = own.index("--")
        own, dashes, command = own[:at], own[at : at + 1], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--install", action="append", default=[], metavar="REQUIREMENT",
                        help="for uv pip install; a path such as . is the project itself")  # fmt: skip
    parser.add_argument("--baseline", metavar="FILE", help="the committed contract")
    parser.add_argument("--out", type=Path, default=Path("kvtrace-ci"), metavar="DIR", help="[kvtrace-ci]")
    parser.add_argument("--check", default=[], action="append", metavar="WORDS",
                        help="one more option of kvtrace check: --check=--min=save_kv_layer=1.0")  # fmt: skip
    parser.add_argument("--github", action="store_true", help="annotations and a job summary")
    parser.add_argument("--no-setup", action="store_true",
                        help="use the environment of this Python: vLLM and kvtrace are there")  # fmt: skip
    args = parser.parse_args(own)
    args.command = command
    if not dashes or not command:
        parser.error("no command: write ... -- python tests/smoke.py")
    return args


def main(argv: Sequence[str]) -> int:
    args = options(argv)
    began = time.monotonic()
    if args.out.exists() and any(args.out.iterdir()):
        print(f"connector_ci: {args.out} holds something: give another --out, or remove it", file=sys.stderr)
        return SETUP
    if not args.no_setup and (code := bootstrap.main()):
        return code
    python = Path(sys.executable) if args.no_setup else bootstrap.VENV_PYTHON
    env = environment(python)
    if args.install and (code := install(args.install, python)):
        return code
    model = CACHE / "tiny-model"
    if call("tiny model", [str(python), str(SCRIPTS / "tiny_model.py"), str(model)], env):
        return SETUP
    env["KVTRACE_TINY_MODEL"] = str(model)
    command = [word.replace("{model}", str(model)) for word in args.command]
    kvtrace = [str(python), "-m", "kvtrace"]
    run = args.out / "run"
    ended = call("the smoke test", [*kvtrace, "run", "-o", str(run), "--name", "ci", "--", *command], env)
    say(f"the smoke test ended with {ended} after {time.monotonic() - began:.0f} s")
    proposed = args.out / baseline_name(args.baseline)
    call("a baseline of this run", [*kvtrace, "baseline", str(run), "-o", str(proposed)], env)
    gate = call("the gate", [*kvtrace, "check", str(run), *check_words(args)], env)
    if gate:
        say(
            "if this run is what you want, commit its baseline: "
            f"cp {proposed} {args.baseline or 'kvtrace-baseline.json'}"
        )
    say(f"{'passed' if not (gate or ended) else 'failed'} in {time.monotonic() - began:.0f} s")
    return gate if gate == SETUP else int(bool(gate or ended))


def baseline_name(baseline: str | None) -> str:
    return Path(baseline).name if baseline else "kvtrace-baseline.json"


def check_words(args: argparse.Namespace) -> list[str]:
    words = ["--junit", str(args.out / "junit.xml"), "--sarif", str(args.out / "check.sarif")]
    if args.baseline is not None:  # an empty one is refused by kvtrace check
        words += ["--baseline", args.baseline]
    if args.github:
        words.append("--github")
    return [*words, *args.check]


def environment(python: Path) -> dict[str, str]:
    """vLLM's, with caches in this clone; VLLM_* of the project's own settings stay."""
    env = {**vllm_env(), **{name: value for name, value in os.environ.items() if name.startswith("VLLM_")}}
    env["PATH"] = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    return env


def install(requirements: Sequence[str], python: Path) -> int:
    """The project into the environment of vLLM, whose own packages stay as they are."""
    flags, variables = bootstrap.pip_settings()
    uv = shutil.which("uv", path=str(python.parent)) or "uv"
    words: list[str] = []
    for requirement in requirements:
        words += ["-e", requirement] if Path(requirement).is_dir() else [requirement]
    overrides = CACHE / "overrides.txt"
    more = ["--override", str(overrides)] if overrides.is_file() else []
    command = [uv, "pip", "install", "--python", str(python), *more, *flags, *words]
    return SETUP if call("the project", command, {**os.environ, **variables}) else 0


def call(what: str, command: Sequence[str], env: dict[str, str]) -> int:
    """Runs a command; its output is this script's."""
    say(what)
    sys.stdout.flush()
    try:
        code = subprocess.run(command, env=env, check=False).returncode
    except OSError as error:
        print(f"connector_ci: {what}: {command[0]}: {error.strerror}", file=sys.stderr)
        return SETUP
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    print(f"[connector_ci] {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
