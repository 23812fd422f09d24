"""The scripts behind `make demo` and `make test`, run against interpreters and drivers that are made up."""

import dataclasses
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("cat", "chmod", "cksum", "cp", "dirname", "head", "mkdir", "rm", "sed", "sort", "tr", "uname")

# Runs the code that find-python asks an interpreter to run, as if this Python were another.
POSE = """
import sys, types
path, version, implementation, modules, flag, code = sys.argv[1:]
assert flag == "-c"
sys.version_info = tuple(map(int, version.split(".")))
sys.implementation = types.SimpleNamespace(name=implementation)
sys.modules["venv"] = types.ModuleType("venv")
sys.modules["ensurepip"] = types.ModuleType("ensurepip") if modules == "venv" else None
sys._base_executable = path
exec(code)
"""


def write_program(path: Path, text: str) -> Path:
    """An executable shell script at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def run_script(script: str | Path, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script with nothing in its environment but `env`."""
    return subprocess.run([script, *arguments], env=dict(env), capture_output=True, text=True)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for the PATH with the few tools that the scripts use; no Python and no nvidia-smi."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, f"{name} is missing"
        (folder / name).symlink_to(found)
    return folder


# For find-python: a machine maps a file to what answers there, a version and perhaps what is amiss with it;
# "a" and "b" are the folders on the PATH, in that order.
MACHINES: dict[str, tuple[dict[str, str], str]] = {
    "newest name first": ({"a/python3.12": "3.12.9", "b/python3.14": "3.14.0"}, "b/python3.14"),
    "python3 when it is the newest": ({"a/python3.12": "3.12.9", "a/python3": "3.13.1"}, "a/python3"),
    "a shim that fails": ({"a/python3.13": "fails", "b/python3.13": "3.13.1"}, "b/python3.13"),
    "a shim that fails, then pyenv": ({"a/python3.12": "fails", "pyenv/3.12.1": "3.12.1"}, "pyenv/3.12.1"),
    "an old python3, then a new one": ({"a/python3": "3.11.7", "b/python3": "3.12.0"}, "b/python3"),
    "a name that lies": ({"a/python3.14": "3.11.0", "a/python3.12": "3.12.0"}, "a/python3.12"),
    "no venv": ({"a/python3.13": "3.13.1 no-venv", "a/python3.12": "3.12.0"}, "a/python3.12"),
    "PyPy": ({"a/python3": "3.12.0 pypy", "pyenv/3.12.1": "3.12.1"}, "pyenv/3.12.1"),
    "the PATH before pyenv": ({"a/python3.12": "3.12.0", "pyenv/3.14.0": "3.14.0"}, "a/python3.12"),
    "newest in pyenv": (
        {f"pyenv/{version}": version for version in ("3.9.1", "3.13.9", "3.13.10", "3.13.11")},
        "pyenv/3.13.11",
    ),
    "releases after 3.14 last": ({"a/python3": "3.15.0", "a/python3.12": "3.12.0"}, "a/python3.12"),
    "but before nothing": ({"a/python3": "3.15.0"}, "a/python3"),
    "uv": ({"a/python3": "3.11.2", "a/uv": "uv"}, "uv"),
    "pyenv before uv": ({"a/uv": "uv", "pyenv/3.12.1": "3.12.1"}, "pyenv/3.12.1"),
}


def interpreter_file(base: Path, place: str) -> Path:
    """The file of a place in a machine of the table."""
    folder, name = place.split("/")
    return base / ".pyenv/versions" / name / "bin/python3" if folder == "pyenv" else base / folder / name


def make_machine(base: Path, machine: Mapping[str, str]) -> dict[str, str]:
    """Write a machine's interpreters under `base`; returns the environment of someone sitting there."""
    pose = base / "pose.py"
    pose.write_text(POSE)
    for place, answer in machine.items():
        path = interpreter_file(base, place)
        version, _, fault = answer.partition(" ")
        if version == "fails":
            text = "echo 'command not found' >&2; exit 127"
        elif version == "uv":
            text = "echo uv 1.0"
        else:
            implementation = fault if fault == "pypy" else "cpython"
            modules = "no" if fault == "no-venv" else "venv"
            command = [sys.executable, "-S", pose, path, version, implementation, modules]
            text = f'exec {shlex.join(map(str, command))} "$@"'
        write_program(path, text)
    return {"PATH": f"{base / 'a'}:{base / 'b'}", "HOME": str(base)}


