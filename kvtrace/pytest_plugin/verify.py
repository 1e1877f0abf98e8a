"""The fixture ``kvtrace_verify``: ``kvtrace verify --connector``, for a connector's own tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtrace.verify.answers import Result
from kvtrace.verify.session import Options, Small, verify


def verifier(folders: pytest.TempPathFactory) -> Callable[..., Result]:
    """The function that the fixture gives."""

    def kvtrace_verify(
        connector: str,
        config: Mapping[str, Any] | None = None,
        suite: str = "quick",
        model: Path | str | None = None,
        **more: Any,
    ) -> Result:
        """Verify a connector on a small server.

        Args:
            connector: ``module:Class``; the module is imported as from the working directory.
            config: its ``kv_connector_extra_config``.
            model: a folder; None makes a small model.
            more: other fields of :class:`~kvtrace.verify.session.Options`.

        Raises:
            VerifyError: the server does not start; with its own words.
        """
        text = None if config is None else json.dumps(dict(config))
        small = Small(connector, text, None if model is None else Path(model))
        return verify(Options((), suite, folders.mktemp("kvtrace-verify"), small=small, **more))

    return kvtrace_verify
