"""Words that authors of connectors use, for classes, fields, methods, files and settings."""

from __future__ import annotations

import random

# One concept, many words. A run draws one of each; what is drawn once is not drawn again.
CLASSES = {
    "connector": (
        "Depot Ferry Courier Lighthouse Harbor Granary Quarry Stash Vault Relay Bridge Switchyard "
        "Larder Hopper Reservoir Annex Silo Cistern Attic Pantry Archive Mirror Conveyor Turnstile "
        "Kiln Beacon Cellar TieredKV RemoteKV DiskTier KVSpill PrefixPool ShadowCache ColdTier "
        "PageShip KVMover SwapTier"
    ),
    "meta": (
        "StepPlan Manifest Itinerary Docket Worklist Bill Agenda Orders Roster Slate Batch Envelope "
        "Briefing TransferMeta StepInfo Schedule Program Bulletin Packet Queue Ledger Round"
    ),
    "entry": (
        "Job Parcel Ticket Slip Order Leg Errand Move Xfer Span Piece Stub Voucher Row Line Item "
        "Lot Crate Hop ReqMeta BlockOp Chore Card Cut Tile"
    ),
    "step": "Phase Lane Half Side Part Board Tray Section Column Bay",
    "state": "Progress Track Cursor Tally Watermark Account Sheet Trail Bookmark Dossier Chart",
    "store": (
        "Shelf Warehouse Locker Rack Drawer Bucket Backend Medium Chest Basket Tank Bank Dock Coop Tier Repo"
    ),
    "bg": "Runner Crew Pump Porter Drain Feeder Spooler Belt Worker Writer Motor Lift Gang Engine",
    "dict": "SHARED POOL CONTENTS HELD PILE CACHE_OF_ALL STASHED",
    "front": ("Planner Dispatcher Clerk Steward Registrar Broker SchedulerSide Controller Office Brain Desk"),
    "back": (
        "Mover Hauler Carrier Loader WorkerSide Hands Transport Operator Muscle Floor Stevedore Executor"
    ),
    "mixin": "Common Plumbing Shared Basics Options Base Core Kit",
}
FIELDS = {
    "puts": (
        "puts stores saves writes outgoing uploads pushes egress spills deposits ship_out to_write "
        "offloads exports sends stashed commits persists"
    ),
    "gets": (
        "gets loads reads incoming fetches downloads pulls ingress fills withdrawals bring_in "
        "to_read restores imports receives recalls warmups"
    ),
    "flag": "is_store save outgoing writing upload store persist dump put export",
    "mode": "op kind mode direction action verb opcode what",
    "groups": "groups lanes by_group kv_groups sections classes tiers",
    "payload": "payload body data content info work plan state bag",
    "step": "step now batch current turn frame",
    "by_request": "by_request per_req requests table_of_work reqs sessions",
    "rid": "req_id request_id rid owner who session ticket uid order_no job_id seq_id name",
    "key": "key digest tag label hash_ slug handle address cid fingerprint etag locator ident",
    "tokens": "token_ids toks prompt prefix words ids ink content_ids seq prompt_ids",
    "table": "table block_table map_ layout ids_all grid physical cells_all page_table",
    "blocks": (
        "blocks block_ids pages frames cells berths trays tiles bins planks gpu_blocks ids locs seats bricks"
    ),
    "slots": "slots slot_mapping positions offsets places spots rows indices cells_flat",
    "lo": "start lo first begin frm head low since",
    "hi": "end hi last stop to tail high until",
    "span": "span rng extent window stretch reach",
    "index": "idx index nth ordinal part number seqno chunk_no",
    "skip": "skip skip_leading already done_before offset base",
    "flat": "flat all_blocks vec ids_flat pile column",
    "counts": "counts sizes lens widths cu splits",
    "blob": "blob raw wire packed message frozen letter",
    "new": "admitted fresh opened joined added",
    "grown": "grown extended more appended extra",
    "upto": "upto frontier reached progress watermark computed",
    "total": "num_tokens n_tok prompt_len length total seq_len",
    "layer_ids": "layer_ids layers_wanted which_layers strata",
    "stamp": "created_at stamp t0 at_time queued",
    "attempt": "attempt retry generation tries lap",
    "final": "is_last final complete last_chunk done_after",
    "group": "group kv_group group_id family lane_no",
    "model": "model engine_name family_name tenant realm",
    "rank": "rank tp pair shard topology",
    "hashes": "block_hashes hashes hash_chain fingerprints page_keys",
    "finished": "finished over done_ids finalize ended_reqs goodbye",
    "running": "running alive unfinished present members crew_ids",
    "scheduled": "scheduled shares portions per_request quota",
    "budget": "budget total_scheduled load_factor step_size",
    "version": "version schema_no proto rev",
    "gone": "gone closed left dropped ended_ids",
}
ATTRIBUTES = {
    "errors": "_errors misses n_failed trouble _bad_count",
    "asked": "_asked deferred_once thinking _seen_before",
    "open": "_open _tracks _live _states _active tracked cursors _by_id accounts",
    "due": "_due _want _to_load pending_loads _inbound _awaiting promised",
    "hits": "_hits _matched _found matches _len_hit lookups",
    "known": "_known _index _present seen_keys _have catalog inventory",
    "requests": "_requests _reqs live_requests _by_request handles",
    "ship": "_ship _leaving outbox to_flush _departures finished_work",
    "busy": "_busy _held kept holding _pinned inflight",
    "caches": "_caches kv_caches layers _kv tensors gpu_cache _pools",
    "store": "_store backend shelf storage _medium tier sink _be",
    "bg": "_bg runner crew pool_ _worker executor belt pump",
    "buffer": "_buffer staged _gathered pile_up holding_area _parts draft",
    "backlog": "_backlog later deferred waiting_line _todo debts",
    "ended": "_ended over _closing finished_here _fin",
    "seen": "_seen touched _ever participants",
    "got": "_got arrived landed _recv_done received",
    "done": "_done sent _send_done shipped flushed",
    "lock": "_lock mutex guard_ _mu latch",
    "bad": "_bad failed_blocks _invalid broken errors_at",
    "work": "_work now_ this_step _current items_ todo_now",
    "plan": "_plan active_meta _bound step_meta _msg orders_",
    "staging": "_staging scratch bounce pinned _area workspace",
    "fetched": "_fetched unpacked _cache_of_step hot _ready",
    "pending": "_pending in_air tickets_ _futs outstanding",
    "tick": "_tick epoch step_no clock _n",
    "enabled": "_enabled active on_ _armed live_ operational",
    "order": "_order layer_order names_ _layer_ids rank_of_layer",
    "front": "front planner sched _s scheduler_side brain office",
    "back": "back mover work_side _w worker_side hands floor_",
    "tables": "_tables tables_ rows_of block_tables _maps",
    "lookahead": "_stats counters meter numbers",
}
METHODS = {
    "fetch": "_fetch layer_of _tensor_for unpack_layer obtain _value",
    "put_one": "_put_one write_out _store_record deposit_one push_record _persist_one",
    "save_all": "_save_all save_layers all_layers_out _every_layer spill",
    "step_saves": "_step_saves save_step run_stores do_saves flush_now",
    "take_and_put": "_take_and_put copy_and_write _grab_put move_out offload_one",
    "take_bad": "take_bad errors_so_far failed bad_blocks pop_errors",
    "digest": "digest absorb hear update_tables take_news",
    "pack": "_packed to_bytes encode_tensor freeze serialise",
    "unpack": "_floats from_bytes decode_tensor thaw deserialise",
    "add_put": "note_store add_save offer_out schedule_put book_out _plan_store enlist_write queue_up",
    "add_get": "note_load add_load offer_in schedule_get book_in _plan_load enlist_read call_back",
    "each_put": "_stores _each_put walk_out outgoing_items iter_saves _to_write",
    "each_get": "_loads _each_get walk_in incoming_items iter_loads _to_read",
    "grab": "_grab gather_pages copy_out take read_blocks _extract lift slice_kv",
    "give": "_give scatter_pages copy_in put_back write_blocks _inject drop_in fill_kv",
    "rec": "_rec name_of path_for record_id _slot_name address_of locate",
    "send": "_send hand_over dispatch commit emit _enqueue forward_to",
    "offer": "_offer advance consider progress_to roll _maybe_store extend_to",
    "finish": "_finish_one ship_request complete flush_request _drain_one",
    "pull": "_pull bring restore_one fetch_all _load_items hydrate",
    "pull_one": "_pull_one bring_layer restore_layer _load_layer",
    "keys": "unit_keys digests make_keys chain fingerprints hash_prefix labels_for key_series",
    "keys_of": "_keys_of names_for keys_for identify tags_of",
    "put": "put save write store push set_ add deposit insert",
    "get": "get load read fetch pull recall withdraw open_",
    "has": "has exists contains __contains__ probe have stat check is_there",
    "drop": "drop delete remove evict unlink_ forget",
    "close": "close shutdown stop finish end",
    "submit": "submit post start run_later enqueue give_to",
    "wait": "wait join flush settle barrier drain",
    "lookup": "match lookup find_prefix count_hits probe_prefix",
    "admit": "admit allocated on_alloc note_blocks reserve",
    "compose": "compose build make_plan assemble prepare",
    "release": "release finished on_finish wind_up farewell",
    "begin": "begin load_step start_step arrive open_step",
    "layer_in": "layer_in before_layer await_layer ensure",
    "layer_out": "layer_out after_layer save_layer take_layer",
    "end": "end_step close_step finish_step flush_step",
    "report": "report harvest collect poll",
}
FILES = (
    "tiering spillway kvship offloader prefix_store pagemover coldkv kvdepot shadow "
    "remote_pages kvio swapline warehouse kvbridge layerpost blockferry kvstash pageline "
    "prefixbank kvlocker outpost"
)
SUFFIXES = ("", "", "", "Connector", "Connector", "V1", "KV", "Adapter", "ConnectorV1")


class Names:
    """Draws words: one for a concept, the same whenever it is asked for again, no word for two concepts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._drawn: dict[str, str] = {}
        self._used: set[str] = set()

    def __getitem__(self, concept: str) -> str:
        """The word for a concept: ``class:entry``, ``field:rid``, ``self:open``, ``call:offer``."""
        if concept not in self._drawn:
            kind, _, name = concept.partition(":")
            words = {"class": CLASSES, "field": FIELDS, "self": ATTRIBUTES, "call": METHODS}[kind][
                name
            ].split()
            free = [word for word in words if word not in self._used]  # classes and attributes share a space
            self._drawn[concept] = self._rng.choice(free or [f"{words[0]}_{len(self._used)}"])
            self._used.add(self._drawn[concept])
        return self._drawn[concept]

    def connector(self) -> str:
        return self["class:connector"] + self._rng.choice(SUFFIXES)

    def module(self) -> str:
        return self._rng.choice(FILES.split())
