"""The scheduler's side of a generated connector, as source."""

from __future__ import annotations

from kvgen.common import TOKEN_BYTES, Method, Writer

OPT_OUT = "no_store"
"""What a request says in its kv_transfer_params that is not to be stored."""


def state_class(w: Writer) -> str:
    return f"""

class {w.names["class:state"]}:
    def __init__(self, toks, table, done, plen, req=None):
        self.toks = toks
        self.table = table
        self.done = done
        self.plen = plen
        self.req = req
        self.sent = False
"""


def init(w: Writer) -> str:
    """Lines of the constructor, after those that both sides have."""
    lines = [f"{w.attribute(name)} = {{}}" for name in ("open", "due", "hits", "requests")]
    lines += [
        f"{w.attribute('known')} = set()",
        f"{w.attribute('ship')} = []",
        f"{w.attribute('busy')} = set()",
    ]
    if w.plan.defer:
        lines.append(f"{w.attribute('asked')} = set()")
    if w.asks:
        lines.append(f"{w.attribute('store')} = {w.names['class:store']}(place)")
    limit = f"int(extra['{w.words['limit']}'])"
    if w.is_("quota"):
        if w.plan.variant % 4 == 2:
            limit += f" // ({w.unit} * {TOKEN_BYTES})"
        lines.append(f"self._prompts_left = {limit}" if w.plan.variant % 2 else f"self._left = {limit}")
        lines.append("self._let_in = set()")
    if w.is_("head-only", "end-left-out"):
        lines.append(f"self._cut = {limit}")
    if w.is_("second-use"):
        lines.append("self._once = set()")
    if w.is_("remainder-never-offered"):
        lines.append("self._partly = set()")
    if w.is_("one-load"):
        lines.append("self._loads_one = False")
    if w.is_("never-offered"):
        lines.append("self._wanted = set()" if w.plan.variant % 2 else "self._mode = 'auto'")
    return "\n".join(lines)


def methods(w: Writer) -> list[Method]:
    """All methods of the side; the first five are what vLLM calls."""
    out = [
        Method(w.names["call:lookup"], "request, num_computed_tokens", _lookup(w)),
        Method(w.names["call:admit"], "request, blocks, num_external_tokens", _admit(w)),
        Method(w.names["call:compose"], "scheduler_output", _compose(w)),
        Method(w.names["call:release"], "request, block_ids", _release(w)),
    ]
    if w.saves:
        if w.plan.decide != "finish" and w.plan.shape.form != "deltas":
            out.append(Method(w.names["call:offer"], "meta, rid, st, upto", _offer(w)))
        if w.plan.shape.form != "deltas":
            arguments = "meta, rid, toks, keys, table, lo, hi"
            out.append(Method(w.names["call:add_put"], arguments, _add_put(w)))
    if w.loads:
        out.append(
            Method(w.names["call:add_get"], "meta, rid, toks, keys, table, lo, hi", w.shape.add("get"))
        )
    out.append(Method(w.names["call:keys_of"], "toks, req", _keys_of(w)))
    if w.asks or w.plan.dedupe != "none" or w.loads:
        out.append(Method(w.names["call:has"] + "_key", "key", _has_key(w)))
    return out


def _has(w: Writer, key: str, lookup: bool) -> str:
    """Whether a record is there, as an expression."""
    way = w.plan.lookup if lookup else w.plan.dedupe
    if way == "index":
        return f"{key} in {w.attribute('known')}"
    return f"{w.call('has')}_key({key})"


def _has_key(w: Writer) -> str:
    if not w.asks:
        return f"return key in {w.attribute('known')}"
    probe = f"{w.attribute('store')}.{w.names['call:has']}"
    if w.plan.record == "stack":
        return f"return {probe}({w.call('rec')}(key, ''))"
    return f"return all({probe}({w.call('rec')}(key, layer)) for layer in {w.attribute('order')})"


def _keys_of(w: Writer) -> str:
    if not w.needs_keys:
        return "return ()"
    if w.plan.keys.chain == "vllm":
        every = f"{w.per_unit} - 1:len(toks) // {w.block}:{w.per_unit}"
        return f"names = [h.hex() for h in req.block_hashes]\nreturn names[{every}]"
    return f"return {w.names['call:keys']}(toks, {w.unit})"


