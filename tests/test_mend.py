"""What vLLM says as it refuses to start, in short, and what to do about it."""

from __future__ import annotations

import pytest

from kvtrace.causes.rules import hook_raised
from kvtrace.ledger.run import HookException
from kvtrace.mend import in_short, remedy

UNKNOWN = """1 validation error for KVTransferConfig
kv_rolle
  Unexpected keyword argument [type=unexpected_keyword_argument, input_value='kv_both', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/unexpected_keyword_argument"""


def test_what_pydantic_adds_is_left_out() -> None:
    assert in_short(UNKNOWN) == "KVTransferConfig has no key 'kv_rolle'"
    assert in_short(UNKNOWN.replace("Unexpected keyword argument", "Input should be a dict")) == (
        "1 validation error for KVTransferConfig kv_rolle Input should be a dict"
    )


@pytest.mark.parametrize(
    ("said", "do"),
    [
        (UNKNOWN, "write kv_role for kv_rolle"),
        (
            UNKNOWN.replace("kv_rolle", "path"),
            "keys of the connector's own go into kv_connector_extra_config",
        ),
        (UNKNOWN.replace("kv_rolle", "kv_rank"), "leave out kv_rank: only other versions of vLLM have it"),
        ("No module named 'vllm.v1.gone'", "change what imports vllm.v1.gone"),
        ("ModuleNotFoundError: No module named 'my_store'", "install my_store in the Python that runs vLLM"),
        ("AttributeError: Class Nope not found in my_store", "the name of a class that my_store has"),
        ("AttributeError: type object 'Store' has no attribute 'open'", "look whether Store is the version"),
        ("PermissionError: [Errno 13] Permission denied: '/srv/kv'", "make /srv/kv a place where this user"),
        ("Value error, Connector Old uses deprecated 2-argument constructor signature.", "give Old.__init__"),
        ("AssertionError: blocks of 7", ""),
    ],
)
def test_the_remedy_names_what_the_message_names(said: str, do: str) -> None:
    assert do in remedy(said) and bool(remedy(said)) == bool(do)


@pytest.mark.parametrize(
    ("message", "remedy_says"),
    [
        ("[Errno 13] Permission denied: '/srv/kv/…'", "make /srv/kv a place where this user may write"),
        ("[Errno 13] Permission denied: '/srv/kv'", "make /srv/kv a place where this user may write"),
        ("[Errno 13] Permission denied", "Fix the connector at kv/store.py:12 in save"),
    ],
)
def test_a_configured_path_not_to_be_had_is_no_fault_of_code(message: str, remedy_says: str) -> None:
    raised = HookException(
        hook="save_kv_layer", type="PermissionError", message=message, where="kv/store.py:12 in save"
    )
    assert hook_raised._remedy([raised], False)[0].startswith(remedy_says)


@pytest.mark.parametrize("writes", [True, False])
def test_a_missing_file_of_its_own_is_no_place_to_make(writes: bool) -> None:
    message = "[Errno 2] No such file or directory: '/srv/kv/7.bin'"
    raised = HookException(
        hook="start_load_kv", type="FileNotFoundError", message=message, where="c.py:3 in f"
    )
    said = hook_raised._remedy([raised], writes)[0]
    assert said.startswith("Fix the connector at c.py:3" if writes else "make /srv/kv/7.bin a place")
