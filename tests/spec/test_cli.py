"""The program as a user meets it: what it prints, in which order, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.chat_loop import ChatLoop
from reference.frontend.cli import main, pick_tier
from reference.frontend.cli_options import parse_memory
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.tokenizer import load_tokenizer
from reference.frontend.trace_file import read_trace
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
    prompts = ["a rather long prompt, which is finished last", "--prompt", "second", "--prompt", "third"]
    assert main(generate(model, "--tier", tier_name, "--json", "--max-num-seqs", "2", *prompts)) == 0
    first, second, third = json_lines(capsys.readouterr().out)
    assert [line["prompt"] for line in (first, second, third)] == [prompts[0], "second", "third"]
    assert set(first) == {"request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "metrics"}
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
    assert "\x1b" not in captured.out  # no colours in a pipe
    assert captured.err.startswith("reference: 6 tokens in")
    assert captured.err.count("\n") == 1


def test_plain_output_of_a_chat_shows_the_question_and_not_the_template(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(generate(model, "--tier", "reference", "--chat", "One?", "Two?")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("One?\n")
    assert "\n\nTwo?\n" in printed
    assert "<bos>" not in printed


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
    command = ["generate", "--model", model, "--tier", "reference", "--json", "--input", str(file)]
    assert main(command) == 0
    (line,) = json_lines(capsys.readouterr().out)
    assert (line["request_id"], line["prompt"], len(line["outputs"][0]["token_ids"])) == ("x", None, 3)
    assert main([*command, "--max-tokens", "5"]) == 0
    (line,) = json_lines(capsys.readouterr().out)
    assert len(line["outputs"][0]["token_ids"]) == 5  # what is said on the command line wins


def test_the_engine_options_of_a_workload_file_hold_unless_the_command_line_says_otherwise(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(
        '{"config": {"block_size": 4, "max_num_batched_tokens": 8}}\n'
        '{"prompt": "the same prompt"}\n{"prompt": "the same prompt", "arrival_step": 9}\n'
    )
    cached = []
    for options in ([], ["--block-size", "8"], ["--no-enable-prefix-caching"]):
        assert main(generate(model, "--tier", "reference", "--json", "--input", str(file), *options)) == 0
        cached.append(json_lines(capsys.readouterr().out)[1]["metrics"]["num_cached_tokens"])
    assert cached == [12, 8, 0]


def test_a_sampling_seed_gives_every_prompt_the_same_draws(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(*options: str) -> list[list[int]]:
        command = ["generate", "--model", model, "--tier", "reference", "--json", *options, "Hello", "Hello"]
        assert main(command) == 0
        return [line["outputs"][0]["token_ids"] for line in json_lines(capsys.readouterr().out)]

    first, second = tokens("--sampling-seed", "5")
    assert first == second == tokens("--sampling-seed", "5", "--seed", "9")[0]
    first, second = tokens("--seed", "5")
    assert first != second
    assert [first, second] == tokens("--seed", "5")


def test_the_rules_of_the_command_line_reach_the_sampler(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids(*options: str) -> list[int]:
        command = ["generate", "--model", model, "--tier", "reference", "--json", "--temperature", "0"]
        assert main([*command, "--max-tokens", "6", *options, "--prompt", "Hello"]) == 0
        (line,) = json_lines(capsys.readouterr().out)
        token_ids: list[int] = line["outputs"][0]["token_ids"]
        return token_ids

    assert ids("--logit-bias", "50=100") == [50] * 6
    assert ids("--allowed-token-ids", "60") == [60] * 6
    both = ("--logit-bias", "50=100", "--logit-bias", "51=100", "--allowed-token-ids", "50", "51")
    for penalty in ("--frequency-penalty", "--presence-penalty"):
        assert len(set(ids(*both, "--max-tokens", "40", penalty, "2"))) == 2
    eos_first = ["--logit-bias", "1=100", "--logit-bias", "60=90"]
    assert ids(*eos_first, "--min-tokens", "3") == [60, 60, 60, 1]
    assert ids("--repetition-penalty", "100", "--logit-bias", "50=100")[1] != 50
    assert ids("--temperature", "5", "--min-p", "1") == ids()
    e = load_tokenizer(Path(model)).encode("e")[0]
    assert (
        ids("--allowed-token-ids", str(e), "60", "--logit-bias", f"{e}=100", "--bad-words", "e", "zz")
        == [60] * 6
    )


@pytest.mark.parametrize("bias", ["50", "50=", "=3", "x=3", "50=y", "5.5=1"])
def test_a_bias_that_is_no_pair_is_refused(model: str, capsys: pytest.CaptureFixture[str], bias: str) -> None:
    assert main(["generate", "--model", model, "--logit-bias", bias, "--prompt", "Hello"]) == 2
    assert f"{bias!r} is no bias: write ID=X" in capsys.readouterr().err


def test_stops_of_the_command_line_end_the_output(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*options: str) -> dict[str, Any]:
        assert main(generate(model, "--tier", "reference", "--json", *options, "--prompt", "Hello")) == 0
        (line,) = json_lines(capsys.readouterr().out)
        return dict(line["outputs"][0])

    tokens = output("--ignore-eos")["token_ids"]
    stopped = output("--ignore-eos", "--stop-token-ids", "319", str(tokens[2]))
    assert stopped["token_ids"] == tokens[: tokens.index(tokens[2]) + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", tokens[2])


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
        (["--prompt", "x", "--device", "abacus"], "device must be 'auto', 'cpu', 'cuda' or 'simt'"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["generate", "--colour", "red"], "unrecognized arguments: --colour"),
        (["generate", "--max-tok", "3"], "unrecognized arguments: --max-tok"),
        (["generate", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["generate", "--speculative", "ngram"], '\'ngram\' is no JSON object: write \'{"method": "ngram"'),
        (["generate", "--speculative", "[4]"], "'[4]' is no JSON object"),
        (["generate", "--kv-cache-memory", "3XB"], "'3XB' is no size: write bytes, 512MiB or 1GiB"),
        (["generate", "--scheduling-policy", "lifo"], "invalid choice: 'lifo'"),
        (["generate", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["diff"], "required: WORKLOAD.jsonl"),
        (["chat", "--tier", "warp"], "There is no tier 'warp'"),
        (["model", "no-such-model"], "no-such-model"),
        (["conform", "missing.jsonl.gz", "--tier", "reference"], "missing.jsonl.gz cannot be read"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_sentence_and_exit_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("twinfer: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_standard_input_is_refused(
    model: str, content: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(content))
    assert main(generate(model)) == 2
    assert capsys.readouterr().err == "twinfer: No prompt: standard input is empty.\n"


def test_standard_input_that_is_no_text_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(generate(model)) == 2
    assert capsys.readouterr().err == "twinfer: Standard input is no utf-8 text.\n"


def test_token_ids_cannot_be_wrapped_into_a_chat(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text('{"id": "x", "prompt_token_ids": [5]}\n')
    assert main(generate(model, "--chat", "--input", str(file))) == 2
    assert "Request 'x' has token ids, which --chat cannot wrap" in capsys.readouterr().err


def test_a_pool_that_does_not_fit_into_memory_is_one_sentence(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("Unable to allocate 1.12 TiB")

    monkeypatch.setattr(LLMEngine, "from_engine_args", fail)
    assert main(generate(model, "--tier", "reference", "x")) == 2
    assert capsys.readouterr().err == (
        "twinfer: there is not enough memory (Unable to allocate 1.12 TiB); lower --kv-cache-memory or --num-blocks.\n"
    )


def test_a_tier_that_cannot_run_here_is_left_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_tier(None).name == "fast"
    monkeypatch.setattr(type(load_tier("fast")), "why_unavailable", lambda self: "not built")
    assert pick_tier(None).name == "reference"
    assert pick_tier("fast").name == "fast"


def run_program(*arguments: str) -> subprocess.Popen[str]:
    """The program in its own process, with buffered output as at a user's."""
    return subprocess.Popen(
        [sys.executable, "-m", "reference", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
    )


def test_a_reader_that_has_gone_is_no_error(model: str) -> None:
    program = run_program(*generate(model, "--json", "x"))
    assert program.stdout is not None
    program.stdout.close()
    assert program.stderr is not None
    assert program.stderr.read() == ""
    assert program.wait() == 0
    program.stderr.close()


def test_ctrl_c_leaves_quietly_with_exit_status_130(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: LLMEngine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLMEngine, "step", interrupt)
    assert main(generate(model, "--tier", "reference", "x")) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "diff", "trace", "conform", "bench", "model"])
