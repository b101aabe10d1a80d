"""A step in one sentence, in English and in Chinese. The reasons are the trace's own words and stand beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reference.contracts.trace import StepTrace

_SHOWN = 4  # requests that are named; of more the number is told
_WORDS = {
    "en": {
        "step": "Step {n}: ", "sep": "; ", "end": ".", "and": ", ", "more": " and {n} more",
        "nothing": "nothing is computed", "cached": "{who} finds {n} tokens in the prefix cache",
        "cached_one": "{who} finds 1 token in the prefix cache",
        "prefill": "{who} prefills {n} tokens", "prefill_many": "{who} prefill {n} tokens",
        "prefill_one": "{who} prefills 1 token",
        "decode": "{who} decodes", "decode_many": "{who} decode",
        "drafts": "{who} checks {n} drafts and keeps {ok}", "drafts_one": "{who} checks 1 draft and keeps {ok}",
        "copy": "block {a} is copied to {b} before the write",
        "copies": "block {a} is copied to {b} before the writes",
        "out": "{n} blocks are swapped out", "in": "{n} blocks are swapped in",
        "out_one": "1 block is swapped out", "in_one": "1 block is swapped in",
        "preempted": "{who} is preempted", "preempted_many": "{who} are preempted",
        "finished": "{who} is finished", "finished_many": "{who} are finished",
    },
    "zh": {
        "step": "第 {n} 步：", "sep": "；", "end": "。", "and": "、", "more": " 等另外 {n} 个",
        "nothing": "没有计算", "cached": "{who} 在前缀缓存中命中 {n} 个词元",
        "prefill": "{who} 预填充 {n} 个词元", "prefill_many": "{who} 共预填充 {n} 个词元",
        "decode": "{who} 解码", "decode_many": "{who} 解码",
        "drafts": "{who} 验证 {n} 个草稿，接受 {ok} 个",
        "copy": "写入前把块 {a} 复制到 {b}", "copies": "写入前把块 {a} 复制到 {b}",
        "out": "换出 {n} 块", "in": "换入 {n} 块", "preempted": "{who} 被抢占", "preempted_many": "{who} 被抢占",
        "finished": "{who} 完成", "finished_many": "{who} 完成",
    },
}  # fmt: skip


def step_sentence(trace: StepTrace, label: Callable[[str], str], language: str) -> str:
    """What one step did. `label` is the short name of a request."""
    words = _WORDS[language]

    def tell(key: str, names: Iterable[str] = (), **values: object) -> str:
        labels = [label(name) for name in names]
        who = words["and"].join(labels[:_SHOWN])
        if len(labels) > _SHOWN:
            who += words["more"].format(n=len(labels) - _SHOWN)
        form = f"{key}_many" if len(labels) > 1 else f"{key}_one" if values.get("n") == 1 else key
        return words.get(form, words[key]).format(who=who, **values)

    parts = []
    if trace.preempted:
        parts.append(tell("preempted", trace.preempted))
    if trace.swap_outs:
        parts.append(tell("out", n=len(trace.swap_outs)))
    if trace.swap_ins:
        parts.append(tell("in", n=len(trace.swap_ins)))
    parts += [tell("cached", [name], n=n) for name, n in trace.num_cached_tokens.items() if n]
    targets: dict[int, list[str]] = {}
    for _, source, target in trace.block_copies:
        targets.setdefault(source, []).append(str(target))
    for source, copies in targets.items():
        parts.append(
            words["copies" if len(copies) > 1 else "copy"].format(a=source, b=words["and"].join(copies))
        )
    prefilled = {n: c for n, c in trace.num_scheduled_tokens.items() if trace.kinds[n] == "prefill"}
    if prefilled:
        parts.append(tell("prefill", prefilled, n=sum(prefilled.values())))
    plain = [n for n, kind in trace.kinds.items() if kind == "decode" and n not in trace.draft_token_ids]
    if plain:
        parts.append(tell("decode", plain))
    for name, drafts in trace.draft_token_ids.items():
        accepted = max(len(trace.sampled_token_ids.get(name, ())) - 1, 0)
        parts.append(tell("drafts", [name], n=len(drafts), ok=accepted))
    if trace.finished:
        parts.append(tell("finished", trace.finished))
    return words["step"].format(n=trace.step) + (words["sep"].join(parts) or words["nothing"]) + words["end"]
