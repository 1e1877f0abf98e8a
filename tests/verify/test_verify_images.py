"""Images on a real vLLM: one server with a small model that takes them, and one store, which tells them apart
or does not, as a request wants it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Place, Ran, Script

from kvtrace.verify.answers import Answer, Verdict
from kvtrace.verify.connector import command
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.observed import Observed, Settings
from kvtrace.verify.registry import PROPERTIES
from kvtrace.verify.served import TracedServer
from kvtrace.verify.suite import facts_of, observed
from kvtrace.verify.workload import Streams, parse

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from vllm_env import CACHE, vllm_env  # noqa: E402

pytestmark = pytest.mark.engine
OTHER_IMAGE = next(one for one in PROPERTIES if one.id == "other-image")
SOUND, BY_IDS, REFUSED = "sound", "by-ids", "refused"


def asked(place: Place) -> Observed:
    """The property's workload, with sound keys and with faulty ones, and a prompt that is too long."""
    model = CACHE / "tiny-models" / "idefics3"  # made in a process of its own: torch stays out of this one
    subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", "idefics3", model], check=True)
    environ = vllm_env()
    places = [str(ROOT / "scenarios" / "connectors"), str(Path(__file__).parent)]
    environ["PYTHONPATH"] = os.pathsep.join([*places, environ.get("PYTHONPATH", "")])
    config = json.dumps({"path": str(place.store), "unit": 32})
    server = TracedServer(command("image_store:ImageStore", config, model, 640), environ, place.folder, 600.0)
    try:
        server.start()
        engine = server.look().engine
        assert engine is not None
        facts = facts_of(engine)
        workload = OTHER_IMAGE.workload(facts)
        salted = re.sub(r"(a\d+\S*)", r"\1@ids", workload)
        driver = Driver(server, Streams(1), server.look)
        jobs = {SOUND: workload, BY_IDS: salted, REFUSED: f"a{facts.longest - 8}#3"}
        driver.run([Job(name, parse(text)) for name, text in jobs.items()])
        return observed(driver, facts, Settings())
    finally:
        server.stop()


SCRIPTS = (asked,)


@pytest.fixture
def what(ran: Mapping[Script, Ran]) -> Observed:
    found: Observed = ran[asked].done
    return found


def judged(what: Observed, job: str) -> Verdict:
    return OTHER_IMAGE.judge(what.of(job), what)


def test_a_store_that_tells_images_apart_is_proved(what: Observed) -> None:
    found = judged(what, SOUND)
    assert found.answer is Answer.PROVED, found
    first, second, again = (one for one in what.of(SOUND)[:3])
    assert not second.given and again.seen is not None and again.seen.proved
    # the image decides about the answer, and what came back gives the same one
    assert first.reply.tokens == again.reply.tokens != second.reply.tokens
    assert len(first.reply.tokens) == len(first.reply.logprobs) == 4 and len(first.reply.logprobs[0][1]) >= 5


def test_a_store_with_keys_of_token_ids_alone_fails(what: Observed) -> None:
    found = judged(what, BY_IDS)
    assert found.answer is Answer.FAILED and "a request with this image never asked for" in found.says, found
    # nor does it go by its own word: what came is the first image's KV
    reasons = [line for one in what.of(BY_IDS) if one.seen for line in sum(one.seen.reasons.values(), ())]
    assert any("of another request" in line for line in reasons)


def test_an_image_that_the_server_refuses_is_not_observed(what: Observed) -> None:
    found = judged(what, REFUSED)
    assert found.answer is Answer.NOT_OBSERVED
    assert re.search("requests with another image had no answer: HTTP 400: .*2048", found.says), found
