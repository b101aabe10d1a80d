"""The program as a user meets it: what it prints, in which order, and how it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.chat_loop import ChatLoop
from reference.frontend.cli import main, parse_memory
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_LOGGING_LEVEL", "WARNING")


def generate(model: str, *arguments: str) -> list[str]:
    return ["generate", "--model", model, "--temperature", "0", "--max-tokens", "6", *arguments]


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_output_has_one_object_a_prompt_in_input_order(
    model: str, tier_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = generate(
        model, "--tier", tier_name, "--json", "--prompt", "first", "--prompt", "the second prompt"
    )
    assert main(arguments) == 0
    first, second = json_lines(capsys.readouterr().out)
    assert (first["prompt"], second["prompt"]) == ("first", "the second prompt")
    assert set(first) == {"request_id", "prompt", "prompt_token_ids", "outputs", "metrics"}
    (output,) = first["outputs"]
    assert set(output) == {"index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs"}
    assert len(output["token_ids"]) == 6
    assert output["finish_reason"] == "length"
    assert first["metrics"]["num_output_tokens"] == 6
    assert first["metrics"]["num_cached_tokens"] == 0
    assert first["metrics"]["latency_s"] >= first["metrics"]["ttft_s"] > 0


def test_both_tiers_print_the_same_token_ids(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = []
    for tier in ("reference", "fast"):
        assert main(generate(model, "--tier", tier, "--json", "--prompt", "The same prompt")) == 0
        tokens.append(json_lines(capsys.readouterr().out)[0]["outputs"][0]["token_ids"])
    assert tokens[0] == tokens[1]


def test_plain_output_shows_prompt_and_text_and_puts_the_statistics_on_stderr(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(generate(model, "--tier", "reference", "a [bold]prompt[/bold]")) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("a [bold]prompt[/bold]")
    assert "reference: 6 tokens in" in captured.err


def test_prompts_are_read_from_standard_input_one_a_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(generate(model, "--tier", "reference", "--json")) == 0
    assert [line["prompt"] for line in json_lines(capsys.readouterr().out)] == ["one", "two"]


def test_a_workload_file_brings_its_own_parameters_and_ids(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(
        '{"id": "x", "prompt_token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "temperature": 0}}\n'
    )
    assert main(generate(model, "--tier", "reference", "--json", "--input", str(file))) == 0
    (line,) = json_lines(capsys.readouterr().out)
    assert (line["request_id"], line["prompt"], len(line["outputs"][0]["token_ids"])) == ("x", None, 3)


def test_chat_wraps_the_prompt_into_the_template(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = []
    for flag in ([], ["--chat"]):
        assert main(generate(model, "--tier", "reference", "--json", *flag, "Hello")) == 0
        lengths.append(len(json_lines(capsys.readouterr().out)[0]["prompt_token_ids"]))
    assert lengths[1] > lengths[0]


def test_the_tier_of_python_dash_m_is_used_unless_another_is_named(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(generate(model, "x"), tier="reference") == 0
    assert "reference: 6 tokens" in capsys.readouterr().err
    assert main(generate(model, "--tier", "fast", "x"), tier="reference") == 0
    assert "fast: 6 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "x", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--prompt", "x", "--stop-token-ids", "999999"], "outside the vocabulary"),
        (["--prompt", "x" * 2000], "max_model_len is 512"),
        (["--prompt", "x", "--max-model-len", "100000"], "above the 512 positions"),
        (["--prompt", "x", "--block-size", "0"], "block_size must be at least 1"),
        (["--prompt", "x", "--num-blocks", "5", "--kv-cache-memory", "1MiB"], "give only one of them"),
        (["--prompt", "x", "--tier", "warp"], "There is no tier 'warp'"),
        (["--prompt", "x", "--device", "abacus"], "device must be 'auto' or 'cpu'"),
        (["--input", "does-not-exist.jsonl"], "does-not-exist.jsonl cannot be read"),
        (["--input", "does-not-exist.jsonl", "x"], "not both"),
    ],
)
def test_bad_input_is_one_sentence_on_stderr_and_exit_status_2(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = [] if "--tier" in arguments else ["--tier", "reference"]
    assert main(generate(model, *tier, *arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("name", ["no-such-model", "LICENSE"])
def test_an_unknown_model_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--tier", "reference", "--model", name, "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert "smollm2-135m" in error
    assert error.count("\n") == 1


def test_an_unknown_flag_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--colour", "red"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "diff", "conform", "model"])
def test_every_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_diff_exits_0_when_equal_and_2_on_bad_input(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(
        '{"config": {"block_size": 4}}\n{"prompt": "Hello", "sampling_params": {"max_tokens": 5}}\n'
    )
    assert main(["diff", str(file), "--model", model]) == 0
    assert "reference and fast are equal." in capsys.readouterr().out
    file.write_text("nonsense\n")
    assert main(["diff", str(file), "--model", model]) == 2
    assert "line 1" in capsys.readouterr().err


def test_conform_exits_2_on_a_file_that_is_no_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("nonsense\n")
    assert main(["conform", str(file), "--tier", "reference"]) == 2
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 2**20),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2_000_000_000),
        ("64k", 65536),
    ],
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


class InterruptedEngine(LLMEngine):
    """Ctrl-C arrives in the third step of the first answer."""

    num_steps = 0

    def step(self) -> Any:
        self.num_steps += 1
        if self.num_steps == 3:
            raise KeyboardInterrupt
        return super().step()


def chat(engine: LLMEngine, *lines: str, max_tokens: int = 5, system: str | None = None) -> ChatLoop:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    loop = ChatLoop(engine, params, system, io.StringIO("".join(f"{line}\n" for line in lines)))
    assert loop.run() == 0
    return loop


@pytest.fixture
def engine(model: str, tier_name: str) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model=model), load_tier(tier_name))


def test_a_second_turn_finds_the_first_in_the_prefix_cache(
    engine: LLMEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = chat(engine, "Hello there, engine", "And again", system="Be brief.")
    assert [message["role"] for message in loop.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    printed = capsys.readouterr().out
    assert ", 0 of them cached; 5 generated" in printed
    assert ", 32 of them cached; 5 generated" in printed or ", 48 of them cached; 5 generated" in printed
    assert loop.messages[2]["content"] in printed


def test_reset_starts_over_and_exit_leaves(engine: LLMEngine, capsys: pytest.CaptureFixture[str]) -> None:
    loop = chat(engine, "Hello", "/reset", "/help", "/exit", "never read")
    assert loop.messages == []
    printed = capsys.readouterr().out
    assert "A new conversation." in printed
    assert "Unknown command /help." in printed
    assert not engine.has_unfinished_requests()


def test_ctrl_c_stops_the_answer_and_not_the_program(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = InterruptedEngine.from_engine_args(EngineArgs(model=model), load_tier("reference"))
    loop = chat(engine, "Hello", "Again", max_tokens=9)
    printed = capsys.readouterr().out
    assert "2 generated" in printed
    assert "stopped]" in printed
    assert "9 generated" in printed
    assert len(loop.messages) == 4
    assert not engine.has_unfinished_requests()


def test_a_conversation_that_outgrows_the_model_says_how_to_go_on(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_model_len=64), load_tier("reference"))
    loop = chat(engine, "Hello " * 40, "Hi")
    printed = capsys.readouterr().out
    assert "max_model_len is 64" in printed
    assert "/reset starts a new conversation." in printed
    assert [message["content"] for message in loop.messages][:1] == ["Hi"]
