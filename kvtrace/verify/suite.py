"""A suite on an engine: learn sizes and the connector's unit, ask every workload, gather what was seen."""

from __future__ import annotations

from dataclasses import replace

from kvtrace.ledger.run import Engine, RunError
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.drive import Driver, Job
from kvtrace.verify.observed import EngineFacts, Observed, Settings, taken_unit, unit_of
from kvtrace.verify.property import workloads
from kvtrace.verify.registry import of_suite
from kvtrace.verify.workload import MODEL, STORE_ACTS, parse

CASE = "case"


def ask(
    driver: Driver, suite: str, case: str = "", store: bool = False, blocks: int = 0
) -> tuple[Engine, EngineFacts]:
    """Ask everything, or one case alone.

    Args:
        store: whether the connector's directory is named. blocks: of the KV cache; 0: not known.

    Raises:
        VerifyError: nothing was traced, or the engine has no connector.
    """
    try:
        evidence = driver.look()
    except RunError as error:
        raise VerifyError("nothing of the server was traced", str(error)) from None
    first = evidence.engine
    if first is None or first.configured is None:
        raise VerifyError("this server has no KV connector", "add --kv-transfer-config to its command")
    facts = replace(facts_of(first, store), blocks=blocks)
    if evidence.pair:
        facts = replace(facts, role="", looks_up=True)
    facts = replace(facts, adapters=driver.engine.adapters, other_model=driver.engine.other_model)
    if case:
        name, colon, text = case.rpartition(":")
        if colon and name not in {one.id for one in of_suite(suite)}:
            raise VerifyError(
                f"the case {case!r} names no property of suite {suite}", "write it without a name"
            )
        workload = parse(text)
        if any(prompt.adapter > facts.adapters for prompt in workload.prompts):
            raise VerifyError(f"the case {case!r} names a LoRA adapter that this server does not serve")
        if not facts.images and any(prompt.image for prompt in workload.prompts):
            raise VerifyError(f"the case {case!r} names an image", "the server's model takes none")
        if not store and set(workload.acts) & set(STORE_ACTS):
            raise VerifyError(f"the case {case!r} damages the store", "name its directory with --store")
        if MODEL in workload.acts and not facts.other_model:
            raise VerifyError(f"the case {case!r} changes the model", "--connector makes another one")
        driver.run([Job(name or CASE, workload)])
        return first, _with_unit(facts, driver)
    driver.probe(probes(facts), facts.looks_up and facts.role != "kv_producer")
    facts = _with_unit(facts, driver)
    driver.run([Job(name, workload) for name, workload in workloads(of_suite(suite), facts)])
    return first, facts


def observed(driver: Driver, facts: EngineFacts, settings: Settings, first: int = 0) -> Observed:
    """What the properties judge: of the requests from the one of number ``first`` on."""
    evidence = driver.look()
    if driver.shares is not None:
        evidence = replace(evidence, hook_shares=driver.shares)
    return Observed(
        driver.seen(evidence)[first:], evidence, facts, settings,
        driver.died, driver.deaths, driver.held, driver.resets, driver.resets_known,
        patience=driver.patience, samples=driver.samples,
    )  # fmt: skip


def probes(facts: EngineFacts) -> list[tuple[int, int]]:
    """Lengths of prompts, two a block or two apart: a few blocks, then all that fits into one step, then the
    longest."""
    block, most = facts.block, facts.longest - 32
    few = min(4 * block + block // 2, most)
    step = min(facts.budget or most, most) - 1
    tried = [few, step if step > few else most, most]
    return [(max(1, length - block), length) for length in tried]


def _with_unit(facts: EngineFacts, driver: Driver) -> EngineFacts:
    if driver.died:
        return facts
    seen = driver.seen(driver.look())
    unit = unit_of(one for one in seen if one.given) or taken_unit(seen)
    return replace(facts, unit=unit)


def facts_of(engine: Engine, store: bool = False) -> EngineFacts:
    """Of an engine, from its spools."""
    known = engine.facts
    longest = known.max_model_len or 2048
    return EngineFacts(
        block=engine.block_size or 16, budget=known.max_num_batched_tokens or 0, longest=longest,
        seqs=known.max_num_seqs or 0, unit=0, role=engine.role or "",
        looks_up=engine.looks_up or engine.role == "kv_producer", store=store,
        images=known.multimodal is not False,
    )  # fmt: skip
