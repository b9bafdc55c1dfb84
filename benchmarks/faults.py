"""What faults and hostile files do: kills, full disks, exceptions, damaged files, memory limits, many requests at once.

    python benchmarks/faults.py           # some ten minutes on one CPU thread
    python benchmarks/faults.py --quick   # about a minute: every kind of trial, fewer of each

A trial is something done to a run and what must hold after it, seen from outside:

    torn      a file that exists cannot be read, or holds what was never saved
    lost      a run cannot go on from its last checkpoint, or ends with other weights than an undisturbed one
    executed  code that a file names was run (a canary file tells)
    traceback the command ended with one instead of a message
    exit      the command ended with another exit code than it should

Commands run in processes that are forked from this one, so that a trial does not wait for imports. Exits with 1 if anything
was torn, lost or executed, or where a command showed a traceback or a wrong exit code.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import errno
import hashlib
import http.client
import io
import json
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
from safetensors.torch import save as as_safetensors
from torch import nn

from pliant import PliantError, Session, models, recipes, report

COUNTS = ("torn", "lost", "executed", "traceback", "exit")
NET = """
from torch import nn
def net(classes=4):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, classes))
"""
EVIL = "from pathlib import Path\nPath({canary!r}).touch()\ndef net(classes=4):\n    Path({canary!r}).touch()\n"
TRAIN = ["train", "--model=faults_net:net", "--data=set.npz", "--size=8", "--batch=8", "--epochs=3", "--evaluate-every=2"]
TRAIN += ["--device=cpu", "--exact", "--scratch", "--recipe=full", "--validation=0.4", "--keep-anyway"]
FILES = ("state.pt", "best.safetensors", "last.safetensors")

Trial = dict[str, Any]


def trial(kind: str, what: str, *wrong: str) -> Trial:
    return {"kind": kind, "what": what, "wrong": sorted(set(wrong))}


# ---------------------------------------------------------------- a command in a process of its own


def forked(work: Callable[[], object]) -> int:
    """The number of a process that does this work."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    try:
        work()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # as Python itself would end
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def command(*arguments: str, before: Callable[[], object] = lambda: None) -> int:
    """The number of a process that runs the command `pliant`; what it prints goes to the file `said`."""
    (main,) = entry_points(group="console_scripts", name="pliant")

    def work() -> None:
        said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = ["pliant", *arguments]
        before()
        main.load()()

    return forked(work)


