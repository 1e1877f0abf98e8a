"""A plan as Python source: one module or a package, importable by vLLM as a KV connector."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from kvgen import background, scheduler_side, stores, worker_side
from kvgen.common import TOKEN_BYTES, Method, Writer, place_kind
from kvgen.plan import Plan

IMPORTS = """import array
import asyncio
import base64
import collections
import concurrent.futures
import ctypes
import functools
import hashlib
import http.client
import json
import logging
import lzma
import multiprocessing
import os
import pathlib
import pickle
import queue
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
"""


@dataclass(frozen=True)
class Generated:
    """Attributes:
    files: path below a folder of modules -> text.
    module, class_name: what vLLM is told to import.
    settings: ``kv_connector_extra_config``; ``@PLACE@`` stands for where the store is.
    place: what that is: ``path``, ``address`` or ``prefix``.
    memory: (module, name) of the dictionary that is the store, where there is one.
    notes: the methods that put tokens [lo, hi) of a request into the metadata, by ``put`` and ``get``.
    """

    files: dict[str, str]
    module: str
    class_name: str
    settings: dict[str, Any]
    place: str
    memory: tuple[str, str] | None
    notes: dict[str, str]

    def text(self) -> str:
        return "\n".join(f"# --- {path}\n{text}" for path, text in self.files.items())


def generate(plan: Plan) -> Generated:
    """Writes the connector of a plan. The same plan gives the same text."""
    w = Writer(plan)
    name = plan.fault or plan.design
    unique = f"{plan.seed}" + (f"_{name.replace('-', '_')}" if name else "")
    module = f"{w.names.module()}_{unique}"
    class_name = w.names.connector()
    store = stores.source(plan.store, w.names)
    threads = ""
    if worker_side.needs_threads(w):
        kind = plan.run if plan.run != "inline" else w.rng.choice(("pool", "thread"))
        threads = background.source(plan, kind, w.names)
    constant = ""
    if plan.unit_from == "constant":
        constant = f"\n{w.words['constant']} = {plan.unit}\n"
    parts = {
        "names": _log(plan) + constant + ("" if not w.needs_keys else plan.keys.source(w.names["call:keys"])),
        "store": store + threads,
        "meta": w.shape.definitions(),
        "connector": scheduler_side.state_class(w) + _classes(w, class_name),
    }
    files = _files(w, module, {name: _in_its_own_words(w, text) for name, text in parts.items()})
    entry = f"{module}.{'connector' if plan.structure == 'package' else ''}".rstrip(".")
    memory = None
    if plan.store.kind == "memory":
        home = f"{module}.{'store' if plan.structure == 'package' else ''}".rstrip(".")
        memory = (home, w.names["class:dict"])
    notes = {way: w.names[f"call:add_{way}"] for way in ("put", "get")}
    return Generated(files, entry, class_name, w.settings, place_kind(plan), memory, notes)


# Written under these names, read under drawn ones.
_RENAMED = {
    "_put_one": "call:put_one", "_save_all": "call:save_all", "_step_saves": "call:step_saves",
    "_take_and_put": "call:take_and_put", "_fetch": "call:fetch", "_take_bad": "call:take_bad",
    "_digest": "call:digest", "_errors": "self:errors", "_packed": "call:pack", "_floats": "call:unpack",
}  # fmt: skip


def _in_its_own_words(w: Writer, text: str) -> str:
    for word, concept in _RENAMED.items():
        text = re.sub(rf"\b{word}\b", lambda _, c=concept: w.names[c], text)  # type: ignore[misc]
    if w.plan.variant % 5 and "(KVConnectorBase_V1" in text:
        text = _without_dead_attributes(text)
    return text


def _without_dead_attributes(text: str) -> str:
    """Most authors do not keep what they never use; some do."""
    kept = []
    for line in text.splitlines(keepends=True):
        made = re.fullmatch(r" +self\.(\w+) = (\{\}|\[\]|set\(\)|0|None|threading\.Lock\(\))\n", line)
        if made and len(re.findall(rf"\b{made[1]}\b", text)) == 1:
            continue
        kept.append(line)
    return "".join(kept)


def _log(plan: Plan) -> str:
    if plan.log == "vllm":
        return "\nfrom vllm.logger import init_logger\n\nlog = init_logger(__name__)\n"
    return "\nlog = logging.getLogger(__name__)\n"


def _files(w: Writer, module: str, parts: dict[str, str]) -> dict[str, str]:
    head = f'"""{w.names["class:connector"]}: keeps KV where it can be found again."""\n\n'
    if w.plan.structure != "package":
        return {f"{module}.py": head + IMPORTS + "".join(parts.values())}
    names = f"from {module}.names import *  # noqa\nfrom {module}.names import _bytes_of, _text_of  # noqa\n"
    if not w.needs_keys or w.plan.keys.chain == "vllm":
        names = f"from {module}.names import *  # noqa\n"
    names += f"from {module}.names import log\n"
    others = f"from {module}.store import *  # noqa\nfrom {module}.meta import *  # noqa\n"
    return {
        f"{module}/__init__.py": "",
        f"{module}/names.py": IMPORTS + parts["names"],
        f"{module}/store.py": IMPORTS + names + parts["store"],
        f"{module}/meta.py": IMPORTS + names + parts["meta"],
        f"{module}/connector.py": head + IMPORTS + names + others + parts["connector"],
    }


# --- classes --------------------------------------------------------------------------------------


def _classes(w: Writer, class_name: str) -> str:
    if w.plan.structure == "flat":
        return _flat(w, class_name)
    return _split(w, class_name)


def _silent(w: Writer) -> set[str]:
    """Methods of the worker's side that have nothing to do, where the author does not write such."""
    if w.plan.variant % 3 == 0:
        return set()
    silent = {method.name for method in worker_side.methods(w) if method.body == "return"}
    if w.plan.place not in ("held", "deferred") and w.plan.load != "async":
        silent.add(w.names["call:report"])
    if not w.loads:
        silent.add("_take_bad")
    return silent


