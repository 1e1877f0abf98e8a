"""The repository keeps its own rules: what the package needs, who imports whom, what no file may name."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

import kvtrace

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvtrace"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# --- the package ----------------------------------------------------------------------------------


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def requirement_names(lines: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in lines}


def test_the_package_depends_on_neither_vllm_nor_torch() -> None:
    installed = [line for line in importlib.metadata.requires("kvtrace") or [] if "extra ==" not in line]
    for names in (requirement_names(PROJECT["dependencies"]), requirement_names(installed)):
        assert names == {"numpy", "pandas", "rich", "typer"}


def test_no_dependency_has_an_upper_bound() -> None:
    # kvtrace goes into the user's vLLM environment and must change no version there
    for line in PROJECT["dependencies"]:
        assert not re.search(r"<|==|~=", line), line


def test_versions_agree() -> None:
    assert PROJECT["version"] == kvtrace.__version__ == importlib.metadata.version("kvtrace")
    assert f"## [{kvtrace.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["requires-python"] == ">=3.10"


def test_entry_points() -> None:
    mine = {(e.group, e.name): e for e in importlib.metadata.distribution("kvtrace").entry_points}
    assert mine["console_scripts", "kvtrace"].value == "kvtrace.cli.app:main"
    assert mine["vllm.general_plugins", "kvtrace"].value == "kvtrace.agent.plugin:activate"
    assert mine["pytest11", "kvtrace"].value == "kvtrace.pytest_plugin"
    for entry in mine.values():
        assert callable(entry.load()) or entry.group == "pytest11"


def test_the_wheel_holds_everything_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".c", ".so"):
            assert str(path.relative_to(ROOT)) in names
    # The recorder in C: built where there is a compiler, for this Python.
    built = {name for name in names if name.endswith((".c", ".so"))}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert built == (
        {f"kvtrace/trace/_recorder{suffix}"} if shutil.which("cc") or shutil.which("gcc") else set()
    )
    assert "kvtrace/py.typed" in names
    assert "kvtrace/report/schema/kvtrace.report.2.json" in names
    assert {name.split("/")[0] for name in names} == {"kvtrace", f"kvtrace-{kvtrace.__version__}.dist-info"}


# --- who imports whom -----------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# Each piece may import itself, what CONTRIBUTING.md says, and the modules at the top of the package.
MAY_IMPORT = {
    name: set(re.findall(r"`(\w+)`", may))
    for name, may in re.findall(r"^\| `kvtrace/(\w+)/` \| .* \|(.*)\|$", CONTRIBUTING, re.MULTILINE)
}
OBSERVED = {"vllm", "torch"}
# These run inside vLLM's processes: at load they import the standard library and each other.
IN_VLLM = [
    *sorted((PACKAGE / "agent").rglob("*.py")),
    PACKAGE / "trace" / "format.py",
    PACKAGE / "trace" / "writer.py",
]


def imports(path: Path) -> Iterator[str]:
    """The absolute names of what a file imports: modules, and names in modules."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            yield child
            yield from walk(child)

    for node in walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = list(path.relative_to(ROOT).parent.parts)
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *([node.module] if node.module else [])])
            else:
                module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("piece", sorted(MAY_IMPORT))