def _lookup(w: Writer) -> str:
    if not w.loads:
        return "return 0, False"
    u, plan = w.unit, w.plan
    barred = "if self._writes_only:\n    return 0, False\n" if w.is_("writes-only") else ""
    toks = "list(request.prompt_token_ids)"
    if w.is_("lookup-off-by-one") and plan.variant % 2:
        toks = "list(request.prompt_token_ids)[1:]"
    keys = f"{w.call('keys_of')}(toks, request)"
    if w.is_("lookup-off-by-one") and not plan.variant % 2:
        keys = f"[f'{{k}}:{{len(toks)}}' for k in {keys}]"
    lines = [f"toks = {toks}", f"keys = {keys}"]
    if plan.defer:
        asked = w.attribute("asked")
        lines = [
            f"if request.request_id not in {asked}:",
            f"    {asked}.add(request.request_id)",
            "    return None, False",
            *lines,
        ]
    if w.is_("lookup-claims"):
        lines.append(f"{w.attribute('known')}.update(keys)")
    if plan.family == "prefix":
        lines += [
            f"n = (len(request.prompt_token_ids) - 1) // {u} * {u}",
            f"n = min(n, len(keys) * {u})",
            f"while n > num_computed_tokens and not {_paren(_has(w, f'keys[n // {u} - 1]', True))}:",
            f"    n -= {u}",
        ]
    elif w.is_("overclaims"):
        lines += [f"n = len(keys) * {u} if keys and {_has(w, 'keys[0]', True)} else 0"]
    else:
        lines += ["n = 0", "for key in keys:", f"    if not {_paren(_has(w, 'key', True))}:", "        break"]
        lines += [f"    n += {u}", "    break" if w.is_("finds-one-unit") else ""]
    lines += [
        f"while n >= request.num_prompt_tokens:\n    n -= {u}" if plan.family != "prefix" else "",
        "if n <= num_computed_tokens:",
        "    return 0, False",
        *(
            ["if self._loads_one:", "    return 0, False", "self._loads_one = True"]
            if w.is_("one-load")
            else []
        ),
        f"{w.attribute('hits')}[request.request_id] = num_computed_tokens",
        f"return n - num_computed_tokens, {plan.load == 'async'}",
    ]
    return barred + "\n".join(line for line in lines if line)


def _paren(expression: str) -> str:
    return f"({expression})" if " in " in expression else expression


def _admit(w: Writer) -> str:
    lines = [f"{w.attribute('requests')}[request.request_id] = request"]
    if w.loads:
        lines += [
            f"local = {w.attribute('hits')}.pop(request.request_id, 0)",
            "if num_external_tokens > 0:",
            *(["    self._partly.add(request.request_id)"] if w.is_("remainder-never-offered") else []),
            f"    {w.attribute('due')}[request.request_id] = (",
            "        list(request.prompt_token_ids), list(blocks.get_block_ids()[0]),",
            "        local, local + num_external_tokens, request)",
        ]
    return "\n".join(lines)


def _compose(w: Writer) -> str:
    lines = [f"meta = {w.shape.create()}"]
    lines += [f"meta.{name} = {value}" for name, _, value in w.shape.step_noise()]
    if w.loads:
        low = f"lo // {w.unit} * {w.unit}"
        lines += [
            f"for rid, (toks, table, lo, hi, req) in {w.attribute('due')}.items():",
            f"    keys = {w.call('keys_of')}(toks[:hi], req)",
            f"    {w.call('add_get')}(meta, rid, toks[:hi], keys, table, {low}, hi)",
            f"{w.attribute('due')}.clear()",
            *(["self._loads_one = False"] if w.is_("one-load") else []),
        ]
    if w.saves:
        lines += _compose_stores(w)
    return "\n".join([*lines, "return meta"])


def _compose_stores(w: Writer) -> list[str]:
    plan = w.plan
    if plan.decide == "finish":
        return [
            f"for rid, toks, keys, table, hi in {w.attribute('ship')}:",
            f"    {w.call('add_put')}(meta, rid, toks, keys, table, 0, hi)",
            *(f"    {line}" for line in _shipped_known(w)),
            f"{w.attribute('ship')}.clear()",
        ]
    if plan.shape.form == "deltas":
        return _compose_deltas(w)
    if w.is_("one-per-step"):
        return ["self._one = False", *_tracker(w)]
    return _tracker(w)


