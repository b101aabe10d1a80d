"""One small workload for each lesson, as one table. Most are two or three runs that differ in a single thing.

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
class PresetSide:
    """One of the runs of a preset: what it is called, and the options in which it differs."""

    title: Text
    options: Mapping[str, Any]
    is_static: bool = False


@dataclass(frozen=True)
class Preset:
    """A lesson.

    Args:
        key: its name in the code and in the address of a picture.
        title, lesson: what is said above the run.
        requests: who asks for what, and when.
        options: engine options of all sides.
        sides: one run, or several to compare with the first.
        facts: keys of `facts.facts`, the lesson's own first.
        embedded: options that replace others on the embedded model.
        stop_at: what the page shows first in a still picture: an event of `state`, or "middle".
    """

    key: str
    title: Text
    lesson: Text
    requests: tuple[WorkloadRequest, ...]
    options: Mapping[str, Any]
    sides: tuple[PresetSide, ...]
    facts: tuple[str, ...]
    embedded: Mapping[str, Any] = field(default_factory=dict)
    stop_at: str = "middle"

    def workload(self, side: int, model_is_scripted: bool = True) -> Workload:
        """What one side runs."""
        extra = {} if model_is_scripted else self.embedded
        return Workload(self.requests, {**self.options, **extra, **self.sides[side].options})


def _in(en: str, zh: str) -> Text:
    return {"en": en, "zh": zh}


def _side(en: str, zh: str, is_static: bool = False, **options: Any) -> PresetSide:
    return PresetSide(_in(en, zh), options, is_static)


def _ask(name: str, prompt: str, tokens: int, at: int = 0, priority: int = 0, n: int = 1) -> WorkloadRequest:
    params = SamplingParams(
        temperature=0.9 if n > 1 else 0, max_tokens=tokens, n=n, ignore_eos=True, seed=1 if n > 1 else None
    )
    return WorkloadRequest(name, prompt=prompt, arrival_step=at, priority=priority, params=params)


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


def _short(count: int, more: int = 0, tokens: int | None = None) -> tuple[WorkloadRequest, ...]:
    """The first of the short requests, with so many tokens more than they have, or with `tokens` each."""
    return tuple(_ask(name, prompt, tokens or own + more) for name, prompt, own in _SHORT[:count])


_SYSTEM = "You are a kind librarian and you answer every question in one short clear sentence . "
_LONG = (
    "Please read this report with care and sum it up for me . The harbour was rebuilt after the great storm and "
    "now serves forty ships a day . Its cranes run on wind power and its lamps on the tide . Fishermen say the "
    "water has never been so clean"
)

# key, title, lesson, requests, options of all runs, the runs, what to look at; then what else must be said.
PRESETS: tuple[Preset, ...] = (
    Preset(
        "continuous",
        _in("Static or continuous batching", "静态批处理与连续批处理"),
        _in(
            "A static batch waits for its slowest request. Continuous batching fills a slot in the very next step.",
            "静态批次要等最慢的请求结束；连续批处理在下一步就把空位补上。",
        ),
        _short(8),
        {"block_size": 4, "num_blocks": 33, "max_num_seqs": 4, "max_num_batched_tokens": 32},
        (_side("static", "静态", is_static=True), _side("continuous", "连续")),
        ("num_steps", "mean_latency_steps", "mean_running", "num_sampled_tokens"),
    ),
    Preset(
        "chunked",
        _in("A long prompt, whole or in chunks", "长提示：整段预填充与分块预填充"),
        _in(
            "Computed whole, a long prompt makes one huge step that everybody waits for. In chunks it shares the "
            "steps with those who decode.",
            "整段计算长提示会造成一个巨大的步，所有人都得等；分块后它与解码请求共用每一步。",
        ),
        (_ask("ann", "Tell me a story", 12), _ask("ben", "Sing a song", 12), _ask("long", _LONG, 4, at=2)),
        {"block_size": 4, "num_blocks": 49, "max_model_len": 72, "max_num_batched_tokens": 72},
        (
            _side("whole", "整段", enable_chunked_prefill=False),
            _side("in chunks", "分块", long_prefill_token_threshold=10),
        ),
        ("largest_step", "num_chunks", "num_steps", "num_prefill_tokens"),
        embedded={"num_blocks": 65, "max_model_len": 128, "max_num_batched_tokens": 128},
    ),
    Preset(
        "prefix",
        _in("One system prompt, shared", "共享系统提示"),
        _in(
            "The first request computes the system prompt. The others find its full blocks by their hash and point "
            "at the same physical blocks.",
            "第一个请求计算系统提示；其余请求凭哈希找到它的满块，指向同样的物理块。",
        ),
        (
            _ask("ann", _SYSTEM + "What is a comet ?", 6),
            _ask("ben", _SYSTEM + "Who wrote Faust ?", 6, at=1),
            _ask("cleo", _SYSTEM + "How old is the Moon ?", 6, at=2),
            _ask("dan", _SYSTEM + "Where is Samarkand ?", 6, at=3),
        ),
        {"block_size": 4, "num_blocks": 41, "max_num_batched_tokens": 32},
        (
            _side("without cache", "无前缀缓存", enable_prefix_caching=False),
            _side("with prefix cache", "有前缀缓存"),
        ),
        ("num_cached_tokens", "num_prefill_tokens", "peak_blocks", "most_holders"),
        stop_at="hit",
    ),
    Preset(
        "copy",
        _in("Parallel sampling and copy-on-write", "并行采样与写时复制"),
        _in(
            "Four samples share every block of one prompt. Who writes first into the half-filled last block gets a "
            "copy; the last holder writes in place.",
            "四个样本共享同一提示的全部块；先写入半满末块的得到副本，最后的持有者原地写入。",
        ),
        (_ask("poem", "Write a short poem about the old stone bridge today", 7, n=4),),
        {"block_size": 4, "num_blocks": 25, "max_num_batched_tokens": 16},
        (_side("this run", "本次运行"),),
        ("num_copies", "most_holders", "first_copy", "peak_blocks"),
        stop_at="copy",
    ),
    Preset(
        "preemption",
        _in("Preemption: recompute or swap", "抢占：重算与换出"),
        _in(
            "The pool is full and somebody must give way. Recompute throws the blocks away and pays in tokens; swap "
            "copies them to the host pool and pays in copies.",
            "块池已满，必须有人让位。重算丢弃块、以重新计算为代价；换出把块复制到主机池、以复制为代价。",
        ),
        (
            _ask("ann", "Tell me how bread is baked", 12),
            _ask("ben", "Tell me how glass is blown", 12),
            _ask("cleo", "Tell me how ships are built", 12),
        ),
        {"block_size": 4, "num_blocks": 13, "max_num_batched_tokens": 24, "enable_prefix_caching": False},
        (
            _side("recompute", "重算", preemption_mode="recompute"),
            _side("swap", "换出", preemption_mode="swap"),
        ),
        ("first_preemption", "num_preemptions", "num_prefill_tokens", "num_swapped_blocks"),
        stop_at="preempt",
    ),
    Preset(
        "priority",
        _in("First come, or most urgent first", "先来先服务与优先级"),
        _in(
            "An urgent request comes last. By order of arrival it waits for a slot; by priority it goes to the head "
            "of the queue, and when blocks run short the least urgent gives way.",
            "紧急请求最后到达：先来先服务时它要等空位；按优先级它排到队首，块不足时最不紧急者让位。",
        ),
        (
            _ask("ann", "Tell me about old maps", 10, priority=5),
            _ask("ben", "Tell me about tall trees", 12, priority=5),
            _ask("cleo", "Tell me about slow rivers", 10, priority=4),
            _ask("dan", "Tell me about deep caves", 8, priority=5),
            _ask("eve", "Tell me about warm winds", 8, priority=5),
            _ask("finn", "Tell me about high passes", 8, priority=5),
            _ask("urgent", "Where is the fire exit", 4, at=2, priority=0),
        ),
        {"block_size": 4, "num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 32},
        (
            _side("first come", "先来先服务", scheduling_policy="fcfs"),
            _side("by priority", "按优先级", scheduling_policy="priority"),
        ),
        ("urgent_ttft", "mean_latency_steps", "num_preemptions", "num_steps"),
        embedded={"num_blocks": 13},
    ),
    Preset(
        "blocksize",
        _in("Block size and waste", "块大小与浪费"),
        _in(
            "The same memory, cut three ways. The last block of every request is only partly filled: the larger the "
            "blocks, the more slots stand empty; the smaller, the longer the tables.",
            "同样的内存，三种切法。每个请求的末块只填了一部分：块越大，空位越多；块越小，块表越长。",
        ),
        _short(6, more=6),
        {"max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_prefix_caching": False},
        (
            _side("32 tokens a block", "每块 32 词元", block_size=32, num_blocks=9),
            _side("16 tokens a block", "每块 16 词元", block_size=16, num_blocks=17),
            _side("8 tokens a block", "每块 8 词元", block_size=8, num_blocks=33),
        ),
        ("mean_fill", "wasted_slots", "peak_blocks", "longest_table"),
    ),
    Preset(
        "speculation",
        _in("Speculative decoding", "投机解码"),
        _in(
            "Cheap guesses are checked several in one step. The right ones are kept, the first wrong one ends it: "
            "the same text in fewer steps.",
            "廉价的猜测在一步里一起验证：对的留下，遇到第一个错的就停。文本不变，步数更少。",
        ),
        (
            _ask("ann", "1 2 3 4 5 1 2 3 4 5 1 2 3 4 5 1 2 3", 18),
            _ask("ben", "red green blue red green blue red green blue red green", 18),
        ),
        {"block_size": 4, "num_blocks": 25, "max_num_batched_tokens": 32},
        (
            _side("one token a step", "每步一个词元"),
            _side("with 3 drafts", "3 个草稿词元", speculative={"method": "ngram", "num_speculative_tokens": 3}),
        ),
        ("num_steps", "num_accepted", "num_rejected", "num_sampled_tokens"),
        stop_at="draft",
    ),
    Preset(
        "contiguous",
        _in("Contiguous memory or pages", "连续分配与分页"),
        _in(
            "Give each request one contiguous piece for the longest text it might write, and most of it stays empty. "
            "With small pages the same memory holds many more requests.",
            "若按可能的最长文本给每个请求一整段连续空间，大半都空着；用小页，同样的内存能容纳多得多的请求。",
        ),
        _short(8, more=2),
        {"max_model_len": 64, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
        (
            _side("contiguous", "连续", block_size=64, num_blocks=4),
            _side("pages of 4", "每页 4 词元", block_size=4, num_blocks=49),
        ),
        ("mean_fill", "peak_running", "num_steps", "mean_latency_steps"),
    ),
    Preset(
        "small",
        _in("A pool too small", "块池太小"),
        _in(
            "With too few blocks requests push each other out again and again, and every return is paid in computed "
            "tokens. Enough blocks, and none of it happens.",
            "块太少时，请求一再互相挤出，每次返回都要重新计算；块足够时，这一切都不会发生。",
        ),
        _short(6, tokens=12),
        {"block_size": 4, "max_num_batched_tokens": 32, "enable_prefix_caching": False},
        (_side("11 blocks", "11 块", num_blocks=12), _side("32 blocks", "32 块", num_blocks=33)),
        ("num_preemptions", "num_prefill_tokens", "num_steps", "peak_blocks"),
        stop_at="preempt",
    ),
)  # fmt: skip


def preset(key: str) -> Preset:
    """The preset of that key. Raises ValueError when there is none."""
    for candidate in PRESETS:
        if candidate.key == key:
            return candidate
    raise ValueError(f"There is no preset {key!r}; there are {', '.join(p.key for p in PRESETS)}.")
