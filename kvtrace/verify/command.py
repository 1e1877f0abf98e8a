"""The user's command, as far as verify has to understand it: where its server will listen, and the same
command without a connector. Pure; the command itself is never changed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvtrace.trace.options import KV_TRANSFER, option
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.http import Address

BLOCKS = "--num-gpu-blocks-override"
_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")


def address(command: Sequence[str]) -> Address:
    """Where the server of that command will listen.

    Raises:
        VerifyError: it speaks TLS, or its port is no number.
    """
    if option(command, "--ssl-keyfile") or option(command, "--ssl-certfile"):
        raise VerifyError("verify asks its server without TLS", "leave --ssl-keyfile and --ssl-certfile out")
    port = option(command, "--port") or "8000"
    if not port.isdecimal():
        raise VerifyError(f"--port {port!r} is no port")
    host = option(command, "--host") or ""
    key = (option(command, "--api-key") or os.environ.get("VLLM_API_KEY", "")).split(",")[0]
    return Address("127.0.0.1" if host in _EVERYWHERE else host, int(port), key)


def without_connector(command: Sequence[str]) -> list[str] | None:
    """The same command with no connector; None where it is not known how it gets one."""
    kept: list[str] = []
    found = False
    words = iter(command)
    for word in words:
        key, equals, _ = word.partition("=")
        key = key.replace("_", "-")
        if key != KV_TRANSFER and not key.startswith(f"{KV_TRANSFER}."):
            kept.append(word)
            continue
        found = True
        if not equals:
            next(words, None)
    return kept if found else None
