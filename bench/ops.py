"""Times the ops on one GPU: Mosaic, XLA, PyTorch and FlashInfer, each checked against float64 first.

    python3 bench/ops.py --out bench/results/ops-h200.json

The clock is CUPTI's, for all: the device time of a call's kernels, added. CUPTI serves one framework a process, so
JAX and PyTorch run in a worker process each, and take turns. A call is waited for before the next one, and its
results are dropped, so that each call finds its buffers in the cache ("warm") and gets the same memory to write to.
The floor is the bytes that must be read and written once, at the rate of a copy of 4 GiB; a warm call can be below.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from op_cases import HEADS, Case, Wide, cases, draw, sampled_rows, work, worst_error
from peers import EPS, PEERS

type Reply = dict[str, Any]
type Run = Callable[[], Any]
type Clock = Callable[[Run, int], list[float]]

WORKER_OF = {"mosaic": "jax", "xla": "jax", "torch": "torch", "torch_rms_norm": "torch", "flashinfer": "torch"}
COPIED = (1 << 18, 4096)  # float32: 4 GiB, far beyond the cache
REPLY_LIMIT_S = 300.0  # FlashInfer compiles at its first call


# The workers.


class Side:
    """What a worker does when asked: one framework's part."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.case: Case | None = None
        self.runs: dict[str, Run] = {}

    def hello(self) -> Reply:
        """The device, and the versions of what runs on it."""
        raise NotImplementedError

    def copying(self) -> Run:
        """A call that reads and writes an array of COPIED float32 numbers."""
        raise NotImplementedError

    def build(self, case: Case, impl: str) -> Run:
        """The call to time, its inputs on the device; returns the op's outputs, in a tuple or list."""
        raise NotImplementedError

    def read(self, output: Any, rows: NDArray[Any]) -> Wide:
        """Those rows of an output."""
        raise NotImplementedError

    def copy(self, iterations: int) -> Reply:
        """Times a copy."""
        return {"us": self.clock(self.copying(), iterations)}

    def prepare(self, case: Case, impl: str) -> Reply:
        """Makes the call and checks it."""
        if case != self.case:
            self.forget()
            self.case, self.drawn = case, draw(case)
        run = self.build(case, impl)
        rows = sampled_rows(case["rows"])
        outputs = [self.read(output, rows) for output in run()]
        error = worst_error(case, impl, self.drawn, rows, outputs)
        if not error <= 1:
            return {"failed": f"wrong: its error is {error:.3g} times what is allowed"}
        self.runs[impl] = run
        return {"error": error}

    def time(self, case: Case, impl: str, iterations: int) -> Reply:
        """Times a call, in microseconds; prepares it, where the process was started anew since."""
        if case != self.case or impl not in self.runs:
            reply = self.prepare(case, impl)
            if "failed" in reply:
                return reply
        return {"us": self.clock(self.runs[impl], iterations)}

    def forget(self) -> Reply:
        """Lets go of a case's arrays."""
        self.case, self.drawn = None, []
        self.runs.clear()
        return {}


class JaxSide(Side):
    """`mosaic` and `xla`."""

    def hello(self) -> Reply:
        """The device, and the versions."""
        import jax

        device = jax.devices()[0]
        if device.platform != "gpu":
            return {"failed": f"needs an NVIDIA GPU that JAX can use; JAX found {device.device_kind}"}
        return {"device": device.device_kind, "versions": {"jax": jax.__version__}}

    def copying(self) -> Run:
        """Adds one: JAX's clock sees kernels, and a plain copy need not be one."""
        import jax
        import jax.numpy as jnp

        return functools.partial(jax.jit(lambda x: x + 1), jnp.ones(COPIED, jnp.float32))

    def build(self, case: Case, impl: str) -> Run:
        """The public op under jit."""
        import jax
        import jax.numpy as jnp

        import jaxfuse.kernels

        options = {"eps": EPS} if case["op"].endswith("rms_norm") else {}
        op = functools.partial(getattr(jaxfuse.kernels, case["op"]), implementation=impl, **options)
        arrays = [jnp.asarray(array) for array in self.drawn]
        last = 2 if case["op"] == "rotary_embedding" else len(arrays)
        arrays = [array.astype(jnp.bfloat16) if i < last else array for i, array in enumerate(arrays)]
        program = jax.jit(op).lower(*arrays).compile()

        def run() -> Any:
            outputs = program(*arrays)
            return outputs if isinstance(outputs, tuple | list) else (outputs,)

        return run

    def read(self, output: Any, rows: NDArray[Any]) -> Wide:
        """Those rows."""
        return np.asarray(output[rows]).astype(np.float64)


