"""Writes the measured tables into the documents: `python benchmarks/publish.py`.

`docs/results.md` is assembled from the tables in `benchmarks/results/`, with hardware, versions, date and command; so is
`docs/models.md`, from one of them. The tables in the README and in `docs/fleets.md` are cut out of others. A test compares
these documents with what this script would write.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
FLEETS = re.compile(r"(<!-- (?P<column>accuracy|time): (?P<tasks>[a-z, ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FACTS = re.compile(r"hardware (?P<hardware>.+?), python \S+, torch (?P<torch>[^,]+),.* date (?P<date>\S+)$")

# The README's table: file, section, method, and what the README calls it.
README_ROWS = (
    ("transfer_x86_openvino", "mobilenet_v2/cub", "full", "bird species: full fine-tuning"),
    ("transfer_x86_openvino", "mobilenet_v2/cub", "last 0.4", "bird species: last layers, `time=0.4`"),
    ("transfer_x86_openvino", "mobilenet_v2/cub", "pliant 0.4", "bird species: **pliant**, `time=0.4`"),
    ("transfer_x86_openvino", "mobilenet_v2/gtsrb", "full", "traffic signs: full fine-tuning"),
    ("transfer_x86_openvino", "mobilenet_v2/gtsrb", "pliant 0.4", "traffic signs: **pliant**, `time=0.4` (we lose)"),
)


# The tables of docs/fleets.md: columns of the fleet files, and methods in the order of their rows.
FLEET_COLUMNS = {"accuracy": "accuracy at half of FedAvg's time", "time": "time to its final accuracy"}
FLEET_METHODS = (
    *("fedavg", "pliant", "fewer_steps", "last_layers", "elastic_trainer", "fedel", "fedel_stopped"),
    *("drop_stragglers", "depth", "random_windows", "exact_windows"),
)


class Section(NamedTuple):
    title: str
    text: str
    command: str
    files: tuple[str, ...]


TRANSFER = """Tasks: `cub` is bird species (CUB-200), `pets` breeds of cats and dogs, `gtsrb` traffic signs, `trec6` questions.
A name like `pliant 3.2ms` is a recipe and its time budget per step; `pliant 0.4` asks for a share of a full step.
`full` is plain PyTorch. `full, tuned` adds bfloat16, channels-last and a fused optimizer; `full, captured` adds CUDA graphs.
`random` trains random layers that fit the same budget, re-drawn every 100 steps. `alike 0.8` and `solver dense` are variants of
the solver: see the [notebook](notebook.md#solver).

| column | meaning |
|---|---|
| test accuracy | mean in percent (range, number of seeds) |
| run alone | training time with profiling, probing and choosing, without evaluation |
| / full, / tuned, / captured (older tables: of full, …) | that time as a share of the run of this name |
| time to full's accuracy − 0.3 (to full's − 0.3) | time to the validation accuracy of `full`, less 0.3; `no`: never |
| peak MB, later MB | peak memory; on a GPU also what is held after profiling, captured steps included |
| engine (ran on) | the engine mode |"""

SECTIONS = (
    Section(
        "Pretrained networks on new tasks",
        TRANSFER,
        "python benchmarks/transfer.py --data DIR --device cuda      # CPU: --classes 20 --images 40",
        (
            *("transfer_x86_openvino", "transfer_arm_cpu", "transfer_keywords_x86_cpu", "transfer_text_x86_cpu"),
            *("transfer_cub_h200", "transfer_pets_h200", "transfer_gtsrb_h200"),
        ),
    ),
    Section(
        "At equal MACs",
        """Shares of a full step's MACs, 12 epochs with every method, two seeds. `full` is full training, captured; with `norm
