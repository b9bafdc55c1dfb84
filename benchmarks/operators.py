"""Where the time of one training step goes, operator by operator, against the limits of one core.

    python benchmarks/operators.py                                  # some minutes on one CPU thread
    python benchmarks/operators.py --network mobilenet_v2 --batch 8 --pixels 128 --choice 'last half' --way auto
    python benchmarks/operators.py --quick

`--way plain` is plain freezing, channels-last; any other is `session.step` with that engine. Every operator that PyTorch
dispatches is timed in the step itself, with the caches as they are then; the fastest of several steps counts, call by call.

| column | meaning |
|---|---|
| ms | of all calls with these shapes in one step |
| arithmetic | the least its products could take: at the speed of a large product of matrices |
| traffic | the least its tensors could take, each read or written once: at the speed of a large copy |
| over the limit | ms less the larger of the two |

Tensors that lie in the processor's caches can be faster than a large copy. The row "Python and autograd" is what a step takes
beyond its operators. An inference runtime is one row: its model is one call.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import record
import step as steps
import torch
from torch.utils._python_dispatch import TorchDispatchMode

GROUPS = {
    "products (mm)": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"),
    "convolutions": ("aten.convolution.",),
    "convolutions, backward": ("aten.convolution_backward",),
    "batch norms": ("aten.native_batch_norm.",),
    "batch norms, backward": ("aten.native_batch_norm_backward",),
    "clippings": ("aten.clamp", "aten.hardtanh", "aten.relu", "aten.threshold"),
    "optimizer": ("aten._fused", "aten._foreach", "aten.mul_", "aten.add_", "aten.addcdiv_", "aten.addcmul_", "aten.lerp_"),
}
ROWS = 12  # of the table by shapes
RUNTIMES = {"openvino": ("InferRequest", "infer"), "onnxruntime": ("InferenceSession", "run_with_iobinding")}


def clock(wall: bool) -> float:
    return time.perf_counter() if wall else time.thread_time()


class Timed(TorchDispatchMode):
    """Times every operator of the code inside."""

    def __init__(self, wall: bool) -> None:
        super().__init__()
        self.wall, self.calls = wall, list[tuple[str, tuple[Any, ...], float, float, float]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = clock(self.wall)
        out = func(*args, **(kwargs or {}))
        taken = clock(self.wall) - start
        given = [one for one in flat((args, kwargs)) if isinstance(one, torch.Tensor)]
        shapes = tuple(tuple(one.shape) for one in given)
        tensors = {one.data_ptr(): one.numel() * one.element_size() for one in (*given, *flat(out)) if is_plain(one)}
        is_free = func.is_view or "empty" in str(func) or "detach" in str(func)
        moved = 0.0 if is_free else float(sum(tensors.values()))
        self.calls.append((str(func), shapes, taken, products(str(func), args, shapes), moved))
        return out


def is_plain(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.layout == torch.strided


def flat(tree: Any) -> list[Any]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(tree)
    return leaves


def products(name: str, args: Any, shapes: tuple[Any, ...]) -> float:
    """Multiplications of a product of matrices or a convolution; 0 for others."""
    kind = name.split(".")[1]
    if kind in ("mm", "addmm"):
        one, other = shapes[-3:-1] if name.endswith("out") else shapes[-2:]
        return float(one[0] * one[1] * other[1])
    if kind in ("bmm", "baddbmm"):
        one, other = shapes[-2:]
        return float(one[0] * one[1] * one[2] * other[2])
    if kind == "convolution":
        image, weight = args[0], args[1]
        stride, padding, dilation = args[3], args[4], args[5]
        sides = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(image.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
        ]
        return float(len(image) * weight.numel() * torch.Size(sides).numel())
    if kind == "convolution_backward":
        grad, weight, wanted = args[0], args[2], args[-1]
        return float(len(grad) * weight.numel() * torch.Size(grad.shape[2:]).numel() * sum(wanted[:2]))
    return 0.0


def fastest(run: Callable[[], Any], wall: bool, times: int = 15) -> float:
    taken = []
    for _ in range(times):
        start = clock(wall)
        run()
        taken.append(clock(wall) - start)
    return min(taken)


def limits(wall: bool) -> dict[str, float]:
    """What one core does at best: multiplications and bytes a second."""
    one, other, out = torch.randn(768, 768), torch.randn(768, 768), torch.empty(768, 768)
    source, target = torch.randn(4_000_000), torch.empty(4_000_000)
    return {
        "products_per_second": 768**3 / fastest(lambda: torch.mm(one, other, out=out), wall),
        "bytes_per_second": 2 * 4 * 4_000_000 / fastest(lambda: target.copy_(source), wall),
    }


def runtime_seconds(wall: bool) -> list[float]:
    """A list that collects what inference runtimes take, call by call: those that a session has imported by now."""
    taken = list[float]()
    for package, (kind, name) in RUNTIMES.items():
        if package in sys.modules:
            owner = getattr(sys.modules[package], kind)
            setattr(owner, name, timed_call(getattr(owner, name), wall, taken))
    return taken


def timed_call(original: Callable[..., Any], wall: bool, taken: list[float]) -> Callable[..., None]:
    def run(*given: Any, **how: Any) -> None:
        start = clock(wall)
        original(*given, **how)
        taken.append(clock(wall) - start)

    return run


def measure(name: str, size: int, choice: str, way: str, setting: dict[str, Any]) -> dict[str, Any]:
    """One step of one way, taken apart."""
    wall = setting["wall"]
    best = limits(wall)
    mine, take = steps.made(name, size, choice, "plain freezing, channels-last" if way == "plain" else way, setting)
    on_runtime = runtime_seconds(wall)
    whole, runtime, calls = list[float](), list[float](), list[Any]()
    for _ in range(setting["repeats"]):
        take()
        on_runtime.clear()
        start = clock(wall)
        take()
        whole.append(clock(wall) - start)
        runtime.append(sum(on_runtime))
        with Timed(wall) as timed:
            take()
        calls.append(timed.calls)
    calls = [some for some in calls if len(some) == len(calls[-1])]
    rows = [(*one[:2], min(some[i][2] for some in calls), *one[3:]) for i, one in enumerate(calls[-1])]
    found: dict[Any, list[float]] = defaultdict(lambda: [0.0] * 4)
    for func, shapes, seconds, macs, moved in rows:
        for i, value in enumerate((1, seconds, macs, moved)):
            found[func, shapes][i] += value
    operators = [
        {"operator": func, "shapes": shapes, "calls": int(n), "seconds": seconds, "products": macs, "bytes": moved}
        for (func, shapes), (n, seconds, macs, moved) in sorted(found.items(), key=lambda one: -one[1][1])
    ]
    ran = mine.engine if mine is not None else "plain"
    out = {"network": name, "batch": size, "chosen": choice, "way": way, "ran": ran, "limits": best}
    return {**out, "step": min(whole), "runtime": min(runtime), "operators": operators}


def group_of(operator: str) -> str:
    return next((group for group, starts in GROUPS.items() if operator.startswith(starts)), "others")


def line(name: str, calls: int | str, seconds: float, macs: float, moved: float, best: dict[str, float]) -> str:
    least = macs / best["products_per_second"], moved / best["bytes_per_second"]
    over = max(seconds - max(least), 0.0)
    return f"| {name} | {calls} | {seconds * 1e3:.2f} | {least[0] * 1e3:.2f} | {least[1] * 1e3:.2f} | {over * 1e3:.2f} |"


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: for each step, kinds of operators, then the shapes that take most."""
    out = []
    for c in cells:
        best, rest = c["limits"], c["step"] - c["runtime"] - sum(one["seconds"] for one in c["operators"])
        speeds = f"{best['products_per_second'] / 1e9:.0f} products and {best['bytes_per_second'] / 1e9:.1f} bytes a nanosecond"
        head = "| calls | ms | arithmetic | traffic | over the limit |"
        out += [f"**{c['network']}, batch {c['batch']}, {c['chosen']}, {c['way']}** ({c['ran']}): {c['step'] * 1e3:.1f} ms. "
                f"Limits here: {speeds}.", "", f"| operators {head}", "|" + "---|" * 6]  # fmt: skip
        kinds: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        for one in c["operators"]:
            for i, key in enumerate(("calls", "seconds", "products", "bytes")):
                kinds[group_of(one["operator"])][i] += one[key]
        for kind, (n, seconds, macs, moved) in sorted(kinds.items(), key=lambda one: -one[1][1]):
            out.append(line(kind, int(n), seconds, macs, moved, best))
        if c["runtime"]:
            out.append(f"| prefix on the runtime | – | {c['runtime'] * 1e3:.2f} | – | – | – |")
        out += [f"| Python and autograd | – | {max(rest, 0) * 1e3:.2f} | 0 | 0 | {max(rest, 0) * 1e3:.2f} |", ""]
        out += [f"| operator {head}", "|" + "---|" * 6]
        for one in c["operators"][:ROWS]:
            shapes = " ".join("×".join(map(str, shape)) for shape in one["shapes"][:2])
            name = f"`{one['operator'].removeprefix('aten.')}` {shapes}"
            out.append(line(name, one["calls"], one["seconds"], one["products"], one["bytes"], best))
        out.append("")
    return "\n".join(out)


def main() -> None:
    parser = record.options(__doc__, device=False)
    parser.add_argument("--network", default=None, choices=steps.NETWORKS, help="just this one (with --batch, --choice, --way)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--choice", default="last half", choices=steps.CHOICES)
    parser.add_argument("--way", default="auto", help="'plain', or an engine")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--wall", action="store_true", help="wall time instead of CPU time")
    args = parser.parse_args()
    cells = [(args.network, args.batch, args.choice, args.way)]
    if args.network is None:
        ways = [("last half", "plain"), ("last half", "auto"), ("last quarter", "auto"), (steps.CHOICES[2], "auto")]
        cells = [("mobilenet_v2", args.batch, choice, way) for choice, way in ways[: 1 if args.quick else None]]
    repeats = args.repeats or (3 if args.quick else 8)
    setting = {"device": "cpu", "pixels": args.pixels, "repeats": repeats, "wall": args.wall}
    out = record.out(args, "operators")
    done: list[dict[str, Any]] = []
    for one in cells:
        done.append(measure(*one, setting))
        record.save(out, setting, done, table(done))
        print(table(done[-1:]), flush=True)


if __name__ == "__main__":
    main()