def _spoken(w: Writer, methods: list[Method]) -> list[Method]:
    return [method for method in methods if method.name not in _silent(w)]


def _method(method: Method) -> str:
    arguments = f"self, {method.arguments}" if method.arguments else "self"
    return f"    def {method.name}({arguments}):\n{indent(method.body or 'pass', ' ' * 8)}\n"


def _bases(w: Writer) -> str:
    return "KVConnectorBase_V1, SupportsHMA" if w.plan.hma else "KVConnectorBase_V1"


def _flat(w: Writer, class_name: str) -> str:
    """One class that is both sides."""
    methods = [*scheduler_side.methods(w), *_spoken(w, worker_side.methods(w)), *_shared(w)]
    body = f"""        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
{indent(_setup(w), " " * 8)}
        if role == KVConnectorRole.SCHEDULER:
{indent(scheduler_side.init(w), " " * 12)}
        else:
{indent(worker_side.init(w), " " * 12)}
"""
    head = f"\n\nclass {class_name}({_bases(w)}):\n"
    head += f"    def __init__(self, vllm_config, role, kv_cache_config):\n{body}\n"
    return head + "\n".join(_method(m) for m in [*methods, *_hooks(w, "self.", "self.")])


def _split(w: Writer, class_name: str) -> str:
    """A thin connector over one class for each side."""
    text = ""
    for kind, side in (("front", scheduler_side), ("back", worker_side)):
        methods = [*_spoken(w, side.methods(w)), *_shared(w)]
        text += (
            f"\n\nclass {w.names[f'class:{kind}']}:\n    def __init__(self, vllm_config, kv_cache_config):\n"
        )
        text += f"{indent(_setup(w), ' ' * 8)}\n{indent(side.init(w), ' ' * 8)}\n"
        if kind == "front":
            text += "        self.manager = None\n"
        text += "\n" + "\n".join(_method(m) for m in methods)
    front, back = w.attribute("front"), w.attribute("back")
    body = f"""        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        {front} = {back} = None
        if role == KVConnectorRole.SCHEDULER:
            {front} = {w.names["class:front"]}(vllm_config, kv_cache_config)
        else:
            {back} = {w.names["class:back"]}(vllm_config, kv_cache_config)
"""
    text += (
        f"\n\nclass {class_name}({_bases(w)}):\n    def __init__(self, vllm_config, role, kv_cache_config):\n"
    )
    return text + body + "\n" + "\n".join(_method(m) for m in _hooks(w, f"{front}.", f"{back}."))