def test_imports_run_one_way(piece: str) -> None:
    for path in (PACKAGE / piece).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "kvtrace" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] in MAY_IMPORT[piece] | {piece}, f"{path.relative_to(ROOT)} imports {name}"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that stand on, or between, circles of `graph`."""
    left = dict(graph)
    while True:
        reached = {name for names in left.values() for name in names}
        loose = [name for name in left if not left[name] & left.keys() or name not in reached]
        if not loose:
            return set(left)
        for name in loose:
            del left[name]


def test_imports_have_no_circle() -> None:
    """Those inside functions count too: what is imported late to break a circle is in the wrong place."""
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        seen = (other if other in modules else other.rpartition(".")[0] for other in imports(path))
        graph[name] = {other for other in seen if other in modules and other != name}
    assert "kvtrace.report.build" in graph["kvtrace.report.load"]  # inside a function, and seen
    assert not circle(graph)
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {"a", "b", "c"}


def test_sub_packages_have_no_circle() -> None:
    """Between folders inside packages; what stands at the top of one may be imported by its folders, and may
    import them."""
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    folders = {name: ".".join(path.relative_to(ROOT).parent.parts) for name, path in modules.items()}
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values() if folder.count(".") > 1}
    for name, path in modules.items():
        for other in imports(path):
            into = folders.get(other) or folders.get(other.rpartition(".")[0])
            if into in graph and folders[name] in graph and into != folders[name]:
                graph[folders[name]].add(into)
    assert graph["kvtrace.agent.engine"] >= {"kvtrace.agent.hooks", "kvtrace.agent.watch"}
    assert not circle(graph)


def test_the_top_of_the_agent_is_small() -> None:
    assert len(list((PACKAGE / "agent").glob("*.py"))) <= 20


SAID_ONCE = ("model", "read", "parts", "trace", "follow")


def test_modules_with_names_that_say_little_are_in_one_package() -> None:
    packages = {
        stem: {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob(f"{stem}.py")}
        for stem in SAID_ONCE
    }
    assert packages["model"] and all(len(found) < 2 for found in packages.values()), packages


def test_no_two_classes_have_one_name() -> None:
    classes = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in classes.items() if times > 1]


WORDS = {
    "left", "rest", "turned", "piece", "holdings", "twins", "wayout", "headless", "displaced", "instead",
    "spoiled", "lent", "fate", "site", "stood", "again",
}  # fmt: skip
"""What no vLLM engineer says of these things."""


def names_in(tree: ast.AST) -> Iterator[str]:
    """Of classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign))


def words_of(name: str) -> set[str]:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return {*words, *(word.removesuffix("s") for word in words)}


IN_WORDS = [*(PACKAGE / "agent").rglob("*.py"), *(PACKAGE / "ledger").glob("*/*.py")]


def test_the_names_are_words_of_the_field() -> None:
    assert words_of("_StillLeft") & WORDS and words_of("_pieces") & WORDS and not words_of("leftmost") & WORDS
    for path in IN_WORDS:
        for name in (path.stem, *names_in(tree(path))):
            assert not words_of(name) & WORDS, f"{path.relative_to(ROOT)}: {name}"


def test_the_map_for_contributors_has_every_room() -> None:
    others = set(re.findall(r"^\| `(\w+)/` \|", CONTRIBUTING, re.MULTILINE))
    assert others == {"scenarios", "reports", "benchmarks", "scripts", "tests"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(MAY_IMPORT)
    assert MAY_IMPORT["trace"] == set() and MAY_IMPORT["agent"] == {"trace"}  # they run inside vLLM
    for path in PACKAGE.glob("*.py"):
        assert path.stem.startswith("__") or f"`{path.stem}`" in CONTRIBUTING


def test_each_room_says_what_it_takes_gives_and_may_not_do() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        about = ast.get_docstring(tree(path)) or ""
        starts = re.findall(r"^(Comes in|Goes out|May not): \S", about, re.MULTILINE)
        assert starts == ["Comes in", "Goes out", "May not"], str(path.relative_to(ROOT))


@pytest.mark.parametrize("piece", sorted(set(MAY_IMPORT) - {"agent"}))
def test_only_the_agent_may_import_what_it_observes(piece: str) -> None:
    for path in (PACKAGE / piece).rglob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] not in OBSERVED, f"{path.relative_to(ROOT)} imports {name}"


def test_loading_the_agent_loads_no_library() -> None:
    """Nor does anything that the agent's modules import in turn."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in IN_VLLM if path.stem != "__init__"
    ]
    code = (
        "import sys; before = set(sys.modules)\n"
        f"import {', '.join(modules)}\n"
        "tops = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'kvtrace', '__mp_main__'}))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KVTRACE_CONFIG"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


# --- the files ------------------------------------------------------------------------------------


def repository_files() -> list[Path]:
    """What git knows or would take: no caches, no runs made here."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# Put together here, so that this file does not name them itself.
