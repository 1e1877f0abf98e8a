"""The keys that a connector's source asks for: known where each use says its key, unknown elsewhere."""

from __future__ import annotations

import pytest

from kvtrace.agent.code.config_source import Hidden, keys_named

CONFIG = "config.kv_transfer_config"
EXTRA = f"{CONFIG}.kv_connector_extra_config"


def of(*lines: str) -> set[str]:
    """The keys of a constructor with these lines."""
    body = "\n        ".join(lines)
    return keys_named([f"class C:\n    def __init__(self, config):\n        {body}\n"])


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ([f"extra = {EXTRA}", "self.a = extra['a']", "extra.get('b', 1)"], {"a", "b"}),
        ([f"self.extra = {EXTRA} or {{}}", "if 'a' in self.extra: pass"], {"a"}),
        ([f"a = {CONFIG}.get_from_extra_config('a', None)"], {"a"}),
        ([f"a = {CONFIG}.get_from_extra_config(default=None, key='a')"], {"a"}),
        ([f"option = {CONFIG}.get_from_extra_config", "a, b = option('a', 1), option('b', 2)"], {"a", "b"}),
        ([f"extra = dict({EXTRA})", "a = extra.pop('a')"], {"a"}),
        ([f"extra = getattr({CONFIG}, 'kv_connector_extra_config', {{}})", "a = extra['a']"], {"a"}),
        ([f"if (extra := {EXTRA}) and len(extra): a = extra['a']"], {"a"}),
        ([f"e = {EXTRA}", "for k in ('a', 'b'): setattr(self, k, e.get(k))"], {"a", "b"}),
        ([f"extra = {EXTRA}", "log.info('made with %s', extra)"], set()),
        (["print('hello')"], set()),
    ],
)  # fmt: skip
def test_uses_that_say_their_key(lines: list[str], keys: set[str]) -> None:
    assert of(*lines) == keys


def test_what_vllm_hands_the_class_is_the_dictionary() -> None:
    body = "    @classmethod\n    def {}(cls, extra_config):\n        return extra_config.get('declares')\n"
    hand = body.format("requires_piecewise_for_cudagraph")
    assert keys_named([f"class C:\n{hand}"]) == {"declares"}
    assert keys_named([f"class C:\n{body.format('another')}"]) == set()


@pytest.mark.parametrize(
    "use",
    [
        "for key in extra: pass",
        "self.settings = Settings(**extra)",
        "self.settings = Settings(extra)",
        "items = extra.items()",
        "merged = {**extra}",
        "both = extra | {}",
        "text = json.dumps(extra)",
        "value = extra[f'{prefix}_a']",
        "value = extra.get(config.name)",
        "value = [extra[key] for key in wanted]",
        "self.all = [extra]",
        "a, b = extra.values()",
        "first = lambda: extra",
        "wanted = functools.partial(extra.get, 'a')",
    ],
)
def test_a_use_that_does_not_say_its_key_hides_what_is_read(use: str) -> None:
    with pytest.raises(Hidden):
        of(f"extra = {EXTRA}", "extra['a']", use)


def test_a_function_of_ones_own_is_followed_to_who_calls_it() -> None:
    helper = "def option(config, name, default):\n    return config.kv.get_from_extra_config(name, default)\n"
    user = "from helper import option\nA = option(c, 'a', 1)\nB = option(c, name='b', default=2)\n"
    assert keys_named([helper, user]) == {"a", "b"}
    with pytest.raises(Hidden):
        keys_named([helper, f"{user}option(c, made_up(), 1)\n"])
    method = (
        "class C:\n"
        "    def setting(self, key):\n        return self.kv.kv_connector_extra_config.get(key)\n"
        "    def go(self):\n        return self.setting('a')\n"
    )
    assert keys_named([method]) == {"a"}


def test_an_attribute_is_followed_into_files_without_the_dict() -> None:
    base = "class Base:\n    def __init__(self, c):\n        self.options = c.kv_connector_extra_config\n"
    child = "class Child(Base):\n    def go(self):\n        return self.options['a']\n"
    other = "class Other:\n    pass\n"
    assert keys_named([child, other, base]) == {"a"}
    with pytest.raises(Hidden):
        keys_named([base, child.replace("['a']", ".keys()")])


def test_a_key_with_a_name_of_its_own() -> None:
    constant = "KEY = 'a'\nclass C:\n    OTHER = 'b'\n    def go(self, e):\n"
    use = "        e.kv_connector_extra_config[KEY], e.kv_connector_extra_config.get(self.OTHER)\n"
    assert keys_named([constant + use]) == {"a", "b"}
    with pytest.raises(Hidden):
        keys_named([f"{constant}{use}KEY = compute()\n"])
    assert keys_named([constant + use, "class D(C):\n    OTHER = 'd'\n"]) == {"a", "b", "d"}
    listed = (
        "NAMES = ('a', 'b')\ndef go(e):\n    return [n for n in NAMES if n in e.kv_connector_extra_config]\n"
    )
    assert keys_named([listed]) == {"a", "b"}


def test_a_script_that_only_writes_the_config_reads_nothing() -> None:
    script = "KVTransferConfig(kv_connector='C', kv_connector_extra_config={'a': 1})\n"
    assert keys_named([f"{script}x = {{'kv_connector_extra_config': 1}}\n"]) == set()
