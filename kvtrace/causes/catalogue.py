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

STAGES = ("wiring", "schedule", "bind", "forward", "hook", "effect", "completion")


@dataclass(frozen=True)
class Cause:
    id: str
    stage: int | None
    severity: str
    ledger: str  # saves | loads | note
    meaning: str
    seen_as: str
    remedy: str
    versions: str = ALL
    implemented: bool = False
    live: bool = False
    """Seen on a real vLLM by a scenario; else its rule was tested on synthetic traces only."""


def _c(
    ident: str,
    stage: int | None,
    severity: str,
    ledger: str,
    meaning: str,
    seen_as: str,
    remedy: str,
    *,
    rule: bool = False,
    versions: str = ALL,
    live: bool = True,
) -> Cause:
    return Cause(ident, stage, severity, ledger, meaning, seen_as, remedy, versions, rule, rule and live)


_CAUSES = (
    # ------------------------------------------------------------------ stage 0: wiring
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
        "Set kv_connector_module_path, and remove the copy that you do not want "
        "(pip uninstall, or its folder out of PYTHONPATH).",
        rule=True,
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
        "The connector switched itself off (missing option, prefix caching off, unhealthy backend).",
        "No store entry and no lookup hit in the whole run, and a warning of the connector's own that says "
        "so; or "
        "a built-in connector known to do nothing under this configuration (SimpleCPUOffloadConnector "
        "without "
        "prefix caching).",
        "Mend what its log line names.",
        rule=True,
    ),
    _c(
        "config-key-unused", 0, FAULT, "note",
        "Extra configuration keys that the connector never read: misspelt, or of another version. A fault "
        "where "
        "nothing was saved, else a note.",
        "Keys given in kv_connector_extra_config less keys read, in the scheduler and in the workers "
        "together. A "
        "connector that reads none of its keys where that can be seen is not judged.",
        "Compare the keys with the connector's documentation.",
        rule=True,
    ),
    # ---------------------------------------------------------------- stage 1: schedule
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
        "The request was preempted, and what it had computed (or computed again) was not offered for saving.",
        "A preemption, no store entry for the positions, and requests of the same run that were not "
        "preempted and "
        "were offered in full.",
        "Treat resumed requests like new ones in build_connector_meta; or fewer sequences at once "
        "(--max-num-seqs) "
        "or more KV cache memory.",
        rule=True,
    ),
    _c(
        "aborted-before-save", 1, LIMIT, SAVES,
        "The request was aborted before what it had computed was offered for saving.",
        "A finish with status FINISHED_ABORTED, no store entry for the positions, and requests of the same "
        "run that "
        "were not aborted and were offered in full.",
        "Look at the client's timeouts; or offer each chunk as it is computed.",
        rule=True,
    ),
    # -------------------------------------------------------------------- stage 2: bind
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
        "The metadata was cleared before the draft model's forward (speculative decoding): its layers are "
        "not saved.",
        "In one step: metadata bound, other layers saved, clear_connector_metadata, and after it the "
        "layer's body "
        "without metadata.",
        "Use a vLLM with finalize_kv_connector (0.18.1 and later).",
        rule=True, versions="0.11.1 .. 0.21.0",
    ),
    # ----------------------------------------------------------------- stage 3: forward
    _c(
        "full-cudagraph-replay", 3, FAULT, SAVES,
        "The step replayed a FULL CUDA graph: no Python hook runs in it.",
        "Graph mode FULL in the step, and no op body.",
        "Set --compilation-config '{\"cudagraph_mode\": \"PIECEWISE\"}', or override "
        "requires_piecewise_for_cudagraph (from 0.17.1) in the connector.",
        rule=True, live=False,
    ),
    _c(
        "captured-not-run", 3, FAULT, SAVES,
        "The layer's Python body ran only while graphs were captured or warmed up, and never again.",
        "Graph modes in real steps, bodies or save hooks of the layer outside of all steps, none inside one.",
        "Set cudagraph_mode to PIECEWISE, or enforce_eager to see the difference.",
        rule=True, live=False,
    ),
    _c(
        "direct-call-bypass", 3, FAULT, SAVES,
        "The layer calls its backend directly and not through the hooked op.",
        "use_direct_call is true for the layer, and its op never ran in a real step.",
        "Upgrade: from vLLM 0.15.0 Attention calls the hooked function also directly (MLA does not yet). On "
        "CUDA and CPU use_direct_call is false.",
        rule=True, live=False, versions="0.8.5 .. 0.14.1 (MLA: .. 0.33.0)",
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
    # -------------------------------------------------------------------- stage 4: hook
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
        "Exceptions raised and handled inside the connector's frames in watched calls, where such calls read "
        "fewer slots than their metadata names (a note where they read all).",
        "Mend the connector at the place named here.",
        rule=True,
    ),
    # ------------------------------------------------------------------ stage 5: effect
    _c(
        "stored-nothing", 5, FAULT, SAVES,
        "The hook ran with a store entry and took 0 slots (it may still write files: empty ones).",
        "0 slots read from the layer's KV tensor in a watched call with slots to store (or whose metadata "
        "leaves it to the worker), and one of these: other calls of this connector were seen to read some; "
        "the files written hold less than 8 bytes a slot; no watched call of the run read anything, and in "
        "none could it have happened out of sight (another thread, native code, a memory address, a look "
        "into the store).",
        "Look at the connector's slot mapping; in a wrapper, at what it does not hand on.",
        rule=True,
    ),
    _c(
        "slots-short", 5, FAULT, SAVES,
        "The hook read fewer slots of the KV tensor than its metadata names.",
        "0 < slots read < slots declared in a watched call, by a block or more per entry.",
        "Look at the connector's slot mapping.",
        rule=True,
    ),
    _c(
        "save-lost", 5, FAULT, SAVES,
        "Handed over, and then overwritten or dropped inside the connector: prompts with different "
        "tokens share one key, or an asynchronous save failed.",
        "A file that was written for one prompt is written anew, as the only file of a watched call and "
        "with as many bytes a slot, for a prompt that has not even the first block in common with it "
        "(salted prefix digests). Or a save that the connector itself reports as failed. What a "
        "connector loses in other ways is not visible.",
        "Make the key of all tokens up to the end of what is stored (and of the model, the layer and the "
        "rank); if saves failed, look at the connector's queue.",
        rule=True,
    ),
    _c(
        "ranks-share-store", 5, FAULT, SAVES,
        "Several ranks write the same key or file: the last one wins, and a later load is silently wrong.",
        "The same file written by different ranks for the same layer in one step (watched calls). The rank "
        "that "
        "wrote last counts as saved. KV that every rank holds alike (MLA) is no loss.",
        "Put the rank into the key (ExampleConnector does not: use it with TP 1 only).",
        rule=True,
    ),
    # -------------------------------------------------------------- stage 6: completion
    _c(
        "save-never-finished", 6, FAULT, SAVES,
        "An asynchronous save whose completion never came back, or came from some ranks only.",
        "request_finished kept the blocks, and no completion of the request: three saves that began later "
        "are "
        "done, or 60 s went by, or 5 s after some ranks were done. What the end of the trace cuts off is "
        "pending.",
        "Look at get_finished on the rank named here.",
        rule=True,
    ),
    _c(
        "save-blocks-step", 6, NOTE, "note",
        "Not lost but slow: wait_for_save takes a large share of the step.",
        "Host time of wait_for_save: a quarter of execute_model or more, and at least 1 s in the run.",
        "Save asynchronously, or fewer tokens at once.",
        rule=True,
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
        "The scheduler let a request in and computed its prompt without asking the connector.",
        "Prefill chunks of a request, and no get_num_new_matched_tokens for it.",
        "vLLM's own scheduler asks for every new request, also for those that may not load (prompt_logprobs, "
        "skip_reading_prefix_cache): look at the scheduler class (--scheduler-cls) of this engine, and at "
        "connectors inside another one, which are asked by that one.",
        rule=True,
    ),
    _c(
        "lookup-miss", None, NOTE, LOADS,
        "Asked, and nothing was there, where a hit could be expected: the prompt begins like an earlier one "
        "of this run, or the engine is a kv_consumer. A prompt that is new is no finding.",
        "A lookup that was answered with 0, and no earlier save of this run that surely covers it.",
        "See the ledger of saves: what was not saved cannot be loaded. A prefix that two prompts share is "
        "found only in whole units of the connector, and not at all where it keys whole prompts "
        "(ExampleConnector).",
        rule=True,
    ),
    _c(
        "key-mismatch", None, FAULT, LOADS,
        "The tokens were saved, under another key than the lookup computes (alignment, hash seed per "
        "process, salt, LoRA, multimodal).",
        "A prompt was saved in every layer, at least one token short of the whole; the save was written; "
        "nothing else was saved since; a request with the same tokens is looked up and told 0.",
        "Use one function for both keys. Up to vLLM 0.28, or with a hash other than sha256, set "
        "PYTHONHASHSEED where keys build on vLLM's block hashes.",
        rule=True,
    ),
    _c(
        "lookup-clamped", None, LIMIT, LOADS,
        "The connector offered N tokens, and the scheduler took fewer (prompt_logprobs, full hit less one, "
        "block rounding, no free blocks).",
        "Lookup N, allocation M < N.",
        "Depends on the reason, which the finding names where the trace shows it.",
        rule=True,
    ),
    _c(
        "load-not-injected", None, FAULT, LOADS,
        "Accepted, and no layer was written: attention ran over KV that was not there. The answer is wrong, "
        "without a word.",
        "A step with loads in which the watched load hooks wrote 0 slots, and either wrote in other steps or "
        "logged or swallowed why not; or a worker in which start_load_kv was not called or has no "
        "connector. Hooks that leave the writing to threads or native code are not judged.",
        "Look at start_load_kv for early returns: the forward context's attn_metadata is None in a step "
        "without a forward (only asynchronous loads scheduled) and in a FULL graph of the V2 runner. "
        "Load into the registered KV caches instead, or report the blocks in get_block_ids_with_load_errors.",
        rule=True,
    ),
    _c(
        "load-failed", None, FAULT, LOADS,
        "The connector reported blocks or requests that it could not load, or its load hook raised.",
        "get_block_ids_with_load_errors, failed transfers, exceptions of start_load_kv and "
        "wait_for_layer_load. Blocks are counted, at most up to what was accepted.",
        "Mend what the connector's log names. kv_load_failure_policy says what becomes of the request: "
        "\"recompute\" computes the tokens, \"fail\" ends it (from vLLM 0.13).",
        rule=True, versions="0.11.1 .. 0.33.0 (reported blocks; raised: all)",
    ),
    _c(
        "load-after-use", None, FAULT, LOADS,
        "The attention of a layer ran before its load was waited for.",
        "Host times in the step of the load: the attention body began before start_load_kv returned or "
        "before wait_for_layer_load of its layer was called; the layer was not waited for, as others of the "
        "step were; or it ran in a FULL graph, which waits for nothing, under a connector that loads layer "
        "by layer (this last one is not yet seen live).",
        "A layer past vLLM's attention op needs a connector that loads all layers in start_load_kv. With "
        "graphs: cudagraph_mode PIECEWISE, and requires_piecewise_for_cudagraph overridden in a connector "
        "that loads layer by layer (from 0.17.1).",
        rule=True,
    ),
    _c(
        "load-never-finished", None, FAULT, LOADS,
        "The request waits for remote KV for ever.",
        "An asynchronous load that was accepted, of which no get_finished tells and after which the request "
        "never ran: open for 5 s or more when the request was aborted, or for 60 s or more when the trace "
        "ends.",
        "Look at get_finished on the ranks named here: every rank must report the request, also when its "
        "load failed (then together with get_block_ids_with_load_errors).",
        rule=True,
    ),
    _c(
        "loaded-partly", None, FAULT, LOADS,
        "Fewer tokens reached the layers than were accepted: attention ran over KV that was not there.",
        "The slots that the load hooks were seen to write in a layer, or the slots that the metadata names, "
        "against what the scheduler accepted.",
        "Look at the connector's slot mapping: the lookup promised more than it covers.",
        rule=True,
    ),
    # ----------------------------------------------------------------------- the notes
    _c(
        "hook-slow", None, NOTE, "note",
        "A hook takes a large share of the step.",
        "Host time of the hook, by rank: a quarter of execute_model or more, and at least 1 s in the run.",
        "Move the work off the step.",
        rule=True,
    ),
    _c(
        "sync-in-hook", None, NOTE, "note",
        "The hook waits for the device.",
        "Events around its calls (CUDA): calls that began while their stream had 0.1 ms of work left or "
        "more, of which none returned before that work was done, and half or more took little longer than "
        "it, over a spread of its length. Without a device clock it is not observed.",
        "Copy asynchronously on a stream of its own, and wait for it in wait_for_save or get_finished.",
        rule=True, live=False,
    ),
    _c(
        "load-late", None, NOTE, "note",
        "Loading takes longer than computing the tokens would.",
        "Time from the lookup to the end of start_load_kv (synchronous) or to the report that it is finished "
        "(asynchronous): in the median 100 ms and five steps of this run or more, and at least twice what "
        "the tokens cost to compute at this run's pace.",
        "Load asynchronously, or answer a lookup with a hit only where loading is faster than computing.",
        rule=True,
    ),
    _c(
        "tracer-cost", None, NOTE, "note",
        "What tracing itself took.",
        "An estimate, as the agent does not measure itself call by call: records times 10 µs against the "
        "time in "
        "steps. A finding from a tenth of it, and 1 s, on.",
        "Trace fewer layers or a shorter run; see docs/overhead.md.",
        rule=True, live=False,
    ),
)  # fmt: skip

CATALOGUE: dict[str, Cause] = {cause.id: cause for cause in _CAUSES}
assert len(CATALOGUE) == len(_CAUSES)


def stage_of(ident: str) -> int:
    """The stage at which a cause's tokens leave the stages; 1 for one that is not known."""
    cause = CATALOGUE.get(ident)
    return 1 if cause is None or cause.stage is None else cause.stage
