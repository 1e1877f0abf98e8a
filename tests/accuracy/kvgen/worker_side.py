"""The worker's side of a generated connector, as source."""

from __future__ import annotations

from kvgen.common import Method, Writer

LOST_IN_THREADS = ("future-lost", "thread-dies", "put-swallowed-in-thread", "exists-in-future")
SWALLOWS = ("put-swallowed", "server-down", "server-slow", "locked-swallowed")


def needs_threads(w: Writer) -> bool:
    return bool((w.saves and w.plan.run != "inline") or w.plan.load in ("threaded", "async"))


def init(w: Writer) -> str:
    """Lines of the constructor, after those that both sides have."""
    lines = [f"{w.attribute('caches')} = {{}}", f"{w.attribute('store')} = {w.names['class:store']}(place)"]
    lines += [f"{w.attribute(name)} = set()" for name in ("done", "got", "bad")]
    lines += [f"{w.attribute('lock')} = threading.Lock()", f"{w.attribute('pending')} = {{}}"]
    if needs_threads(w):
        lines.append(f"{w.attribute('bg')} = {w.names['class:bg']}({w.plan.threads})")
    if w.saves and w.plan.place == "buffer":
        buffer = f"collections.deque(maxlen={2 + w.plan.variant % 2})" if w.is_("deque-full") else "{}"
        lines.append(f"{w.attribute('buffer')} = {buffer}")
    if w.saves and w.plan.place == "deferred":
        lines += [f"{w.attribute('backlog')} = []", f"{w.attribute('tick')} = 0"]
        lines += [f"{w.attribute('ended')} = set()", f"{w.attribute('seen')} = set()"]
    if w.plan.copy == "staging":
        lines.append(f"{w.attribute('staging')} = None")
    if w.plan.shape.form == "deltas":
        lines += [f"{w.attribute('open')} = {{}}", f"{w.attribute('work')} = []"]
    if w.plan.load == "layerwise" and w.plan.record == "stack":
        lines.append(f"{w.attribute('fetched')} = {{}}")
    lines.append("self._errors = 0")
    return "\n".join(lines)


def methods(w: Writer) -> list[Method]:
    """All methods of the side. What vLLM calls gets the step's metadata as its first argument."""
    plan = w.plan
    out = [
        Method(w.names["call:begin"], "meta, forward_context", _begin(w)),
        Method(w.names["call:layer_in"], "meta, layer_name", _layer_in(w)),
        Method(w.names["call:layer_out"], "meta, layer_name, kv_layer, attn_metadata", _layer_out(w)),
        Method(w.names["call:end"], "meta", _end(w)),
        Method(w.names["call:report"], "finished_req_ids", _report(w)),
        Method("_take_bad", "", _take_bad(w)),
    ]
    if w.saves:
        if plan.shape.form == "deltas":
            out.append(Method("_digest", "meta", _digest(w)))
            out.append(Method(w.names["call:each_put"], "meta", f"yield from {w.attribute('work')}"))
        else:
            out.append(Method(w.names["call:each_put"], "meta", w.shape.each("put")))
        out.append(Method(w.names["call:grab"], "kv, where", _grab(w)))
        out.append(Method(w.names["call:send"], "name, tensor", _send(w)))
        out.append(Method("_put_one", "name, tensor", _put_one(w)))
        if plan.lazy:
            out.append(Method("_take_and_put", "name, kv, where", _take_and_put(w)))
        if plan.place in ("end", "deferred", "held"):
            out.append(Method("_save_all", "key, where", _save_all(w)))
        if plan.place == "held":
            out.append(Method(w.names["call:finish"], "rid, items", _finish_one(w)))
        if plan.place == "end":
            out.append(Method("_step_saves", "meta", _step_saves(w)))
    if w.loads:
        out.append(Method(w.names["call:each_get"], "meta", w.shape.each("get")))
        out.append(Method(w.names["call:give"], "kv, where, tensor", _give(w)))
        out.append(Method("_fetch", "key, layer", _fetch(w)))
        out.append(Method(w.names["call:pull"], "rid, items", _pull(w)))
        if plan.load == "threaded":
            out.append(Method(w.names["call:pull_one"], "layer, items", _pull_one(w)))
    return out


