"""Every cause that kvtrace knows, as data: what it means, how it shows, what to do.

Ids are stable. ``docs/causes/`` is made from this table. ``implemented`` says honestly whether a
rule looks for the cause; a cause without one is never found and never ruled out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtrace.causes.model import FAULT, LIMIT, NOTE

ALL = "0.8.5 .. 0.33.0"
SILENT_SKIP = "0.11.1 .. 0.33.0"

SAVES, LOADS = "saves", "loads"

GATES = ("wiring", "schedule", "bind", "forward", "hook", "effect", "completion")


@dataclass(frozen=True)
class Cause:
    id: str
    gate: int | None
    severity: str
    ledger: str  # saves | loads | note
    meaning: str
    seen_as: str
    remedy: str
    versions: str = ALL
    implemented: bool = False


def _c(
    ident: str,
    gate: int | None,
    severity: str,
    ledger: str,
    meaning: str,
    seen_as: str,
    remedy: str,
    *,
    rule: bool = False,
    versions: str = ALL,
) -> Cause:
    return Cause(ident, gate, severity, ledger, meaning, seen_as, remedy, versions, rule)


_CAUSES = (
    # ------------------------------------------------------------------ gate 0: wiring
    _c(
        "agent-not-loaded", 0, FAULT, "note",
        "A vLLM process of this run never loaded the agent: what happened in it is not in this report.",
        "A vLLM engine or worker process in the process tree, and no spool with its pid.",
        "Start the whole command under 'kvtrace run'; if its environment is rebuilt on the way (ssh, sudo, "
        "containers), pass KVTRACE_CONFIG, PYTHONPATH and VLLM_PLUGINS on, and install kvtrace there.",
        rule=True,
    ),
    _c(
        "no-connector-configured", 0, FAULT, SAVES,
        "The engine has no kv_transfer_config: nothing can be saved or loaded.",
        "The engine's configuration as its scheduler was made.",
        "Give the engine a connector: --kv-transfer-config "
        "'{\"kv_connector\": \"...\", \"kv_role\": \"kv_both\"}'.",
        rule=True,
    ),
    _c(
        "connector-not-created", 0, FAULT, SAVES,
        "A connector is configured, but it was not created in the scheduler or in one of the workers.",
        "The connectors that are live in each process, against the configuration.",
        "Look at the worker class and the start-up log of the process named here: an out-of-tree worker must "
        "call ensure_kv_transfer_initialized() before its KV cache is made.",
        rule=True,
    ),
    _c(
        "connector-failed-to-start", 0, FAULT, SAVES,
        "Creating the connector raised, or it refused the KV caches; the engine may have died of it under "
        "another name (\"Engine core initialization failed\").",
        "An exception at the connector's factory, its constructor or register_kv_caches.",
        "Mend what the exception says: a missing package, a constructor without kv_cache_config (three "
        "arguments from vLLM 0.21 on), an allocator or model that the connector does not support.",
        rule=True,
    ),
    _c(
        "wrong-connector-class", 0, FAULT, SAVES,
        "Another class or module than the configured one is live (a bundled copy wins, two installs).",
        "The class, module and file of the live connector in each process.",
        "Set kv_connector_module_path, and remove the copy that you do not want.",
    ),
    _c(
        "role-does-not-save", 0, LIMIT, SAVES,
        "Under this role the connector only reads: kv_consumer, or a rank that it leaves out.",
        "kv_role, and no store entry in any metadata of the run.",
        "If this engine shall save, set \"kv_role\" to \"kv_both\" or \"kv_producer\".",
        rule=True,
    ),
    _c(
        "connector-disabled-itself", 0, FAULT, SAVES,
        "The connector switched itself off at start (missing option, prefix caching off, unhealthy backend).",
        "Hooks that do nothing, with the connector's own log line or flags.",
        "Mend what its log line names.",
    ),
    _c(
        "config-key-unused", 0, FAULT, "note",
        "Extra configuration keys that the connector never read: misspelt, or of another version.",
        "Keys given in kv_connector_extra_config less keys read.",
        "Compare the keys with the connector's documentation.",
    ),
    # ---------------------------------------------------------------- gate 1: schedule
    _c(
        "below-save-granularity", 1, FAULT, SAVES,
        "The tokens do not fill the connector's unit (a block, a chunk, max_num_batched_tokens): they are "
        "rounded down to nothing (a fault where whole prompts go), or a prompt's tail is cut off (a limit).",
        "Tokens stored = floor(prompt / unit) x unit over all requests, with a unit that has a name.",
        "Make the unit smaller than the prompts, or change the connector's rounding.",
        rule=True,
    ),
    _c(
        "already-stored", 1, LIMIT, SAVES,
        "The connector holds these tokens already, so it does not store them again.",
        "No store entry, and an earlier store of the same tokens in this trace, or a hit at the lookup.",
        "Nothing to mend. Let such prompts load (kv_role kv_both, no prompt_logprobs) if they should not be "
        "computed again.",
        rule=True,
    ),
    _c(
        "false-already-stored", 1, FAULT, SAVES,
        "The connector takes prompts for stored that never were: different prompts share one key (all short "
        "prompts hash the same empty prefix).",
        "A prompt left out of the metadata after another, different one was rounded down to nothing.",
        "Do not look up or store a prompt whose rounded length is 0, and use one rounding for both; and make "
        "the unit smaller: a key of its own would still name no tokens.",
        rule=True,
    ),
    _c(
        "first-chunk-only", 1, FAULT, SAVES,
        "Chunked prefill: the connector offers the first scheduled chunk of a prompt and no later one.",
        "Prefill chunks of a request against the store entries in its steps.",
        "Offer later chunks too: in build_connector_meta, scheduled_cached_reqs of prompts still in prefill. "
        "Until then raise --max-num-batched-tokens above the longest prompt.",
        rule=True,
    ),
    _c(
        "metadata-has-no-store", 1, FAULT, SAVES,
        "The connector's scheduler side did not put these tokens into any step's metadata, and nothing that "
        "kvtrace knows explains it.",
        "Metadata that is readable, and names no slots of these positions.",
        "Look at build_connector_meta of this connector: what must be true of a request before it gets a "
        "store entry?",
        rule=True,
    ),
    _c(
        "decode-not-offered", 1, LIMIT, SAVES,
        "Tokens made in decode are not offered for saving by this connector.",
        "No store entry in this run reaches past a prompt.",
        "By design in most connectors; some have an option for it (LMCache: save_decode_cache).",
        rule=True,
    ),
    _c(
        "preempted-before-save", 1, LIMIT, SAVES,
        "The request was preempted before its tokens were saved.",
        "A preemption between the chunk and its store.",
        "Fewer sequences at once (--max-num-seqs) or more KV cache memory.",
    ),
    _c(
        "aborted-before-save", 1, LIMIT, SAVES,
        "The request was aborted before its tokens were saved.",
        "A finish with status FINISHED_ABORTED before the store.",
        "Look at the client's timeouts.",
    ),
    # -------------------------------------------------------------------- gate 2: bind
    _c(
        "metadata-not-bound", 2, FAULT, SAVES,
        "The forward ran while the connector had no metadata bound: vLLM then leaves the layer hooks out, "
        "without a word. Dummy, profile and warm-up runs are no fault and do not count.",
        "has_connector_metadata() is false at the attention op in a real step.",
        "If the connector overrides bind_connector_metadata, clear_connector_metadata or "
        "has_connector_metadata, call super() there.",
        rule=True, versions=SILENT_SKIP,
    ),
    _c(
        "metadata-cleared-early", 2, FAULT, SAVES,
        "The metadata was cleared before the draft model's forward (speculative decoding).",
        "Order of clear and of the draft layers' ops.",
        "Use a vLLM with finalize_kv_connector (0.18.1 and later).",
        versions="0.11.1 .. 0.21.0",
    ),
    # ----------------------------------------------------------------- gate 3: forward
    _c(
        "full-cudagraph-replay", 3, FAULT, SAVES,
        "The step replayed a FULL CUDA graph: no Python hook runs in it.",
        "Graph mode FULL in the step, and no op body.",
        "Set --compilation-config '{\"cudagraph_mode\": \"PIECEWISE\"}', or override "
        "requires_piecewise_for_cudagraph (from 0.17.1) in the connector.",
        rule=True,
    ),
    _c(
        "captured-not-run", 3, FAULT, SAVES,
        "A hook ran only while a graph was captured, and never again.",
        "Hook calls inside capture, none after.",
        "Set cudagraph_mode to PIECEWISE, or enforce_eager to see the difference.",
    ),
    _c(
        "direct-call-bypass", 3, FAULT, SAVES,
        "The layer calls its backend directly and not through the hooked op.",
        "use_direct_call is true for the layer, and its op never ran in a real step.",
        "Upgrade: from vLLM 0.15.0 Attention calls the hooked function also directly (MLA does not yet). On "
        "CUDA and CPU use_direct_call is false.",
        rule=True, versions="0.8.5 .. 0.14.1 (MLA: .. 0.33.0)",
    ),
    _c(
        "layer-not-hooked", 3, FAULT, SAVES,
        "The layer owns KV, but its forward passes no connector hook (custom attention, indexer, Mamba and "
        "linear attention, some fused ops).",
        "KV-owning layers less the layers whose hooks ever fired.",
        "This model needs a connector that takes the KV in wait_for_save from the registered caches.",
        rule=True,
    ),
    _c(
        "no-forward", 3, LIMIT, SAVES,
        "The step had nothing to compute, so no layer hook ran; what its metadata asked for was not stored "
        "there.",
        "A store entry in a step without tokens.",
        "Store in wait_for_save or get_finished what must also be stored without a forward.",
        rule=True,
    ),
    # -------------------------------------------------------------------- gate 4: hook
    _c(
        "connector-gone", 4, FAULT, SAVES,
        "At the op the worker had no connector any more, though one was created (disabled, shut down).",
        "has_kv_transfer_group() is false at the op.",
        "Look for a shutdown or an out-of-tree runner that disables the connector.",
        rule=True,
    ),
    _c(
        "saves-elsewhere", 4, NOTE, "note",
        "Not a fault: save_kv_layer does nothing in this connector; it saves in wait_for_save or later.",
        "The body of save_kv_layer only returns.",
        "Nothing to do.",
        rule=True,
    ),
    _c(
        "hook-raised", 4, FAULT, SAVES,
        "A connector hook raised.",
        "The exception's type, message and place.",
        "Mend the connector at the place named here.",
        rule=True,
    ),
    _c(
        "exception-swallowed", 4, FAULT, SAVES,
        "The connector raised and caught its own exception inside the hook, and went on: every hook fires, "
        "nothing is stored.",
        "Exceptions raised and handled inside the connector's frames.",
        "Mend the connector at the place named here.",
    ),
    # ------------------------------------------------------------------ gate 5: effect
    _c(
        "stored-nothing", 5, FAULT, SAVES,
        "The hook ran with a store entry and took 0 slots.",
        "Slots 0 for tokens > 0.",
        "Look at the connector's slot mapping.",
    ),
    _c(
        "slots-short", 5, FAULT, SAVES,
        "Fewer slots than tokens in one store.",
        "Slots < tokens in one store entry.",
        "Look at the connector's slot mapping.",
    ),
    _c(
        "save-lost", 5, FAULT, SAVES,
        "Handed over, then overwritten or dropped inside the connector before it was written.",
        "Saves handed over > saves completed.",
        "Look at the connector's queue.",
    ),
    _c(
        "ranks-share-store", 5, FAULT, SAVES,
        "Several ranks write the same key or file: the last one wins, and a later load is silently wrong.",
        "The same target written by different ranks in one step.",
        "Put the rank into the key (ExampleConnector does not: use it with TP 1 only).",
    ),
    # -------------------------------------------------------------- gate 6: completion
    _c(
        "save-never-finished", 6, FAULT, SAVES,
        "An asynchronous save whose completion never came back, or came from some ranks only.",
        "Finish events per rank.",
        "Look at get_finished on the rank named here.",
    ),
    _c(
        "save-blocks-step", 6, NOTE, "note",
        "Not lost but slow: wait_for_save takes a large share of the step.",
        "Durations of wait_for_save against the step.",
        "Save asynchronously, or fewer tokens at once.",
    ),
    _c(
        "ranks-diverge", 6, FAULT, SAVES,
        "Ranks of one engine saved different amounts for the same request.",
        "The ledger, rank by rank.",
        "Look at the causes that are found on the rank that saved less.",
        rule=True,
    ),
    # ----------------------------------------------------------------------- the loads
    _c(
        "never-looked-up", None, LIMIT, LOADS,
        "The scheduler never asked the connector for this request (fully cached, "
        "skip_reading_prefix_cache, prompt_logprobs).",
        "No lookup for the request.",
        "Look at the request's parameters.",
    ),
    _c(
        "lookup-miss", None, LIMIT, LOADS,
        "Asked, and nothing was there: no earlier save covers it.",
        "No save of that key known.",
        "See the ledger of saves: what was not saved cannot be loaded.",
    ),
    _c(
        "key-mismatch", None, FAULT, LOADS,
        "The tokens were saved, under another key than the lookup computes (alignment, hash seed per "
        "process, salt, LoRA, multimodal).",
        "Saved tokens = looked-up tokens, and different keys.",
        "Use one function for both keys; set PYTHONHASHSEED up to vLLM 0.28.",
    ),
    _c(
        "lookup-clamped", None, LIMIT, LOADS,
        "The connector offered N tokens, and the scheduler took fewer (prompt_logprobs, full hit less one, "
        "block rounding, no free blocks).",
        "Lookup N, allocation M < N.",
        "Depends on the reason.",
    ),
    _c(
        "load-not-injected", None, FAULT, LOADS,
        "Accepted, but no layer was written.",
        "start_load_kv with loads, and no layer touched.",
        "Look at attn_metadata in start_load_kv: it is None in a step without forward.",
    ),
    _c(
        "load-failed", None, FAULT, LOADS,
        "The connector reported invalid blocks, or raised.",
        "Load errors per request.",
        "Mend the connector at the place named here.",
    ),
    _c(
        "load-after-use", None, FAULT, LOADS,
        "The attention of a layer ran before its load was waited for.",
        "Order of events in the step.",
        "Use cudagraph_mode PIECEWISE with a connector that loads layer by layer.",
    ),
    _c(
        "load-never-finished", None, FAULT, LOADS,
        "The request waits for remote KV for ever.",
        "An open load, and no finish.",
        "Look at get_finished on the ranks named here.",
    ),
    _c(
        "loaded-partly", None, FAULT, LOADS,
        "Fewer tokens were loaded than accepted.",
        "The ledger of loads.",
        "Look at the connector's slot mapping.",
    ),
    # ----------------------------------------------------------------------- the notes
    _c(
        "hook-slow", None, NOTE, "note",
        "A hook takes a large share of the step.",
        "Durations by hook and rank.",
        "Move the work off the step.",
    ),
    _c(
        "sync-in-hook", None, NOTE, "note",
        "The hook waits for the device.",
        "Host time of the hook against device time.",
        "Copy asynchronously on a stream of its own.",
    ),
    _c(
        "load-late", None, NOTE, "note",
        "A long time from lookup to the first injected layer.",
        "Times of lookup and load.",
        "Load asynchronously.",
    ),
    _c(
        "tracer-cost", None, NOTE, "note",
        "What tracing itself took.",
        "Records and bytes written.",
        "Nothing to do.",
    ),
)  # fmt: skip

CATALOGUE: dict[str, Cause] = {cause.id: cause for cause in _CAUSES}
assert len(CATALOGUE) == len(_CAUSES)


def gate_of(ident: str) -> int:
    """The gate at which a cause's tokens leave the road; 1 for one that is not known."""
    cause = CATALOGUE.get(ident)
    return 1 if cause is None or cause.gate is None else cause.gate
