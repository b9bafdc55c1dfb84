"""Every example runs in its quick form, what a newcomer pastes first runs as it is, and the notebook's outputs are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {"own_cnn": "sklearn", "text_hugging_face": "transformers", "webcam_few_shot": "PIL"}
NEEDS |= {"hf_trainer": "transformers", "accelerate_loop": "accelerate", "lightning_fit": "lightning"}
SEVERAL = ("ddp", "fsdp")  # processes
SAYS = {
    "own_cnn": "test accuracy",
    "text_hugging_face": "step 10: loss",
    "audio": "best accuracy",
    "webcam_few_shot": "book: taken for",
    "preemptible": "goes on after step 15",
    "battery": "22:00 time=1.0",
    "hf_trainer": "chosen: ",
    "accelerate_loop": "chosen: ",
    "lightning_fit": "chosen: ",
    "ddp": "process 1 chose: ",
    "fsdp": "process 1 chose: ",
}


def environment(place: Path) -> dict[str, str]:
    """Nothing is downloaded, and nothing is written but in a folder of the test's own."""
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "QUICK": "1", "MPLBACKEND": "agg"}
    return {**os.environ, **quiet, "PYTHONPATH": path, "PLIANT_CACHE": str(place / "cache")}


def test_every_example_is_tested() -> None:
    assert {each.stem for each in EXAMPLES.glob("*.py")} == set(SAYS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({each.name})" in listed for each in EXAMPLES.iterdir() if each.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    starter = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if name in SEVERAL else []
    command = [sys.executable, *starter, str(EXAMPLES / f"{name}.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert SAYS[name] in done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_example_runs_as_it_is_pasted(page: str, tmp_path: Path) -> None:
    """With its own budget: one below the floor of its network would be refused."""
    text = (EXAMPLES.parent / page).read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_notebook_runs_and_holds_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(EXAMPLES / "what_was_chosen.ipynb", 4)
    kept = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in kept) == 3
    assert not any(output.output_type == "error" for output in kept)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND")  # the kernel has one of its own
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert "noisy images" in notebook.cells[-1].outputs[0].text