MACHINE = re.compile(r"(?<![\w.])/" + "(?:work|opt|root)" + r"/[\w.]")
HOSTS = re.compile(
    "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch\.org"]), re.I
)


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE.search(line) or HOSTS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_no_file_is_large() -> None:
    large = [str(path.relative_to(ROOT)) for path in repository_files() if path.stat().st_size > 1_000_000]
    assert not large


def test_the_readme_shows_the_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("make demo", "make test", "pip install"):
        assert command in text, f"README.md does not show `{command}`"


def test_relative_links_in_the_docs_lead_somewhere() -> None:
    dead = []
    for path in repository_files():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
                if (
                    "://" not in target
                    and not target.startswith("mailto:")
                    and not (path.parent / target).exists()
                ):
                    dead.append(f"{path.relative_to(ROOT)}: {target}")
    assert not dead


def anchors(page: Path) -> set[str]:
    """What a link can name in a page: its headings, as they are shown on the web."""
    headings = re.findall(r"^#{1,6} (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_links_to_a_part_of_a_page_name_one_of_its_headings() -> None:
    links = [
        (path, target, anchor)
        for path in repository_files()
        if path.suffix == ".md"
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)#([^)]+)\)", path.read_text(encoding="utf-8"))
    ]
    assert links
    dead = [one for one in links if one[2] not in anchors(one[0].parent / one[1])]
    assert not dead


def test_the_licence_is_there_and_ci_runs_make_test() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text(encoding="utf-8")


# --- functions that can be reviewed -----------------------------------------------------------------

MOST_LINES = 60
MOST_PARAMETERS = 6


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}", node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of all parameters; a method's own object is none."""
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]


def is_command(where: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Of a typer command each parameter is an option of the command line: its signature is a table of them,
    and as long as the verb has options."""
    return where.startswith("cli/") and node.name == Path(where.partition(":")[0]).stem


def test_functions_are_short_enough_to_be_reviewed() -> None:
    for where, node in functions():
        first = node.body[0].lineno if is_command(where, node) else node.lineno
        assert node.end_lineno is not None
        length = node.end_lineno - first + 1
        assert length <= MOST_LINES, f"{where}: {length} lines, at most {MOST_LINES}"


def test_functions_have_few_parameters() -> None:
    for where, node in functions():
        names = parameters(node)
        few = len(names) <= MOST_PARAMETERS or is_command(where, node)
        assert few, f"{where}: {len(names)} parameters, at most {MOST_PARAMETERS}"


def module_names(module: ast.Module) -> set[str]:
    """What a module imports, defines and assigns at its top."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for one in targets if isinstance(one, ast.Name)}
    return names


@pytest.mark.parametrize("package", ["kvtrace", "scripts", "scenarios"])
def test_no_comprehensions_name_hides_its_modules(package: str) -> None:
    """CPython 3.12 may take such a name for a local one in all of the function: once no report was made."""
    for path in sorted((ROOT / package).rglob("*.py")):
        names = module_names(tree(path))
        functions = (one for one in ast.walk(tree(path)) if isinstance(one, ast.FunctionDef))
        nodes = (node for one in functions for node in ast.walk(one))
        for node in (one for one in nodes if isinstance(one, ast.comprehension)):
            inner = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
            assert not inner & names, f"{path.relative_to(ROOT)}:{node.target.lineno}: {inner & names}"


def test_no_two_test_modules_outside_packages_have_one_name() -> None:
    """pytest imports them by their bare names: with two of one name, it stops at the second."""
    modules = (ROOT / "tests").rglob("test_*.py")
    plain = [path.name for path in modules if not (path.parent / "__init__.py").exists()]
    assert [name for name, times in Counter(plain).items() if times > 1] == []


MOST_CHARACTERS = 59


def test_a_tests_name_is_a_sentence_of_one_line() -> None:
    """It names the behaviour that it protects, and a failure's line in the summary still shows it whole."""
    definition = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in definition.findall(path.read_text(encoding="utf-8")):
            assert len(name) <= MOST_CHARACTERS, f"{path.relative_to(ROOT)}: {name}: {len(name)} characters"
