"""What a user gets from `pip install twinfer`: a wheel that works from any folder, without the source tree."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).resolve().parents[2]

# One worker for all: the build folder is shared, so that compiling costs nothing after `make`.
pytestmark = pytest.mark.xdist_group("wheel")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet"]
    run(*pip, "--wheel-dir", folder, ".", cwd=ROOT)
    (path,) = folder.glob("twinfer-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that holds the wheel and can see third-party packages, but no source tree.

    The packages are links to the ones this test runs with. Our own, their metadata and every .pth file, through which
    an editable installation works, are left out.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    third_party = folder / "third-party"
    third_party.mkdir()
    ours = ("reference", "fast", "app", "twinfer", "_twinfer", "__editable__")
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(source).iterdir():
            if not entry.name.startswith(ours) and entry.suffix != ".pth":
                (third_party / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=folder)
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(where) / "third-party.pth").write_text(f"{third_party}\n", encoding="utf-8")
    return folder / "bin"


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """Nothing that could lead back to the source tree; one thread, because other workers use the other cores."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TWINFER"))
    }
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return inherited | pinned | {"HOME": str(tmp_path), "TWINFER_HOME": str(tmp_path / "cache")}


def test_the_wheel_holds_both_tiers_the_app_and_the_compiled_module_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    dist_info = next(name for name in names if name.endswith("/METADATA")).split("/")[0]
    assert {name.split("/")[0] for name in names} == {"reference", "fast", "app", dist_info}
    for module in ("_cpu", "_simt", "_simt_trace"):
        assert [name for name in names if name.startswith(f"fast/{module}.") and name.endswith(".so")]
    for tier in ("reference", "fast", "app"):
        expected = {str(path.relative_to(ROOT)) for path in (ROOT / tier).rglob("*.py")}
        assert expected <= set(names)
        assert f"{tier}/py.typed" in names
    assert {"app/assets/viewer.js", "app/assets/viewer.css"} <= set(names)
    assert {f"{dist_info}/licenses/LICENSE", f"{dist_info}/licenses/NOTICE"} <= set(names)


def test_the_core_requires_no_torch_and_the_fast_extra_does(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist", [])
    assert [line for line in required if line.startswith("torch")] == ['torch>=2.6; extra == "fast"']
    assert any(line.startswith("numpy") and "extra" not in line for line in required)
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_installed_packages_come_from_the_wheel_and_not_from_the_source_tree(
    installed: Path, clean_environment: dict[str, str], tmp_path: Path
) -> None:
    found = "[reference.__file__, fast._cpu.__file__, sys.path]"
    script = f"import json, sys, reference, fast._cpu; print(json.dumps({found}))"
    output = run(installed / "python", "-c", script, cwd=tmp_path, env=clean_environment)
    reference_file, extension_file, search_path = json.loads(output)
    environment = installed.parent
    assert environment in Path(reference_file).parents
    assert environment in Path(extension_file).parents
    assert not [entry for entry in search_path if Path(entry) == ROOT]


def test_generate_works_from_another_folder_and_both_tiers_agree(
    installed: Path, clean_environment: dict[str, str], tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny-llama")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    token_ids = {}
    for tier in ("reference", "fast"):
        options = ["--tier", tier, "--model", model, "--json", "--temperature", "0", "--max-tokens", "8"]
        command = [installed / "twinfer", "generate", *options, "--prompt", "To be or not to be"]
        output = run(*command, cwd=elsewhere, env=clean_environment)
        (line,) = output.splitlines()
        token_ids[tier] = json.loads(line)["outputs"][0]["token_ids"]
    assert 1 <= len(token_ids["reference"]) <= 8
    assert token_ids["fast"] == token_ids["reference"]