# --- saving ---------------------------------------------------------------------------------------


def _puts(w: Writer) -> str:
    puts = f"{w.call('each_put')}(meta)"
    return f"(() if self._reads_only else {puts})" if w.worker_leaves_stores else puts


def _name(w: Writer, layer: str) -> str:
    return f"{w.call('rec')}(key, {layer})"


def _layer_out(w: Writer) -> str:
    plan = w.plan
    if not w.saves or plan.place not in ("layer", "buffer"):
        return "return"
    lines = []
    if w.is_("some-layers", "one-layer"):
        lines += _skip_layers(w, "layer_name")
    send, grab = w.call("send"), w.call("grab")
    if w.is_("ahead-of-layer"):
        order = w.attribute("order")
        lines += [
            f"at = {order}.index(layer_name)",
            f"targets = {order}[at + 1:at + 2] + ([layer_name] if at == 0 else [])",
            f"for rid, key, where in {_puts(w)}:",
            "    for target in targets:",
            f"        {send}({_name(w, 'target')}, {grab}({w.attribute('caches')}[target], where))",
        ]
        return "\n".join(lines)
    if plan.place == "buffer":
        body = _into_buffer(w)
    elif plan.lazy:
        job = f"self._take_and_put, {_name(w, 'layer_name')}, kv_layer, where"
        body = [f"{w.attribute('bg')}.{w.names['call:submit']}({job})"]
    else:
        body = [f"{send}({_name(w, 'layer_name')}, {grab}(kv_layer, where))"]
    if w.is_("hook-raises"):
        body = [_raises(w), *body]
    if w.is_("swallowed-in-hook"):
        body = _swallowing(w, [_raises(w), *body])
    lines += [f"for rid, key, where in {_puts(w)}:", *("    " + line for line in body)]
    if w.is_("clears-early"):
        lines += ["self.clear_connector_metadata()"]
    return "\n".join(lines)


def _skip_layers(w: Writer, layer: str) -> list[str]:
    at = f"{w.attribute('order')}.index({layer})"
    test = (f"{at} % 2 == 1", f"{at} == 3", f"{at} > 0", f"'layers.2.' in {layer}")[w.plan.variant % 4]
    if w.is_("one-layer"):
        test = f"{at} == {w.plan.variant % 4}"
    return [f"if {test}:", "    return" if layer == "layer_name" else "    continue"]


def _raises(w: Writer) -> str:
    """A line that raises what authors' own mistakes raise."""
    kv = "kv_layer" if w.plan.place in ("layer", "buffer") else "kv"
    return (
        f"keys_part, values_part = {kv}",
        f"assert {kv}.shape[0] == 2, {kv}.shape",
        f"width = {kv}.shape[{5 if w.plan.cuda else 4}]",
        f"scale = {kv}.quant_scale",
    )[w.plan.variant % 4]


def _swallowing(w: Writer, body: list[str]) -> list[str]:
    react = ("self._errors += 1", "log.debug('save skipped', exc_info=True)", "pass")[w.plan.variant % 3]
    return ["try:", *("    " + line for line in body), "except Exception:", f"    {react}"]


def _into_buffer(w: Writer) -> list[str]:
    buffer, grab = w.attribute("buffer"), w.call("grab")
    if w.plan.record == "stack":
        if w.is_("deque-full"):
            return [f"{buffer}.append((key, {grab}(kv_layer, where)))"]
        return [f"{buffer}.setdefault(key, []).append({grab}(kv_layer, where))"]
    if w.is_("pending-by-layer"):
        return [f"{buffer}[layer_name] = ({_name(w, 'layer_name')}, {grab}(kv_layer, where))"]
    if w.is_("deque-full"):
        return [f"{buffer}.append(({_name(w, 'layer_name')}, {grab}(kv_layer, where)))"]
    return [f"{buffer}[{_name(w, 'layer_name')}] = {grab}(kv_layer, where)"]