class TorchSide(Side):
    """PyTorch, and what runs in it."""

    device = "cuda"

    def hello(self) -> Reply:
        """The device, and the versions."""
        import torch

        if not torch.cuda.is_available():
            return {"failed": f"torch {torch.__version__} finds no GPU"}
        versions = {"torch": torch.__version__}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # `prepare` says so
            versions["flashinfer"] = importlib.metadata.version("flashinfer-python")
        return {"device": torch.cuda.get_device_name(), "versions": versions}

    def copying(self) -> Run:
        """A copy."""
        import torch

        source = torch.ones(COPIED, device=self.device)
        return functools.partial(torch.empty_like(source).copy_, source)

    def build(self, case: Case, impl: str) -> Run:
        """A peer, on arrays of its own."""
        import torch

        tensors = [torch.from_numpy(array).to(self.device, copy=True) for array in self.drawn]
        last = 2 if case["op"] == "rotary_embedding" else len(tensors)
        tensors = [tensor.bfloat16() if i < last else tensor for i, tensor in enumerate(tensors)]
        return PEERS[case["op"]][impl](*tensors)

    def read(self, output: Any, rows: NDArray[Any]) -> Wide:
        """Those rows."""
        import torch

        wide: Wide = output[torch.from_numpy(rows).to(output.device)].double().cpu().numpy()
        return wide

    def copy(self, iterations: int) -> Reply:
        """Times a copy, and gives its 8 GiB back."""
        import torch

        reply = super().copy(iterations)
        torch.cuda.empty_cache()
        return reply


def jax_clock(run: Run, iterations: int) -> list[float]:
    """CUPTI's device time of each call, µs, through the profiler of JAX's Mosaic GPU."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    class Alone(jax.stages.Wrapped):
        """`run` as the profiler takes it: of a plain jitted function it keeps all results until the last call."""

        def __call__(self) -> None:
            jax.block_until_ready(run())

        def trace(self) -> jax.stages.Traced:
            raise NotImplementedError

        def lower(self) -> jax.stages.Lowered:
            raise NotImplementedError

    call: Callable[[], None] = Alone()
    _, times = profiler.measure(call, aggregate=True, iterations=iterations)()
    if times is None:
        raise RuntimeError("the clock saw no kernel")
    return [1e3 * time for time in (times if isinstance(times, list) else [times])]


def torch_clock(run: Run, iterations: int) -> list[float]:
    """CUPTI's device time of each call, µs, through torch's profiler."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(iterations):
            run()
            # A kernel that is launched while another runs (FlashInfer's may be) is timed with its wait for that.
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return per_call([(event.name, event.time_range.elapsed_us()) for event in events], iterations)


def per_call(kernels: list[tuple[str, float]], iterations: int) -> list[float]:
    """The time of each call from that of its kernels, in order; all calls run the same."""
    each, rest = divmod(len(kernels), iterations)
    calls = [kernels[i : i + each] for i in range(0, len(kernels), each or 1)]
    if each == 0 or rest or any([name for name, _ in call] != [name for name, _ in calls[0]] for call in calls):
        raise RuntimeError(f"the clock saw {len(kernels)} kernels, which are not those of {iterations} equal calls")
    return [sum(time for _, time in call) for call in calls]


def serve(side: Side, requests: TextIO, replies: TextIO) -> None:
    """Answers each request, a line of JSON, with one line of JSON."""
    for line in requests:
        request = json.loads(line)
        try:
            reply = getattr(side, request.pop("do"))(**request)
        except ImportError as error:
            reply = {"absent": str(error)}
        except Exception as error:  # Whatever a peer raises, the others still run.
            traceback.print_exc()
            reason = (str(error).strip() or "no message").splitlines()[0]
            reply = {"failed": f"{type(error).__name__}: {reason[:300]}"}
            # What follows an error of CUDA's fails as well, in this process.
            reply["over"] = "CUDA error" in str(error) or "CUDA_ERROR" in str(error)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("over"):
            return


