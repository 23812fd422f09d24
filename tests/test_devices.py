"""A GPU that JAX does not use: the note about it, and the machines on which there is none."""

from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxfuse import devices


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a shell script in the place of nvidia-smi, on a machine on which JAX runs on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("580.65.06", "cuda13"),
        ("595.10", "cuda13"),
        ("1000.1", "cuda13"),
        ("575.57.08", "cuda12"),
        ("525.60", "cuda12"),
    ],
)
def test_an_idle_gpu(nvidia_smi: Callable[[str], None], driver: str, extra: str) -> None:
    """The note names the GPU and the extra that its driver can run: CUDA 13 from driver 580 on."""
    nvidia_smi(f"echo 'NVIDIA H200, {driver}'; echo 'NVIDIA T4, 1.0'")
    message = devices.unused_gpu()
    assert message is not None
    assert "NVIDIA H200" in message
    assert f"[{extra}]" in message


@pytest.mark.parametrize("script", ["exit 9", "echo; exit 9", "echo 'No devices were found'", "true", "kill $$"])
def test_no_working_gpu(nvidia_smi: Callable[[str], None], script: str) -> None:
    """A driver that does not answer is no GPU, and no reason to stop."""
    nvidia_smi(script)
    assert devices.unused_gpu() is None


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is said on a machine without nvidia-smi, nor where JAX has its GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.unused_gpu() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert devices.unused_gpu() is None
