"""Empty stand-ins for the CUDA libraries that a CUDA build of torch is linked to.

With them it can be imported on a machine without these libraries, and works on the CPU: for vLLM CPU builds
that ask for a torch of which an index has the CUDA build alone. A call of CUDA would fail. Needs ldd, nm and
gcc.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import tempfile
from pathlib import Path

_CUDA = re.compile(
    r"__cuda|cupti|cublas|cudnn|cufft|cuFile|curand|cusolver|cusparse|nccl|nvrtc|nvshmem|nvJitLink|cu[A-Z]|nvtx"
    r"|cuda[A-Z]|_Z\w*(cudnn|cublas|nvshmem)\w*"
)
_SYMBOL = re.compile(r"[0-9a-f ]{16} (\w) (\S+)$")
_STUBS = "libcudastub.so"
_NO_DEVICE = """

def synchronize(device=None, /):
    \"""There is no device (written by kvtrace's scripts/cuda_stubs.py): a build for CPUs has nothing to wait
    for, one for CUDA would ask for a driver.\"""
"""


def make_stubs(torch: Path) -> list[str]:
    """Writes them into the folder of a package torch; returns the names of the libraries that were missing.

    Raises:
        OSError, subprocess.CalledProcessError: a tool is not there, or did not work.
    """
    lib = torch / "lib"
    files = [one for one in glob.glob(f"{lib}/*.so*") if not os.path.islink(one)]
    files += glob.glob(f"{torch}/*.so")
    missing: set[str] = set()
    wanted: set[str] = set()
    there: set[str] = set()
    for file in files:
        missing |= {line.split()[0] for line in _said("ldd", file) if "not found" in line}
        for line in _said("nm", "-D", file):
            if match := _SYMBOL.match(line):
                (wanted if match[1] in "Uwv" else there).add(match[2].split("@")[0])
    names = sorted(name for name in wanted - there if _CUDA.match(name))
    if missing:
        _build(lib, sorted(missing), names)
        _without_device(torch / "accelerator" / "__init__.py")
    return sorted(missing)


def _without_device(file: Path) -> None:
    """vLLM 0.20 calls torch.accelerator.synchronize when an engine ends, on the CPU too."""
    text = file.read_text(encoding="utf-8")
    if not text.endswith(_NO_DEVICE):
        file.unlink()  # it may be one with that of an installer's cache
        file.write_text(text + _NO_DEVICE, encoding="utf-8")


def _said(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def _build(lib: Path, missing: list[str], names: list[str]) -> None:
    """One library with all the symbols, and the missing ones without any, linked to it: the loader does not
    bear a versioned reference to a library that defines the symbol without a version."""
    with tempfile.TemporaryDirectory() as folder:
        full, empty = Path(folder) / "full.c", Path(folder) / "empty.c"
        full.write_text("".join(f"int {name}(void){{return 1;}}\n" for name in names), encoding="utf-8")
        empty.write_text("", encoding="utf-8")
        shared = ["gcc", "-w", "-shared", "-fPIC"]
        command = [*shared, "-fno-builtin", f"-Wl,-soname,{_STUBS}", "-o", f"{lib}/{_STUBS}", str(full)]
        subprocess.run(command, check=True)
        for name in missing:
            command = [*shared, f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
            command += ["-o", f"{lib}/{name}", str(empty), f"-L{lib}", f"-l:{_STUBS}"]
            subprocess.run(command, check=True)
