"""The comparison with other engines, with engines made up here: what they answer, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from fast.bench.peers import catalogue, compare
from fast.bench.peers.catalogue import PEERS, Peer
from fast.bench.peers.compare import burning_core
from fast.bench.peers.environments import Environment
from fast.bench.peers.models import float32_folder, requantised
from fast.bench.peers.process import CHILDREN, PeerError, PeerProcess
from fast.bench.workloads import make_workload
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.cli import main
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import make_tiny_llama

FAKE = """
import os, sys, threading, time
sys.path.insert(0, {children!r})
from child import serve

def spin():
    while True:
        pass

class Fake:
    configuration = "made up"
    def run(self, requests):
        print("libraries like to print")
        os.system("echo and so do their processes")
        how = sys.argv[1]
        if how == "raises":
            raise RuntimeError("no such kernel")
        if how == "dies":
            sys.stderr.write("cannot allocate\\n")
            os._exit(3)
        if how == "hangs":
            time.sleep(60)
        if how == "spins":
            threading.Thread(target=spin, daemon=True).start()
        return [count - (how == "short") for ids, count in requests]

serve(lambda model, threads: Fake(), "pytest")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE.format(children=str(CHILDREN)), encoding="utf-8")
    return path


def start(script: Path, how: str, timeout: float = 60.0) -> PeerProcess:
    return PeerProcess([sys.executable, str(script), how], script.with_suffix(".log"), timeout=timeout)


def test_an_engine_answers_what_it_is_and_how_long_it_took(script: Path) -> None:
    with start(script, "well") as process:
        about = process.load(script, 2)
        seconds = process.run([([1, 2], 3), ([4], 5)])
        peak = process.peak_memory()
    assert about == {"configuration": "made up", "versions": {"pytest": pytest.__version__}}
    assert 0 <= seconds < 60
    assert peak is None or peak > 1_000_000
    # What it printed is kept, and no part of the conversation.
    assert "libraries like to print" in script.with_suffix(".log").read_text()
    assert "and so do their processes" in script.with_suffix(".log").read_text()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", "RuntimeError: no such kernel"),
        ("dies", "it ended with status 3: cannot allocate"),
        ("short", "it generated 6 tokens where 8 were asked for"),
        ("hangs", "it gave no answer within 1 s"),
    ],
)
def test_each_way_to_fail_is_one_sentence(script: Path, how: str, sentence: str) -> None:
    with start(script, how) as process:
        process.load(script, 2)
        process.timeout = 1.0 if how == "hangs" else 60.0
        with pytest.raises(PeerError) as failure:
            process.run([([1, 2], 3), ([4], 5)])
    assert str(failure.value) == sentence


def test_the_next_turn_waits_for_an_engine_that_goes_on_spinning(script: Path, tmp_path: Path) -> None:
    with start(script, "well") as calm, start(script, "spins") as spinning:
        for process in (calm, spinning):
            process.load(tmp_path, 1)
            process.run([([1, 2], 1)])
        assert compare.settle([calm], patience=60)
        assert not compare.settle([calm, spinning], patience=1.0)


def test_a_program_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="it cannot be started"):
        PeerProcess([str(tmp_path / "nothing")], tmp_path / "log")


def fake_peer(script: Path, name: str, how: str) -> Peer:
    return Peer(name, str(script), "none", lambda model, python: model, (how,))


def test_engines_take_turns_and_one_that_fails_leaves_the_others_alone(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path))
    peers = [
        fake_peer(script, name, how) for name, how in (("ours", "well"), ("bad", "short"), ("good", "well"))
    ]
    workloads = [make_workload("uniform"), make_workload("prefix", 2)]
    entries = compare.compare(peers, script, workloads, 49152, rounds=2, neighbour=True, timeout=60)
    ours, bad, good = entries
    for entry in (ours, good):
        assert entry.error is None
        assert {name: len(rates) for name, rates in entry.quiet.items()} == {"uniform": 2, "prefix": 2}
        assert {name: len(rates) for name, rates in entry.beside_neighbour.items()} == {
            "uniform": 2,
            "prefix": 2,
        }
        assert entry.start_s is not None
    assert bad.error == "it generated 0 tokens where 1 were asked for"
    assert bad.quiet == {}


