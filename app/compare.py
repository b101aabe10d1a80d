"""Where two runs part, and why, in a sentence."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.runs import Run
from reference.contracts.trace import StepTrace

HASH_DIGITS = 8  # of the 64 that a hash has in hex: enough to tell blocks apart by eye
LANGUAGES = ("en", "zh")

# What is compared, causes before their effects: the first of them that differs is what the sentence is about.
_COMPARED = (
    "preempted", "num_scheduled_tokens", "num_cached_tokens", "refusal_reasons", "block_tables", "block_copies",
    "swap_outs", "swap_ins", "draft_token_ids", "sampled_token_ids", "finished", "free_order", "hashes", "queues",
)  # fmt: skip

_WHAT = {
    "en": {
        "preempted": "the preempted requests are {a} in {left} and {b} in {right}",
        "num_scheduled_tokens": "{who} computes {a} tokens in {left} and {b} in {right}",
        "num_cached_tokens": "{who} finds {a} tokens in the prefix cache of {left} and {b} in that of {right}",
        "refusal_reasons": "admission ends for a different reason",
        "block_tables": "{who} holds the blocks {a} in {left} and {b} in {right}",
        "block_copies": "the blocks copied are {a} in {left} and {b} in {right}",
        "swap_outs": "the blocks swapped out are {a} in {left} and {b} in {right}",
        "swap_ins": "the blocks swapped in are {a} in {left} and {b} in {right}",
        "draft_token_ids": "the drafts of {who} are {a} in {left} and {b} in {right}",
        "sampled_token_ids": "{who} gets the tokens {a} in {left} and {b} in {right}",
        "finished": "{who} ends with {a} in {left} and {b} in {right}",
        "free_order": "the free queue is {a} in {left} and {b} in {right}",
        "hashes": "block {who} has the hash {a} in {left} and {b} in {right}",
        "queues": "running, waiting and swapped are {a} in {left} and {b} in {right}",
        "order": "the order is {a} in {left} and {b} in {right}",
        "length": "{left} has {a} steps and {right} has {b}",
    },
    "zh": {
        "preempted": "被抢占的请求：{left} 为 {a}，{right} 为 {b}",
        "num_scheduled_tokens": "{who} 计算的词元：{left} 为 {a}，{right} 为 {b}",
        "num_cached_tokens": "{who} 从前缀缓存命中的词元：{left} 为 {a}，{right} 为 {b}",
        "refusal_reasons": "停止接纳的原因不同",
        "block_tables": "{who} 持有的块：{left} 为 {a}，{right} 为 {b}",
        "block_copies": "复制的块：{left} 为 {a}，{right} 为 {b}",
        "swap_outs": "换出的块：{left} 为 {a}，{right} 为 {b}",
        "swap_ins": "换入的块：{left} 为 {a}，{right} 为 {b}",
        "draft_token_ids": "{who} 的草稿：{left} 为 {a}，{right} 为 {b}",
        "sampled_token_ids": "{who} 得到的词元：{left} 为 {a}，{right} 为 {b}",
        "finished": "{who} 的结束原因：{left} 为 {a}，{right} 为 {b}",
        "free_order": "空闲队列：{left} 为 {a}，{right} 为 {b}",
        "hashes": "块 {who} 的哈希：{left} 为 {a}，{right} 为 {b}",
        "queues": "运行、等待、换出队列：{left} 为 {a}，{right} 为 {b}",
        "order": "顺序：{left} 为 {a}，{right} 为 {b}",
        "length": "{left} 共 {a} 步，{right} 共 {b} 步",
    },
}
_WORDS = {
    "en": {
        "equal": "Both runs are equal, step for step: {left} and {right}.",
        "parts": "{left} and {right} part in step {step}: {what}.", "nothing": "nothing",
        "size": " A block holds {a} tokens in {left} and {b} in {right}.",
        "budget": " The budget of the step is {a} tokens in {left} and {b} in {right}.",
        "says": " {name} says: {text}.",
    },
    "zh": {
        "equal": "{left} 与 {right} 逐步相同。", "parts": "{left} 与 {right} 在第 {step} 步分开：{what}。",
        "nothing": "无", "size": "一个块：{left} 为 {a} 个词元，{right} 为 {b} 个。",
        "budget": "该步的预算：{left} 为 {a} 个词元，{right} 为 {b} 个。", "says": "{name} 的说明：{text}。",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Where two runs part: an index of both, and what differs there."""

    step: int
    what: str
    request_id: str | None
    values: tuple[Any, Any]