def ended(number: int, seconds: float = 120.0) -> int:
    """The exit code of a process, negative for a signal; it is killed where it takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    return -99


def said() -> str:
    return Path("said").read_text(errors="replace") if Path("said").exists() else ""


def wrong_end(code: int, *allowed: int) -> list[str]:
    return (["exit"] if code not in allowed else []) + (["traceback"] if "Traceback" in said() else [])


def torn(folder: Path) -> list[str]:
    """Whether a file of a run that exists is not whole."""
    out = []
    for name in FILES:
        if (folder / name).exists():
            try:
                torch.load(folder / name, weights_only=True) if name.endswith("pt") else models.read_weights(folder / name)
            except Exception:
                out.append("torn")
    log = folder / "run.jsonl"
    for line in log.read_bytes().split(b"\n")[:-1] if log.exists() else ():
        try:
            json.loads(line)
        except ValueError:
            out.append("torn")
    if (folder / "run.json").exists():
        json.loads((folder / "run.json").read_text())
    return out


# ---------------------------------------------------------------- kills, full disks, memory limits: whole runs


def set_of_images() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 24)
    kinds = rng.random((4, 64)) < 0.5
    bits = np.packbits(kinds[labels] ^ (rng.random((96, 64)) < 0.2), axis=1)
    np.savez("set.npz", bits=bits, label=labels, classes=np.array(list("abcd")))


def goes_on(folder: Path, last: str) -> list[str]:
    """Whether a run that was stopped ends as one that was not, and leaves nothing half-written behind."""
    if not (folder / "run.json").exists():  # stopped before it began
        shutil.rmtree(folder, ignore_errors=True)
        return wrong_end(ended(command(*TRAIN, f"--out={folder}")), 0)
    out = wrong_end(ended(command("train", "--resume", "--model=faults_net:net", f"--out={folder}")), 0)
    whole = (folder / "last.safetensors").exists() and digest(folder / "last.safetensors") == last
    left = [file for file in folder.iterdir() if file.name.endswith(".tmp")]
    return out + ([] if whole else ["lost"]) + (["torn"] if left else [])


def digest(file: Path) -> str:
    """Of the tensors of a weight file."""
    held, _ = models.read_weights(file)
    return hashlib.sha256(b"".join(held[name].numpy().tobytes() for name in sorted(held))).hexdigest()


def kills(count: int, rng: random.Random) -> Iterator[Trial]:
    """kill −9 of `pliant train` at a random moment."""
    start = time.monotonic()
    if ended(command(*TRAIN, "--out=whole")):
        raise SystemExit(said())
    seconds, last = time.monotonic() - start, digest(Path("whole/last.safetensors"))
    for i in range(count):
        shutil.rmtree("cut", ignore_errors=True)
        number = command(*TRAIN, "--out=cut")
        time.sleep(rng.uniform(0.2, 1.0) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        wrong = torn(Path("cut")) if Path("cut").exists() else []
        yield trial("kill −9 of train", str(i), *wrong, *(goes_on(Path("cut"), last) if Path("cut").exists() else []))


def limits(count: int, rng: random.Random) -> Iterator[Trial]:
    """Disks that are full (no file may be longer than so much), and too little memory."""
    last, largest = digest(Path("whole/last.safetensors")), Path("whole/state.pt").stat().st_size
    for _ in range(count):
        shutil.rmtree("cut", ignore_errors=True)
        room = int(rng.uniform(0.02, 1.1) * largest)
        code = ended(
            command(*TRAIN, "--out=cut", before=lambda room=room: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
        )
        wrong = wrong_end(code, 0, 1)
        if Path("cut").exists():
            wrong += torn(Path("cut")) + goes_on(Path("cut"), last)
        yield trial("full disk", f"{room} bytes", *wrong)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc").exists() else 0
    for i in range(max(count // 3, 1) if used else 0):
        shutil.rmtree("cut", ignore_errors=True)
        room = used + int(rng.uniform(0, 64e6))
        code = ended(
            command(*TRAIN, "--out=cut", before=lambda room=room: resource.setrlimit(resource.RLIMIT_AS, (room, room)))
        )
        wrong = ["exit"] if code == -99 else []
        if Path("cut").exists():
            wrong += torn(Path("cut")) + goes_on(Path("cut"), last)
        yield trial("memory limit", f"{i}", *wrong)


def folders(count: int, rng: random.Random) -> Iterator[Trial]:
    """A run's folder that is removed or moved while it runs: exit code 1, and the run goes on elsewhere."""
    last = digest(Path("whole/last.safetensors"))
    for i in range(count):
        for name in ("cut", "cut-2", "moved"):
            shutil.rmtree(name, ignore_errors=True)
        number = command(*TRAIN, "--out=cut")
        while not Path("cut/state.pt").exists():
            if os.waitpid(number, os.WNOHANG)[0]:
                raise SystemExit(said())
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            Path("cut").rename("moved")
            if i % 2:
                shutil.rmtree("moved")
        wrong = wrong_end(ended(number), 1)
        new = Path("cut-2") if Path("cut-2").exists() else Path("cut")
        wrong += (torn(new) + goes_on(new, last)) if new.exists() else ["lost"]
        yield trial("folder gone", "removed" if i % 2 else "moved", *wrong)


# ---------------------------------------------------------------- kills and exceptions around Session.save


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def session() -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    return Session(model, torch.optim.AdamW(model.parameters()), loss, recipes.full())


def weights(run: Session) -> str:
    held = run.model.state_dict()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in held.values())).hexdigest()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(count)]


def is_saved_state(file: Path, known: list[str]) -> list[str]:
    """Whether a checkpoint is one of those that were saved."""
    with session() as run:
        try:
            run.load(file)
        except Exception:
            return ["torn"]
        return [] if known[run.progress.step] == weights(run) else ["torn"]