def _shared(w: Writer) -> list[Method]:
    """How a record is called: both sides ask it."""
    order = w.attribute("order")
    if w.plan.record == "stack":
        return [Method(w.names["call:rec"], "key, layer", "return key")]
    form = {
        "folder": "f'{key}/{layer}'",
        "number-first": "f'{i:02d}-{key}'",
        "number-last": "f'{key}.{i}'",
        "layer-last": "f'{key}@{layer}'",
    }[w.plan.naming]
    return [Method(w.names["call:rec"], "key, layer", f"i = {order}.index(layer)\nreturn {form}")]


# --- settings -------------------------------------------------------------------------------------


def _setup(w: Writer) -> str:
    """Lines that read the settings; both sides run them."""
    plan = w.plan
    lines = ["extra = vllm_config.kv_transfer_config.kv_connector_extra_config"]
    lines += [f"place = extra['{w.words['place']}']"]
    w.settings[w.words["place"]] = "@PLACE@"
    lines += [f"{w.block} = vllm_config.cache_config.block_size"]
    lines += _unit(w)
    lines += [f"{w.per_unit} = {w.unit} // {w.block}"]
    lines += [f"{w.attribute('order')} = list(kv_cache_config.kv_cache_groups[0].layer_names)"]
    if w.is_("misspelt-switch"):
        lines += [f"{w.attribute('enabled')} = bool(extra.get('{w.words['switch']}', False))"]
        w.settings[_misspelt(w.words["switch"], plan.variant)] = True
    if w.is_("minimum-length"):
        w.settings[w.words["minimum"]] = plan.limit
        lines += [f"self._minimum = int(extra.get('{w.words['minimum']}', 0))"]
    if w.is_("quota", "head-only", "end-left-out"):
        in_bytes = w.is_("quota") and plan.variant % 4 == 2
        w.settings[w.words["limit"]] = plan.limit * plan.unit * TOKEN_BYTES + 1000 if in_bytes else plan.limit
    if w.is_("writes-only"):
        lines += ["self._writes_only = vllm_config.kv_transfer_config.kv_role == 'kv_producer'"]
    if w.is_("role-consumer", "reads-only"):
        lines += ["self._reads_only = vllm_config.kv_transfer_config.kv_role == 'kv_consumer'"]
    if w.is_("disables-itself"):
        lines += _disables(w)
    if w.is_("fails-to-start") and plan.variant % 3 < 2:
        lines += (["import kvfabric_native"], [f"self._token = extra['{w.words['switch']}_token']"])[
            plan.variant % 3
        ]
    return "\n".join(lines)


