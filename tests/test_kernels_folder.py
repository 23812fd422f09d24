"""The folder kernels/: what it imports, and that it is not taken for Hugging Face's package of that name."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_kernels_depend_on_jax_alone() -> None:
    """The folder imports itself, jax, and what jax itself needs: no Flax, no torch, no file formats."""
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top in {"jax", "numpy"} or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_folder_beside_transformers_is_harmless() -> None:
    """From the repository root, where `kernels` is this folder, transformers works, and so does jaxfuse.

    It asks for Hugging Face's package of that name, and for its version; this folder must not pass for it.
    """
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from transformers.models.qwen3 import modeling_qwen3
from transformers.utils.import_utils import is_kernels_available
import kernels
import jaxfuse.kernels
if is_kernels_available():
    assert not kernels.__file__.startswith(sys.argv[1] + "/kernels"), kernels.__file__
    from kernels import get_kernel
else:
    assert not hasattr(kernels, "__version__")
assert callable(jaxfuse.kernels.rms_norm)
print(modeling_qwen3.Qwen3RMSNorm(8))
"""
    command = [sys.executable, "-c", script, str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Qwen3RMSNorm((8,)" in done.stdout


def test_the_folder_gives_way_to_the_package_of_its_name(tmp_path: Path) -> None:
    """Another `kernels` behind it on the path is what is imported, its parts too; with none it is an empty module."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.1'\nfrom .part import NAME\n")
    (package / "part.py").write_text("NAME = 'theirs'\n")
    script = """
import sys
sys.path[:0] = sys.argv[1:]
import kernels
import kernels as again
assert again is kernels is sys.modules["kernels"]
print(getattr(kernels, "NAME", None), getattr(kernels, "__version__", None), "jax" in sys.modules)
"""
    # Without site-packages, so that whether the package is installed does not matter.
    for behind, expected in ((tmp_path, "theirs 0.1 False"), (tmp_path / "empty", "None None False")):
        command = [sys.executable, "-I", "-S", "-c", script, str(ROOT), str(behind)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == expected, done.stderr