def saves(count: int, rng: random.Random) -> Iterator[Trial]:
    """kill −9 of a process that does nothing but steps and saves; then exceptions at every call that a save makes."""
    steps, file = batches(40), Path("run.pt")
    known = []
    with session() as run:
        known.append(weights(run))
        for batch in steps:
            run.step(batch)
            known.append(weights(run))

    def work() -> None:
        with session() as run:
            for batch in steps:
                run.step(batch)
                run.save(file)

    for i in range(count):
        number = forked(work)
        time.sleep(rng.uniform(0.02, 0.6))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        yield trial("kill −9 around save", str(i), *(is_saved_state(file, known) if file.exists() else []))
    left = [each for each in Path().iterdir() if each.name.startswith(".run.pt")]
    with session() as run:
        run.step(steps[0])
        run.save(file)
    stale = [each for each in left if each.exists()]
    yield trial(
        "kill −9 around save", f"{len(left)} temporary files left, {len(stale)} after the next save", *["torn"] * len(stale)
    )
    yield from exceptions(steps, known, file)


def exceptions(steps: list[Any], known: list[str], file: Path) -> Iterator[Trial]:
    calls = ("os.fsync", "os.replace", "torch.save", "builtins.open", "os.fstat", "os.scandir", "torch.get_rng_state")
    errors = (OSError(errno.ENOSPC, "No space left on device"), MemoryError(), KeyboardInterrupt(), RuntimeError("fault"))
    for call in calls:
        for error in errors:
            for nth in (1, 2):
                with session() as run:
                    run.step(steps[0])
                    run.save(file)
                    run.step(steps[1])
                    wrong = failing(run, call, error, nth, file) + is_saved_state(file, known)
                    run.save(file)  # and it goes on
                    wrong += [] if known[2] == weights(run) and not is_saved_state(file, known) else ["lost"]
                    yield trial("exception while saving", f"{call}, {type(error).__name__}, call {nth}", *wrong)


def failing(run: Session, call: str, error: BaseException, nth: int, file: Path) -> list[str]:
    import importlib

    module, _, name = call.rpartition(".")
    real, count = getattr(importlib.import_module(module), name), [0]

    def faulty(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            raise error
        return real(*args, **kwargs)

    before = set(os.listdir())
    with mock.patch(call, faulty), contextlib.suppress(type(error)):
        run.save(file)
    return ["torn"] if set(os.listdir()) != before else []


# ---------------------------------------------------------------- hostile files


def flipped(content: bytes, rng: random.Random) -> bytes:
    """The content with a bit changed, cut off, or with a few bytes of something else."""
    at = rng.randrange(len(content))
    how = rng.randrange(4)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at + 20 :]
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def sealed(held: Any) -> bytes:
    """A checkpoint with a forged checksum."""
    content = io.BytesIO()
    torch.save(held, content)
    body = content.getvalue()[:-2]
    comment = b"sha256:" + hashlib.sha256(body).hexdigest().encode()
    return body + len(comment).to_bytes(2, "little") + comment


