"""Print the table of docs/server.md: which request field is honoured and which is refused, read from the models.

`python tools/compat_table.py` after a change of `reference/frontend/server/protocol.py`; a test compares the two.
"""

from __future__ import annotations

import json

from reference.frontend.server.protocol import ChatCompletionRequest, CompletionRequest, Strict

OPENAI = {
    "model", "prompt", "messages", "stream", "stream_options", "n", "seed", "stop", "temperature", "top_p",
    "presence_penalty", "frequency_penalty", "logit_bias", "user", "max_tokens", "max_completion_tokens", "echo",
    "logprobs", "top_logprobs", "best_of", "suffix", "response_format", "tools", "tool_choice", "parallel_tool_calls",
    "functions", "function_call", "modalities", "audio", "prediction", "reasoning_effort", "verbosity",
    "web_search_options", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "moderation",
}  # fmt: skip

NOTES = {
    "model": "404 if it is another",
    "prompt": "text, ids, or a list of either",
    "messages": "content as text or as parts of text; `developer` becomes `system`",
    "max_tokens": "16 for completions, up to the maximum length for chats",
    "temperature": "0 to 2",
    "n": "1 to 64",
    "logprobs": "0 to 20; of the prompt too with `echo`",
    "prompt_logprobs": "0 to 20; not in a stream",
    "response_format": "`text`, `json_object`, `json_schema`",
    "structured_outputs": "`json`, `regex`, `choice`, `grammar` or `json_object`",
    "guided_json": "short for `structured_outputs`; one way to constrain the output at a time",
    "top_logprobs": "0 to 20",
    "stop": "4 strings of 256 characters",
    "stream_options": "`include_usage`, `continuous_usage_stats`",
    "user": "written to the access log",
    "seed": "64 bits; choice i draws with `seed + i`",
    "chat_template": "with `--trust-request-chat-template`, else refused",
    "priority": "with `--scheduling-policy priority`; smaller runs first",
    "cache_salt": "only requests with the same salt share cached blocks; with several API keys, within a key",
    "return_token_ids": "`token_ids` and `prompt_token_ids` in the answer",
}


def rows() -> list[tuple[str, str, str, str, str]]:
    """(field, whose, in completions, in chats, note), honoured fields first."""
    models: tuple[type[Strict], ...] = (CompletionRequest, ChatCompletionRequest)
    honoured = list(dict.fromkeys(name for model in models for name in model.model_fields))
    refused = list(dict.fromkeys(name for model in models for name in model.refused if name not in honoured))
    return [_row(name, models) for name in honoured + refused]


def _row(name: str, models: tuple[type[Strict], ...]) -> tuple[str, str, str, str, str]:
    notes = [NOTES[name]] if name in NOTES else []
    states = []
    for model in models:
        states.append("honoured" if name in model.model_fields else "refused")
        if name in model.refused and name not in NOTES:
            neutral, reason = model.refused[name]
            values = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
            notes.append(reason + (f"; taken: {values}" if values else ""))
    whose = "OpenAI" if name in OPENAI else "vLLM"
    return f"`{name}`", whose, *states, "; ".join(dict.fromkeys(notes))  # type: ignore[return-value]


def table() -> str:
    head = ("field", "of", "completions", "chat", "")
    lines = [head, ("---",) * len(head), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