def test_the_table_and_the_json_hold_every_engine(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model")
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path))
    fakes = tuple(
        fake_peer(script, name, how) for name, how in (("ours", "well"), ("other", "well"), ("bad", "dies"))
    )
    monkeypatch.setattr(compare, "PEERS", fakes)
    command = [
        "bench",
        "peers",
        "--peers",
        "other",
        "bad",
        "--quick",
        "--workload",
        "uniform",
        "--model",
        str(model),
    ]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "other: made up, pytest" in printed
    assert "bad: it ended with status 3: cannot allocate." in printed
    assert main([*command, "--json", "--save", str(tmp_path / "out" / "peers")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "out" / "peers.json").read_text())
    assert (tmp_path / "out" / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert document["workloads"] == {"uniform": {"requests": 1, "prompt_tokens": 64, "output_tokens": 64}}
    assert set(document["engines"]) == {"ours", "other", "bad"}
    assert document["engines"]["other"]["tokens_per_s"]["uniform"] > 0
    assert document["engines"]["bad"]["error"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--peers", "nobody"], "invalid choice"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--workload", "chat"], "invalid choice"),
        (["--model", "nowhere"], "was not found"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_installed(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_an_environment_is_made_once_and_a_package_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path))
    calls: list[list[str]] = []

    def run(self: Environment, command: list[str], log: Path) -> None:
        calls.append(command)
        self.folder.mkdir(parents=True, exist_ok=True)

    with monkeypatch.context() as patched:
        patched.setattr(Environment, "_run", run)
        environment = Environment("one", ("a==1", "b==2"))
        assert (
            environment.prepare() == environment.prepare() == tmp_path / "peers/environments/one/bin/python"
        )
        assert [command[-1] for command in calls] == [str(environment.folder), "a==1", "b==2"]
        Environment("one", ("a==1", "b==3")).prepare()
        assert calls[-1][-1] == "b==3"
    broken = Environment("broken", ("./no-such-wheel-1.0-py3-none-any.whl",))
    with pytest.raises(PeerError, match="it cannot be installed"):
        broken.prepare()


def test_packages_of_other_engines_are_pinned_and_no_index_is_named() -> None:
    for peer in PEERS:
        for package in peer.environment.packages if peer.environment is not None else ():
            assert "==" in package
            assert "//" not in package


def test_every_script_of_the_catalogue_exists() -> None:
    assert {peer.script for peer in PEERS} <= {path.name for path in CHILDREN.glob("run_*.py")}
    assert PEERS[0].name == catalogue.OURS


def tiny_q4_1(folder: Path) -> Path:
    path = folder / "tiny.gguf"
    write_tiny_gguf(make_tiny_llama(folder / "model"), path, gguf.GGMLQuantizationType.Q4_1)
    return path


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5, 6]], True),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], True),
        ([[1, 2, 3, 4], [1, 2, 9, 9]], False),
        ([[1, 2], [1, 2, 3, 4]], False),
        ([[1, 2, 3, 4]], False),  # nobody to share it with
        ([], False),
    ],
)
def test_requests_of_one_long_prefix_are_recognised(prompts: list[list[int]], expected: bool) -> None:
    asked = f"import child; print(child.share_a_prefix({[(ids, 1) for ids in prompts]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=CHILDREN, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected)


def test_the_model_in_another_type_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path / "home"))
    source = tiny_q4_1(tmp_path)
    before = load_checkpoint(source)
    after = load_checkpoint(requantised(source, gguf.GGMLQuantizationType.F16))
    name = "model.layers.0.mlp.up_proj.weight"
    assert after.config == before.config
    packed = after.packed_tensor(name)
    assert packed is not None
    assert packed.type == "F16"
    np.testing.assert_allclose(after.tensor(name), before.tensor(name), rtol=1e-3, atol=1e-6)  # 11 bits


def test_float32_weights_are_the_dequantised_ones_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path / "home"))
    source = tiny_q4_1(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    packed, plain = (load_checkpoint(path).packed_tensor(name) for path in (source, float32_folder(source)))
    assert packed is not None
    assert plain is not None
    assert (packed.type, plain.type) == ("Q4_1", "F32")


def test_the_neighbour_is_gone_when_its_time_is_over() -> None:
    with burning_core() as process:
        assert process.poll() is None
    assert process.poll() is not None