def test_every_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: twinfer {command}")
    assert "examples:" in page
    assert all(len(line) <= 100 for line in page.splitlines())


def test_the_help_page_shows_the_defaults_of_the_engine_and_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, max_tokens in (("generate", 16), ("chat", 512)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        page = " ".join(capsys.readouterr().out.split())
        assert f"tokens to generate at most (default: {max_tokens})" in page
        assert f"tokens a KV cache block holds (default: {EngineArgs().block_size})" in page
        assert f"(default: {EngineArgs().model})" in page


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"twinfer {version('twinfer')}\n"


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


TRACED = (
    '{"config": {"block_size": 4, "max_num_seqs": 2}}\n'
    + '{"prompt": "Hello", "sampling_params": {"max_tokens": 5, "ignore_eos": true}}\n' * 3
)


def test_trace_writes_both_files_and_prints_the_totals(
    model: str, tier_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, chrome = tmp_path / "w.jsonl", tmp_path / "run.json", tmp_path / "run.chrome.json"
    file.write_text(TRACED)
    arguments = ["--model", model, "--tier", tier_name, "--out", str(out), "--chrome", str(chrome)]
    assert main(["trace", str(file), *arguments]) == 0
    traces = read_trace(out)
    assert list(traces[0].num_scheduled_tokens) == ["r0", "r1"]
    assert traces[0].refusal_reasons == {"r2": "r2 waits: max_num_seqs is 2"}
    assert json.loads(chrome.read_text())["traceEvents"]
    lines = [line.strip().split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {columns[0]: columns[-1].strip() for columns in lines}
    assert rows["requests"] == "3"
    assert rows["steps"].startswith(f"{len(traces)}, of ")
    assert rows["tokens sampled"] == "15"
    # Three equal prompts: the second finds the first's full block in the same step, the third in a later one.
    num_prompt = traces[0].num_scheduled_tokens["r0"]
    hit = (num_prompt - 1) // 4 * 4
    assert rows["prefix cache"].startswith(f"{2 * hit} of {3 * num_prompt} tokens hit")
    assert rows["preemptions"] == "0"
    assert rows["peak running, waiting"] == "2, 1"


def test_speculation_is_an_option_in_json_and_trace_says_what_became_of_the_drafts(
    model: str, tier_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is its own draft model: of five tokens the first step gives one, and the second the other four."""
    file, out = tmp_path / "w.jsonl", tmp_path / "run.json"
    file.write_text(TRACED)
    table = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    arguments = ["--model", model, "--tier", tier_name, "--speculative", json.dumps(table), "--out", str(out)]
    assert main(["trace", str(file), *arguments]) == 0
    lines = [line.strip().split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {columns[0]: columns[-1].strip() for columns in lines}
    assert rows["tokens sampled"] == "15"
    assert rows["drafts accepted"] == "9 of 9"
    traces = read_trace(out)
    assert list(traces[1].draft_token_ids) == ["r0", "r1"]
    assert {traces[1].kinds[name] for name in traces[1].draft_token_ids} == {"decode"}
    assert traces[1].sampled_token_ids["r0"][:3] == traces[1].draft_token_ids["r0"]


def test_diff_compares_runs_with_speculation(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    table = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    file.write_text(
        TRACED.replace('"max_num_seqs": 2', f'"max_num_seqs": 2, "speculative": {json.dumps(table)}')
    )
    assert main(["diff", str(file), "--model", model]) == 0
    assert "equal" in capsys.readouterr().out


def test_trace_without_a_file_prints_only_the_totals_and_the_command_line_wins(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(TRACED)
    assert main(["trace", str(file), "--model", model, "--tier", "reference", "--max-num-seqs", "1"]) == 0
    assert "1, 2" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["w.jsonl"]


def test_trace_refuses_a_folder_that_is_not_there_before_it_runs(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(TRACED)
    assert main(["trace", str(file), "--model", model, "--out", str(tmp_path / "none" / "run.json")]) == 2
    captured = capsys.readouterr()
    assert "There is no folder" in captured.err
    assert captured.out == ""


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
    num_interrupts = 1

    def step(self) -> Any:
        self.num_steps += 1
        if self.num_steps == 3:
            for _ in range(self.num_interrupts):
                signal.raise_signal(signal.SIGINT)
        return super().step()


def test_no_line_of_the_log_lands_in_an_answer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[LLMEngine] = []

    def run(self: ChatLoop) -> int:
        engines.append(self.engine)
        return 0

    monkeypatch.setattr(ChatLoop, "run", run)
    assert main(["chat", "--model", model, "--tier", "reference"]) == 0
    assert [engine.log_stats for engine in engines] == [False]


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
    assert "; 3 generated" in printed  # the step in which it arrived is finished first
    assert "stopped]" in printed
    assert "; 9 generated" in printed
    assert loop.messages[1]["content"] in printed
    assert len(loop.messages) == 4
    assert not engine.has_unfinished_requests()


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_a_step_and_leaves(model: str) -> None:
    engine = InterruptedEngine.from_engine_args(EngineArgs(model=model), load_tier("reference"))
    engine.num_interrupts = 2
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background of a shell
    with pytest.raises(KeyboardInterrupt):
        chat(engine, "Hello", max_tokens=9)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_is_written_as_it_comes(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("sys.stdout.write", written.append)
    loop = chat(engine, "Hello", max_tokens=12)
    answer = loop.messages[1]["content"]
    start = next(i for i in range(len(written)) if "".join(written[i : i + 12]) == answer)
    assert sum(bool(delta) for delta in written[start : start + 12]) > 3


def test_a_chat_over_a_pipe_answers_every_line_and_ends_with_the_input(model: str) -> None:
    program = run_program("chat", "--model", model, "--temperature", "0", "--max-tokens", "5", "--ignore-eos")
    printed, log = program.communicate("Hello\nAgain\n")
    assert program.returncode == 0
    assert printed.count("; 5 generated") == 2
    assert "Traceback" not in log


def test_a_chat_without_a_template_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_llama(tmp_path)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    assert main(["chat", "--tier", "reference", "--model", str(folder)]) == 2
    assert "This model has no chat template" in capsys.readouterr().err


def test_an_answer_that_fills_the_model_says_that_the_conversation_is_full(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_model_len=48), load_tier("reference"))
    chat(engine, "Hello", max_tokens=100)
    assert "the conversation is full: /reset starts a new one]" in capsys.readouterr().out
    chat(engine, "Hello", max_tokens=3)
    assert "cut off by --max-tokens]" in capsys.readouterr().out


def test_a_conversation_that_outgrows_the_model_says_how_to_go_on(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_model_len=64), load_tier("reference"))
    loop = chat(engine, "Hello " * 40, "Hi")
    printed = capsys.readouterr().out
    assert "max_model_len is 64" in printed
    assert "/reset starts a new conversation." in printed
    assert [message["content"] for message in loop.messages][:1] == ["Hi"]


SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "maxProperties": 1}'
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--regex", "[0-9]{3}"], "[0-9]{3}"),
        (["--choice", "tea", "--choice", "coffee"], "tea|coffee"),
        (["--grammar", 'start: "(" "x" ")"'], r"\(x\)"),
        (["--json-schema", SCHEMA, "--disable-any-whitespace"], r'\{"a":"[xy]"\}'),
        (["--json-object", "--disable-any-whitespace", "--logit-bias", "94=100"], r"\{\}"),
    ],
)
def test_the_text_of_generate_is_what_the_options_ask_for(
    model: str, tier_name: str, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert (
        main(generate(model, "--max-tokens", "20", "--tier", tier_name, "--json", *arguments, "Hello")) == 0
    )
    ((output,),) = (line["outputs"] for line in json_lines(capsys.readouterr().out))
    assert re.fullmatch(expected, output["text"])


def test_a_schema_and_a_grammar_may_stand_in_a_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "grammar.lark").write_text("start: A\nA: /x+y/\n", encoding="utf-8")
    options = generate(model, "--max-tokens", "40", "--json", "--logit-bias", "91=9")
    assert (
        main([*options, "--json-schema", str(tmp_path / "schema.json"), "--disable-any-whitespace", "Hello"])
        == 0
    )
    assert main([*options, "--grammar", str(tmp_path / "grammar.lark"), "Hello"]) == 0
    first, second = (line["outputs"][0]["text"] for line in json_lines(capsys.readouterr().out))
    assert json.loads(first)["a"] in ("x", "y")
    assert re.fullmatch("x+y", second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regex", "a", "--choice", "b"], "structured_outputs needs exactly one of"),
        (["--json-schema", "no-such-file.json"], "the file 'no-such-file.json' cannot be read"),
        (["--grammar", "no-such-file"], "the file 'no-such-file' cannot be read"),
        (["--regex", "[a"], "structured_outputs.regex cannot be compiled"),
    ],
)
def test_options_of_guided_decoding_that_make_no_sense_are_one_sentence(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(generate(model, *arguments, "Hello")) == 2
    assert message in capsys.readouterr().err


def test_the_collector_is_left_alone_where_the_program_is_called_by_another() -> None:
    code = """
import gc, sys
from reference.frontend.cli import main
before = gc.get_threshold()
for argv in (["--version"], None):
    sys.argv = ["twinfer", "--version"]
    try:
        main(argv)
    except SystemExit:
        print(gc.get_threshold() == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[1::2][:2] == ["True", "False"], done.stdout