def _start(w: Writer, computed: str) -> str:
    """From which token on a request is offered."""
    if w.plan.start == "zero":
        return "0"
    return f"{computed} // {w.unit} * {w.unit}"


def _tracker(w: Writer) -> list[str]:
    state, open_, offer = w.names["class:state"], w.attribute("open"), w.call("offer")
    requests, tracker = w.attribute("requests"), w.plan.tracker
    scheduled = "scheduler_output.num_scheduled_tokens"
    first_only = w.is_("first-step-only", "first-chunk")
    gone = [f"for rid in scheduler_output.finished_req_ids:\n    {open_}.pop(rid, None)"]
    if tracker in ("manager", "blockstate"):
        table = {
            "manager": f"{_manager(w)}.get_block_ids(rid)[0]",
            "blockstate": "scheduler_output.kv_connector_block_state.get_block_ids(rid)[0]",
        }[tracker]
        only = ["    if rid in open_before:", "        continue"] if first_only else []
        before = [f"open_before = set({open_})"] if first_only else []
        return [
            *before,
            f"for rid, count in {scheduled}.items():",
            *only,
            f"    req = {requests}[rid]",
            f"    st = {open_}.get(rid)",
            "    if st is None:",
            f"        st = {open_}[rid] = {state}(None, None, {_start(w, 'req.num_computed_tokens')}, "
            "req.num_prompt_tokens, req)",
            f"    st.table = list({table})",
            f"    {offer}(meta, rid, st, req.num_computed_tokens + count)",
            *gone,
        ]
    req = f"{requests}.get(new.req_id)" if tracker == "requests" else "None"
    if w.plan.keys.chain == "vllm":
        req = f"{requests}[new.req_id]"
    start = _start(w, "new.num_computed_tokens")
    lines = [
        "for new in scheduler_output.scheduled_new_reqs:",
        f"    st = {open_}[new.req_id] = {state}(",
        f"        list(new.prompt_token_ids), list(new.block_ids[0]), {start},",
        f"        len(new.prompt_token_ids), {req})",
        f"    {offer}(meta, new.req_id, st, new.num_computed_tokens + {scheduled}[new.req_id])",
    ]
    if tracker == "first-step" or first_only:
        return lines + gone
    back = [
        "    if rid in cached.resumed_req_ids:",
        "        st.table = list(fresh[0])",
        "    elif fresh is not None:",
    ]
    if w.is_("table-appended"):
        back = ["    if fresh is not None:"]
    return [
        *lines,
        "cached = scheduler_output.scheduled_cached_reqs",
        "for i, rid in enumerate(cached.req_ids):",
        f"    st = {open_}[rid]",
        "    fresh = cached.new_block_ids[i]",
        *back,
        "        st.table.extend(fresh[0])",
        f"    {offer}(meta, rid, st, cached.num_computed_tokens[i] + {scheduled}[rid])",
        *gone,
    ]


def _manager(w: Writer) -> str:
    return "self._kv_cache_manager" if w.plan.structure == "flat" else "self.manager"


def _compose_deltas(w: Writer) -> list[str]:
    f = {name: w.names[f"field:{name}"] for name in ("new", "grown", "upto", "gone")}
    scheduled = "scheduler_output.num_scheduled_tokens"
    return [
        "for new in scheduler_output.scheduled_new_reqs:",
        f"    meta.{f['new']}[new.req_id] = (list(new.prompt_token_ids), list(new.block_ids[0]), "
        f"{_start(w, 'new.num_computed_tokens')})",
        f"    meta.{f['upto']}[new.req_id] = new.num_computed_tokens + {scheduled}[new.req_id]",
        "cached = scheduler_output.scheduled_cached_reqs",
        "for i, rid in enumerate(cached.req_ids):",
        "    if cached.new_block_ids[i] is not None:",
        f"        meta.{f['grown']}[rid] = list(cached.new_block_ids[i][0])",
        f"    meta.{f['upto']}[rid] = cached.num_computed_tokens[i] + {scheduled}[rid]",
        f"meta.{f['gone']}.extend(scheduler_output.finished_req_ids)",
    ]