@pytest.mark.parametrize(("machine", "chosen"), MACHINES.values(), ids=MACHINES.keys())
def test_find_python(tmp_path: Path, machine: dict[str, str], chosen: str) -> None:
    """A Python chosen that does not run, is too old, or cannot make .venv, while a fitting one is there."""
    base = tmp_path / "with a space"
    base.mkdir()
    done = run_script(ROOT / "scripts/find-python", env=make_machine(base, machine))
    expected = chosen if chosen == "uv" else str(interpreter_file(base, chosen))
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_find_python_says_what_to_install(tmp_path: Path) -> None:
    """An error that does not say what was found, why it does not fit, and how to go on."""
    machine = {"a/python3.13": "3.13.1 no-venv", "a/python3.12": "fails", "b/python3": "3.11.2"}
    done = run_script(ROOT / "scripts/find-python", env=make_machine(tmp_path, machine))
    assert (done.returncode, done.stdout) == (1, "")
    for part in (
        "apt install python3 python3-venv",
        "make demo PYTHON=",
        "Python 3.13.1 cannot make environments (on Debian or Ubuntu: apt install python3.13-venv)",
        f"{tmp_path / 'a/python3.12'}: it does not run",
        "Python 3.11.2 is older than 3.12",
    ):
        assert part in done.stderr