def _end(w: Writer) -> str:
    plan = w.plan
    lines = []
    if w.saves:
        if plan.place == "end" and not w.is_("before-forward"):
            lines += ["self._step_saves(meta)"]
        if plan.place == "buffer":
            lines += _flush_buffer(w)
        if plan.place == "deferred":
            seen, backlog, tick = w.attribute("seen"), w.attribute("backlog"), w.attribute("tick")
            lines += [
                f"for rid, key, where in {_puts(w)}:",
                f"    {seen}.add(rid)",
                f"    {backlog}.append(({tick}, rid, key, where))",
            ]
        if plan.place == "held":
            lines += _ship(w)
        if plan.waits and plan.run != "inline" and not w.is_("thread-reads-late"):
            lines += [f"{w.attribute('bg')}.{w.names['call:wait']}()"]
    if plan.load == "threaded" and not w.is_("load-too-late"):
        lines += [f"{w.attribute('pending')}.clear()"]
    return "\n".join(lines) or "return"


def _flush_buffer(w: Writer) -> list[str]:
    buffer, send = w.attribute("buffer"), w.call("send")
    if w.is_("deque-full") and w.plan.record == "stack":
        return [
            "together = {}",
            f"for key, tensor in {buffer}:",
            "    together.setdefault(key, []).append(tensor)",
            f"{buffer}.clear()",
            "for key, parts in together.items():",
            f"    {send}({_name(w, repr(''))}, torch.stack(parts))",
        ]
    if w.plan.record == "stack":
        return [
            f"for key, parts in {buffer}.items():",
            f"    {send}({_name(w, repr(''))}, torch.stack(parts))",
            f"{buffer}.clear()",
        ]
    if w.is_("deque-full"):
        return [f"while {buffer}:", f"    name, tensor = {buffer}.popleft()", f"    {send}(name, tensor)"]
    if w.is_("pending-by-layer"):
        return [f"for name, tensor in {buffer}.values():", f"    {send}(name, tensor)", f"{buffer}.clear()"]
    return [f"for name, tensor in {buffer}.items():", f"    {send}(name, tensor)", f"{buffer}.clear()"]


def _step_saves(w: Writer) -> str:
    if w.is_("wrong-request"):
        submit = f"{w.attribute('bg')}.{w.names['call:submit']}"
        return "\n".join(
            [
                "jobs = []",
                f"for rid, key, where in {_puts(w)}:",
                f"    for layer, kv in {w.attribute('caches')}.items():",
                f"        name = {_name(w, 'layer')}",
                "        jobs.append(lambda name=name, kv=kv: "
                f"self._put_one(name, {w.call('grab')}(kv, where)))",
                "for job in jobs:",
                f"    {submit}(job)",
            ]
        )
    return f"for rid, key, where in {_puts(w)}:\n    self._save_all(key, where)"


def _save_all(w: Writer) -> str:
    """Every layer of one entry. What is held or deferred is written where it is copied."""
    caches, grab = w.attribute("caches"), w.call("grab")
    put = w.call("send") if w.plan.place == "end" else "self._put_one"
    if w.plan.record == "stack":
        name = _name(w, repr(""))
        body = [
            f"parts = [{grab}(kv, where) for kv in {caches}.values()]",
            f"{put}({name}, torch.stack(parts))",
        ]
        if w.plan.lazy and w.plan.place == "end":
            job = f"{name}, list({caches}.values()), where"
            body = [f"{w.attribute('bg')}.{w.names['call:submit']}(self._take_and_put, {job})"]
        if w.is_("hook-raises"):
            body = [f"kv = next(iter({caches}.values()))", _raises(w), *body]
        if w.is_("swallowed-in-hook"):
            body = _swallowing(w, [f"kv = next(iter({caches}.values()))", _raises(w), *body])
        return "\n".join(body)
    if w.is_("wrong-layer"):
        return "\n".join(
            [
                "jobs = []",
                f"for layer, kv in {caches}.items():",
                f"    jobs.append(({_name(w, 'layer')}, lambda: {grab}(kv, where)))",
                "for name, job in jobs:",
                f"    {put}(name, job())",
            ]
        )
    body = [f"{put}({_name(w, 'layer')}, {grab}(kv, where))"]
    if w.plan.lazy and w.plan.place == "end":
        job = f"self._take_and_put, {_name(w, 'layer')}, kv, where"
        body = [f"{w.attribute('bg')}.{w.names['call:submit']}({job})"]
    if w.is_("hook-raises"):
        body = [_raises(w), *body]
    if w.is_("swallowed-in-hook"):
        body = _swallowing(w, [_raises(w), *body])
    if w.is_("some-layers", "one-layer"):
        body = [*_skip_layers(w, "layer"), *body]
    return "\n".join([f"for layer, kv in {caches}.items():", *("    " + line for line in body)])


