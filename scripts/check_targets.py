#!/usr/bin/env python3
"""Hold the agent's tables of targets and reads against vLLM's sources, without importing them.

    python scripts/check_targets.py PATH [--version X.Y.Z]

PATH is a wheel of vLLM (CUDA or CPU build: their Python sources are the same), an unpacked one, a checkout
or an installed `vllm` package. Each row of `kvtrace/agent/targets.py` that is meant for that version must be
there, with the functions and parameters that the wrappers rely on; so must each name that the agent reads
(`kvtrace/agent/reads.py`). Nothing of vLLM runs: the files are parsed. Exit code 0, 1 where something is
missing, 2 where PATH holds no vLLM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvtrace.agent.targets import Target
from kvtrace.doctor.vllm_sources import NoVllm, check, open_sources, parse_version, version_of
from kvtrace.doctor.vllm_sources import meant_for as meant_for


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="a wheel, or a folder with vllm/ in it")
    parser.add_argument("--version", help="vLLM's version, where the sources do not say")
    options = parser.parse_args(arguments)
    try:
        read = open_sources(options.path)
        version = parse_version(options.version) if options.version else version_of(read, options.path)
        if not version:
            raise NoVllm(f"{options.path} does not say which vLLM it is: add --version X.Y.Z")
    except (NoVllm, OSError) as error:
        print(f"check_targets: {error}", file=sys.stderr)
        return 2
    targets = names = 0
    for one in check(read, version):
        missing = one.expected and bool(one.problems)
        state = "missing" if one.problems else "ok"
        if isinstance(one.target, Target):
            targets += missing
        else:
            names += len(one.problems) if missing else 0
            if not missing:
                continue  # so many names are read that only what is wrong is said
        line = (one.target.id, state if one.expected else "not meant for it", one.target.versions)
        print(f"{line[0]:26} {line[1]:17} {line[2]:18} {'; '.join(one.problems)}".rstrip())
    counts = f"{_count(targets, 'target')} missing, {_count(names, 'name')} that the agent reads missing"
    print(f"vLLM {'.'.join(map(str, version))}: {counts}")
    return 1 if targets or names else 0


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    raise SystemExit(main())