def _tokens(w: Writer) -> str:
    return "st.toks" if w.plan.tracker in ("table", "first-step") else "list(st.req.all_token_ids)"


def _guards(w: Writer) -> list[str]:
    """What keeps an entry from being offered, where a fault or a setting says so."""
    lines = []
    if w.is_("misspelt-switch", "disables-itself"):
        lines += [f"if not {w.attribute('enabled')}:", "    return"]
    if w.is_("role-consumer", "reads-only") and not w.worker_leaves_stores:
        lines += ["if self._reads_only:", "    return"]
    if w.is_("remainder-never-offered"):
        lines += ["if rid in self._partly:", "    return"]
    if w.is_("opt-out"):
        live = f"getattr({w.attribute('requests')}.get(rid), 'kv_transfer_params', None)"
        lines += [f"if ({live} or {{}}).get('{OPT_OUT}'):", "    return"]
    if w.is_("quota") and w.plan.variant % 2:
        lines += [
            "if rid not in self._let_in:",
            "    if len(self._let_in) >= self._prompts_left:",
            "        return",
            "    self._let_in.add(rid)",
        ]
    if w.is_("never-offered"):
        test = "rid not in self._wanted" if w.plan.variant % 2 else "self._mode not in ('write', 'both')"
        lines += [f"if {test}:", "    return"]
    if w.is_("minimum-length"):
        lines += ["if st.plen < self._minimum:", "    return"]
    if w.is_("sent-flag"):
        lines += ["if st.sent:", "    return"]
    return lines


def _offer(w: Writer) -> str:
    u, plan, known = w.unit, w.plan, w.attribute("known")
    limit = "upto" if plan.decode else "min(upto, st.plen)"
    lines = [*_guards(w), f"full = {limit} // {u} * {u}"]
    if plan.family == "request-exact":
        lines = [*_guards(w), f"full = {limit}"]
    if w.is_("head-only"):
        lines += [f"full = min(full, self._cut * {u})"]
    if w.is_("end-left-out"):
        lines += [f"full = min(full, max(0, st.plen // {u} - self._cut) * {u})"]
    if w.is_("rounds-up"):
        lines = [
            *_guards(w),
            f"full = min(-(-upto // {u}), st.plen // {u}, len(st.table) // {w.per_unit}) * {u}",
        ]
    if plan.decide == "prompt-end" or w.is_("empty-prefix"):
        lines += ["if upto < st.plen or st.sent:", "    return", "st.sent = True"]
    if not w.is_("empty-prefix"):
        lines += ["if full <= st.done:", "    return"]
    if w.is_("one-per-step"):
        lines += ["if self._one:", "    st.done = full", "    return"]
    lines += [f"toks = {_tokens(w)}[:full]", f"keys = {w.call('keys_of')}(toks, st.req)"]
    table = "st.table"
    if w.is_("wrong-blocks"):
        table = "list(range(len(st.table)))"
    if w.is_("next-block"):
        table = "[b + 1 for b in st.table]"
    put = f"{w.call('add_put')}(meta, rid, toks, keys, {table}, "
    each = plan.dedupe != "none" and plan.family == "units" and plan.shape.form != "combined"
    if w.is_("second-use"):
        lines += [
            f"for at in range(st.done // {u}, full // {u}):",
            "    if keys[at] in self._once:",
            f"        {put}at * {u}, (at + 1) * {u})",
            "    self._once.add(keys[at])",
        ]
    elif plan.whole:
        lines += _offer_whole(w, put)
    elif plan.dedupe == "none":
        lines += [put + "st.done, full)"]
    elif each and (plan.variant % 2 or w.is_("key-without-parent")):
        lines += [
            f"for at in range(st.done // {u}, full // {u}):",
            f"    if not {_paren(_has(w, 'keys[at]', False))}:",
            f"        {put}at * {u}, (at + 1) * {u})",
        ]
    else:
        lines += [
            "lo = st.done",
            f"while lo < full and {_paren(_has(w, f'keys[lo // {u}]', False))}:",
            f"    lo += {u}",
            "if lo < full:",
            f"    {put}lo, full)",
        ]
    if "index" in (plan.dedupe, plan.lookup) and w.needs_keys and not w.is_("index-never-filled"):
        if not plan.whole:
            lines += [f"{known}.update(keys)"]
        else:
            lines += [f"{known}.add(keys[-1] if keys else '')"]
    lines += [f"st.done = -(-upto // {u}) * {u}" if w.is_("straddling-left-out") else "st.done = full"]
    if w.is_("sent-flag"):
        lines += ["st.sent = True"]
    if w.is_("one-per-step"):
        lines += ["self._one = True"]
    return "\n".join(lines)


