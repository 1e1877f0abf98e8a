"""The recorder in C: built where there is a compiler, clean under AddressSanitizer, not missed elsewhere."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HOOK: dict[str, Any] = runpy.run_path(str(ROOT / "hatch_build.py"))
SANITIZED = ("-O1", "-g", "-fPIC", "-shared", "-pthread", "-fsanitize=address", "-fno-omit-frame-pointer")
# What the suites of the recorder do, without hypothesis, whose own memory is not the matter.
SUITES = ("tests/trace/test_window.py", "tests/trace/test_spool.py")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """kvtrace's sources under another folder, without what was built of them."""
    made = tmp_path / "copy"
    made.mkdir()
    (made / "kvtrace").mkdir()
    for entry in (ROOT / "kvtrace").iterdir():
        if entry.name != "trace":
            (made / "kvtrace" / entry.name).symlink_to(entry)
    (made / "kvtrace" / "trace").mkdir()
    for entry in (ROOT / "kvtrace" / "trace").iterdir():
        if entry.suffix != ".so":
            (made / "kvtrace" / "trace" / entry.name).symlink_to(entry)
    return made


def suites(package: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(one) for one in (package, ROOT / "scripts", ROOT / "tests"))
    check = "from kvtrace.trace import _recorder as r; import sys, pytest; "
    check += f"assert r.__file__.startswith({str(package)!r}), r.__file__; "
    check += "sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", check, "-q", "-p", "no:cacheprovider", "-o", "pythonpath=", *options]
    return subprocess.run(
        [*command, *(str(ROOT / one) for one in SUITES)], cwd=package,
        env=os.environ | {"PYTHONPATH": paths} | env, capture_output=True, text=True,
    )  # fmt: skip


def test_without_a_compiler_one_line_says_why_none_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(HOOK["NotBuilt"], match="no C compiler"):
        HOOK["build"](tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_compile_leaves_nothing(tmp_path: Path) -> None:
    try:
        HOOK["_compiler"]()
    except HOOK["NotBuilt"]:
        pytest.skip("there is no compiler here")
    with pytest.raises(HOOK["NotBuilt"], match="failed: "):
        HOOK["build"](tmp_path, (*HOOK["FLAGS"], "-DPy_GIL_DISABLED"))
    assert list(tmp_path.iterdir()) == []


def test_no_access_out_of_bounds_and_none_after_a_free(package: Path) -> None:
    """The suites of the recorder, with AddressSanitizer in it."""
    try:
        compiler = HOOK["_compiler"]()[0]
        HOOK["build"](package / "kvtrace" / "trace", SANITIZED)
    except HOOK["NotBuilt"] as error:
        pytest.skip(f"it can't be built so here: {error}")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = found.stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("the compiler has no AddressSanitizer")
    left_out = ("[python", "fork", "daemon", "memory", "bytes_are", "promises", "corrupted")
    done = suites(
        package,
        "-k",
        " and ".join(f"not {one}" for one in left_out),
        LD_PRELOAD=os.path.realpath(library),
        ASAN_OPTIONS="detect_leaks=0:abort_on_error=0:exitcode=99",
        PYTHONMALLOC="malloc",
    )
    assert done.returncode == 0 and "AddressSanitizer" not in done.stdout + done.stderr, done.stdout[-3000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
