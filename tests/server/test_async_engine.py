"""`AsyncLLM` over an engine core on its event loop, in a thread and in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from reference.contracts.protocols import Tier
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.async_engine import AsyncLLM
from reference.frontend.core_client import ClientMode, EngineDeadError, ProcessClient
from reference.frontend.core_messages import AddRequest, Command, PackedRequest
from reference.frontend.engine_args import EngineArgs
from reference.frontend.engine_core import EngineCore
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from tests.scripted import NO_WEIGHTS, ScriptedTier, byte_tokenizer, make_scripted_config
from tests.tiny_models import make_tiny_llama

T = TypeVar("T")
MODES: tuple[ClientMode, ...] = ("inproc", "thread", "process")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def use(llm: Awaitable[AsyncLLM], body: Callable[[AsyncLLM], Awaitable[T]]) -> T:
    """Run `body` with an engine that is closed afterwards."""

    async def run() -> T:
        engine = await llm
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(run())


async def scripted(tier: Tier, mode: ClientMode = "inproc", **options: Any) -> AsyncLLM:
    """An engine whose model is a script; keeps its core under `core`."""
    config = make_scripted_config(**options.pop("config", {}))
    core = EngineCore(config, ScriptedTier(tier, **options), NO_WEIGHTS)
    llm = await AsyncLLM.from_engine_core(core, byte_tokenizer(), mode)
    llm.core = core  # type: ignore[attr-defined]
    return llm


async def collect(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str, **more: Any
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, name, **more)]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_synchronous_engine_wherever_the_core_runs(
    mode: ClientMode, tier: Tier, model: Path
) -> None:
    prompts = ["Hello there", "A test of many words", "ok"]
    params = [
        PARAMS,
        SamplingParams(seed=2**64 - 1, n=2, max_tokens=9, logit_bias={7: 1.5}, stop=["zz"]),
        PARAMS,
    ]
    args = EngineArgs(model=str(model))
    engine = LLMEngine.from_engine_args(args, tier)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, p)
    expected: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        expected.update({o.request_id: o for o in engine.step() if o.finished})

    async def body(llm: AsyncLLM) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm, t, params[i], str(i)) for i, t in enumerate(prompts)))

    for outputs in use(AsyncLLM.from_engine_args(args, tier, mode), body):
        last = outputs[-1]
        twin = expected[last.request_id]
        assert last.finished
        assert [(c.text, c.token_ids, c.finish_reason) for c in last.outputs] == [
            (c.text, c.token_ids, c.finish_reason) for c in twin.outputs
        ]


def test_deltas_add_up_to_the_whole_and_only_the_last_output_is_finished(tier: Tier, model: Path) -> None:
    params = SamplingParams(n=2, max_tokens=7, seed=3, ignore_eos=True)

    async def body(llm: AsyncLLM) -> tuple[list[RequestOutput], RequestOutput]:
        deltas = await collect(llm, "abc", params, "a", output_kind="delta")
        (final,) = await collect(llm, "abc", params, "a", output_kind="final")
        return deltas, final

    deltas, final = use(AsyncLLM.from_engine_args(EngineArgs(model=str(model)), tier, "inproc"), body)
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(final.outputs) == 2
    for whole in final.outputs:
        parts = [c for output in deltas for c in output.outputs if c.index == whole.index]
        assert len(parts) > 1
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [part.finish_reason for part in parts if part.finished] == ["length"]


def test_the_backlog_of_a_slow_reader_is_merged_and_holds_nobody_up(model: Path, tier: Tier) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)

    async def body(llm: AsyncLLM) -> tuple[list[RequestOutput], RequestOutput]:
        slow = llm.generate("Hello there", params, "slow", output_kind="delta")
        read = [await anext(slow)]
        (quick,) = await collect(llm, "Hello there", params, "quick", output_kind="final")
        return read + [output async for output in slow], quick

    read, quick = use(AsyncLLM.from_engine_args(EngineArgs(model=str(model)), tier, "inproc"), body)
    assert len(read) < 12, "the tokens that were made while nobody read came together"
    parts = [output.outputs[0] for output in read]
    whole = quick.outputs[0]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert "".join(part.text for part in parts) == whole.text
    tables = [table for part in parts for table in part.logprobs or ()]
    assert [list(table) for table in tables] == [list(table) for table in whole.logprobs or ()]
    # The two requests ran in different batches, whose matrix products round float32 differently.
    sums = [sum(table[token].logprob for table, token in zip(tables, whole.token_ids, strict=True))]
    sums.append(parts[-1].cumulative_logprob or 0.0)
    assert sums == pytest.approx([whole.cumulative_logprob] * 2, abs=1e-3)


@pytest.mark.parametrize("n", [1, 3])
def test_closing_the_generator_aborts_every_sequence_and_frees_its_blocks(tier: Tier, n: int) -> None:
    async def body(llm: AsyncLLM) -> None:
        core = llm.core  # type: ignore[attr-defined]
        stream = llm.generate("some words", SamplingParams(n=n, max_tokens=200), "a")
        async for output in stream:
            if len(output.outputs[0].token_ids) > 2:
                break
        assert core.scheduler.kv_cache_manager.usage > 0
        await stream.aclose()
        (after,) = await collect(llm, "ok", SamplingParams(max_tokens=1), "b", output_kind="final")
        assert after.outputs[0].finish_reason == "length"
        assert core.scheduler.requests == {}
        assert core.scheduler.kv_cache_manager.usage == 0
        assert llm.output_processor.states == llm.output_processor.sequences == llm._collectors == {}

    use(scripted(tier), body)


def test_an_aborted_request_gives_its_reader_a_last_output(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> RequestOutput:
        stream = llm.generate("some words", SamplingParams(max_tokens=200), "a")
        await anext(stream)
        llm.abort("a")
        return [output async for output in stream][-1]

    last = use(scripted(tier), body)
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"


def test_a_stop_string_ends_the_request_in_the_core_too(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=200, stop=["</"])
        (output,) = await collect(llm, "x", params, "a", output_kind="final")
        assert output.outputs[0].finish_reason == "stop"
        await collect(llm, "x", SamplingParams(max_tokens=1), "b")
        assert llm.core.scheduler.requests == {}  # type: ignore[attr-defined]

    tokens = byte_tokenizer().encode("hi </ there")
    use(scripted(tier, script={"a": tokens}), body)


def test_a_failed_step_ends_its_requests_and_no_others(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> None:
        (failed,) = await collect(llm, "x", SamplingParams(max_tokens=9), "a", output_kind="final")
        assert failed.outputs[0].finish_reason == "error"
        assert "out of luck" in str(failed.error)
        (served,) = await collect(llm, "x", SamplingParams(max_tokens=3), "b", output_kind="final")
        assert served.outputs[0].finish_reason == "length"

    use(scripted(tier, raise_at={3: RuntimeError("out of luck")}), body)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", PARAMS, "prompt is empty"),
        ([5000], PARAMS, "outside the vocabulary"),
        ([5] * 64, PARAMS, "KV cache holds no more than 48"),
        ("x", SamplingParams(stop_token_ids=[9999]), "stop_token_ids"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing_behind(
    tier: Tier, prompt: Any, params: SamplingParams, message: str
) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(ValueError, match=message):
            await collect(llm, prompt, params, "a")
        assert llm.num_arrivals == 0
        assert llm.num_unfinished_requests == 0

    use(scripted(tier, config={"block_size": 4, "num_usable_blocks": 12, "max_model_len": 100}), body)


def test_an_id_in_use_is_refused_and_its_first_user_is_not_disturbed(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = llm.generate("some words", SamplingParams(max_tokens=6), "a")
        await anext(first)
        with pytest.raises(ValueError, match="already in the engine"):
            await collect(llm, [5, 6], SamplingParams(max_tokens=2), "a")
        outputs = [output async for output in first]
        assert len(outputs[-1].outputs[0].token_ids) == 6

    use(scripted(tier), body)


def test_a_prefix_cache_that_is_in_use_is_not_reset(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate("x" * 40, SamplingParams(max_tokens=50), "a")
        await anext(stream)
        assert not await llm.reset_prefix_cache()
        await stream.aclose()
        assert await llm.reset_prefix_cache()
        (again,) = await collect(llm, "x" * 40, SamplingParams(max_tokens=1), "b", output_kind="final")
        assert again.num_cached_tokens == 0

    use(scripted(tier), body)


def test_a_watcher_gets_every_step_in_order_and_the_core_keeps_none(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []

        async def watch() -> None:
            with llm.watch_steps() as watched:
                async for step in watched:
                    steps.append(msgspec.json.decode(step))

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await collect(llm, "some words", SamplingParams(max_tokens=5), "a")
        assert await llm.reset_prefix_cache()
        await asyncio.sleep(0)
        watcher.cancel()
        assert llm.core.traces == []  # type: ignore[attr-defined]
        return steps

    steps = use(scripted(tier, config={"trace": True}), body)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert [step["keyframe"] for step in steps] == [True, False, False, False, False]
    assert steps[-1]["finished"] == {"a": "length"}


def test_without_traces_there_is_nothing_to_watch(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(ValueError, match="trace=True"), llm.watch_steps():
            pass

    use(scripted(tier), body)


def test_each_tier_has_an_async_engine_of_its_own(tier_name: str, model: Path) -> None:
    import fast
    import reference

    own = {"reference": reference, "fast": fast}[tier_name].AsyncLLM

    async def body(llm: AsyncLLM) -> None:
        (output,) = await collect(llm, "Hello", PARAMS, "a", output_kind="final")
        assert len(output.outputs[0].token_ids) == 12

    use(own.from_engine_args(EngineArgs(model=str(model)), mode="inproc"), body)
    with pytest.raises(ValueError, match="No tier"):
        asyncio.run(AsyncLLM.from_engine_args(EngineArgs(model=str(model))))


def test_the_socket_of_the_process_is_private_and_goes_away(model: Path) -> None:
    async def body() -> None:
        llm = await AsyncLLM.from_engine_args(EngineArgs(model=str(model)), load_tier("reference"))
        client = llm.client
        assert isinstance(client, ProcessClient)
        (path,) = client._folder.iterdir()
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(client._folder.stat().st_mode) == 0o700
        await llm.close()
        assert not client._folder.exists()
        assert client.process is not None
        assert client.process.returncode == 0

    asyncio.run(body())


def test_a_killed_engine_process_is_noticed_and_its_readers_get_an_error(model: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        client = llm.client
        assert isinstance(client, ProcessClient)
        assert client.process is not None
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        stream = llm.generate("Hello", params, "a")
        await anext(stream)
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="signal 9"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, "Hello", PARAMS, "b")
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        assert llm.num_unfinished_requests == 0

    use(AsyncLLM.from_engine_args(EngineArgs(model=str(model)), load_tier("reference")), body)


def test_a_core_that_breaks_says_so_and_everybody_hears_it(tier: Tier) -> None:
    async def body(llm: AsyncLLM) -> None:
        def broken() -> None:
            raise AssertionError("queues disagree")

        stream = llm.generate("x", SamplingParams(max_tokens=100000), "a")
        await anext(stream)
        llm.core.scheduler.schedule = broken  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="queues disagree"):
            async for _ in stream:
                pass

    use(scripted(tier, "thread", config={"max_model_len": 4096, "num_usable_blocks": 2000}), body)


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="was not found"):
            await AsyncLLM.from_engine_args(EngineArgs(model=str(tmp_path / "none")), load_tier("reference"))

    asyncio.run(body())


def test_a_packed_request_is_the_same_after_a_journey_as_bytes() -> None:
    params = SamplingParams(
        n=3, temperature=0.5, logit_bias={5: -1.0, 70: 2.0}, allowed_token_ids=[1, 2], stop=["x", "yz"],
        stop_token_ids=[4], bad_words=["no"], min_tokens=2, seed=-5, max_tokens=None,
    ).resolved([0, 1], [[7, 8], [9]])  # fmt: skip
    request = EngineCoreRequest(
        "a", (1, 2, 3), params, 2**64 - 1, (7, 0), frozenset({1, 0}), -2, "salt",
        prompt_embeds=np.arange(12, dtype=np.float32).reshape(3, 4),
    )  # fmt: skip
    content = msgspec.msgpack.encode(AddRequest(PackedRequest.pack(request)))
    command = msgspec.msgpack.decode(content, type=Command)
    assert isinstance(command, AddRequest)
    back = command.request.unpack()
    assert back == request
    assert back.sampling_params.all_stop_token_ids == {0, 1, 4}
    assert back.sampling_params.bad_words_token_ids == ((7, 8), (9,))
    np.testing.assert_array_equal(np.asarray(back.prompt_embeds), np.asarray(request.prompt_embeds))


def test_bytes_that_are_no_message_are_refused() -> None:
    for content in (b"\x80\x04\x95", msgspec.msgpack.encode({"type": "AddRequest", "request": 1})):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.msgpack.decode(content, type=Command)


def test_api_process_killed_leaves_no_engine_process_and_no_socket(model: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from reference.frontend.async_engine import AsyncLLM\n"
        "from reference.frontend.engine_args import EngineArgs\n"
        "from reference.frontend.tiers import load_tier\n"
        "async def main():\n"
        "    llm = await AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1]), load_tier('reference'))\n"
        "    print(llm.client.process.pid, llm.client._folder, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    child = int(pid)
    assert [path.name for path in Path(folder).iterdir()] == ["engine"]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while is_alive(child):
        assert time.monotonic() < deadline, "the engine process outlived its parent"
        time.sleep(0.02)
    assert not Path(folder).exists()


def is_alive(pid: int) -> bool:
    """A zombie that nobody has waited for yet is dead."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
