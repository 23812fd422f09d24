"""What the pages say: their examples run, their links lead somewhere, the tests that they name exist."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
WITH_EXAMPLES = [ROOT / "README.md", *DOCS]
PAGES = [*WITH_EXAMPLES, ROOT / "CONTRIBUTING.md"]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_there_are_pages() -> None:
    """Checks that pass because they look at nothing."""
    assert ROOT / "docs/custom_ops.md" in DOCS
    assert all(page.is_file() for page in PAGES)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """An example that fails or warns: a page's run in order, in one process, on a CPU, from the repository's root."""
    text = page.read_text("utf-8")
    examples = list(EXAMPLE.finditer(text))
    assert len(examples) == len(re.findall("^```python", text, re.MULTILINE)) > 0
    # A traceback's line is the page's.
    lines: list[str] = []
    for example in examples:
        lines += [""] * (text.count("\n", 0, example.start(1)) - len(lines)) + example[1].splitlines()
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(lines), "utf-8")
    command = (sys.executable, "-W", "error", script)
    # The folder of the script, not the repository, comes first on Python's path: an installed jaxfuse is meant.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link to a file that is not there."""
    links = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text("utf-8")))
    relative = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """A claim held by a test that was renamed or removed."""
    named = re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text("utf-8"))
    assert page not in DOCS or any(name for _, name in named)
    for file, name in named:
        path = ROOT / file
        assert path.is_file(), file
        tree = ast.parse(path.read_text("utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{file}::{name}"