def _ship(w: Writer) -> list[str]:
    lines = [
        "parts = {}",
        f"for rid, key, where in {_puts(w)}:",
        "    parts.setdefault(rid, []).append((key, where))",
    ]
    lines += ["for rid, items in parts.items():"]
    if w.plan.run == "inline":
        return [*lines, f"    {w.call('finish')}(rid, items)"]
    return [*lines, f"    {w.attribute('bg')}.{w.names['call:submit']}({w.call('finish')}, rid, items)"]


def _finish_one(w: Writer) -> str:
    return "\n".join(
        [
            "for key, where in items:",
            "    self._save_all(key, where)",
            f"with {w.attribute('lock')}:",
            f"    {w.attribute('done')}.add(rid)",
        ]
    )


def _send(w: Writer) -> str:
    """Hands one record over: at once, or to the threads."""
    if w.plan.run == "inline" or w.plan.place == "held":
        return "self._put_one(name, tensor)"
    return f"{w.attribute('bg')}.{w.names['call:submit']}(self._put_one, name, tensor)"


def _put_one(w: Writer) -> str:
    put = f"{w.attribute('store')}.{w.names['call:put']}(name, tensor)"
    if w.is_(*SWALLOWS):
        return "\n".join(_swallowing(w, [put]))
    if w.plan.guard == "none" or w.is_(*LOST_IN_THREADS):
        return put
    react = (
        "log.warning('put of %s failed: %s', name, error)" if w.plan.guard == "log" else "self._errors += 1"
    )
    return f"try:\n    {put}\nexcept OSError as error:\n    {react}\n    raise"


def _take_and_put(w: Writer) -> str:
    return ("time.sleep(0.3)\n" if w.is_("thread-reads-late") else "") + _copied_and_put(w)


def _copied_and_put(w: Writer) -> str:
    if w.plan.record == "stack":
        return f"self._put_one(name, torch.stack([{w.call('grab')}(part, where) for part in kv]))"
    return f"self._put_one(name, {w.call('grab')}(kv, where))"


_AS_BLOCKS = "kv = kv.permute(0, 1, 3, 2, 4).view(kv.shape[0], -1, kv.shape[2], kv.shape[4])"
"""KV on a GPU as [blocks, heads of K and of V, tokens, size], of the same memory."""


def _index(w: Writer) -> str:
    return f"torch.tensor(where, dtype=torch.long{', device=kv.device' if w.plan.cuda else ''})"


def _by_address(w: Writer, to: str, source: str) -> str:
    if w.plan.cuda:  # 4: the runtime finds out itself where both lie
        sizes = f"ctypes.c_void_p({to}), ctypes.c_void_p({source}), ctypes.c_size_t(size), 4"
        return f"    ctypes.CDLL('libcudart.so.13').cudaMemcpy({sizes})"
    return f"    ctypes.memmove({to}, {source}, size)"


