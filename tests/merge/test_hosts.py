"""Two hosts, as namespaces of this kernel: names, networks and clocks of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtrace.merge.build import merge
from kvtrace.merge.merged import Joined

SCRIPT = Path(__file__).with_name("host.py")
CLOCK = 5000  # seconds that the second host's clock is ahead
BOOT = "/proc/sys/kernel/random/boot_id"
NAMESPACES = ["--uts", "--net", "--mount"]
OF_A_USER = ["--user", "--map-root-user"]

Host = Callable[[str, Path, str, bool], dict[str, Any]]


def in_namespaces(rights: Sequence[str], command: str, clock: bool) -> subprocess.CompletedProcess[str]:
    """A shell command on a host of its own; `clock`: with a clock of its own."""
    time = ["--time", "--fork", "--monotonic", str(CLOCK), "--boottime", str(CLOCK)] if clock else []
    words = ["unshare", *rights, *NAMESPACES, *time, "sh", "-euc", command]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def host() -> Host:
    """Runs the engine of one role on a host of its own, and says what it saw there."""
    said = []
    for rights in ([], OF_A_USER):
        tried = in_namespaces(rights, f"hostname x && mount --bind /dev/null {BOOT}", clock=True)
        if tried.returncode == 0:
            break
        said.append(tried.stderr.strip())
    else:
        pytest.skip(f"no right to make namespaces here, as root or as a user: {' / '.join(said)}")

    def run(name: str, folder: Path, role: str, own_clock: bool) -> dict[str, Any]:
        folder.mkdir(parents=True)
        other = folder.parent / f"{folder.name}-boot"
        other.write_text(f"boot of {name}\n")
        bind = f"mount --bind '{other}' {BOOT}; " if own_clock else ""
        command = f"{bind}hostname {name}; exec '{sys.executable}' '{SCRIPT}' {role} '{folder}'"
        done = in_namespaces(rights, command, own_clock)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_two_hosts_with_clocks_of_their_own(tmp_path: Path, host: Host) -> None:
    one = host("host-one", tmp_path / "one", "kv_producer", False)
    two = host("host-two", tmp_path / "two", "kv_consumer", True)
    assert one["interfaces"] == two["interfaces"] == ["lo"], "networks of their own"
    assert one["boot"] != two["boot"] and two["t"] - one["t"] > CLOCK * 10**9
    answer = merge([str(tmp_path / "two"), str(tmp_path / "one")], 10**8, tmp_path)
    (row,) = answer.requests
    assert isinstance(row, Joined) and (row.there.id, row.here.id, row.again) == ("p-1", "d-1", 128)
    assert [run.hosts for run in answer.merged.runs] == [("host-two",), ("host-one",)]
    assert len(answer.merged.clocks) == 2 and not answer.merged.notes
    # their clocks are 5000 s apart, and on the wall the one came at most the test's time after the other
    assert 0 < row.after_ns < CLOCK * 10**9 // 2


def test_two_host_names_on_one_kernel_have_one_clock(tmp_path: Path, host: Host) -> None:
    host("host-one", tmp_path / "one", "kv_producer", False)
    host("host-two", tmp_path / "two", "kv_consumer", False)
    answer = merge([str(tmp_path / "one"), str(tmp_path / "two")], 10**8, tmp_path)
    (row,) = answer.requests
    assert isinstance(row, Joined) and row.sure and row.after_ns > 0
    assert [clock.hosts for clock in answer.merged.clocks] == [("host-one", "host-two")]