def places(held: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested dicts and lists."""
    for key, value in held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def checkpoints(count: int, rng: random.Random) -> Iterator[Trial]:
    """Damaged bytes, and edited content under a forged checksum: refused, and nothing has changed; or taken as it was."""
    file = Path("hostile.pt")
    with session() as run:
        for batch in batches(3):
            run.step(batch)
        run.save(file)
        content, was = file.read_bytes(), weights(run)
    spots = list(places(torch.load(file, weights_only=True)))
    for i in range(count):
        if i % 2:
            held = torch.load(io.BytesIO(content), weights_only=True)
            *where, last = rng.choice(spots)
            at = held
            for key in where:
                at = at[key]
            if rng.random() < 0.3:
                del at[last]
            else:
                at[last] = rng.choice([None, -1, "text", [], {}, torch.zeros(3), 1e308])
            what = f"edited {(*where, last)}"
            file.write_bytes(sealed(held))
        else:
            what = "damaged bytes"
            file.write_bytes(flipped(content, rng))
        with session() as run:
            run.step(batches(1)[0])
            before, wrong = weights(run), []
            try:
                run.load(file)
            except (ValueError, PliantError):
                wrong = ["torn"] if weights(run) != before else []
            except Exception:
                wrong = ["traceback"]
            else:
                wrong = ["torn"] if weights(run) != was and not i % 2 else []
            yield trial("hostile checkpoint", what, *wrong)


def others(count: int, rng: random.Random) -> Iterator[Trial]:
    """Weight files, run.json, options, logs, packed sets and images."""
    canary = Path("canary").absolute()
    Path("evil.py").write_text(EVIL.format(canary=str(canary)))
    Path("hostile").mkdir(exist_ok=True)

    def wrong(work: Callable[[], Any], right: Callable[[Any], bool] = lambda _: True) -> list[str]:
        """A clear error, or a result that is right; and no code that a file names."""
        try:
            out = [] if right(work()) else ["torn"]
        except (ValueError, PliantError, ImportError):
            out = []
        except Exception:
            out = ["traceback"]
        if canary.exists():
            canary.unlink()
            out.append("executed")
        return out

    model = models.mcunet_5fps(classes=2)
    content, file = models.weights_of(model), "hostile/net.safetensors"
    right, about = models.read_weights(written(file, content))
    for _ in range(count):
        written(file, flipped(content, rng))
        same = wrong(lambda: models.read_weights(file)[0], lambda held: all(map(torch.equal, right.values(), held.values())))
        yield trial("hostile weights", "damaged bytes", *same)
    for name in (
        "evil:net",
        "os:abort",
        "hostile/net.safetensors",
        "builtins:exec",
        "evil:net@hostile/net.safetensors",
        "timm:x",
    ):
        written(file, as_safetensors(right, {"model": name, "classes": "2"}))
        yield trial("hostile weights", f"names {name}", *wrong(lambda: models.load(file)))
    for arch in ("[]", "{", "[" * 99999, about["arch"].replace("16", str(10**12)), about["arch"].replace("3", "0")):
        written(file, as_safetensors(right, {"arch": arch}))
        yield trial("hostile weights", f"arch {arch[:20]}", *wrong(lambda: models.load(file)))
    code = ended(command("train", f"--model={written(file, as_safetensors(right, {'model': 'evil:net'}))}", "--data=set.npz"))
    yield trial("hostile weights", "in train", *wrong_end(code, 2), *wrong(lambda: None))
    yield from hostile_runs(wrong)
    log = Path("whole/run.jsonl").read_bytes()
    for _ in range(count):
        written("hostile/run.jsonl", flipped(log, rng))
        yield trial("hostile log", "damaged bytes", *wrong(lambda: report.page([report.load("hostile/run.jsonl")])))
    yield from hostile_images(wrong)


def hostile_runs(wrong: Callable[..., list[str]]) -> Iterator[Trial]:
    begin = json.loads(Path("whole/run.json").read_text())
    edits: list[Any] = [[], {}, 3, {"format": "pliant.run/1"}, {**begin, "options": []}, {**begin, "options": {"model": 3}}]
    edits += [{**begin, "options": {**begin["options"], "model": name}} for name in ("evil:net", "os:abort", "timm:x")]
    for held in edits:
        shutil.rmtree("cut", ignore_errors=True)
        shutil.copytree("whole", "cut")
        Path("cut/run.json").write_text(json.dumps(held))
        code = ended(command("train", "--resume", "--out=cut"))
        yield trial("hostile run.json", json.dumps(held)[:30], *wrong_end(code, 1, 2), *wrong(lambda: None))
    Path("options.toml").write_text('model = "evil:net"\n')
    code = ended(command("train", "--config=options.toml", "--out=cut2"))
    yield trial("hostile run.json", "file of options", *wrong_end(code, 2), *wrong(lambda: None))


def hostile_images(wrong: Callable[..., list[str]]) -> Iterator[Trial]:
    whole = {"label": np.array([0, 1]), "classes": np.array(["a", "b"])}
    sets: list[dict[str, Any]] = [
        {"bits": np.zeros(8, np.uint8)},
        {"bits": np.zeros((2, 0), np.uint8)},
        {"label": np.zeros((2, 2))},
    ]
    sets += [{"data": np.zeros(3, np.uint8), "offset": np.array(offset)} for offset in (3, [5.0, 9.0], [0, -7, 10**9], [])]
    sets += [{"bits": np.array([{}], dtype=object)}]
    for held in sets:
        np.savez("hostile/set.npz", **{**whole, **held})
        code = ended(
            command("train", "--model=faults_net:net", "--data=hostile/set.npz", "--size=8", "--out=cut3", "--scratch")
        )
        shown = ", ".join(f"{name} {np.shape(value)}" for name, value in held.items())
        yield trial("hostile images", shown, *wrong_end(code, 1, 2), *wrong(lambda: None))
    from PIL import Image

    for name in "ab":
        Path("hostile/set", name).mkdir(parents=True, exist_ok=True)
        Image.new("1", (13000, 13000)).save(f"hostile/set/{name}/1.png")
    code = ended(
        command(
            *("train", "--model=faults_net:net", "--data=hostile/set", "--size=8", "--out=cut4", "--scratch"),
            before=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 33, 2 << 33)),
        )
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    yield trial("hostile images", f"169 megapixels, peak {peak / 1e6:.1f} GB", *wrong_end(code, 1, 2))


def written(file: str, content: bytes) -> str:
    Path(file).write_bytes(content)
    return file


# ---------------------------------------------------------------- many requests at once


def requests(count: int, rng: random.Random) -> Iterator[Trial]:
    """Requests to `pliant watch` from many threads, among them idle ones, slow ones and nonsense; then it still answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    number = command("watch", "whole", f"--port={port}")
    for _ in range(400):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.05)
    answers: list[str] = []

    def ask(i: int) -> None:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as one:
                one.sendall([b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port, b"G", b"\0" * 999, b""][i % 4])
                answers.append(one.recv(64)[9:12].decode(errors="replace") if i % 4 in (0, 2) else "")
        except OSError:
            answers.append("")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    most = max((len(os.listdir(f"/proc/{number}/task")) if Path(f"/proc/{number}/task").exists() else 0) for _ in range(200))
    for thread in threads:
        thread.join()
    time.sleep(0.2)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/")
    alive = connection.getresponse().status == 200
    os.kill(number, signal.SIGINT)
    wrong = wrong_end(ended(number), 0) + ([] if alive else ["lost"]) + (["lost"] if most > 40 else [])
    yield trial("requests at once", f"{count} requests, {answers.count('200')} pages, at most {most} threads", *wrong)


