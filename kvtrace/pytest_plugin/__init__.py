"""pytest plugin: the fixture ``kvtrace`` traces the vLLM engine of one test and gives its report.

pytest loads this module in every session of an environment that has kvtrace. At load it imports
pytest and the standard library only, and it does nothing until the fixture is used or the
project asks for it (``kvtrace = true`` in pytest's configuration, or ``--kvtrace``): then the
agent's hooks go in before any conftest or test module can import vLLM.

Comes in: a test that asks for a fixture.
Goes out: the report of its engine, or what verify says of its connector.
May not: do anything in a session that does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvtrace.pytest_plugin.measured import Measured

if TYPE_CHECKING:
    from kvtrace.pytest_plugin.trace import Trace
    from kvtrace.verify.answers import Result

_TRACE = pytest.StashKey["Trace"]()
_SECTION = "kvtrace"


class Alias:
    """Registered only where the project asked for kvtrace: ``trace`` may be anybody's name."""

    @pytest.fixture
    def trace(self, kvtrace: Trace) -> Trace:
        """The trace of this test's vLLM engine: another name for the fixture ``kvtrace``."""
        return kvtrace


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "hook vLLM before it is imported, for tests that use the fixture kvtrace (or its alias trace)"
    parser.getgroup("kvtrace").addoption("--kvtrace", action="store_true", default=False, help=help)
    parser.addini("kvtrace", help, type="bool", default=False)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # before the first conftest: it may import vLLM
    if _wanted(early_config):
        from kvtrace.pytest_plugin.session import activate

        activate()


def pytest_configure(config: pytest.Config) -> None:
    if _wanted(config):
        from kvtrace.pytest_plugin.session import activate

        activate()
        config.pluginmanager.register(Alias(), "kvtrace-alias")


def _wanted(config: pytest.Config) -> bool:
    if getattr(config.known_args_namespace, "kvtrace", False) or config.getini("kvtrace"):
        return True
    return bool(getattr(config.option, "kvtrace", False))


@pytest.fixture
def kvtrace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    """Traces the vLLM engine that this test makes; gives coverage, saved tokens and findings."""
    from kvtrace.pytest_plugin.session import recording

    with recording(request.node, tmp_path_factory) as trace:
        request.node.stash[_TRACE] = trace
        yield trace


@pytest.fixture
def kvtrace_verify(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Verifies a connector on small servers of its own, and gives what was proved."""
    from kvtrace.pytest_plugin.verify import verifier

    return verifier(tmp_path_factory)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    trace = item.stash.get(_TRACE, None)
    if trace is None or call.when == "teardown":
        return
    report: pytest.TestReport = outcome.get_result()
    if report.failed:
        trace.keep = True
        report.sections.append((_SECTION, trace.summary()))


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """``assert trace.coverage("save_kv_layer") == 1``: the numbers, and the finding behind them."""
    measured = next((side for side in (left, right) if isinstance(side, Measured)), None)
    if measured is None:
        return None
    return [f"{left!r} {op} {right!r} ({measured.what})", *measured.because()]