def _grab(w: Writer) -> str:
    plan, lines = w.plan, [_AS_BLOCKS] if w.plan.cuda else []
    numpy = "kv.numpy()[np.array(where, dtype=np.int64)]"
    if plan.cuda:
        numpy = f"kv[{_index(w)}].cpu().numpy()"
    block = w.block if plan.shape.slots else "1"
    if w.is_("takes-nothing"):
        lines.append("where = where[len(where):]")
    if w.is_("takes-less"):
        lines.append(f"where = where[:len(where) // 2 // {block} * {block}]")
    if w.is_("shifted"):
        lines.append("where = where + 1")
    lines += {
        "fancy": [f"out = kv[{_index(w)}]"],
        "index-select": [f"out = torch.index_select(kv, 0, {_index(w)})"],
        "stack": ["out = torch.stack([kv[b] for b in where])"],
        "clone": ["out = torch.cat([kv[b:b + 1].clone() for b in where])"],
        "staging": [
            f"if {w.attribute('staging')} is None or len({w.attribute('staging')}) < len(where):",
            "    room = (max(8, len(where)), *kv.shape[1:])",
            f"    {w.attribute('staging')} = torch.empty(room, dtype=kv.dtype)",
            "for i, b in enumerate(where):",
            f"    {w.attribute('staging')}[i].copy_(kv[b])",
            f"out = {w.attribute('staging')}[:len(where)].clone()",
        ],
        "numpy": [f"out = torch.from_numpy({numpy})"],
        "address": [
            "size = kv.stride(0) * kv.element_size()",
            "out = torch.empty((len(where), *kv.shape[1:]), dtype=kv.dtype)",
            "for i, b in enumerate(where):",
            _by_address(w, "out.data_ptr() + i * size", "kv.data_ptr() + b * size"),
        ],
        "view": [f"out = kv.view(kv.shape[0], -1)[{_index(w)}].view(-1, *kv.shape[1:])"],
        "slots": [f"out = kv[where // {w.block}, :, where % {w.block}]"],
    }[plan.copy]
    if plan.cuda:
        lines.append("out = out.cpu()")
    if plan.axis == "permuted":
        lines.append("out = out.permute(0, 2, 1, 3).contiguous()")
    lines += _alters(w)
    return "\n".join([*lines, "return out"])


def _alters(w: Writer) -> list[str]:
    if w.is_("half-zeroed"):
        return ["out = out.clone()", "out[..., out.shape[-1] // 2:] = 0"]
    if w.is_("heads-flipped"):
        return ["out = out.flip(1)"]
    return []


def _digest(w: Writer) -> str:
    """Works out from what was scheduled which units are complete with this step."""
    f = {name: w.names[f"field:{name}"] for name in ("new", "grown", "upto", "gone")}
    open_, u, per = w.attribute("open"), w.unit, w.per_unit
    name = "f'{rid}.{j}'" if w.plan.shape.what == "index" else "keys[j]"
    keys = "" if w.plan.shape.what == "index" else f"    keys = {w.names['call:keys']}(toks[:full], {u})\n"
    return f"""work = []
for rid, (toks, table, done) in meta.{f["new"]}.items():
    {open_}[rid] = [toks, list(table), done]
for rid, table in meta.{f["grown"]}.items():
    {open_}[rid][1].extend(table)
for rid, upto in meta.{f["upto"]}.items():
    toks, table, done = {open_}[rid]
    full = min(upto, len(toks)) // {u} * {u}
{keys}    for j in range(done // {u}, full // {u}):
        work.append((rid, {name}, table[j * {per}:(j + 1) * {per}]))
    {open_}[rid][2] = max(done, full)
for rid in meta.{f["gone"]}:
    {open_}.pop(rid, None)
{w.attribute("work")} = work"""


# --- loading --------------------------------------------------------------------------------------


def _begin(w: Writer) -> str:
    plan, caches = w.plan, w.attribute("caches")
    lines = []
    if plan.caches == "context":
        lines += [
            f"if not {caches}:",
            "    for name, layer in forward_context.no_compile_layers.items():",
            "        kv = getattr(layer, 'kv_cache', None)",
            "        if kv is not None:",
            f"            {caches}[name] = kv",
        ]
    if not w.loads:
        return "\n".join(lines) or "return"
    lines += ["parts = {}", f"for rid, key, where in {w.call('each_get')}(meta):"]
    lines += ["    parts.setdefault(rid, []).append((key, where))"]
    if w.is_("loads-half") and not plan.whole:
        lines += ["parts = {rid: items[:(len(items) + 1) // 2] for rid, items in parts.items()}"]
    submit = f"{w.attribute('bg')}.{w.names['call:submit']}" if needs_threads(w) else ""
    if plan.load == "sync":
        lines += ["for rid, items in parts.items():", f"    {w.call('pull')}(rid, items)"]
    elif plan.load == "async":
        lines += ["for rid, items in parts.items():", f"    {submit}({w.call('pull')}, rid, items)"]
        if w.is_("load-told-early"):
            lines += [f"    {w.attribute('got')}.add(rid)"]
    elif plan.load == "threaded":
        lines += [
            "items = [item for part in parts.values() for item in part]",
            "if items:",
            f"    {w.attribute('pending')} = {{layer: threading.Event() for layer in {caches}}}",
            f"    for layer in {caches}:",
            f"        {submit}({w.call('pull_one')}, layer, items)",
        ]
    else:
        lines += [f"{w.attribute('pending')} = parts"]
        if plan.record == "stack":
            lines += [f"{w.attribute('fetched')} = {{}}"]
    return "\n".join(lines)


