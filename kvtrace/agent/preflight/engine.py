"""vLLM's own reading of its command line, up to the configuration that an engine starts with."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
from typing import Any

from kvtrace.agent.preflight.facts import CommandLine, Parsed, Planned

SERVE = "serve"


def parse(asked: CommandLine) -> tuple[Parsed, Any]:
    """What the parser says, and its namespace; None where it refused the command line."""
    if not asked.kind:
        return Parsed(), None
    from vllm.entrypoints.cli import serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    sys.argv = ["vllm", *asked.words]
    said = io.StringIO()
    parser = FlexibleArgumentParser(prog="vllm")
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if asked.kind == SERVE:
                commands = parser.add_subparsers(required=False, dest="subparser")
                for command in serve.cmd_init():
                    command.subparser_init(commands)
            else:
                parser = serve.make_arg_parser(parser)
            arguments = parser.parse_args(list(asked.words))
    except SystemExit as ended:
        lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
        first = next((at for at, line in enumerate(lines) if " error: " in line), -1)
        why = " ".join(lines[first:]).partition(" error: ")
        return Parsed(refused=(why[2] or why[0] or "it ended")[:600] if ended.code else ""), None
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    return Parsed(transfer=_transfer(getattr(arguments, "kv_transfer_config", None))), arguments


def _transfer(value: Any) -> dict[str, Any] | None:
    """The fields of a KVTransferConfig, or of the dictionary that it is in older versions."""
    if value is None or isinstance(value, dict):
        return value
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    wanted = [name for name in names if name.startswith("kv_connector") or name in ("kv_role", "engine_id")]
    return {name: getattr(value, name) for name in wanted}


def configuration(arguments: Any) -> Planned:
    """What `vllm serve` would start its engine with; raises what vLLM raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    made = AsyncEngineArgs.from_cli_args(arguments)
    config: Any = made.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    transfer = config.kv_transfer_config
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    sizes = (
        getattr(parallel, name, None) or 1
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size")
    )
    return Planned(
        states=bool(getattr(model, "is_hybrid", False)),
        encoder=bool(getattr(model, "is_encoder_decoder", False)),
        one_group=getattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", None),
        block_size=cache.block_size,
        set_by_user=getattr(cache, "user_specified_block_size", None),
        context_parallel=math.prod(sizes),
        several_groups=_several_groups(model),
        graph_mode=getattr(mode, "name", None),
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        connector=getattr(transfer, "kv_connector", None),
    )


def _several_groups(model: Any) -> bool | None:
    try:
        if model.is_hybrid or getattr(model, "is_encoder_decoder", False):
            return True
        kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
        return len(kinds) > 1 or bool(getattr(model, "is_interleaved", False))
    except Exception:  # a model's configuration may lack or compute any of these: then it is not known
        return None
