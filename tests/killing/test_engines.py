"""What waits for an engine always comes to an end, and leaves nothing behind. Without vLLM."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from .engines import CLIENTS, Engine, Place, Setup, until

SETUP = Setup("server", server=True)
# Answers a token and no more. Told to stop it waits for its answers, as vLLM does, or does not stop.
SERVER = """
import signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
        self.wfile.write(b'data: {"choices": [{"token_ids": [7]}]}\\n\\n')
        self.rfile.read(1)  # until the client goes away

def told(*_):
    if sys.argv[2] == "stops":
        sys.exit(5)

signal.signal(signal.SIGTERM, told)
ThreadingHTTPServer.daemon_threads = False
with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers) as server:
    server.serve_forever()
"""


class Small(Engine):
    """A server of ours in place of vLLM."""

    what = "stops"

    def _command(self) -> list[str]:
        return [sys.executable, "-c", SERVER, str(self.port), self.what]


class Deaf(Small):
    what = "does not stop"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "here", tmp_path, dict(os.environ))


def asked(engine: Engine) -> Engine:
    """Every client holds an answer that does not end."""
    engine.start()
    until(lambda: len(engine.answers) == CLIENTS, "every client has a token")
    engine.kill([engine.process.pid], signal.SIGTERM)
    return engine


def test_a_server_that_waits_for_answers_ends_with_its_clients(place: Place) -> None:
    with Small(SETUP, place, 1, traced=False) as engine:
        asked(engine).drop()
        assert engine.wait() == 5
        assert [tokens for _, tokens in engine.given()] == [[7]] * CLIENTS


def test_one_that_does_not_end_is_said_to_and_is_killed(place: Place) -> None:
    with Deaf(SETUP, place, 1, traced=False) as engine:
        assert asked(engine).wait(0) is None
        assert engine.left()
    assert not engine.processes()