def _layer_in(w: Writer) -> str:
    plan, pending = w.plan, w.attribute("pending")
    if plan.load == "threaded":
        if w.is_("load-too-late"):
            return "return"
        return f"event = {pending}.get(layer_name)\nif event is not None:\n    event.wait()"
    if plan.load == "layerwise":
        body = _pull_body(w, "layer_name", f"{w.attribute('caches')}[layer_name]")
        lines = [f"for rid, items in {pending}.items():", "    for key, where in items:"]
        return "\n".join([*lines, *("        " + line for line in body)])
    return "return"


def _fetch(w: Writer) -> str:
    """The tensor of one layer, or None."""
    get = f"{w.attribute('store')}.{w.names['call:get']}"
    order = w.attribute("order")
    layer = "layer"
    if w.is_("load-wrong-layer"):
        layer = f"{order}[({order}.index(layer) + 1) % len({order})]"
    if w.plan.record == "layer":
        return f"return {get}({w.call('rec')}(key, {layer}))"
    take = f"value.reshape(len({order}), -1)[{order}.index(layer)]"
    name = f"{w.call('rec')}(key, '')"
    if w.plan.load == "layerwise":
        fetched = w.attribute("fetched")
        head = f"if key not in {fetched}:\n    {fetched}[key] = {get}({name})\nvalue = {fetched}[key]"
    else:
        head = f"value = {get}({name})"
    return f"{head}\nreturn None if value is None else {take}"


def _pull_body(w: Writer, layer: str, kv: str) -> list[str]:
    """Loads one entry of one layer."""
    bad = f"{w.attribute('bad')}.update({_blocks_of(w)})"
    body = [f"tensor = self._fetch(key, {layer})", "if tensor is None:", f"    {bad}"]
    if w.is_("overclaims"):
        body = [f"tensor = self._fetch(key, {layer})", "if tensor is None:", "    pass"]
    body += ["else:", f"    {w.call('give')}({kv}, where, tensor)"]
    if w.is_("load-fails"):
        return ["try:", *("    " + line for line in body), "except OSError as error:", f"    {bad}"]
    if w.is_("load-error-swallowed"):
        react = ("self._errors += 1", "log.debug('load failed', exc_info=True)", "pass")[w.plan.variant % 3]
        return ["try:", *("    " + line for line in body), "except Exception:", f"    {react}"]
    return body


def _blocks_of(w: Writer) -> str:
    return f"set((where // {w.block}).tolist())" if w.plan.shape.slots else "where"


def _pull(w: Writer) -> str:
    loop = [f"for layer, kv in {w.attribute('caches')}.items():"]
    if w.is_("loads-some-layers"):
        loop += [
            f"    if {w.attribute('order')}.index(layer) == {1 + w.plan.variant % 3}:",
            "        continue",
        ]
    loop += ["    for key, where in items:", *("        " + line for line in _pull_body(w, "layer", "kv"))]
    lines = ["with torch.inference_mode():", *("    " + line for line in loop)]
    if w.is_("load-told-early"):
        return "\n".join(["time.sleep(0.3)", *lines])
    if w.plan.load == "async":
        lines += [f"with {w.attribute('lock')}:", f"    {w.attribute('got')}.add(rid)"]
    return "\n".join(lines)


