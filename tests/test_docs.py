"""What the documents show runs, and the tables they hold are the measured ones."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def given() -> dict[str, Any]:
    """What a reader has at hand: a model, an optimizer and a loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    model.layer4 = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(torch.randn(8, 3, 2, 2), torch.randint(0, 3, (8,))) for _ in range(2)]
    return {"model": model, "optimizer": optimizer, "loader": loader}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = given()
    for number, block in enumerate(blocks(page)):
        # A toy's forward pass is most of its step, and timing it is noise: give every budget room.
        code = re.sub(r"time=0\.\d+", "time=1.0", block)
        exec(compile(code, f"{page.name}, example {number}", "exec"), space)
    assert "Session" in space


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page end with."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} → {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} → {target}#{anchor}"


def test_every_page_is_part_of_the_site() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} <= listed
    assert all((ROOT / page).exists() for page in listed)


def test_the_published_tables_are_the_measured_ones() -> None:
    """If this fails: python benchmarks/publish.py."""
    spec = importlib.util.spec_from_file_location("publish", ROOT / "benchmarks" / "publish.py")
    assert spec is not None and spec.loader is not None
    publish = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(publish)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- table -->" in text
    assert publish.readme(text) == text
    text = (ROOT / "docs" / "fleets.md").read_text(encoding="utf-8")
    assert len(publish.FLEETS.findall(text)) == 4
    assert publish.fleets(text) == text
    assert publish.results() == (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert publish.models() == (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
