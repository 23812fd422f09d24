"""What people install: the wheel's files, a run from it, its version; and what no file may say."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxfuse

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its standard output; a failure shows all that it printed."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what it is made of, so that nothing else can lend it a file."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxfuse", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", source / "dist", source, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel, installed, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target")
    run(*pip, target, wheel, cwd=target)
    return target


def test_wheel_holds_every_file_and_no_other(wheel: Path) -> None:
    """A module or a checkpoint file left out of the wheel, or a top-level package `kernels` in it."""
    package, kernels = ROOT / "jaxfuse", ROOT / "kernels"
    checkpoint = [path for path in (package / "checkpoint").rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in checkpoint}
    expected = {f"jaxfuse/{path.relative_to(package)}" for path in (*package.rglob("*.py"), *checkpoint)}
    expected |= {f"jaxfuse/kernels/{path.relative_to(kernels)}" for path in kernels.rglob("*.py")}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_installed_wheel_generates(installed: Path, tmp_path: Path) -> None:
    """The command as a user gets it: outside the repository, from the wheel's files and checkpoint alone."""
    env = os.environ | {"PYTHONPATH": str(installed), "JAXFUSE_CACHE": "0"}
    where = "import jaxfuse.kernels; print(jaxfuse.__file__, jaxfuse.kernels.__file__, sep='\\n')"
    files = run(sys.executable, "-c", where, cwd=tmp_path, env=env).split("\n")
    assert files[:2] == [str(installed / "jaxfuse" / name) for name in ("__init__.py", "kernels/__init__.py")]

    arguments = ("generate", "--tokens", "1,2,3", "--max-new-tokens", "4", "--json")
    answer = json.loads(run(sys.executable, "-m", "jaxfuse.cli", *arguments, cwd=tmp_path, env=env))
    assert answer["prompt_tokens"] == [[1, 2, 3]]
    (tokens,) = answer["tokens"]
    assert len(tokens) == 4 or answer["finish_reason"] == ["stop"]
    assert all(isinstance(token, int) and token >= 0 for token in tokens)

    help_text = run(installed / "bin" / "jaxfuse", "--help", cwd=tmp_path, env=env)
    assert "generate" in help_text


def test_a_clone_is_importable(installed: Path) -> None:
    """Python started in a clone, where its folder jaxfuse/ comes before an installed jaxfuse and must be whole."""
    code = "import jaxfuse.kernels; jaxfuse.Qwen3; print(jaxfuse.__file__, jaxfuse.kernels.__file__, sep='\\n')"
    files = run(sys.executable, "-c", code, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(installed)})
    assert files.split("\n")[:2] == [str(ROOT / "jaxfuse" / name) for name in ("__init__.py", "kernels/__init__.py")]


def test_version_is_one() -> None:
    """The version in pyproject.toml, the installed one and `jaxfuse.__version__` drifting apart."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.metadata.version("jaxfuse") == version
    assert jaxfuse.__version__ == version


def test_no_file_names_a_registry() -> None:
    """A lock file or a note that spells out registry addresses, which are not everyone's."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git and a checkout, to know which files belong to the project")
    # In pieces, or this file would be found.
    names = ("pypi", "pythonhosted", "npmjs", "debian")
    hosts = [f"{name}.{end}".encode() for name in names for end in ("org", "com")]
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    paths = [ROOT / name for name in listed.split("\0") if name]
    named = [str(path) for path in paths if path.is_file() and any(h in path.read_bytes() for h in hosts)]
    assert paths
    assert not named
