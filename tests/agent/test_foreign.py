"""Of a foreign text, what stands in the source is kept; what was put into it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvtrace.agent.code import foreign
from kvtrace.agent.errors import logs
from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Fact

from . import fakes
from .fakes import on_worker

PROMPT = "The formula of the secret sauce is garlic"
TOKENS = [40961, 7, 51966]


class BoxFull(Exception):
    def __init__(self, box: str) -> None:
        super().__init__(box)

    def __str__(self) -> str:
        return f"no box left for {self.args[0]} in the shelf"


class Shelf:
    why = ""

    def put(self, prompt: str, tokens: list[int]) -> None:
        raise ValueError(
            f"cannot store {len(tokens)} blocks of {prompt!r} (tokens {tokens}) under key {prompt}"
        )

    def old(self, prompt: str) -> None:
        raise ValueError("cannot store %s after %d tries" % (prompt, 3))  # noqa: UP031

    def passed_on(self, prompt: str) -> None:
        self.why = self.explain(prompt)
        raise RuntimeError(self.why)

    def explain(self, prompt: str) -> str:
        return f"storing is disabled for {prompt}"


def kept(call: Callable[[], object], keep: bool = False) -> str:
    with pytest.raises(BaseException) as caught:
        call()
    return foreign.of_exception(caught.value, keep)


def full() -> None:
    raise BoxFull(PROMPT)


def no_such_file() -> None:
    open(f"/nowhere/{PROMPT}").close()


def whole() -> None:
    raise RuntimeError(PROMPT)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Shelf().put(PROMPT, TOKENS), "cannot store … blocks of … (tokens …) under key …"),
        (lambda: Shelf().old(PROMPT), "cannot store … after … tries"),
        (lambda: Shelf().passed_on(PROMPT), "storing is disabled for …"),
        (full, "no box left for … in the shelf"),
        (no_such_file, "[Errno 2] No such file or directory"),
        (whole, "…"),
        (lambda: {}[PROMPT], "…"),
        (lambda: int(PROMPT), "invalid literal for … with base …"),
        (lambda: [][7], "list index out of range"),
        (lambda: getattr(object(), PROMPT), "'object' object has no attribute …"),
        (lambda: object().reshape_as, "'object' object has no attribute 'reshape_as'"),  # type: ignore[attr-defined]
    ],
)
def test_an_exception_keeps_what_stands_in_the_source(call: Any, text: str) -> None:
    assert kept(call) == text


def test_with_keep_messages_all_is_kept_but_secrets() -> None:
    assert kept(lambda: Shelf().old(PROMPT), keep=True) == f"cannot store {PROMPT} after 3 tries"

    def login() -> None:
        raise ValueError(f"login failed: password={PROMPT[:3]}x")

    assert kept(login, keep=True) == "login failed: password=***"


def test_a_broken_or_huge_exception_still_has_a_message() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def broken() -> None:
        raise Broken

    def huge() -> None:
        raise ValueError("too large: " + "7 " * 1_000_000)

    assert kept(broken) == ""
    assert kept(huge) == "too large: …"


class Chatty(fakes.KVConnectorBase_V1):
    log = logging.getLogger("chatty")

    def wait_for_save(self) -> None:
        self.log.warning("stored %d blocks of %s", 3, PROMPT)
        self.log.warning(f"prompt {PROMPT} has tokens {TOKENS}")
        self.log.warning(PROMPT)
        try:
            full()
        except BoxFull as error:
            self.log.warning("gave up: %s", error)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise ValueError(f"cannot save {layer_name}: {PROMPT} {TOKENS}")


def test_messages_of_logs_and_hooks_are_recorded_without_values(trace: Any) -> None:
    logs.install()
    connector = on_worker(Chatty())
    connector.wait_for_save()
    with pytest.raises(ValueError, match="garlic"):
        connector.save_kv_layer("layer.0", None, None)
    assert [fact["message"] for fact in trace.facts(Fact.LOG)] == [
        "stored … blocks of …",
        "prompt … has tokens …",
        "…",
        "gave up: no box left for … in the shelf",
    ]
    (raised,) = trace.facts(Fact.EXCEPTION)
    assert (raised["type"], raised["message"]) == ("ValueError", "cannot save …")
    assert "test_foreign.py:" in raised["where"]
    AGENT.failed("here", ValueError(f"of {PROMPT}"))
    AGENT.flush()
    spool, _ = trace.read()
    recorded = repr((spool.header, spool.names, list(spool.facts)))
    assert "cannot save" in recorded and "garlic" not in recorded and "51966" not in recorded


def test_a_configured_path_is_named_and_nothing_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_configured", {})
    error = PermissionError(13, "Permission denied", "/srv/kv/store/users-key")
    assert foreign.of_exception(error) == "[Errno 13] Permission denied"
    foreign.know_paths({"path": "/srv/kv/store/", "tiers": [{"root": "/other"}], "unit": 16})
    assert foreign.of_exception(error) == "[Errno 13] Permission denied: '/srv/kv/store/…'"
    above = PermissionError(13, "Permission denied", "/srv/kv")
    assert foreign.of_exception(above) == "[Errno 13] Permission denied: '/srv/kv'"
    beside = PermissionError(13, "Permission denied", "/srv/kv/store2")
    assert foreign.of_exception(beside) == "[Errno 13] Permission denied"