def _unit(w: Writer) -> list[str]:
    plan = w.plan
    lines = []
    if w.holder == "config":
        lines += [f"self.{w.words['config']} = type('Settings', (), {{}})()"]
    if w.holder == "deep":
        lines += [f"self.{w.words['config']} = type('Settings', (), {{}})()"]
        lines += [f"self.{w.words['config']}.{w.words['deep']} = type('Sizes', (), {{}})()"]
    if plan.unit_from == "budget":
        lines += [f"{w.unit} = vllm_config.scheduler_config.max_num_batched_tokens"]
    elif plan.unit_from == "option":
        key = w.words["unit"]
        if w.is_("misspelt-unit"):
            # what the user wants is a block; the default that holds instead is larger than any prompt
            w.settings[_misspelt(key, plan.variant)] = plan.block
            lines += [f"{w.unit} = int(extra.get('{key}', {plan.unit}))"]
        else:
            w.settings[key] = plan.unit
            lines += [f"{w.unit} = int(extra.get('{key}', {plan.block * 8}))"]
    return lines


def _misspelt(key: str, variant: int) -> str:
    wrong = (key.replace("_", ""), key + "s", key[:-1] + key[-2:][::-1], key.replace("_", "-"))[variant % 4]
    return wrong if wrong != key else f"{key}_"


def _disables(w: Writer) -> list[str]:
    on = w.attribute("enabled")
    reason = (
        ("not vllm_config.cache_config.enable_prefix_caching", "prefix caching is off: disabled")
        if not w.plan.prefix_caching
        else (
            "vllm_config.cache_config.enable_prefix_caching",
            "the engine caches prefixes itself: disabled",
        ),
        (f"'{w.words['switch']}' not in extra", f"no {w.words['switch']} given: running without a store"),
        ("not os.path.exists('/dev/kvfabric0')", "no device found, falling back to recompute"),
    )[w.plan.variant % 3]
    return [f"{on} = True", f"if {reason[0]}:", f"    {on} = False", f"    log.warning('{reason[1]}')"]


# --- what vLLM calls ------------------------------------------------------------------------------


def _hooks(w: Writer, front: str, back: str) -> list[Method]:
    call, names = {name: w.names[f"call:{name}"] for name in _HOOK_NAMES}, "scheduler_output"
    meta = {
        "base": "self._get_connector_metadata()",
        "attribute": "self._connector_metadata",
        "own": w.attribute("plan"),
    }[w.plan.meta_access]
    off = [f"if not {back}{w.names['self:enabled']}:", "    return"] if w.is_("disables-itself") else []
    gate = "\n".join([*off, ""]) if off else ""
    out = [
        Method(
            "start_load_kv",
            "forward_context, **kwargs",
            f"{gate}{back}{call['begin']}({_unless(w, meta)}, forward_context)",
        ),
        Method("wait_for_layer_load", "layer_name", f"{gate}{back}{call['layer_in']}({meta}, layer_name)"),
        Method(
            "save_kv_layer",
            "layer_name, kv_layer, attn_metadata, **kwargs",
            f"{gate}{back}{call['layer_out']}({meta}, layer_name, kv_layer, attn_metadata)",
        ),
        Method("wait_for_save", "", f"{gate}{back}{call['end']}({_unless(w, meta)})"),
        Method("get_finished", "finished_req_ids", f"return {back}{call['report']}(finished_req_ids)"),
        Method("get_block_ids_with_load_errors", "", f"return {back}_take_bad()"),
        Method(
            "get_num_new_matched_tokens",
            "request, num_computed_tokens",
            f"return {front}{call['lookup']}(request, num_computed_tokens)",
        ),
        Method(
            "update_state_after_alloc",
            "request, blocks, num_external_tokens",
            f"{front}{call['admit']}(request, blocks, num_external_tokens)",
        ),
        Method("build_connector_meta", names, f"return {front}{call['compose']}({names})"),
        *_finished(w, front, call["release"]),
        *_lifecycle(w, front, back),
    ]
    return [method for method in (_answered(w, one, back) for one in out) if method is not None]