frozen` all norms use running statistics, as `elastic_trainer` has it.""",
        "python benchmarks/transfer.py --data DIR --device cuda --methods 'elastic_trainer 0.5, cost counted' …",
        ("transfer_macs_cub_h200", "transfer_macs_pets_h200"),
    ),
    Section(
        "One change at a time",
        "The recipe `pliant` on the bird species, with one part of the policy replaced.",
        "python benchmarks/transfer.py --data DIR --classes 20 --images 40 --methods 'pliant 0.4, signal fisher' …",
        ("transfer_ablation_cpu",),
    ),
    Section(
        "Every recipe on a small task",
        """EfficientNet-Lite0 (ImageNet weights) learns handwritten digits in 60 steps. *Step* is a share of a plain full step.
`pliant 0.3` is `pliant` with `time=0.3`. A second run finds the profile that an earlier one has kept.""",
        "python benchmarks/digits.py",
        ("digits_x86_cpu", "digits_cpu"),
    ),
    Section(
        "Is a budget kept?",
        "First table: predictions for random selections. Second table: mean step of whole runs against what was asked.",
        "python benchmarks/budget.py      # GPU: --device cuda --engine graphs --batch 32 --asked 0.2 0.3",
        ("budget_cpu", "budget_graphs_h200"),
    ),
    Section(
        "Is a share of the time kept in a short run?",
        """60 steps, in turn with plain full steps of another process. *Step* is the lower quartile of a run. *Mean of all
steps* includes measuring, choosing and corrections. A second run finds the profile that the first one has kept. *Kept*: the
step is between 15 % below and 8 % above what was asked, and the mean at most 25 % above, or 10 % in a second run.""",
        "python benchmarks/turns.py",
        ("turns_x86_cpu",),
    ),
    Section(
        "Is a memory limit kept?",
        "Bytes beyond inference: predicted, measured in a step that also chooses, and measured in an ordinary step.",
        "python benchmarks/memory.py --limits 64MB 16MB      # batch 1: --limits 1MB --chooses channels --batches 1",
        ("memory_limits_cpu",),
    ),
    Section(
        "Memory of a whole process",
        """How far the peak resident memory rises, from after inference until the session is closed. Each row is a process
of its own; "–" is plain full training. *Predicted* and *measured* are bytes of tensors. *Code*: bytes of libraries that the
process gives back when the session is opened; they make room for what follows. *Hard limit*: whether the run
survives with `RLIMIT_DATA` at what inference took at its peak, plus what was asked, plus 32 MB.""",
        "python benchmarks/memory.py --resident",
        ("resident_cpu",),
    ),
    Section(
        "On a device with ExecuTorch",
        """Exported programs train on ten traffic signs: 40 steps of one image, portable kernels, one thread. The three small
networks see 128 px, the others 64. The classes are drawn with the seed. For each row, the rate is picked on 100 validation
images, by accuracy and then by loss, with plain PyTorch. The 100 test images are used once. 40 steps gain little here, and some
rows lose: they show whether device and PyTorch are equal, and what a step takes, not what training gains.

| column | meaning |
|---|---|
| planned bytes | the program's mutable memory: arena, gradients, weights that change |
| measured | anonymous memory of the process beyond the same process with the program loaded and idle |
| resident | the same with pages of files: code and frozen weights |
| gradients off | largest difference from eager PyTorch, relative to the largest value of each gradient |
| weights moved | how far PyTorch's 40 steps change a weight, relative to the largest weight of its tensor |
| weights off | difference of the device's weights from PyTorch's after them; with int8, against unrounded frozen weights |
| PyTorch against itself | the same of PyTorch with inputs changed by 1e-6: the largest of three runs |

Where *weights off* is no larger than *PyTorch against itself*, training magnifies rounding: the program is not to blame.""",
        "python benchmarks/on_device.py --data DIR",
        ("on_device_cpu",),
    ),
    Section(
        "Time of a step on each engine",
        "The same selection on every engine; in brackets, as a share of plain freezing in the faster layout.",
        "python benchmarks/step.py      # GPU: --device cuda",
        (
            *("step_x86_openvino_64", "step_x86_openvino_128"),
            *("step_x86_ort_64", "step_x86_ort_128", "step_x86_transformers", "step_cpu"),
            *("step_arm_openvino_64", "step_arm_openvino_128", "step_arm_ort_64", "step_arm_ort_128"),
            *("step_x86_openvino_2_threads", "step_arm_openvino_2_threads", "step_arm_transformers"),
            *("step_arm_cpu", "step_h200"),
        ),
    ),
    Section(
        "The prefix in int8",
        """`Session(prefix="int8")` beside float32. First tables: whole runs at one learning rate. Selections depend on MACs,
not on time. Times include calibrating and quantising, on one core. Last table: steps after that. This processor
(Neoverse-N1) has dot-product instructions. The [notebook](notebook.md#a-prefix-in-int8) says what this means.""",
        "python benchmarks/transfer.py --data DIR --classes 20 --images 40 --rates 0.03 --methods 'head, prefix int8' …; "
        "python benchmarks/step.py --ways auto 'auto, int8'",
        ("transfer_int8_arm_cpu", "step_int8_arm_64"),
    ),
    Section(
        "Where the time of a step goes",
        """Operators of one step of MobileNetV2, in milliseconds, against the limits of one core: arithmetic at the speed of a
large product of matrices, traffic at the speed of a large copy, each tensor once.""",
        "python benchmarks/operators.py",
        ("operators_cpu",),
    ),
    Section(
        "Language models in Trainer",
        """Whole steps of Hugging Face Trainer with 8 × 512 random tokens, bfloat16 and random weights in these shapes.
Memory is the peak beyond weights and beyond inference. LoRA: rank 16 on queries and values, by peft.""",
        "python benchmarks/language.py --device cuda --parts step",
        ("language_step_h200",),
    ),
    Section(
        "A small decoder learns another language",
        """A byte-level decoder, pretrained on Python sources, is fine-tuned on C++ headers with Trainer. Wall time includes
measuring and choosing. Tests ran on the CPU beside it. Full training for half of the steps does better here. The
[notebook](notebook.md#language-models-in-trainer) has runs with more seeds.""",
        "python benchmarks/language.py --device cuda --parts quality --steps 100 --pretrain 400 --seeds 1",
        ("language_quality_h200",),
    ),
    Section(
        "Several processes",
        """Two gloo processes against one with the same global batches, in float64. *Off by*: the largest difference.
Second table: a step that trains the last half of a network, by the way that its gradients are averaged.""",
        "python benchmarks/processes.py",
        ("processes_cpu",),
    ),
    Section(
        "Whole runs on each engine",
        "EfficientNet-Lite0 on handwritten digits, the last quarter of the parameter tensors trained.",
        "python benchmarks/end_to_end.py      # GPU: --device cuda",
        ("end_to_end_cpu", "end_to_end_h200"),
    ),
    Section(
        "What a new selection costs",
        "A session switches between selections. A new one has to be captured; a recent one is replayed.",
        "python benchmarks/changes.py --device cuda",
        ("changes_h200",),
    ),
    Section(
        "Layers or tensors?",
        "`elastic_layers` against `elastic_trainer` on traffic signs.",
        "python benchmarks/layers_vs_tensors.py --data DIR      # GPU: --device cuda",
        ("layers_vs_tensors_cpu", "layers_vs_tensors_h200"),
    ),
    Section(
        "Networks in a world that changed",
        """A network tuned on Pets adapts to five images per class after a shift of the input, the features, the labels, its own
weights, or the classes. Test accuracies in percent. *Worst*: the lowest difference to the better of `nothing` and `head`. The
second table has differences of means over shifts. In the third, the best other arm costs no more, and is picked on validation.
`shift_rates_h200` has five seeds at rates from 0.001, and `shift_adamw_h200` two or three. `shift_h200` is older, at higher
rates: there `lora` and `elastic_trainer` diverge without clipping. Not run: `lora`, `elastic_trainer` and `random` at the lower
rates, shares of time.""",
        "python benchmarks/shift.py --data DIR --device cuda --steps 200 --every-rate --seeds 5 --rates 0.001 0.003 0.01",
        ("shift_rates_h200", "shift_adamw_h200", "shift_h200"),
    ),
    Section(
        "A stream without labels",
        "Noise, contrast and blur, one after another, in 12 batches. Each batch is classified once, by the pass that adapts.",
        "python benchmarks/unlabelled.py --data DIR --many 4 --batches 16",
        ("unlabelled_cpu",),
    ),
    Section(
        "Channels of a layer",
        "A quarter of the channels: time of the weight gradient, and bytes of gradient and optimizer state.",
        "python benchmarks/slices.py",
        ("slices_cpu",),
    ),
    Section(
        "Few images: what a task costs",
        "Memory and MACs with one image per pass, and the time of a whole task.",
        "python benchmarks/fewshot_costs.py --data DIR",
        ("fewshot_costs_cpu",),
    ),
    Section(
        "Fleets",
        """Federated training on a simulated clock ([fleets](fleets.md)): devices one to four times as slow as the machine that
was measured. *Late* are client rounds that end after the deadline; a round waits for them. *Sent back* and *received* are bytes
of one client's round. Accuracies are means over three rounds, then mean and range over runs. `fleet_kills`: `kill -9` at random
moments. `fleet_server`: what server and links need; *most change*: the largest update, as a share of the model's norm.""",
        "python benchmarks/fleets.py --alphas 0.1 1 --clients 20 100 --jobs 8; python benchmarks/fleet_kills.py; "
        "python benchmarks/fleet_server.py",
        (
            *("fleet_digits_cpu", "fleet_spoken_cpu", "fleet_spoken_arm_cpu", "fleet_signs_cpu", "fleet_birds_cpu"),
            *("fleet_kills_cpu", "fleet_server_cpu"),
        ),
    ),
    Section(
        "Faults and hostile files",
        """A trial is a fault, and what must hold after it. *Torn*: a file is not whole, or holds what was never saved.
*Lost*: a run cannot go on, or ends with other weights. *Executed*: code that a file names was run.""",
        "python benchmarks/faults.py",
        ("faults_cpu",),
    ),
    Section(
        "Starting the command",
        "CPU seconds until help is there, against Python alone. The help of a subcommand imports PyTorch.",
        "python benchmarks/startup.py",
        ("startup_cpu",),
    ),
    Section(
        "Solvers",
        "How fast the solvers are, and how much of the best possible value they find.",
        "python benchmarks/solver.py",
        ("solver_cpu",),
    ),
)

INTRO = """# Results

This page is generated by `python benchmarks/publish.py` from `benchmarks/results/`. Do not edit it.

On a CPU, times are CPU time of one thread, and variants run in turn. On a GPU, times are synchronised wall time.
`--data DIR` is a folder with data and weights that are not shipped; each script says what is missing.
Each source file names the exact version of every row: some rows are older than others, or come from a second machine.
The [notebook](notebook.md) says what these tables mean, and which experiments failed.
"""

MODELS = """# Models

This page is generated by `python benchmarks/publish.py` from `benchmarks/results/`. Do not edit it.

Pliant takes any PyTorch model. This page lists architectures of other packages that were tried, and what does not work.
Weights are random, inputs are small, and everything runs on a CPU. A row passes if all of its checks hold:

| check | what must hold |
|---|---|
| time | six steps of `recipes.pliant(time=0.5)`: more than the head and less than everything is chosen, and chosen again |
| memory | the same with `memory=0.3`, on the lean engine, or with the reason why not |
| restored | after `close`, flags, modes and hooks are as before, and a plain step equals that of a fresh model |
| resumed | a fresh model that loads the saved run goes on with the same choices and weights, bit for bit |
| plain, lean, prefix, lean+prefix | each step of this engine equals one of plain autograd, in float64 if the model can |
| quiet | no warning that plain training does not give too |
| `elastic_trainer`, `lisa`, … | six steps of this recipe, on eleven of the models |

If 0.5 is below the [floor](glossary.md) of a model, one step runs with the floor as its budget. The others run halfway between
the floor and a full step.

    pip install '.[zoo]' timm torchvision segmentation_models_pytorch
    python benchmarks/foreign.py      # one model: --only transformers/gpt2
"""


def parts(name: str) -> tuple[str, str, str]:
    """Facts, setting and tables of a result file."""
    facts, setting, tables = (RESULTS / f"{name}.md").read_text("utf-8").partition("-->\n")[2].split("\n\n", 2)
    return facts, setting, tables.strip()


def results() -> str:
    """The text of docs/results.md."""
    out, used = [INTRO], set[str]()
    for section in SECTIONS:
        out.append(f"## {section.title}\n\n{section.text}\n\n    {section.command}\n")
        for name in section.files:
            facts, setting, tables = parts(name)
            found = FACTS.match(facts)
            if found is None:
                raise ValueError(f"{name}.md does not begin with hardware, versions and date: {facts!r}")
            where = f"{found['hardware']} · torch {found['torch']} · {found['date']}"
            source = f"[{name}](../benchmarks/results/{name}.md)"
            tables = re.sub(r"^### (.*)$", r"**\1**", tables, flags=re.MULTILINE)
            out.append(f"### {name}\n\n{where} · {source}\n\nSetting: {setting}.\n\n{tables}\n")
            used.add(name)
    others = sorted(path.stem for path in RESULTS.glob("*.md") if path.stem not in used)
    links = "\n".join(f"- [{name}](../benchmarks/results/{name}.md)" for name in others)
    return "\n".join([*out, f"## Further tables\n\n{links}\n"])


def models() -> str:
    """The text of docs/models.md."""
    facts, setting, tables = parts("foreign_cpu")
    found = FACTS.match(facts)
    if found is None:
        raise ValueError(f"foreign_cpu.md does not begin with hardware, versions and date: {facts!r}")
    where = f"{found['hardware']} · torch {found['torch']} · {found['date']} · {setting}."
    return f"{MODELS}\n{where}\n\n" + re.sub(r"^### ", "## ", tables, flags=re.MULTILINE) + "\n"


def readme(text: str) -> str:
    """The README with its table filled in."""
    rows = ["| 20 classes, at most 40 images each | test accuracy | training time | peak memory |", "|---|---|---|---|"]
    for name, section, method, label in README_ROWS:
        cell = cells(name, section, method)
        accuracy = cell["test accuracy"].split(" ")[0]
        rows.append(f"| {label} | {accuracy} % | {cell['run alone']} | {cell['peak MB']} MB |")
    return BLOCK.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], text)


def fleets(text: str) -> str:
    """docs/fleets.md with its tables filled in."""

    def table(found: re.Match[str]) -> str:
        tasks, column = found["tasks"].split(", "), FLEET_COLUMNS[found["column"]]
        several = len(tasks) > 1  # of 20 clients each
        fleets = {
            f"{task}, {head.removeprefix('20 clients, ')}" if several else head: rows
            for task in tasks
            for head, rows in fleet_rows(task).items()
        }
        lines = ["| method | " + " | ".join(fleets) + " |", "|---" * (1 + len(fleets)) + "|"]
        for method in FLEET_METHODS:
            if not any(method in rows for rows in fleets.values()) or (method, found["column"]) == ("fedavg", "time"):
                continue
            each = [fleet_figure(rows[method], column) if method in rows else "–" for rows in fleets.values()]
            lines.append(f"| `{method}` | " + " | ".join(each) + " |")
        return found[1] + "\n".join(lines) + "\n" + found[4]

    return FLEETS.sub(table, text)


def fleet_rows(task: str) -> dict[str, dict[str, dict[str, str]]]:
    """The rows of a fleet file: by fleet, then by method, then by column."""
    _, *found = re.split(r"^\*\*(.+)\*\*$", "\n" + parts(f"fleet_{task}_cpu")[2], flags=re.MULTILINE)
    fleets = {}
    for head, table in zip(found[::2], found[1::2], strict=True):
        columns, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
        fleets[head.removesuffix(", 20 in each round")] = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    return fleets


def fleet_figure(row: dict[str, str], column: str) -> str:
    """One cell: mean (range), the mean alone where there is one run."""
    figure = re.sub(r" \(ends at (\S+)\)", r"; ends at \1", row[column]).removeprefix("reached ")
    return re.sub(r" \(\S+–\S+\)", "", figure) if row["runs"] == "1" else figure


def cells(name: str, section: str, method: str) -> dict[str, str]:
    """One row of a result file, by column."""
    _, _, after = parts(name)[2].partition(f"### {section}\n")
    lines = [line.strip("| ").split(" | ") for line in after.partition("\n###")[0].splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line] for line in lines]
    return next(dict(zip(head, row, strict=False)) for row in rows if row[0] == method)


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(results(), encoding="utf-8")
    (ROOT / "docs" / "models.md").write_text(models(), encoding="utf-8")
    for page, filled in ((ROOT / "README.md", readme), (ROOT / "docs" / "fleets.md", fleets)):
        page.write_text(filled(page.read_text("utf-8")), encoding="utf-8")
