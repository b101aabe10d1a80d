"""One small workload for each lesson. Most are two runs that differ in a single thing.

Prompts are words, so that on the scripted model (one word, one token) a block of four shows four words. The embedded
model cuts them into more tokens; `embedded` says what must be larger there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.workload import Workload, WorkloadRequest

Text = Mapping[str, str]  # by language: en, zh


@dataclass(frozen=True)
class Side:
    """One of the runs of a preset: what it is called, and the options in which it differs."""

    title: Text
    options: Mapping[str, Any] = field(default_factory=dict)
    is_static: bool = False


@dataclass(frozen=True)
class Preset:
    """A lesson.

    Args:
        key: its name in the code and in the address of a picture.
        title, lesson: what is said above the run.
        requests: who asks for what, and when.
        options: engine options of all sides.
        sides: one run, or two to compare.
        facts: keys of `state.facts`, the lesson's own first.
        embedded: options that replace others on the embedded model.
        stop_at: what the page shows first in a still picture: an event of `state`, or "middle".
    """

    key: str
    title: Text
    lesson: Text
    requests: tuple[WorkloadRequest, ...]
    options: Mapping[str, Any]
    sides: tuple[Side, ...]
    facts: tuple[str, ...]
    embedded: Mapping[str, Any] = field(default_factory=dict)
    stop_at: str = "middle"

    def workload(self, side: int, model_is_scripted: bool = True) -> Workload:
        """What one side runs."""
        extra = {} if model_is_scripted else self.embedded
        return Workload(self.requests, {**self.options, **extra, **self.sides[side].options})


def _ask(name: str, prompt: str, tokens: int, at: int = 0, priority: int = 0, n: int = 1) -> WorkloadRequest:
    params = SamplingParams(
        temperature=0.9 if n > 1 else 0, max_tokens=tokens, n=n, ignore_eos=True, seed=1 if n > 1 else None
    )
    return WorkloadRequest(name, prompt=prompt, arrival_step=at, priority=priority, params=params)


_ONLY = (Side({"en": "this run", "zh": "本次运行"}),)

_SHORT = (
    ("ann", "Tell me about the sea", 4),
    ("ben", "Why is the sky blue", 14),
    ("cleo", "Name three kinds of cheese", 5),
    ("dan", "Where do swallows sleep in winter", 6),
    ("eve", "What do bees make", 5),
    ("finn", "Who built the pyramids", 13),
    ("gil", "How deep is the ocean", 4),
    ("hana", "When was paper invented", 6),
)

_SYSTEM = "You are a kind librarian and you answer every question in one short clear sentence . "
_LONG = (
    "Please read this report with care and sum it up for me . The harbour was rebuilt after the great storm and "
    "now serves forty ships a day . Its cranes run on wind power and its lamps on the tide . Fishermen say the "
    "water has never been so clean"
)

PRESETS: tuple[Preset, ...] = (
    Preset(
        key="continuous",
        title={"en": "Static or continuous batching", "zh": "静态批处理与连续批处理"},
        lesson={
            "en": "A static batch waits for its slowest request. Continuous batching fills a slot in the very "
            "next step.",
            "zh": "静态批次要等最慢的请求结束；连续批处理在下一步就把空位补上。",
        },
        requests=tuple(_ask(name, prompt, tokens) for name, prompt, tokens in _SHORT),
        options={"block_size": 4, "num_blocks": 33, "max_num_seqs": 4, "max_num_batched_tokens": 32},
        sides=(
            Side({"en": "static", "zh": "静态"}, is_static=True),
            Side({"en": "continuous", "zh": "连续"}),
        ),
        facts=("num_steps", "mean_latency_steps", "mean_running", "num_sampled_tokens"),
    ),
    Preset(
        key="chunked",
        title={"en": "A long prompt, whole or in chunks", "zh": "长提示：整段预填充与分块预填充"},
        lesson={
            "en": "Computed whole, a long prompt makes one huge step that everybody waits for. In chunks it "
            "shares the "
            "steps with those who decode.",
            "zh": "整段计算长提示会造成一个巨大的步，所有人都得等；分块后它与解码请求共用每一步。",
        },
        requests=(
            _ask("ann", "Tell me a story", 12),
            _ask("ben", "Sing a song", 12),
            _ask("long", _LONG, 4, at=2),
        ),
        options={"block_size": 4, "num_blocks": 49, "max_model_len": 72, "max_num_batched_tokens": 72},
        sides=(
            Side({"en": "whole", "zh": "整段"}, {"enable_chunked_prefill": False}),
            Side({"en": "in chunks", "zh": "分块"}, {"long_prefill_token_threshold": 10}),
        ),
        facts=("largest_step", "num_chunks", "num_steps", "num_prefill_tokens"),
        embedded={"num_blocks": 65, "max_model_len": 128, "max_num_batched_tokens": 128},
    ),
    Preset(
        key="prefix",
        title={"en": "One system prompt, shared", "zh": "共享系统提示"},
        lesson={
            "en": "The first request computes the system prompt. The others find its full blocks by their hash "
            "and point "
            "at the same physical blocks.",
            "zh": "第一个请求计算系统提示；其余请求凭哈希找到它的满块，指向同样的物理块。",
        },
        requests=(
            _ask("ann", _SYSTEM + "What is a comet ?", 6),
            _ask("ben", _SYSTEM + "Who wrote Faust ?", 6, at=1),
            _ask("cleo", _SYSTEM + "How old is the Moon ?", 6, at=2),
            _ask("dan", _SYSTEM + "Where is Samarkand ?", 6, at=3),
        ),
        options={"block_size": 4, "num_blocks": 41, "max_num_batched_tokens": 32},
        sides=(
            Side({"en": "without cache", "zh": "无前缀缓存"}, {"enable_prefix_caching": False}),
            Side({"en": "with prefix cache", "zh": "有前缀缓存"}),
        ),
        facts=("num_cached_tokens", "num_prefill_tokens", "peak_blocks", "most_holders"),
        stop_at="hit",
    ),
    Preset(
        key="copy",
        title={"en": "Parallel sampling and copy-on-write", "zh": "并行采样与写时复制"},
        lesson={
            "en": "Four samples share every block of one prompt. Who writes first into the half-filled last "
            "block gets a "
            "copy; the last holder writes in place.",
            "zh": "四个样本共享同一提示的全部块；先写入半满末块的得到副本，最后的持有者原地写入。",
        },
        requests=(_ask("poem", "Write a short poem about the old stone bridge today", 7, n=4),),
        options={"block_size": 4, "num_blocks": 25, "max_num_batched_tokens": 16},
        sides=_ONLY,
        facts=("num_copies", "most_holders", "first_copy", "peak_blocks"),
        stop_at="copy",
    ),
    Preset(
        key="preemption",
        title={"en": "Preemption: recompute or swap", "zh": "抢占：重算与换出"},
        lesson={
            "en": "The pool is full and somebody must give way. Recompute throws the blocks away and pays in "
            "tokens; swap "
            "copies them to the host pool and pays in copies.",
            "zh": "块池已满，必须有人让位。重算丢弃块、以重新计算为代价；换出把块复制到主机池、以复制为代价。",
        },
        requests=(
            _ask("ann", "Tell me how bread is baked", 12),
            _ask("ben", "Tell me how glass is blown", 12),
            _ask("cleo", "Tell me how ships are built", 12),
        ),
        options={
            "block_size": 4,
            "num_blocks": 13,
            "max_num_batched_tokens": 24,
            "enable_prefix_caching": False,
        },
        sides=(
            Side({"en": "recompute", "zh": "重算"}, {"preemption_mode": "recompute"}),
            Side({"en": "swap", "zh": "换出"}, {"preemption_mode": "swap"}),
        ),
        facts=("first_preemption", "num_preemptions", "num_prefill_tokens", "num_swapped_blocks"),
        stop_at="preempt",
    ),
    Preset(
        key="priority",
        title={"en": "First come, or most urgent first", "zh": "先来先服务与优先级"},
        lesson={
            "en": "An urgent request comes last. By order of arrival it waits for a slot; by priority it goes "
            "to the head "
            "of the queue, and when blocks run short the least urgent gives way.",
            "zh": "紧急请求最后到达：先来先服务时它要等空位；按优先级它排到队首，块不足时最不紧急者让位。",
        },
        requests=(
            _ask("ann", "Tell me about old maps", 10, priority=5),
            _ask("ben", "Tell me about tall trees", 12, priority=5),
            _ask("cleo", "Tell me about slow rivers", 10, priority=4),
            _ask("dan", "Tell me about deep caves", 8, priority=5),
            _ask("eve", "Tell me about warm winds", 8, priority=5),
            _ask("finn", "Tell me about high passes", 8, priority=5),
            _ask("urgent", "Where is the fire exit", 4, at=2, priority=0),
        ),
        options={"block_size": 4, "num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 32},
        sides=(
            Side({"en": "first come", "zh": "先来先服务"}, {"scheduling_policy": "fcfs"}),
            Side({"en": "by priority", "zh": "按优先级"}, {"scheduling_policy": "priority"}),
        ),
        facts=("urgent_ttft", "mean_latency_steps", "num_preemptions", "num_steps"),
        embedded={"num_blocks": 13},
    ),
    Preset(
        key="blocksize",
        title={"en": "Block size and waste", "zh": "块大小与浪费"},
        lesson={
            "en": "The last block of every request is only partly filled. The larger the blocks, the more slots stand "
            "empty; the smaller, the longer the tables. Try 8 and 16 too.",
            "zh": "每个请求的末块只填了一部分。块越大，空位越多；块越小，块表越长。也可试试 8 和 16。",
        },
        requests=tuple(_ask(name, prompt, tokens + 6) for name, prompt, tokens in _SHORT[:6]),
        options={"max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_prefix_caching": False},
        sides=(
            Side({"en": "32 tokens a block", "zh": "每块 32 词元"}, {"block_size": 32, "num_blocks": 9}),
            Side({"en": "8 tokens a block", "zh": "每块 8 词元"}, {"block_size": 8, "num_blocks": 33}),
        ),
        facts=("mean_fill", "wasted_slots", "peak_blocks", "longest_table"),
    ),
    Preset(
        key="speculation",
        title={"en": "Speculative decoding", "zh": "投机解码"},
        lesson={
            "en": "Cheap guesses are checked several in one step. The right ones are kept, the first wrong one "
            "ends it: "
            "the same text in fewer steps.",
            "zh": "廉价的猜测在一步里一起验证：对的留下，遇到第一个错的就停。文本不变，步数更少。",
        },
        requests=(
            _ask("ann", "1 2 3 4 5 1 2 3 4 5 1 2 3 4 5 1 2 3", 18),
            _ask("ben", "red green blue red green blue red green blue red green", 18),
        ),
        options={"block_size": 4, "num_blocks": 25, "max_num_batched_tokens": 32},
        sides=(
            Side({"en": "one token a step", "zh": "每步一个词元"}),
            Side(
                {"en": "with 3 drafts", "zh": "3 个草稿词元"},
                {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
            ),
        ),
        facts=("num_steps", "num_accepted", "num_rejected", "num_sampled_tokens"),
        stop_at="draft",
    ),
    Preset(
        key="contiguous",
        title={"en": "Contiguous memory or pages", "zh": "连续分配与分页"},
        lesson={
            "en": "Give each request one contiguous piece for the longest text it might write, and most of it "
            "stays empty. "
            "With small pages the same memory holds many more requests.",
            "zh": "若按可能的最长文本给每个请求一整段连续空间，大半都空着；用小页，同样的内存能容纳多得多的请求。",
        },
        requests=tuple(_ask(name, prompt, tokens + 2) for name, prompt, tokens in _SHORT),
        options={"max_model_len": 64, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
        sides=(
            Side({"en": "contiguous", "zh": "连续"}, {"block_size": 64, "num_blocks": 4}),
            Side({"en": "pages of 4", "zh": "每页 4 词元"}, {"block_size": 4, "num_blocks": 49}),
        ),
        facts=("mean_fill", "peak_running", "num_steps", "mean_latency_steps"),
    ),
    Preset(
        key="small",
        title={"en": "A pool too small", "zh": "块池太小"},
        lesson={
            "en": "With too few blocks requests push each other out again and again, and every return is paid "
            "in computed "
            "tokens. Enough blocks, and none of it happens.",
            "zh": "块太少时，请求一再互相挤出，每次返回都要重新计算；块足够时，这一切都不会发生。",
        },
        requests=tuple(_ask(name, prompt, 12) for name, prompt, _ in _SHORT[:6]),
        options={"block_size": 4, "max_num_batched_tokens": 32, "enable_prefix_caching": False},
        sides=(
            Side({"en": "11 blocks", "zh": "11 块"}, {"num_blocks": 12}),
            Side({"en": "32 blocks", "zh": "32 块"}, {"num_blocks": 33}),
        ),
        facts=("num_preemptions", "num_prefill_tokens", "num_steps", "peak_blocks"),
        stop_at="preempt",
    ),
)


def preset(key: str) -> Preset:
    """The preset of that key. Raises ValueError when there is none."""
    for candidate in PRESETS:
        if candidate.key == key:
            return candidate
    raise ValueError(f"There is no preset {key!r}; there are {', '.join(p.key for p in PRESETS)}.")