# ---------------------------------------------------------------- reporting


def table(cells: list[Trial]) -> str:
    lines = ["| fault | trials | torn | lost | executed | traceback | wrong exit code |", "|---|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(cell["kind"] for cell in cells):
        lines.append(_row(kind, [cell for cell in cells if cell["kind"] == kind]))
    return "\n".join([*lines, _row("**all**", cells)]) + "\n"


def _row(kind: str, cells: list[Trial]) -> str:
    counts = (sum(count in cell["wrong"] for cell in cells) for count in COUNTS)
    return f"| {kind} | {len(cells)} | " + " | ".join(map(str, counts)) + " |"


def main() -> int:
    args = record.options(__doc__, device=False).parse_args()
    torch.set_num_threads(1)
    path = record.out(args, "faults").absolute()
    few = 8 if args.quick else 1
    plan: list[tuple[Callable[[int, random.Random], Iterator[Trial]], int]] = [
        (kills, 40 // few),
        (limits, 12 // few),
        (folders, 8 // few),
        (saves, 120 // few),
        (checkpoints, 120 // few),
        (others, 40 // few),
        (requests, 200 // few),
    ]
    cells: list[Trial] = []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        sys.path.insert(0, place)
        os.environ["PLIANT_CACHE"] = place
        Path("faults_net.py").write_text(NET)
        set_of_images()
        for part, count in plan:
            start = time.monotonic()
            for one in part(count, random.Random(0)):
                cells.append(one)
                if one["wrong"]:
                    print("WRONG:", one, flush=True)
            print(f"{part.__name__}: {len(cells)} trials so far, {time.monotonic() - start:.0f} s", flush=True)
        os.chdir(here)
    record.save(path, {"quick": args.quick, "seed": 0}, cells, table(cells))
    print(f"\n{table(cells)}")
    return 1 if any(cell["wrong"] for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