def work_for_parent(name: str) -> None:
    """A worker's main: requests on standard input; replies on standard output, which nothing else may write to."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side = JaxSide(jax_clock) if name == "jax" else TorchSide(torch_clock)
    serve(side, sys.stdin, replies)


# The parent.


class Worker:
    """A worker process, started when asked something, and again when it has ended."""

    def __init__(self, command: list[str]):
        self.command = command
        self.process: subprocess.Popen[str] | None = None

    def ask(self, do: str, **arguments: Any) -> Reply:
        """The worker's reply; `failed` or `absent` in it says why there is no other."""
        if self.process is None:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # JAX would take most of the memory, and leave the other worker none.
                env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            )
        requests, replies = self.process.stdin, self.process.stdout
        if requests is None or replies is None:
            raise RuntimeError("a worker was started without pipes")
        try:
            requests.write(json.dumps({"do": do, **arguments}) + "\n")
            requests.flush()
        except BrokenPipeError:
            return {"failed": f"its process ended with status {self.close()}"}
        if not select.select([replies], [], [], REPLY_LIMIT_S)[0]:
            self.close()
            return {"failed": f"no reply within {REPLY_LIMIT_S:g} s"}
        line = replies.readline()
        if not line:
            return {"failed": f"its process ended with status {self.close()}"}
        reply: Reply = json.loads(line)
        if reply.get("over"):
            self.close()
        return reply

    def close(self) -> int:
        """Ends the process; its status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return process.returncode


class Bench:
    """One run: the workers, what came of them, and what did not."""

    def __init__(self, workers: dict[str, Worker], rounds: int, iterations: int):
        self.workers, self.rounds, self.iterations = workers, rounds, iterations
        self.records: list[dict[str, Any]] = []
        self.missing: dict[tuple[str, str], str] = {}
        """(case as JSON, impl) -> why it has no record."""
        self.versions: dict[str, str] = {"python": sys.version.split()[0]}
        self.absent: dict[str, str] = {}
        """worker -> why it has no part."""
        self.rate = 0.0
        """Bytes a second of a copy, read and written."""

    def begin(self) -> None:
        """Greets the workers and measures the ceiling: the fastest copy of either."""
        devices = set()
        for name, worker in self.workers.items():
            reply = worker.ask("hello")
            if reason := _refusal(reply):
                if name == "jax":
                    raise SystemExit(f"bench/ops.py: {reason}")
                self.absent[name] = reason
                worker.close()
                continue
            devices.add(reply["device"])
            self.versions |= reply["versions"]
        if len(devices) > 1:
            raise SystemExit(f"bench/ops.py: the workers run on different devices: {', '.join(sorted(devices))}")
        self.device = devices.pop()
        moved = 2 * 4 * COPIED[0] * COPIED[1]
        copies = {}
        for name in self.workers.keys() - self.absent.keys():
            reply = self.workers[name].ask("copy", iterations=5)
            if reason := _refusal(reply):
                print(f"{name} could not time a copy: {reason}", file=sys.stderr)
            else:
                copies[name] = reply["us"]
        if not copies:
            raise SystemExit("bench/ops.py: no worker could time a copy, and there is no floor without")
        self.rate = max(moved / np.median(times) * 1e6 for times in copies.values())
        case = {"op": "copy", "rows": COPIED[0], "width": COPIED[1], "dtype": "float32", "cache": "cold"}
        for name, times in copies.items():
            self.record(case, "xla" if name == "jax" else name, times, moved, 0)

    def run(self, case: Case) -> None:
        """Checks every implementation of the case, then times them in turn."""
        times: dict[str, list[float]] = {}
        for impl in implementations(case["op"]):
            name = WORKER_OF[impl]
            if name in self.absent:
                self.miss(case, impl, self.absent[name])
                continue
            reply = self.workers[name].ask("prepare", case=case, impl=impl)
            if reason := _refusal(reply):
                self.miss(case, impl, reason)
            else:
                times[impl] = []
        for _ in range(self.rounds):
            for impl in list(times):
                reply = self.workers[WORKER_OF[impl]].ask("time", case=case, impl=impl, iterations=self.iterations)
                if reason := _refusal(reply):
                    self.miss(case, impl, reason)
                    del times[impl]
                else:
                    times[impl] += reply["us"]
        for name in self.workers.keys() - self.absent.keys():
            self.workers[name].ask("forget")
        for impl, measured in times.items():
            self.record(case, impl, measured, *work(case))

    def miss(self, case: Case, impl: str, reason: str) -> None:
        """Notes that this has no record."""
        self.missing[json.dumps(case), impl] = reason
        print(f"{json.dumps(case)} {impl} {reason}", file=sys.stderr, flush=True)

    def record(self, case: Case, impl: str, times: list[float], moved: int, flops: int) -> None:
        """Adds a record."""
        median, p10, p90 = (float(np.percentile(times, q)) for q in (50, 10, 90))
        floor = moved / self.rate * 1e6
        self.records.append(
            {
                "bench": "ops",
                "case": case,
                "impl": impl,
                "median_us": median,
                "p10_us": p10,
                "p90_us": p90,
                "runs": len(times),
                "bytes": moved,
                "flops": flops,
                "floor_us": floor,
                "of_floor": floor / median,
                "device": self.device,
                "versions": self.versions,
                "date": datetime.date.today().isoformat(),
            }
        )

    def table(self, console: Console) -> None:
        """Prints median microseconds, and why there are none."""
        title = f"{self.device}, bfloat16, warm: device time, median µs; a copy runs at {self.rate / 1e12:.2f} TB/s"
        table = Table(title=title)
        for name in ("op", "rows", "width", *WORKER_OF, "floor"):
            table.add_column(name, justify="left" if name == "op" else "right", no_wrap=True)
        found = {(json.dumps(record["case"]), record["impl"]): record["median_us"] for record in self.records}
        reasons: dict[str, list[str]] = {}
        for text in dict.fromkeys(key[0] for key in (*found, *self.missing)):
            case = json.loads(text)
            if case["op"] == "copy":
                continue
            here = {impl: found[text, impl] for impl in WORKER_OF if (text, impl) in found}
            cells = []
            for impl in WORKER_OF:
                if impl in here:
                    cells.append(
                        f"[bold]{here[impl]:.2f}[/]" if here[impl] == min(here.values()) else f"{here[impl]:.2f}"
                    )
                else:
                    reason = self.missing.get((text, impl), "–")
                    cells.append(reason.partition(":")[0])
                    if (text, impl) in self.missing:
                        reasons.setdefault(f"{impl} {reason}", []).append(f"{case['op']} × {case['rows']}")
            heads = "{heads}+{kv_heads} × {head_dim}".format(**case) if "heads" in case else str(case["width"])
            table.add_row(case["op"], str(case["rows"]), heads, *cells, f"{work(case)[0] / self.rate * 1e6:.2f}")
        console.print(table)
        for reason, where in reasons.items():
            console.print(f"{reason} ({', '.join(dict.fromkeys(where))})", markup=False, soft_wrap=True)


def implementations(op: str) -> list[str]:
    """Those that have the op."""
    return [impl for impl, worker in WORKER_OF.items() if worker == "jax" or impl in PEERS[op]]


def _refusal(reply: Reply) -> str | None:
    """Why a reply holds no answer, beginning with what goes into the table."""
    return next((f"{word}: {reply[word]}" for word in ("absent", "failed") if word in reply), None)


def main() -> None:
    """Checks, times and records every case. Status 1: a kernel of ours has no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file of records to write")
    parser.add_argument("--ops", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 8192], help="rows, or tokens")
    parser.add_argument("--hidden", nargs="+", type=int, choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--quick", action="store_true", help="one round of 10 calls instead of three of 20")
    parser.add_argument("--worker", choices=["jax", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work_for_parent(options.worker)
        return
    if options.out is None:
        parser.error("--out FILE is needed")
    if min(options.rows) < 1:
        parser.error(f"--rows must be 1 or more, got {min(options.rows)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    workers = {name: Worker([sys.executable, __file__, "--worker", name]) for name in ("jax", "torch")}
    bench = Bench(workers, *((1, 10) if options.quick else (3, 20)))
    try:
        bench.begin()
        for case in cases(options.ops, options.hidden, options.rows):
            bench.run(case)
            # After each case: what is measured stays, whatever comes.
            options.out.write_text(json.dumps(bench.records, indent=1) + "\n", encoding="utf-8")
    finally:
        for worker in workers.values():
            worker.close()
    bench.table(Console(width=None if sys.stdout.isatty() else 150))
    if any(WORKER_OF[impl] == "jax" for _, impl in bench.missing):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