def _offer_whole(w: Writer, put: str) -> list[str]:
    if w.plan.dedupe == "none":
        return [put + "0, full)"]
    key = f"keys[-1] if keys else {w.names['call:keys']}_of_nothing()"
    if w.plan.dedupe == "index":
        return [
            f"if ({'keys[-1] if keys else ' + repr('')}) not in {w.attribute('known')}:",
            f"    {put}0, full)",
        ]
    return [f"if not {_has(w, key, False)}:", f"    {put}0, full)"]


def _add_put(w: Writer) -> str:
    body = w.shape.add("put")
    if w.is_("quota") and not w.plan.variant % 2:
        u = w.unit
        cut = f"hi = min(hi, lo + self._left * {u})\nif hi <= lo:\n    return\n"
        body = cut + f"self._left -= (hi - lo) // {u}\n" + body
    return f"{w.attribute('busy')}.add(rid)\n{body}"


def _release(w: Writer) -> str:
    u, plan = w.unit, w.plan
    lines = [f"{w.attribute('requests')}.pop(request.request_id, None)"]
    if not w.saves:
        return "\n".join([*lines, "return False, None"])
    busy = w.attribute("busy")
    if w.is_("cleans-up"):
        drop = f"{w.attribute('store')}.{w.names['call:drop']}"
        record = f"{w.call('rec')}(key, layer)"
        loop = [f"    for layer in {w.attribute('order')}:", f"        {drop}({record})"]
        if plan.record == "stack":
            loop = [f"    {drop}({w.call('rec')}(key, ''))"]
        keys = f"{w.call('keys_of')}(list(request.prompt_token_ids), request)"
        lines += [f"for key in {keys}:", *_guarded_drop(w, loop)]
    if plan.decide == "finish":
        limit = "request.num_computed_tokens"
        limit = limit if plan.decode else f"min({limit}, request.num_prompt_tokens)"
        lines += [
            f"hi = {limit}" if plan.family == "request-exact" else f"hi = {limit} // {u} * {u}",
            "if not hi:",
            "    return False, None",
            "toks = list(request.all_token_ids)[:hi]",
            f"keys = {w.call('keys_of')}(toks, request)",
            *_release_known(w),
            f"{w.attribute('ship')}.append((request.request_id, toks, keys, list(block_ids), hi))",
            "return True, None",
        ]
    elif plan.place == "deferred" and not w.is_("late-read"):
        lines += [
            f"held = request.request_id in {busy}",
            f"{busy}.discard(request.request_id)",
            "return held, None",
        ]
    else:
        lines += [f"{busy}.discard(request.request_id)", "return False, None"]
    return "\n".join(lines)


def _guarded_drop(w: Writer, loop: list[str]) -> list[str]:
    """Deleting what another request deleted already must not raise."""
    return [f"    if not {w.call('has')}_key(key):", "        continue", *loop]


def _release_known(w: Writer) -> list[str]:
    """A finished request whose records are all there is not shipped again."""
    if not w.needs_keys or w.plan.dedupe == "none":
        return []
    every = f"all({_paren(_has(w, 'k', False))} for k in keys)"
    return [f"if {_has(w, 'keys[-1]', False) if w.plan.whole else every}:", "    return False, None"]


def _shipped_known(w: Writer) -> list[str]:
    """Known from the step on that stores it: before, a lookup would promise what is not there."""
    plan, known = w.plan, w.attribute("known")
    if not w.needs_keys or "index" not in (plan.dedupe, plan.lookup) or w.is_("index-never-filled"):
        return []
    return [f"{known}.add(keys[-1])" if plan.whole else f"{known}.update(keys)"]