def _pull_one(w: Writer) -> str:
    kv = f"{w.attribute('caches')}[layer]"
    body = ["for key, where in items:", *("    " + line for line in _pull_body(w, "layer", kv))]
    if w.is_("loads-some-layers"):
        body = [
            f"if {w.attribute('order')}.index(layer) != {1 + w.plan.variant % 3}:",
            *("    " + b for b in body),
        ]
    late = ["time.sleep(0.4)"] if w.is_("load-too-late") else []
    return "\n".join(
        [
            *late,
            "try:",
            "    with torch.inference_mode():",
            *("        " + line for line in body),
            "finally:",
            f"    {w.attribute('pending')}[layer].set()",
        ]
    )


def _give(w: Writer) -> str:
    plan, lines = w.plan, [_AS_BLOCKS] if w.plan.cuda else []
    lines.append(
        {
            "plain": "tensor = tensor.reshape(-1, *kv.shape[1:])",
            "permuted": "heads, tokens, width = kv.shape[1:]\n"
            "tensor = tensor.reshape(-1, tokens, heads, width).permute(0, 2, 1, 3)",
            "slots": "tensor = tensor.reshape(-1, kv.shape[1], kv.shape[3])",
        }[plan.axis]
    )
    if w.is_("load-repeats-block"):
        lines.append("tensor = tensor[:1].expand(len(where), *tensor.shape[1:])")
    if w.is_("loads-half") and plan.whole:
        lines.append("half = (len(where) + 1) // 2\nwhere, tensor = where[:half], tensor[:half]")
    index = _index(w)
    numpy = "kv.numpy()[np.array(where, dtype=np.int64)] = tensor.numpy()"
    if plan.cuda:
        lines.append("tensor = tensor.to(kv.device)")
        numpy = f"kv[{index}] = tensor"
    if w.is_("into-a-copy"):
        return "\n".join([*lines, f"kv[{index}].copy_(tensor)"])
    lines += {
        "index-put": [f"kv[{index}] = tensor"],
        "index-copy": [f"kv.index_copy_(0, {index}, tensor)"],
        "per-block": ["for b, piece in zip(where, tensor):", "    kv[b].copy_(piece)"],
        "numpy": [numpy],
        "address": [
            "tensor = tensor.contiguous()",
            "size = kv.stride(0) * kv.element_size()",
            "for i, b in enumerate(where):",
            _by_address(w, "kv.data_ptr() + b * size", "tensor.data_ptr() + i * size"),
        ],
        "scatter": [f"kv[where // {w.block}, :, where % {w.block}] = tensor"],
    }[plan.give]
    return "\n".join(lines)


# --- completion -----------------------------------------------------------------------------------


def _report(w: Writer) -> str:
    plan, lines = w.plan, []
    done, got, lock = w.attribute("done"), w.attribute("got"), w.attribute("lock")
    if w.saves and plan.place == "deferred":
        lines += _report_deferred(w)
    lines += [f"with {lock}:", f"    sent, {done} = {done}, set()", f"    received, {got} = {got}, set()"]
    if w.is_("never-told"):
        lines += ["sent = set()"]
    if w.is_("receive-never-told"):
        lines += ["received = set()"]
    return "\n".join([*lines, "return sent or None, received or None"])


def _report_deferred(w: Writer) -> list[str]:
    tick, backlog = w.attribute("tick"), w.attribute("backlog")
    ended, seen, done = w.attribute("ended"), w.attribute("seen"), w.attribute("done")
    lag = 1 + w.plan.variant % 2
    if w.is_("late-read"):
        lag = w.plan.rounds[0].max_tokens + 1
    lines = [
        f"{tick} += 1",
        f"due = [entry for entry in {backlog} if entry[0] + {lag} < {tick}]",
        f"{backlog} = [entry for entry in {backlog} if entry[0] + {lag} >= {tick}]",
        "for _, rid, key, where in due:",
        "    self._save_all(key, where)",
    ]
    if w.is_("late-read"):
        return lines
    return [
        *lines,
        f"{ended} |= {{rid for rid in finished_req_ids if rid in {seen}}}",
        f"late = {{entry[1] for entry in {backlog}}}",
        f"for rid in {ended} - late:",
        f"    {done}.add(rid)",
        f"    {seen}.discard(rid)",
        f"{ended} &= late",
    ]


def _take_bad(w: Writer) -> str:
    bad = w.attribute("bad")
    return f"bad, {bad} = {bad}, set()\nreturn bad"