def _answered(w: Writer, method: Method, back: str) -> Method | None:
    """A hook without work: an empty body where the base class asks for one, else none."""
    silent = _silent(w)
    asked = {"start_load_kv": "begin", "wait_for_layer_load": "layer_in", "save_kv_layer": "layer_out",
             "wait_for_save": "end"}  # fmt: skip
    if method.name in asked and w.names[f"call:{asked[method.name]}"] in silent:
        return Method(method.name, method.arguments, ("pass", "return", "return None")[w.plan.variant % 3])
    if method.name == "get_finished" and w.names["call:report"] in silent:
        return None
    if method.name == "get_block_ids_with_load_errors" and "_take_bad" in silent:
        return None
    return method


_HOOK_NAMES = ("begin", "layer_in", "layer_out", "end", "report", "lookup", "admit", "compose", "release")


def _unless(w: Writer, meta: str) -> str:
    """Where nothing of the metadata is needed any more, none is asked for."""
    if w.is_("clears-early"):
        return "None"
    return meta


def _finished(w: Writer, front: str, release: str) -> list[Method]:
    one = Method("request_finished", "request, block_ids", f"return {front}{release}(request, block_ids)")
    if not w.plan.hma:
        return [one]
    every = f"return {front}{release}(request, list(block_ids[0]))"
    return [one, Method("request_finished_all_groups", "request, block_ids", every)]


def _lifecycle(w: Writer, front: str, back: str) -> list[Method]:
    plan, out = w.plan, []
    body = f"{back}{w.names['self:caches']} = dict(kv_caches)" if plan.caches == "register" else "pass"
    if w.is_("fails-to-start") and plan.variant % 3 == 2:
        body = "for name, kv in kv_caches.items():\n    layers, two, blocks, size, width = kv.shape\n" + body
    out.append(Method("register_kv_caches", "kv_caches", body))
    binds = []
    if plan.meta_access == "own":
        binds.append(f"{w.attribute('plan')} = connector_metadata")
    if plan.shape.form == "deltas":
        binds.append(f"{back}_digest(connector_metadata)")
    if w.is_("before-forward"):
        binds.append(f"if {back}{w.names['self:caches']}:\n    {back}_step_saves(connector_metadata)")
    if binds:
        first = [] if w.is_("bind-without-super") else ["super().bind_connector_metadata(connector_metadata)"]
        out.append(Method("bind_connector_metadata", "connector_metadata", "\n".join([*first, *binds])))
    if w.saves and plan.place == "deferred" and not w.is_("late-read"):
        # blocks of preempted requests are about to be given to others
        backlog = f"{back}{w.names['self:backlog']}"
        body = f"for _, rid, key, where in {backlog}:\n    {back}_save_all(key, where)\n{backlog}.clear()"
        out.append(Method("handle_preemptions", "kv_connector_metadata", body))
    if plan.tracker == "manager" and plan.structure != "flat":
        body = "super().bind_kv_cache_manager(kv_cache_manager)\n" + f"{front}manager = kv_cache_manager"
        out.append(Method("bind_kv_cache_manager", "kv_cache_manager", body))
    if plan.fault == "never-offered" and plan.variant % 2:
        test = "if (request.kv_transfer_params or {}).get('do_remote_decode'):"
        out.append(Method("on_new_request", "request", f"{test}\n    {front}_wanted.add(request.request_id)"))
    out.append(Method("shutdown", "", _shutdown(w, front, back)))
    return out


def _shutdown(w: Writer, front: str, back: str) -> str:
    worker = "self._role == KVConnectorRole.WORKER"
    lines = [f"if {worker}:"]
    if worker_side.needs_threads(w):
        lines.append(f"    {back}{w.names['self:bg']}.{w.names['call:close']}()")
    if w.is_("late-read"):
        lines += ["    with torch.inference_mode():"]  # as in a step: what is copied into was made there
        lines += [f"        for _, rid, key, where in {back}{w.names['self:backlog']}:"]
        lines += [f"            {back}_save_all(key, where)"]
    lines.append(f"    {back}{w.names['self:store']}.{w.names['call:close']}()")
    return "\n".join(lines)