def test_named_python_wins(tmp_path: Path) -> None:
    """PYTHON= overruled by a newer Python that is there as well."""
    env = make_machine(tmp_path, {"a/python3.14": "3.14.0", "b/other": "3.12.0"})
    for name in ("other", str(tmp_path / "b/other")):
        done = run_script(ROOT / "scripts/find-python", env=env | {"PYTHON": name})
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'b/other'}\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("3.11.7", "Python 3.11.7 is older than 3.12"),
        ("2.7.18", "Python 2.7.18 is older than 3.12"),
        ("3.12.0 no-venv", "apt install python3.12-venv"),
        ("fails", "it does not run"),
        (None, "no such program"),
    ],
)
def test_named_python_that_does_not_fit(tmp_path: Path, answer: str | None, reason: str) -> None:
    """PYTHON= quietly replaced by another Python, or refused without the reason."""
    machine = {"a/python3.14": "3.14.0"} | ({"b/other": answer} if answer else {})
    done = run_script(ROOT / "scripts/find-python", env=make_machine(tmp_path, machine) | {"PYTHON": "other"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "PYTHON=other does not fit: it must be a program that runs as Python 3.12 or newer" in done.stderr
    assert reason in done.stderr


@dataclasses.dataclass(frozen=True)
class Driver:
    """A made-up NVIDIA driver: what nvidia-smi says of it, one compute capability a GPU."""

    version: str
    cuda: str
    capabilities: tuple[str, ...] = ("9.0",)
    knows_capability: bool = True
    error: str | None = None

    def write(self, folder: Path) -> None:
        """Write its nvidia-smi."""
        if self.error is not None:
            write_program(folder / "nvidia-smi", f"echo {shlex.quote(self.error)}; exit 9")
            return
        both = "\n".join(f"{self.version}, {capability}" for capability in self.capabilities)
        alone = "\n".join(self.version for _ in self.capabilities)
        known = f"echo '{both}'"
        unknown = "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
        banner = f"| NVIDIA-SMI {self.version}  Driver Version: {self.version}  CUDA Version: {self.cuda}  |"
        write_program(
            folder / "nvidia-smi",
            f"""case $1 in
            --query-gpu=driver_version,compute_cap) {known if self.knows_capability else unknown} ;;
            --query-gpu=driver_version) echo '{alone}' ;;
            '') echo '{banner}' ;;
            *) exit 2 ;;
            esac""",
        )


@pytest.mark.parametrize(
    ("driver", "extra", "note"),
    [
        (None, "cpu", None),
        (Driver("580.65.06", "13.0"), "cuda13", None),
        (Driver("610.10", "14.1"), "cuda13", None),
        (Driver("580.65.06", "N/A"), "cuda13", None),  # a container without libcuda
        (Driver("575.57.08", "12.9"), "cuda12", None),
        (Driver("525.60.13", "12.0"), "cuda12", None),
        (Driver("570.10", "13.0"), "cuda13", None),  # with CUDA's forward compatibility package
        (Driver("580.65.06", "13.0", ("7.0",)), "cuda12", None),  # Volta, which CUDA 13 dropped
        (Driver("580.65.06", "13.0", ("10.0", "6.1")), "cuda12", None),
        (Driver("580.65.06", "13.0", ("10.3", "7.5")), "cuda13", None),
        (Driver("580.65.06", "13.0", ("[N/A]",)), "cuda13", None),
        (Driver("470.82.01", "11.4", knows_capability=False), "cpu", "470 is older than 525"),
        (Driver("", "", error="Failed to initialize NVML: Driver/library version mismatch"), "cpu", "NVML"),
        (Driver("", "", error="No devices were found"), "cpu", "No devices were found"),
    ],
)
def test_find_extra(tools: Path, driver: Driver | None, extra: str, note: str | None) -> None:
    """A CUDA build of JAX that the driver or the GPU cannot run, or the CPU's without a word of why."""
    if driver is not None:
        driver.write(tools)
    done = run_script(ROOT / "scripts/find-extra", env={"PATH": str(tools)})
    assert (done.returncode, done.stdout) == (0, extra + "\n")
    if note is None:
        assert done.stderr == ""
    else:
        assert note in done.stderr
        assert "Installing JAX for the CPU" in done.stderr


@pytest.mark.parametrize("extra", ["cpu", "cuda12", "cuda13,triton", "parity"])
def test_named_extra_wins(tools: Path, extra: str) -> None:
    """EXTRA= overruled by what the driver suggests."""
    Driver("580.65.06", "13.0").write(tools)
    done = run_script(ROOT / "scripts/find-extra", env={"PATH": str(tools), "EXTRA": extra})
    assert (done.returncode, done.stdout, done.stderr) == (0, extra + "\n", "")


@pytest.mark.parametrize("extra", ["cuda11", "cpu,cuda12", "cuda13,cuda12", "cuda13 triton"])
def test_named_extra_that_does_not_exist(tools: Path, extra: str) -> None:
    """EXTRA= with a name that pip would pass over with a mere warning."""
    done = run_script(ROOT / "scripts/find-extra", env={"PATH": str(tools), "EXTRA": extra})
    assert (done.returncode, done.stdout) == (1, "")
    assert f"EXTRA={extra}: " in done.stderr


# Stands for an interpreter: makes environments that hold copies of itself, and notes what pip is asked for.
INTERPRETER = """
case $1,$2 in
-m,venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv by ${0##*/}" >>"$LOG" ;;
-m,pip)
    shift 2; echo "pip $*" >>"$LOG"
    if [ -e "$LOG.fails" ]; then exit 1; fi
    printf '#!/bin/sh\\nfor a in "$@"; do echo "$a"; done' >.venv/bin/jaxfuse; chmod +x .venv/bin/jaxfuse ;;
-c,'import pip') ;;
-c,*) echo "ok 13000 $0" ;;
esac
"""
PIP = "pip install -qq --disable-pip-version-check --editable"


class Checkout:
    """A copy of the scripts in a folder of its own, with a made-up Python beside it."""

    def __init__(self, base: Path, tools: Path) -> None:
        self.folder = base / "check out"
        self.log = base / "log"
        self.env = {"PATH": f"{base / 'bin'}:{tools}", "HOME": str(base), "LOG": str(self.log)}
        write_program(base / "bin/python3.13", INTERPRETER)
        write_program(base / "bin/python3.14-other", INTERPRETER)
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        shutil.copy(ROOT / "Makefile", self.folder)
        shutil.copy(ROOT / "pyproject.toml", self.folder)

    def make(self, group: str = "", *, fails: bool = False, **choices: str) -> list[str]:
        """Run make-venv; returns what it did."""
        self.log.write_text("")
        script = self.folder / "scripts/make-venv"
        done = run_script(script, *group.split(), env=self.env | choices)
        assert (done.returncode != 0) == fails, done.stderr
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path, tools: Path) -> Checkout:
    """A fresh checkout on a machine without a GPU."""
    return Checkout(tmp_path, tools)


def test_installs_once(checkout: Checkout) -> None:
    """An installation at every call; `make demo` after `make test` taking the test tools away."""
    assert checkout.make() == ["venv by python3.13", f"{PIP} ."]
    assert checkout.make() == []
    assert checkout.make("dev") == [f"{PIP} .[dev]"]
    assert checkout.make("dev") == []
    assert checkout.make() == []


def test_another_choice_makes_venv_anew(checkout: Checkout) -> None:
    """Remains of another JAX or CUDA in .venv after JAX= or EXTRA= changed."""
    anew = "venv by python3.13"
    checkout.make("dev")
    assert checkout.make("dev", JAX="0.11.2") == [anew, f"{PIP} .[dev] jax==0.11.2 jaxlib==0.11.2"]
    assert checkout.make("dev", JAX="0.11.2") == []
    assert checkout.make("dev") == [anew, f"{PIP} .[dev]"]
    assert checkout.make(EXTRA="cuda12,parity") == [anew, f"{PIP} .[cuda12,parity]"]
    assert checkout.make("dev", EXTRA="cuda12,parity") == [f"{PIP} .[cuda12,parity,dev]"]
    assert checkout.make(EXTRA="cpu") == [anew, f"{PIP} ."]
    assert checkout.make() == []


def test_named_python_makes_venv_anew(checkout: Checkout) -> None:
    """PYTHON= ignored because some .venv is there; without PYTHON=, what is there is kept."""
    checkout.make()
    assert checkout.make(PYTHON="python3.14-other") == ["venv by python3.14-other", f"{PIP} ."]
    assert checkout.make(PYTHON="python3.14-other") == []
    assert checkout.make() == []


def test_changed_pyproject_installs_again(checkout: Checkout) -> None:
    """A new dependency not installed because .venv is there."""
    checkout.make("dev")
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert checkout.make("dev") == [f"{PIP} .[dev]"]
    assert checkout.make("dev") == []


def test_unfinished_venv_is_not_trusted(checkout: Checkout) -> None:
    """A .venv left by a failed or interrupted installation, by hand, or by a Python since removed."""
    anew = ["venv by python3.13", f"{PIP} ."]
    fails = checkout.log.with_name("log.fails")
    fails.touch()
    assert checkout.make(fails=True) == anew
    fails.unlink()
    assert checkout.make() == anew
    fails.touch()
    assert checkout.make("dev", fails=True) == [f"{PIP} .[dev]"]
    fails.unlink()
    assert checkout.make() == anew
    (checkout.folder / ".venv/bin/python").unlink()
    assert checkout.make() == anew
    shutil.rmtree(checkout.folder / ".venv")
    (checkout.folder / ".venv/bin").mkdir(parents=True)
    assert checkout.make() == anew


def test_moved_checkout_is_installed_again(checkout: Checkout) -> None:
    """A .venv whose scripts point to where the checkout was."""
    checkout.make()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    assert checkout.make() == ["venv by python3.13", f"{PIP} ."]


@pytest.mark.parametrize(
    "choice",
    [{"JAX": "newest"}, {"JAX": "0.9.0"}, {"JAX": "0.13"}, {"JAX": "0.13.0"}, {"EXTRA": "cuda"}, {"PYTHON": "python9"}],
)
def test_bad_choice_leaves_venv_alone(checkout: Checkout, choice: dict[str, str]) -> None:
    """A typing error in a choice costing the environment that was there."""
    checkout.make()
    assert checkout.make(fails=True, **choice) == []
    assert checkout.make() == []


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_passes_the_prompt_as_typed(checkout: Checkout) -> None:
    """Quotes, dollars and backticks in PROMPT= read by make or by the shell."""
    make = shutil.which("make")
    assert make
    prompt = 'it\'s "a" $HOME $(test) `x` # \\ y'
    command = ("-s", "-C", str(checkout.folder), "demo", f"PROMPT={prompt}", "ARGS=--max-new-tokens 3")
    done = run_script(make, *command, env=checkout.env | {"SHELL": "/bin/sh"})
    assert done.stdout.splitlines() == ["generate", prompt, "--max-new-tokens", "3"], done.stderr
