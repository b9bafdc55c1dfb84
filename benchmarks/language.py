"""Language models inside Hugging Face Trainer: what a step takes, and how well a small decoder learns.

    python benchmarks/language.py --device cuda            # about four minutes on an H200
    python benchmarks/language.py --quick                  # two tiny networks on a CPU: a minute

Needs `pip install 'pliant[hf]' peft`. Two parts, both with `Trainer.train()` as people call it:

    step      networks of the shapes of Llama 3.2 1B, GPT-2 (124M), Qwen 2.5 0.5B and Gemma 3 270M with random weights, in
              bfloat16, 8 × 512 random tokens.
              Seconds: wall time of ten steps, the device synchronised before and after; the median of the last windows.
              Memory: the peak of the last window beyond weights and beyond what inference takes.
    quality   a byte-level decoder, pretrained here on Python sources of installed packages, then fine-tuned on C++ headers of
              PyTorch. Perplexity per byte on held-out headers; wall time without evaluation, with measuring and choosing.

Each part has a file of its own. Each arm is saved when it is done, so that a run that is cut off keeps what it has. `--seconds`
stops starting new ones.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import record
import torch

from pliant import BudgetError, Policy, recipes, schedule

warnings.filterwarnings("ignore")
WINDOW = 10  # steps that are timed together
ARMS: dict[str, Callable[[], Policy | None]] = {
    "full": lambda: None,
    "pliant, time=0.5": lambda: recipes.pliant(time=0.5),
    "pliant, memory=0.25": lambda: recipes.pliant(memory=0.25),
    "LISA": lambda: recipes.lisa(layers=2, steps=20),
    "GreenTrainer, macs=0.5": lambda: recipes.green_trainer(macs=0.5, when=schedule.every(steps=1000)),
    "LoRA": lambda: None,
    "full, compiled": lambda: None,
}
SHAPES = {"llama-1b": 100, "gpt2-124m": 100, "qwen2.5-0.5b": 60, "gemma3-270m": 60}  # steps
MAIN = ("llama-tiny", "llama-1b", "gpt2-124m")  # run every arm
OTHERS = ("full", "pliant, time=0.5", "pliant, memory=0.25", "LoRA")  # arms of the other shapes


# ---------------------------------------------------------------- networks and tokens


def network(shape: str, dtype: torch.dtype, device: str) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {
        "llama-tiny": (16, 32, 64, 4, 2, 96),
        "llama-1b": (16, 2048, 8192, 32, 8, 128256),
        "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151936),
        "gemma3-270m": (18, 640, 2048, 4, 1, 262144),
    }
    heads = ("num_attention_heads", "num_key_value_heads")
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", *heads, "vocab_size")
    common = {**dict(zip(names, sizes.get(shape, ()), strict=False)), "tie_word_embeddings": True, "use_cache": False}
    if shape.startswith("llama"):
        config, make = hf.LlamaConfig(**common), hf.LlamaForCausalLM
    elif shape.startswith("qwen"):
        config, make = hf.Qwen2Config(**common), hf.Qwen2ForCausalLM
    elif shape.startswith("gemma"):
        config, make = hf.Gemma3TextConfig(**common, head_dim=256), hf.Gemma3ForCausalLM
    else:
        config, make = hf.GPT2Config(use_cache=False), hf.GPT2LMHeadModel
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make(config)
    finally:
        torch.set_default_dtype(before)


def tokens(count: int, length: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    several = torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in several]


def arguments(device: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    usual = {"output_dir": tempfile.mkdtemp(), "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    quick = {"logging_steps": 10**6, "use_cpu": device == "cpu", "bf16": device == "cuda", "lr_scheduler_type": "constant"}
    optimizer = {"optim": "adamw_torch_fused" if device == "cuda" else "adamw_torch"}
    return TrainingArguments(**{**usual, **quick, **optimizer, **changes})


def trainer_of(policy: Policy | None, model: Any, args: Any, data: Any, callback: Any, **session: Any) -> Any:
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from pliant.integrations.hf import PliantTrainer

    given = {"train_dataset": data, "callbacks": [callback]}
    trainer = PliantTrainer(model, args, policy=policy, session=session, **given) if policy else Trainer(model, args, **given)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def settle(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def callback(on_step: Callable[[int], None]) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step(state.global_step)

    return Steps()


# ---------------------------------------------------------------- part 1: steps


def step_cell(shape: str, arm: str, device: str, batch: int, length: int, steps: int) -> dict[str, Any]:
    """One run of Trainer: seconds of a step, and bytes beyond weights and inference."""
    settle(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = network(shape, dtype, device)
    data = tokens(batch * 4, length, model.config.vocab_size)
    if arm == "LoRA":
        import peft

        names = ["c_attn"] if shape.startswith("gpt2") else ["q_proj", "v_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=names))
    settle(device)
    base = torch.cuda.memory_allocated() if device == "cuda" else 0
    inference = 0
    if device == "cuda":
        some = {key: torch.stack([one[key] for one in data[:batch]]).cuda() for key in data[0]}
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            model(**some)
        inference = torch.cuda.max_memory_allocated() - base
        del some
    marks: list[float] = []

    def on_step(step: int) -> None:
        if step % WINDOW == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            if device == "cuda" and step < steps:
                torch.cuda.reset_peak_memory_stats()

    begun = time.perf_counter()
    changes = {"per_device_train_batch_size": batch, "max_steps": steps, "torch_compile": arm == "full, compiled"}
    args = arguments(device, **changes)
    trainer = trainer_of(ARMS[arm](), model, args, data * (steps // 4 + 1), callback(on_step))
    trainer.train()
    windows = [(after - before) / WINDOW for before, after in itertools.pairwise(marks)]
    cell: dict[str, Any] = {"part": "step", "shape": shape, "arm": arm, "seconds": statistics.median(windows[-5:])}
    cell |= {"windows": windows, "setup": marks[0] - begun - WINDOW * cell["seconds"]}
    if device == "cuda":
        cell |= {"bytes": torch.cuda.max_memory_allocated() - base - inference, "inference": inference, "weights": base}
    session = getattr(trainer, "session", None)
    if session is not None:
        selection = session.selection
        cell |= {
            "chosen": len(selection.units),
            "units": len(session.units),
            "asked": session.rounds[-1].asked,
            "predicted": selection.cost.seconds,
            "full": session.profile.full.seconds,
            "engine": session.engine,
            "spent": session.spent,
            "rounds": [str(one) for one in session.rounds],
            "params": sum(model.get_parameter(part.param).numel() for part in selection.parts),
        }
    return cell


# ---------------------------------------------------------------- part 2: quality

BLOCK = 512  # bytes of a sample


def files(pattern: str, folder: Path, most: int) -> bytes:
    """The text of installed files, in an order of its own, up to `most` bytes."""
    paths = sorted(folder.rglob(pattern))
    random.Random(0).shuffle(paths)
    out = bytearray()
    for path in paths:
        if len(out) >= most:
            break
        try:
            out += path.read_bytes()[:100_000]
        except OSError:
            continue
    return bytes(out[:most])


class Bytes(torch.utils.data.Dataset[Any]):
    """Random pieces of a text; the same ones for the same seed."""

    def __init__(self, text: torch.Tensor, count: int, seed: int) -> None:
        self._text = text
        self._at = torch.randint(0, len(text) - BLOCK, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self._text[self._at[index] : self._at[index] + BLOCK].long()
        return {"input_ids": piece, "labels": piece}


def decoder(quick: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden, layers = (32, 4) if quick else (512, 8)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=256, use_cache=False))


def perplexity(model: Any, text: torch.Tensor, device: str, most: int) -> float:
    """Per byte, on whole pieces of held-out text."""
    model.eval()
    losses = []
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        for some in text[: most * BLOCK].long().view(-1, 64 if most >= 64 else most, BLOCK).to(device):
            losses.append(model(input_ids=some, labels=some).loss.float())
    model.train()
    return math.exp(float(torch.stack(losses).mean()))


QUALITY = {
    "full": lambda: None,
    "full, half of the steps": lambda: None,
    "pliant, time=0.5": lambda: recipes.pliant(time=0.5),
    "LISA": lambda: recipes.lisa(layers=2, steps=20),
    "GreenTrainer, macs=0.5": lambda: recipes.green_trainer(macs=0.5, when=schedule.every(steps=100)),
    "LoRA": lambda: None,
}


def quality_cells(
    device: str, quick: bool, seeds: int, steps: int, pretrain: int, is_late: Callable[[], bool]
) -> Iterator[Any]:
    """Pretrain once, then fine-tune every arm from there."""
    size = 200_000 if quick else 24_000_000
    source = torch.frombuffer(bytearray(files("*.py", Path(torch.__file__).parents[1], size)), dtype=torch.uint8)
    target = torch.frombuffer(bytearray(files("*.h", Path(torch.__file__).parent / "include", size // 3)), dtype=torch.uint8)
    most, batch = (4, 4) if quick else (512, 128)
    held, target = target[: (most + 1) * BLOCK], target[(most + 1) * BLOCK :]
    model = decoder(quick).to(device)
    args = arguments(device, per_device_train_batch_size=batch, max_steps=pretrain, learning_rate=1e-3, warmup_steps=50)
    trainer_of(None, model, args, Bytes(source, batch * pretrain, 0), callback(lambda step: None)).train()
    start = {key: value.detach().clone() for key, value in model.state_dict().items()}
    about = {"part": "quality", "params": sum(param.numel() for param in model.parameters())}
    yield {**about, "arm": "before", "perplexity": perplexity(model, held, device, most)}
    for seed in range(1, seeds + 1):
        for arm, policy in QUALITY.items():
            if is_late():
                return
            many = steps // 2 if arm == "full, half of the steps" else steps
            model = decoder(quick).to(device)
            model.load_state_dict(start)
            trained: Any = model
            if arm == "LoRA":
                try:
                    import peft
                except ImportError as error:
                    yield {**about, "arm": arm, "seed": seed, "failed": str(error)}
                    continue
                names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
                trained = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=names))
            rate = 2e-3 if arm == "LoRA" else 5e-4
            changes = {"per_device_train_batch_size": batch, "max_steps": many, "learning_rate": rate, "warmup_steps": 10}
            args = arguments(device, **{**changes, "lr_scheduler_type": "cosine", "seed": seed})
            trainer = trainer_of(policy(), trained, args, Bytes(target, batch * steps, seed), callback(lambda step: None))
            settle(device)
            begun = time.perf_counter()
            try:
                trainer.train()
            except BudgetError as error:
                yield {**about, "arm": arm, "seed": seed, "failed": str(error)}
                continue
            if device == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - begun
            cell = {**about, "arm": arm, "seed": seed, "wall": took, "perplexity": perplexity(trained, held, device, most)}
            session = getattr(trainer, "session", None)
            yield cell if session is None else cell | {"spent": session.spent, "rounds": [str(one) for one in session.rounds]}


# ---------------------------------------------------------------- tables


def table(cells: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for shape in dict.fromkeys(cell["shape"] for cell in cells if cell["part"] == "step"):
        mine = [cell for cell in cells if cell.get("shape") == shape]
        full = next((cell for cell in mine if cell["arm"] == "full"), {})
        lines += [
            f"### {shape}",
            "",
            "| arm | ms a step | of full | memory, GB | of full | chosen |",
            "|---|---|---|---|---|---|",
        ]
        for cell in mine:
            if "failed" in cell:
                lines.append(f"| {cell['arm']} | – | – | – | – | {cell['failed']} |")
                continue
            ratio = f"{cell['seconds'] / full['seconds']:.3f}" if full else "–"
            gigas = f"{cell['bytes'] / 1e9:.2f}" if "bytes" in cell else "–"
            share = f"{cell['bytes'] / full['bytes']:.3f}" if "bytes" in cell and full else "–"
            chosen = f"{cell['chosen']} of {cell['units']}" if "chosen" in cell else "–"
            lines.append(f"| {cell['arm']} | {cell['seconds'] * 1e3:.1f} | {ratio} | {gigas} | {share} | {chosen} |")
        lines.append("")
    tried = [cell for cell in cells if cell["part"] == "quality"]
    if tried:
        lines += ["### A small decoder, from Python to C++", ""]
        lines += ["| arm | perplexity per byte | wall time, s | of full | seeds |", "|---|---|---|---|---|"]
        walls = [cell["wall"] for cell in tried if cell["arm"] == "full"]
        for arm in dict.fromkeys(cell["arm"] for cell in tried):
            mine = [cell for cell in tried if cell["arm"] == arm and "perplexity" in cell]
            if not mine:
                continue
            found = [cell["perplexity"] for cell in mine]
            spread = f"{statistics.mean(found):.4f} ({min(found):.4f}–{max(found):.4f})"
            wall = statistics.mean(cell["wall"] for cell in mine) if "wall" in mine[0] else None
            times = ("–", "–") if wall is None else (f"{wall:.2f}", f"{wall / statistics.mean(walls):.3f}" if walls else "–")
            lines.append(f"| {arm} | {spread} | {times[0]} | {times[1]} | {len(mine)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = record.options(__doc__)
    parser.add_argument("--parts", nargs="+", default=["step", "quality"], choices=["step", "quality"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more arms after this time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of fine-tuning, in the second part")
    parser.add_argument("--pretrain", type=int, default=1500, help="steps before it")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    begun = time.monotonic()
    batch, length = (2, 32) if args.quick else (8, 512)
    setting: dict[str, dict[str, Any]] = {
        "step": {"device": args.device, "batch": f"{batch} × {length} tokens", "weights": "random"},
        "quality": {"device": args.device, "steps": args.steps, "pretraining": args.pretrain},
    }
    cells: list[dict[str, Any]] = []

    def is_late() -> bool:
        return time.monotonic() - begun > args.seconds

    def add(cell: dict[str, Any]) -> None:
        cells.append(cell)
        mine, path = [one for one in cells if one["part"] == cell["part"]], record.out(args, "language")
        name = path.with_name(path.name.replace("language", f"language_{cell['part']}"))
        record.save(name, setting[cell["part"]], mine, table(mine))
        shown = {key: value for key, value in cell.items() if key not in ("windows", "rounds", "spent")}
        print(f"{time.monotonic() - begun:6.1f} s", shown, flush=True)

    shapes = {"llama-tiny": 40} if args.quick else SHAPES
    quick_arms = [arm for arm in args.arms if arm != "full, compiled"]
    rows = [(shape, arm) for shape in shapes for arm in quick_arms if arm in OTHERS or shape in MAIN]
    for shape, arm in rows if "step" in args.parts else []:
        if not is_late():
            try:
                add(step_cell(shape, arm, args.device, batch, length, shapes[shape]))
            except Exception as error:  # the other arms are worth having
                traceback.print_exc()
                add({"part": "step", "shape": shape, "arm": arm, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
    if "quality" in args.parts:
        few = {"seeds": 1, "steps": 20, "pretrain": 20} if args.quick else {}
        how = {"seeds": args.seeds, "steps": args.steps, "pretrain": args.pretrain, **few}
        for cell in quality_cells(args.device, args.quick, **how, is_late=is_late):
            add(cell)
    if "step" in args.parts and "full, compiled" in args.arms and not args.quick:
        for shape in (shape for shape in MAIN if shape in shapes):
            if not is_late():
                add(step_cell(shape, "full, compiled", args.device, batch, length, 40))
    print(table(cells))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
