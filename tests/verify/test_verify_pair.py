"""Two servers as one engine."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.pair import ASKS, ServerPair


class Side:
    """A server that answers every request but the refused ones."""

    def __init__(self, name: str, log: list[str], refuses: str = "", resets: bool | None = True) -> None:
        self.name, self.log, self.refuses, self.resets = name, log, refuses, resets
        self.asked: list[RequestToMake] = []

    def start(self) -> None:
        self.log.append(f"{self.name} starts")

    def stop(self) -> None:
        self.log.append(f"{self.name} stops")

    adapters = 0
    other_model = False
    salt = b""

    def restart(self, other: bool = False) -> None: ...

    def reset(self, patience: float) -> bool | None:
        return self.resets

    def gone(self) -> str:
        return ""

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        self.asked += requests
        return [
            Reply(error="no") if one.id == self.refuses else Reply((7,), transfer={"of": one.id})
            for one in requests
        ]


def test_a_prompt_goes_to_prefill_then_its_answer_to_decode() -> None:
    prefill, decode = Side("prefill", [], refuses="b"), Side("decode", [])
    requests = [
        RequestToMake("a", [1], 4, leaves=True),
        RequestToMake("b", [2], 4),
        RequestToMake("c", [3], 4),
    ]
    replies = ServerPair(prefill, decode).ask(requests, 1.0)
    assert [reply.error for reply in replies] == ["", "no", ""]
    assert [(one.generate, one.leaves, one.transfer) for one in prefill.asked] == [(1, False, ASKS)] * 3
    assert [(one.id, one.generate, one.transfer) for one in decode.asked] == [
        ("a", 4, {"of": "a"}), ("c", 4, {"of": "c"}),
    ]  # fmt: skip
    assert decode.asked[0].leaves


def test_a_reset_came_about_where_both_say_so() -> None:
    def told(one: bool | None, other: bool | None) -> bool | None:
        return ServerPair(Side("p", [], resets=one), Side("d", [], resets=other)).reset(1.0)

    assert told(True, True) is True and told(True, False) is False
    assert told(None, False) is False and told(True, None) is None


def test_a_restart_stops_both_before_either_starts() -> None:
    log: list[str] = []
    ServerPair(Side("p", log), Side("d", log)).restart()
    assert log[:2] == ["p stops", "d stops"] and sorted(log[2:]) == ["d starts", "p starts"]