def first_difference(left: Run, right: Run) -> Difference | None:
    """The first step in which two runs did not do the same, and the first cause in it.

    Times do not count; nor do the free queues of pools of different sizes and the hashes of blocks of different sizes,
    which are never the same.
    """
    compared = [
        what
        for what in _COMPARED
        if not (what == "free_order" and _pool_size(left) != _pool_size(right))
        and not (what == "hashes" and left.info.block_size != right.info.block_size)
    ]
    for number, (one, two) in enumerate(zip(left.traces, right.traces, strict=False)):
        for what in compared:
            mine, other = _value(one, what), _value(two, what)
            if mine != other or (isinstance(mine, dict) and list(mine) != list(other)):
                return _locate(number, what, mine, other)
    lengths = len(left.traces), len(right.traces)
    return None if lengths[0] == lengths[1] else Difference(min(lengths), "length", None, lengths)


def _pool_size(run: Run) -> int:
    """Blocks that can be handed out; 0 without a step."""
    if not run.traces:
        return 0
    cache = run.traces[0].state.cache
    return cache.num_free_blocks + len(cache.ref_counts)


def _value(trace: StepTrace, what: str) -> Any:
    if what == "queues":
        return trace.state.running, trace.state.waiting, trace.state.swapped
    return getattr(trace if hasattr(trace, what) else trace.state.cache, what)


def _locate(number: int, what: str, mine: Any, other: Any) -> Difference:
    if isinstance(mine, dict):
        for name in dict.fromkeys((*mine, *other)):
            if mine.get(name) != other.get(name):
                return Difference(number, what, str(name), (mine.get(name), other.get(name)))
        return Difference(number, "order", None, (tuple(mine), tuple(other)))
    return Difference(number, what, None, (mine, other))


def make_comparison(
    left: Run, right: Run, is_same_workload: bool, names: Sequence[Mapping[str, str]] | None = None
) -> dict[str, Any]:
    """What the page says about two runs.

    Args:
        left, right: the runs.
        is_same_workload: they were meant to be equal, so that a difference is an error.
        names: of both, by language; their titles unless given.

    Returns:
        `meant_equal`, `say` (a sentence by language), and where they differ `step`, `what`, `request`, `values`.
    """
    names = names or [dict.fromkeys(LANGUAGES, run.info.title) for run in (left, right)]
    difference = first_difference(left, right)
    view: dict[str, Any] = {
        "meant_equal": is_same_workload,
        "say": {
            language: _sentence(difference, left, right, language, names[0][language], names[1][language])
            for language in LANGUAGES
        },
    }
    if difference is not None:
        view |= {
            "step": difference.step,
            "what": difference.what,
            "request": difference.request_id,
            "values": [short(value) for value in difference.values],
        }
    return view


def _sentence(
    difference: Difference | None, left: Run, right: Run, language: str, left_name: str, right_name: str
) -> str:
    words, quoted = _WORDS[language], {"left": f"“{left_name}”", "right": f"“{right_name}”"}
    if difference is None:
        return words["equal"].format(**quoted)
    a, b = (words["nothing"] if value is None or value == () else short(value) for value in difference.values)
    what = _WHAT[language][difference.what].format(a=a, b=b, who=difference.request_id or "", **quoted)
    text = words["parts"].format(step=difference.step, what=what, **quoted)
    return text + _why(difference, left, right, language, quoted)


def _why(difference: Difference, left: Run, right: Run, language: str, quoted: Mapping[str, str]) -> str:
    """What can be told of the cause: unequal sizes, and the scheduler's own reasons where they are not the same."""
    words = _WORDS[language]
    if difference.step >= min(len(left.traces), len(right.traces)):
        return ""
    one, two = left.traces[difference.step], right.traces[difference.step]
    why = ""
    for key, mine, other in (
        ("size", left.info.block_size, right.info.block_size),
        ("budget", one.token_budget, two.token_budget),
    ):
        if mine != other:
            why += words[key].format(a=mine, b=other, **quoted)
    ours, theirs = (
        [*trace.preemption_reasons.values(), *trace.refusal_reasons.values()] for trace in (one, two)
    )
    for side, own, foreign in (("left", ours, theirs), ("right", theirs, ours)):
        for text in own:
            if text not in foreign:
                why += words["says"].format(name=quoted[side], text=text)
    return why


def short(value: Any) -> str:
    """A value as a sentence can hold it."""
    if value is None:
        return "nothing"
    if isinstance(value, tuple):
        text = ", ".join(f"[{short(item)}]" if isinstance(item, tuple) else str(item) for item in value)
    else:
        text = str(value)
    if len(text) == 64 and all(c in string.hexdigits for c in text):
        return text[:HASH_DIGITS]
    return text if len(text) <= 80 else f"{text[:77]}..."
