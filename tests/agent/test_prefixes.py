"""Prefix digests: comparable within a run, block by block, and useless without its key."""

from __future__ import annotations

import hashlib
from array import array
from types import SimpleNamespace

import pytest

from kvtrace.agent.engine import scheduler
from kvtrace.agent.steps.prefixes import MAX_PREFIXES, digests, key_of, tokens_of
from kvtrace.trace.format import Kind

KEY = b"k" * 16


def direct(tokens, key=KEY):
    data = hashlib.blake2b(array("q", tokens).tobytes(), key=key, digest_size=8).digest()
    return int.from_bytes(data, "little") & ((1 << 63) - 1)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 100])
def test_each_digest_is_that_of_the_tokens_up_to_there(count):
    tokens = list(range(1000, 1000 + count))
    found = digests(tokens, 16, KEY)
    assert found.prompt == direct(tokens)
    aligned = (count - 1) // 16 * 16
    assert found.aligned == (direct(tokens[:aligned]) if aligned else 0)
    assert found.prefixes == [direct(tokens[:end]) for end in range(16, count + 1, 16)]


def test_longer_strides_of_long_prompts_meet_those_of_short():
    tokens = list(range(16 * 700 + 3))
    long, short = digests(tokens, 16, KEY), digests(tokens[: 16 * 300], 16, KEY)
    assert (long.stride, short.stride) == (64, 32)
    assert max(len(long.prefixes), len(short.prefixes)) <= MAX_PREFIXES
    assert short.prefixes[1::2] == long.prefixes[: len(short.prefixes) // 2]


def test_another_key_gives_other_digests_no_tokens_none():
    assert digests([1] * 32, 16, KEY).prompt != digests([1] * 32, 16, b"x" * 16).prompt
    assert digests(None, 16, KEY) == digests([], 16, KEY) == (0, 0, 0, [])
    assert digests([1, 2, 3], 0, KEY).prefixes == []


def test_a_request_leaves_its_prefixes_in_the_trace(trace):
    tokens = list(range(6 * 16 + 5))
    request = SimpleNamespace(
        request_id="r", num_prompt_tokens=len(tokens), prompt_token_ids=tokens, max_tokens=1
    )
    scheduler._before_add_request(SimpleNamespace(block_size=16, requests={}), 0, request)
    rows = trace.table(Kind.PREFIX).tolist()
    assert [(trace.names()[row[1]], row[2], row[3]) for row in rows] == [("r", 16, 16), ("r", 80, 16)]
    assert [*rows[0][4:], *rows[1][4:]] == [direct(tokens[: 16 * n]) for n in range(1, 7)] + [0, 0]


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def test_different_images_share_what_comes_before_the_image() -> None:
    """Two prompts of 96 tokens, placeholders in the second and third block."""
    tokens = [*range(100, 132), *([9] * 40), *range(200, 224)]

    def prefixes_of(*features: SimpleNamespace) -> list[int]:
        request = SimpleNamespace(prompt_token_ids=tokens, mm_features=list(features))
        assert key_of(request, KEY) == KEY
        return digests(tokens_of(request, KEY), 16, KEY).prefixes

    cat, dog = prefixes_of(image("cat", 32, 40)), prefixes_of(image("dog", 32, 40))
    assert cat == prefixes_of(image("cat", 32, 40)) and cat[:2] == dog[:2] == prefixes_of()[:2]
    assert not set(cat[2:]) & set(dog[2:]) and not set(cat[2:]) & set(prefixes_of()[2:])
    # the same image elsewhere is not alike either
    assert not set(prefixes_of(image("cat", 33, 39))[2:]) & set(cat[2:])


def test_of_a_prompt_that_comes_as_vectors_no_token_is_known() -> None:
    for ids in (None, [0, 0, 5]):  # with ids where text stands between the vectors
        request = SimpleNamespace(prompt_token_ids=ids, prompt_embeds="a tensor", mm_features=[])
        assert tokens_of(request, KEY) is None


def test_what_makes_equal_tokens_different_kv_makes_another_key() -> None:
    def request(**more: object) -> SimpleNamespace:
        return SimpleNamespace(lora_request=None, cache_salt=None, mm_features=[], **more)

    salted = SimpleNamespace(cache_salt="a")
    adapted = SimpleNamespace(lora_request=SimpleNamespace(lora_name="a", lora_int_id=1))
    seen = SimpleNamespace(mm_features=[SimpleNamespace(identifier="a")])
    assert key_of(request(), KEY) == key_of(SimpleNamespace(), KEY) == KEY
    keys = {key_of(one, KEY) for one in (salted, adapted, seen, SimpleNamespace(cache_salt="b"))}
    assert len(keys | {KEY}) == 5
    assert len({digests([1, 2], 0, key).prompt for key in keys}) == 4
