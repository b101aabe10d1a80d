"""Twenty planted bugs as cases: what a run looks like with the bug in it, and without. docs/planted-bugs.md."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from docs.support.engines import tokenizer
from docs.support.runs import Arrival, make_core, request_of, run, steps_table
from docs.support.source import source
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.trace import StepTrace
from reference.frontend.detokenizer import IncrementalDetokenizer
from tests.mutants import MUTANTS


@dataclass(frozen=True)
class Case:
    """A bug, what the reader is told, and what is shown."""

    name: str  # of the mutant
    told: str
    exhibit: Callable[[], str]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _free_queue(trace: StepTrace) -> str:
    return " ".join(map(str, trace.state.cache.free_order))


def _until_it_stops(*arrivals: tuple[Any, ...], **options: Any) -> tuple[list[StepTrace], str]:
    """The traces of a run as far as it comes, and what stopped it."""
    core, waiting, step = make_core(**options), [Arrival(*arrival) for arrival in arrivals], 0
    try:
        while waiting or core.has_unfinished_requests():
            for number, arrival in enumerate([a for a in waiting if a.arrives <= step]):
                core.add_request(request_of(arrival, (step * 1000 + number, 0)))
                waiting.remove(arrival)
            core.step()
            step += 1
    except AssertionError as error:
        return core.traces, f"\nIn step {step} the engine stops: `{error}`\n"
    return core.traces, ""


# ---- blocks and the prefix cache ---------------------------------------------------------------------------------

ONES, SEVENS = [1, 1, 1, 1], [7, 7, 7, 7]


def _swapped_blocks() -> str:
    return steps_table(run(("a", [*ONES, *SEVENS, 3], 2), ("b", [*SEVENS, *ONES, 5], 2, 4)), reasons=False)


def _freed() -> str:
    traces = run(("a", 16, 3), ("b", 3, 6), blocks=10)
    end = next(t for t in traces if "a" not in t.state.cache.block_tables)
    return _table(
        ["", "blocks"],
        [
            ["table of a, positions from left to right", list(traces[0].state.cache.block_tables["a"])],
            ["free queue behind its end, first out on the left", _free_queue(end)],
        ],
    )


def _comes_back() -> str:
    prompt = [*ONES, *SEVENS, 2]
    return steps_table(run(("a", prompt, 2), ("b", 5, 2, 3), ("c", prompt, 2, 6), blocks=6), reasons=False)


def _holders() -> str:
    prompt = [*ONES, *SEVENS]
    traces, end = _until_it_stops(("a", [*prompt, 2], 6), ("b", [*prompt, 3], 4, 2), blocks=8)
    cache = next(t for t in traces if len(t.state.cache.block_tables) == 2).state.cache
    tables = cache.block_tables
    blocks = sorted({block for table in tables.values() for block in table})
    rows = [
        [block, " ".join(name for name in tables if block in tables[name]), cache.ref_counts.get(block, 0)]
        for block in blocks
    ]
    return _table(["block", "in the table of", "reference count"], rows) + end


def _overwritten() -> str:
    prompt = [*ONES, *SEVENS, 2]
    traces, end = _until_it_stops(("a", prompt, 2), ("b", 14, 3, 3), ("c", prompt, 2, 8), blocks=4)
    return steps_table(traces, reasons=False) + end


def _findable() -> str:
    rows = []
    for trace in run(("a", 6, 5), blocks=8):
        computed = trace.state.num_computed_tokens["a"]
        rows.append([trace.step, computed, computed // 4, len(trace.state.cache.hashes)])
    return _table(
        ["step", "tokens with K and V", "full blocks", "blocks that the prefix cache can find"], rows
    )


def _room() -> str:
    rows = []
    for trace in run(("a", 6, 8), blocks=8):
        table, computed = trace.state.cache.block_tables.get("a", ()), trace.state.num_computed_tokens["a"]
        rows.append([trace.step, computed, len(table), len(table) * 4 - computed])
    return _table(["step", "tokens with K and V", "blocks of 4", "places left"], rows)


def _siblings() -> str:
    traces, end = _until_it_stops(("p", 6, 4, 0, 0, 3), blocks=12)
    rows = [
        [trace.step, name, list(table), trace.state.num_computed_tokens[name]]
        for trace in traces[:3]
        for name, table in sorted(trace.state.cache.block_tables.items())
    ]
    return _table(["step", "sequence", "table", "tokens with K and V"], rows) + end


def _shared_prompt() -> str:
    traces, end = _until_it_stops(("p", 9, 3, 0, 0, 3), blocks=12)
    cache = traces[1].state.cache
    blocks = sorted({block for table in cache.block_tables.values() for block in table})
    rows = [
        [
            block,
            sum(block in table for table in cache.block_tables.values()),
            cache.ref_counts.get(block, 0),
        ]
        for block in blocks
    ]
    return _table(["block", "tables that hold it", "reference count"], rows) + end


# ---- who computes what -------------------------------------------------------------------------------------------


def _short_of_blocks() -> str:
    return steps_table(run(("a", 7, 6), ("b", 7, 6), blocks=4))


def _waiting_behind() -> str:
    return steps_table(run(("a", 7, 6), ("b", 7, 6), ("c", 6, 2, 1), ("d", 3, 2, 1), blocks=4, caching=False))


def _newcomer() -> str:
    arrivals = (("a", 7, 5), ("b", 7, 5, 0, 5), ("c", 3, 3, 1, 1))
    return steps_table(run(*arrivals, blocks=4, caching=False, scheduling_policy="priority"))


def _victim_was_served() -> str:
    arrivals = (("low", 9, 9, 0, 5), ("high", 7, 4, 1), ("next", 30, 3, 1, 1))
    return steps_table(run(*arrivals, blocks=8, budget=10, scheduling_policy="priority", caching=False))


def _alone() -> str:
    return steps_table(run(("a", 14, 3), budget=64, long_prefill_token_threshold=4), reasons=False)


def _drafts() -> str:
    traces = run(("a", 6, 9), blocks=12, drafts=3)
    rows = []
    for trace, following in zip(traces, [*traces[1:], None], strict=True):
        count, drawn = trace.num_scheduled_tokens["a"], len(trace.sampled_token_ids["a"])
        after = (
            following.state.num_computed_tokens["a"] - following.num_scheduled_tokens["a"]
            if following
            else ""
        )
        rows.append([trace.step, count, len(trace.draft_token_ids.get("a", ())), drawn, after])
    return _table(
        ["step", "tokens computed", "of them drafts", "tokens drawn", "counted as computed afterwards"], rows
    )


# ---- computing ---------------------------------------------------------------------------------------------------


def _draw_alone_and_together() -> str:
    from reference.sampler import Sampler, SamplingMetadata

    logits = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)

    def draw(rows: Sequence[int]) -> list[int]:
        size = len(rows)
        metadata = SamplingMetadata(
            temperature=np.ones(size),
            top_k=np.zeros(size, np.int32),
            top_p=np.ones(size),
            min_p=np.zeros(size),
            seeds=np.array([100 + row for row in rows], np.uint64),
            output_positions=np.zeros(size, np.int64),
            processed_rows={},
        )
        return Sampler()(logits[list(rows)], metadata)

    together = draw(range(4))
    alone = [draw([row])[0] for row in range(4)]
    return _table(
        ["request", "token drawn in a batch of four", "token drawn alone, same seed"],
        [[row, together[row], alone[row]] for row in range(4)],
    )


def _nucleus() -> str:
    from reference import sampler

    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    rows: list[list[object]] = []
    for top_p in (0.4, 0.6, 0.85, 1.0):
        kept = sampler._kept_token_ids(np.log(probabilities), 0.0, 0, top_p)
        rows.append([top_p, kept.tolist(), f"{probabilities[kept].sum():.2f}"])
    return _table(["top_p", "tokens kept of 0.5, 0.3, 0.15, 0.05", "their probability"], rows)


def _old_owner() -> str:
    from reference import attention

    generator = np.random.default_rng(0)
    keys, values = (
        generator.standard_normal((3, 4, 1, 8)).astype(np.float32) for _ in range(2)
    )  # [N, B, Hkv, D]
    query = generator.standard_normal((1, 1, 8)).astype(np.float32)
    rows: list[list[object]] = []
    for left_behind in (0.0, 1.0, 100.0):
        values[2, 2:] = left_behind  # places behind the sequence's end
        metadata = attention.AttentionMetadata(
            query_start_loc=np.array([0, 1], np.int32),
            seq_lens=np.array([6], np.int32),
            block_tables=np.array([[1, 2]], np.int32),
            slot_mapping=np.array([2 * 4 + 1]),
        )
        out = attention.paged_attention(query, keys, values, metadata, 0.35)
        rows.append([left_behind, f"{out[0, 0, 0]:.4f}", f"{out[0, 0, 1]:.4f}"])
    return _table(
        ["what an earlier owner left behind the sequence's end", "output, dimension 0", "dimension 1"], rows
    )


# ---- text --------------------------------------------------------------------------------------------------------


def _stream(text: str, **params: object) -> str:
    t = tokenizer()
    detokenizer = IncrementalDetokenizer(t, SamplingParams(**params))  # type: ignore[arg-type]
    rows: list[list[object]] = []
    ids = t.encode(text)
    for number, token_id in enumerate(ids):
        last = number == len(ids) - 1
        found = detokenizer.update([token_id], "length" if last else None)
        delta = detokenizer.take_delta(finished=last or found is not None)
        rows.append([f"`{t.token_bytes(token_id)!r}`", f"`{delta!r}`" if delta else ""])
        if found is not None:
            break
    return _table(["token", "sent to the client"], rows)


CASES = (
    Case(
        "hash_without_parent",
        "`a` and `b` have the blocks 1111 and 7777 in their prompts, in opposite order. Blocks of four.",
        _swapped_blocks,
    ),
    Case("tail_freed_after_head", "`a` has ended. Which of its blocks will be overwritten first?", _freed),
    Case(
        "newest_content_evicted_first",
        "`c` asks what `a` asked, and in between `b` asked something else. Six blocks, of which four were never used.",
        _comes_back,
    ),
    Case("hits_not_touched", "`a` and `b` have the same first eight tokens, and both run.", _holders),
    Case(
        "evicted_block_still_found",
        "`c` asks what `a` asked. In between `b` needed all four blocks of the pool.",
        _overwritten,
    ),
    Case("half_full_block_registered", "One request; blocks of four.", _findable),
    Case("new_block_one_token_late", "One request, from its prompt to its end.", _room),
    Case("cow_appends", "A prompt of six tokens, three sequences, blocks of four.", _siblings),
    Case("fork_not_counted", "The step after a prompt of nine tokens was forked into three.", _shared_prompt),
    Case(
        "first_of_the_running_preempted",
        "Two requests, four blocks, first come first served.",
        _short_of_blocks,
    ),
    Case(
        "victim_to_the_back_of_the_queue",
        "`b` is preempted while `c` and `d` wait. First come, first served.",
        _waiting_behind,
    ),
    Case(
        "admission_beside_preemption",
        "Priorities: `a` before `c` before `b`. Look at who has blocks when.",
        _newcomer,
    ),
    Case(
        "victims_budget_not_returned",
        "Priorities: `high`, then `next`, then `low`. Ten tokens a step may be computed; add them up.",
        _victim_was_served,
    ),
    Case("lone_request_held_up", "A single request; `long_prefill_token_threshold` is 4.", _alone),
    Case(
        "rejected_drafts_not_rolled_back", "Three drafts a step, of which the third is always wrong.", _drafts
    ),
    Case(
        "draws_from_a_generator_with_state",
        "Four requests with seeds of their own, drawn together and each alone.",
        _draw_alone_and_together,
    ),
    Case("nucleus_without_its_last_token", "Top-p on four tokens.", _nucleus),
    Case("last_block_read_to_its_end", "A sequence of six tokens in two blocks of four.", _old_owner),
    Case(
        "stop_strings_not_held_back",
        "The stop string is `END`; the model writes “the END.”",
        lambda: _stream("the END.", stop=["END"]),
    ),
    Case("tokens_decoded_alone", "The model writes “5 € 北”.", lambda: _stream("5 € 北")),
)


def show(number: int) -> str:
    """Case 1 and so on: what is told and what is to be seen, and folded away the answer."""
    case = CASES[number - 1]
    mutant = MUTANTS[case.name]
    tier = "reference" if "reference" in mutant.tiers else mutant.tiers[0]
    with mutant.planted(tier):
        wrong = _seen(case.exhibit)
    right = _seen(case.exhibit)
    if wrong == right:
        raise AssertionError(f"{case.name} cannot be seen in its exhibit; give it another")
    file = f"tests/mutants/{mutant.plant.__module__.rpartition('.')[2]}.py"
    answer = "\n\n".join([
        f"**`{case.name}`.** {mutant.lesson}",
        "Without the bug:",
        right,
        "The bug, planted from outside:",
        source(file, case.name),
        f"Tests that notice: {', '.join(f'`{name}`' for name in mutant.killed_by)}",
    ])  # fmt: skip
    head = f"### Case {number}\n\n{case.told}\n\n{wrong}\n\n"
    return f'{head}??? success "What is wrong?"\n{textwrap.indent(answer, "    ")}\n'


def _seen(exhibit: Callable[[], str]) -> str:
    """What an exhibit shows; a crash is something to be seen, too."""
    try:
        return exhibit()
    except (AssertionError, RuntimeError, LookupError, ValueError) as error:
        return f"The engine stops: `{type(error).__name__}: {error}`\n"
