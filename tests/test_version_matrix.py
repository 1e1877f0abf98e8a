"""The table of vLLM versions: what a row says, and that the page is of what was measured. No engine."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import bootstrap
import cuda_stubs
import pytest
import spec
import version_matrix as versions

RAN = versions.Row("healthy-example", "ran", "ran", True, "48/48", True)
FAULT = replace(RAN, name="key-mismatch", first="key-mismatch")


def column(
    *rows: versions.Row, said: str = "4 passed", passed: bool = True, note: str = ""
) -> versions.Column:
    return versions.Column("0.31.0", "2.13.0", note, "abc", "2026-11-22", rows, said, passed)


def text_of(*columns: versions.Column) -> str:
    return "\n".join(versions.section(columns))


@pytest.mark.parametrize(
    "row",
    [
        replace(RAN, equal=False),
        replace(RAN, equal=None, traced="exit code 1"),
        replace(RAN, balanced=False),
        replace(RAN, first="save-lost", wrong=("a healthy run with faults",)),
    ],
    ids=["tokens differ", "does not run traced", "ledgers do not balance", "says something else"],
)
def test_a_row_is_wrong_where_anything_is_not_as_expected(row: versions.Row) -> None:
    assert RAN.right and column(RAN).right
    assert not row.right and not column(RAN, row).right
    assert "**wrong**" in text_of(column(row))


def test_what_vllm_itself_does_not_run_is_said_not_to_be_ours() -> None:
    row = versions.Row("healthy-example", "TypeError: no such argument", "TypeError: no such argument")
    assert row.right
    text = text_of(column(row))
    assert "| `healthy-example` | does not run |" in text and "| 0 of 0 |" in text
    assert "0.31.0, `healthy-example`: without kvtrace, too: TypeError: no such argument" in text


def test_a_version_is_wrong_where_its_command_line_tests_fail() -> None:
    assert not column(RAN, said="1 failed, 3 passed", passed=False).right
    assert "1 failed, 3 passed" in text_of(column(RAN, said="1 failed, 3 passed", passed=False))


def test_the_page_counts_healthy_and_planted_ones_apart() -> None:
    wrong = replace(FAULT, hooks="40/48", wrong=("no finding; expected key-mismatch",))
    text = text_of(column(RAN, wrong))
    assert "| 1 of 1 | 48 of 48 | 0 of 1 | 40 of 48 | 4 passed |" in text
    assert "0.31.0, `key-mismatch`: no finding; expected key-mismatch" in text
    assert text.startswith("## Versions of vLLM\n")


def test_an_environment_of_another_kind_is_a_column_of_its_own() -> None:
    other = column(FAULT, note="CUDA build of torch, on the CPU")
    columns = versions.with_column([column(RAN)], other)
    assert [one.note for one in columns] == ["", "CUDA build of torch, on the CPU"]
    assert versions.with_column(columns, column(FAULT))[0].rows == (FAULT,) or len(columns) == 2
    text = text_of(*columns)
    assert "| 0.31.0 [1] |" in text and "[1] CUDA build of torch, on the CPU." in text
    assert "| `healthy-example` | right | not run |" in text


def test_a_hook_not_due_in_each_step_was_due_where_called() -> None:
    rows = [("save_kv_layer", 9, 12), ("handle_preemptions", 4, 90)]
    summary = [{"hook": name, "fired": fired, "eligible": eligible} for name, fired, eligible in rows]
    assert versions.hooks_of({"coverage": {"summary": summary}}) == "13/16"


def test_a_library_that_asks_for_cuda_can_be_loaded_without_it(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    (tmp_path / "accelerator").mkdir()
    (tmp_path / "accelerator" / "__init__.py").write_text(
        "def synchronize(): raise RuntimeError('no driver')\n"
    )
    lib.mkdir()
    (tmp_path / "cuda.c").write_text("int cudaThing(void){return 7;}\n")
    (tmp_path / "user.c").write_text("int cudaThing(void); int ask(void){return cudaThing();}\n")
    shared = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*shared, "-o", lib / "libcuda_x.so", tmp_path / "cuda.c"], check=True)
    subprocess.run(
        [*shared, "-o", lib / "libuser.so", tmp_path / "user.c", "-L", lib, "-lcuda_x"], check=True
    )
    (lib / "libcuda_x.so").unlink()
    load = f"import ctypes; print(ctypes.CDLL({str(lib / 'libuser.so')!r}).ask())"

    def ask() -> str:
        return subprocess.run(
            [sys.executable, "-c", load], capture_output=True, text=True, check=False
        ).stdout

    assert ask() == ""
    assert cuda_stubs.make_stubs(tmp_path) == ["libcuda_x.so"]
    assert ask() == "1\n", "that is an error of CUDA's"
    assert "def synchronize(device=None, /)" in (tmp_path / "accelerator" / "__init__.py").read_text()
    assert cuda_stubs.make_stubs(tmp_path) == [], "nothing is missing any longer"


def test_python_of_another_version_leaves_native_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = tmp_path / "lib" / "python3.11" / "site-packages" / "vllm"
    (vllm / "gone").mkdir(parents=True)
    for name in ("_C.abi3.so", "engine.py", "gone/old.py"):
        (vllm / name).write_text("installed")

    def download(command: list[str], _what: str) -> None:
        wheel = Path(command[command.index("--dest") + 1]) / "vllm-9.9.0-cp38-abi3-any.whl"
        with zipfile.ZipFile(wheel, "w") as new:
            for name in ("vllm/_C.abi3.so", "vllm/engine.py", "vllm-9.9.0.dist-info/METADATA"):
                new.writestr(name, "of the wheel")

    monkeypatch.setattr(bootstrap, "execute", download)
    versions.replace_python_files(tmp_path / "bin" / "python", "9.9.0")
    there = {file.name: file.read_text() for file in vllm.rglob("*") if file.is_file()}
    assert there == {"_C.abi3.so": "installed", "engine.py": "of the wheel"}
    assert not list(vllm.parent.glob("*.dist-info")), "it would name the platform of CUDA"


def test_a_newer_measurement_replaces_only_what_it_looked_at() -> None:
    old = column(RAN, replace(FAULT, equal=False))
    new = versions.with_rows(old, [FAULT])
    assert new.rows == (RAN, FAULT) and new.command_line == "4 passed"
    older, newer = replace(old, vllm="0.9.2"), replace(old, vllm="0.10.0")
    assert versions.with_column([older, old], newer) == [old, newer, older], "newest first, as numbers"
    assert versions.with_column([old], new) == [new]


def test_what_was_measured_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "matrix" / "versions.json"
    assert versions.read_columns(path) == []
    one = column(RAN, replace(FAULT, wrong=("y", "z")))
    versions.write_columns(path, [one])
    assert versions.read_columns(path) == [one]


def test_how_a_scenario_ended_is_its_own_line() -> None:
    said = "scenarios: a: RuntimeError: no memory (3.1 s)\nscenarios: b: ran (1.0 s)\n"
    assert versions.how_it_ended("a", said) == "RuntimeError: no memory (3.1 s)"
    assert versions.how_it_ended("c", "Traceback\nImportError: no torch\n") == "ImportError: no torch"
    assert versions.how_it_ended("c", "") == "no message"


def test_the_tables_scenarios_are_there_healthy_and_faults() -> None:
    first = [spec.load(name).expect.first for name in versions.SCENARIOS]
    assert first.count(None) >= 5 and len(set(first)) >= 8


@pytest.mark.parametrize(
    ("error", "code"),
    [(bootstrap.Unreachable("no network"), 3), (bootstrap.Failed("no space"), 2)],
    ids=["no network", "no space"],
)
def test_an_environment_that_cannot_be_made_gets_one_line(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    out = tmp_path / "out.json"
    monkeypatch.setattr(versions, "make_environment", fail)
    monkeypatch.setattr(sys, "argv", ["x", "--only", "0.27.1", "--work", str(tmp_path), "--out", str(out)])
    assert versions.main() == code
    assert capsys.readouterr().err.splitlines()[-1] == f"matrix: {error}"
    assert not out.exists() and not (tmp_path / "0.27.1").exists()


def test_a_python_without_vllm_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["x", "--python", str(bare), "--work", str(tmp_path)])
    assert versions.main() == 2
    assert capsys.readouterr().err == f"matrix: {bare} has no vLLM, torch and kvtrace\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--part", "scenarios"], "no environment of 0.27.1 in "),
        (["--scenarios", "no-such"], "no-such"),
    ],
    ids=["no environment", "no scenario"],
)
def test_what_is_not_there_is_said_in_one_line(
    more: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["x", "--only", "0.27.1", "--work", str(tmp_path), "--out", str(tmp_path / "out.json"), *more]
    monkeypatch.setattr(sys, "argv", argv)
    assert versions.main() == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_variable_without_a_value_is_refused_first(tmp_path: Path) -> None:
    command = [sys.executable, str(versions.ROOT / "scenarios" / "run.py"), "--env", "NAME", "--out"]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--env takes NAME=VALUE" in done.stderr
    assert not (tmp_path / "out").exists()


def test_scenarios_that_were_killed_say_nothing_of_a_version(tmp_path: Path) -> None:
    """Out of memory without kvtrace looked like a version that does not run them."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in *tiny_model.py) exit 0 ;; esac\nkill -9 $$\n')
    python.chmod(0o755)
    with pytest.raises(bootstrap.Failed, match="killed by signal 9"):
        versions.run_scenarios(versions.Place(python, tmp_path), ["healthy-reuse"], tmp_path, [], True)


def test_what_is_asked_of_the_scenarios_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []

    def scenarios(_1: object, _2: object, _3: object, more: list[str], *_: bool) -> tuple[versions.Row, ...]:
        got.append(more)
        return (RAN,)

    argv = ["x", "--python", sys.executable, "--work", str(tmp_path), "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(
        sys, "argv", [*argv, "--part", "scenarios", "--apart", "--env", "A=1", "--env", "B=2"]
    )
    monkeypatch.setattr(versions, "run_scenarios", scenarios)
    assert versions.main() == 0
    assert got == [["--apart", "--env=A=1", "--env=B=2"]]
    (column,) = versions.read_columns(tmp_path / "out.json")
    assert column.rows == (RAN,) and column.vllm == bootstrap.VLLM


def test_the_committed_page_has_the_committed_measurement() -> None:
    columns = versions.read_columns(versions.RESULTS)
    page = (versions.ROOT / "reports" / "matrix.md").read_text(encoding="utf-8")
    assert "\n".join(versions.section(columns)) in page
    assert json.loads(versions.RESULTS.read_text(encoding="utf-8"))["schema"] == "kvtrace.versions/1"
