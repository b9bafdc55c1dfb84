"""The report: what it says is what the log says; nothing of a log gets out of its quotes; what is no log is told so."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import median

import command
import pytest
import tiny
from hypothesis import given
from instances import chain_profile, laws, profiles, units
from runlogs import BAD, batches, evaluated, hostile, lines, opened, rewrite, train

from pliant import Cost, PliantError, Profile, Selection, Unit, recipes
from pliant.apps import report
from pliant.apps.report import LogError, figures, tables, tiles
from pliant.apps.report.run import blocks
from pliant.core import text as markup
from pliant.cost.profile import SPLIT, ChargeKind
from pliant.session import run_log as runlog


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "chain")


@pytest.fixture
def log(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "run.jsonl"
    copy.write_bytes((folder / "run.jsonl").read_bytes())
    return copy


# ---------------------------------------------------------------- what the session logs for it


def test_the_log_prices_every_unit_and_splits_every_step(tmp_path: Path) -> None:
    with opened(tmp_path / "run.jsonl") as session:
        session.step(batches(1)[0])
        costs = {unit.name: session.profile.cost([unit]) for unit in session.units}
        selection = session.selection
    start, chosen = (next(x for x in lines(tmp_path / "run.jsonl") if x["event"] == e) for e in ("start", "round"))
    assert set(start["costs"]) == set(start["units"]) == set(costs)
    for name, cost in costs.items():
        told = start["costs"][name]
        assert told["seconds"] == pytest.approx(cost.seconds) and told["bytes"] == pytest.approx(cost.bytes, abs=1)
    for line, cost in ((chosen, selection.cost), (start, selection.full)):
        assert set(line["split"]) == set(SPLIT)
        assert sum(part["seconds"] for part in line["split"].values()) == pytest.approx(cost.seconds)
        assert sum(part["macs"] for part in line["split"].values()) == cost.macs
    assert start["profiling_seconds"] >= 0 and lines(tmp_path / "run.jsonl")[-1]["spent"]["all"] > 0


@laws(60)
@given(profiles(moments=4))
def test_a_split_adds_up_to_the_cost_and_a_unit_alone_costs_what_a_step_with_it_costs(profile: Profile) -> None:
    kinds = [kind for kind in ChargeKind if kind is not ChargeKind.FORWARD]  # due only where the prefix is spared
    named = (replace(charge, kind=kinds[i % len(kinds)]) for i, charge in enumerate(profile.charges))
    profile, some = replace(profile, charges=tuple(named)), units(6)[::2]
    split, cost = profile.split(some), profile.cost(some)
    assert sum(part.seconds for part in split.values()) == pytest.approx(cost.seconds)
    assert sum(part.macs for part in split.values()) == cost.macs
    assert sum(part.bytes for part in split.values()) == cost.bytes + max(profile.moments)
    assert all(part.bytes >= 0 for part in split.values())
    every = units(6)
    for alone, unit in zip(profile.alone(every), every, strict=True):
        cost = profile.cost([unit])
        assert (alone.bytes, alone.macs) == (cost.bytes, cost.macs) and alone.seconds == pytest.approx(cost.seconds)


# ---------------------------------------------------------------- reading


def test_a_run_is_read_as_it_was_told(folder: Path) -> None:
    run, told = report.load(folder), lines(folder / "run.jsonl")
    rounds = [line for line in told if line["event"] == "round"]
    steps = [line for line in told if line["event"] == "step"]
    assert run.name == "chain" and run.ended and not run.torn
    assert run.units == tuple(reversed(told[1]["units"])) and run.units[0] == "stem" and run.units[-1] == "head"
    assert [round.number for round in run.rounds] == sorted({line["round"] for line in rounds}) and len(run.rounds) >= 4
    assert [(s.number, s.loss, s.seconds) for s in run.steps] == [(s["step"], s["loss"], s["seconds"]) for s in steps]
    for round in run.rounds:
        mine = [s["seconds"] for s in steps if s["round"] == round.number]
        assert round.steps == len(mine)
        if len(round.chosen) == 1:
            assert round.chosen[0].seconds == median(mine)
    last = rounds[-1]
    assert {u for u in run.units if run.rounds[-1].trained(u)} == {unit["name"] for unit in last["units"]}
    assert {u: run.rounds[-1].value(u) for u in run.units} == last["values"]
    peaks = [line["measured"] for line in told if line["event"] == "memory"]
    assert run.bytes == max(peaks)
    assert run.accuracy is not None and run.accuracy.accuracy == pytest.approx(0.9)
    assert [each.step for each in run.evaluations] == [0, 6, 12]


def test_the_log_itself_may_be_given(folder: Path, tmp_path: Path) -> None:
    assert report.load(folder / "run.jsonl") == report.load(folder)
    other = tmp_path / "tuesday.jsonl"
    other.write_bytes((folder / "run.jsonl").read_bytes())
    assert report.load(other).name == "tuesday"


def test_a_torn_log_is_read_up_to_its_last_whole_line(log: Path) -> None:
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])
    run = report.load(log)
    assert run.torn and len(run.steps) == 12
    for said in (report.page([run]), report.text([run]), report.markdown([run])):
        assert "cut short" in said
    for size in range(1, len(whole), 997):  # wherever the power went
        log.write_bytes(whole[:size])
        try:
            report.page([report.load(log)])
        except LogError:
            assert size < whole.index(b'"start"') + 20000


def test_what_a_resumed_run_did_over_is_told_once(tmp_path: Path) -> None:
    log, saved = tmp_path / "run.jsonl", tmp_path / "run.pt"
    session = opened(log)
    given = batches(12)
    for number, batch in enumerate(given[:8], 1):
        session.step(batch)
        if number == 5:
            session.save(saved)
    session._loop.log.flush()
    session.close()
    evaluated(log, 8, 0.1)
    with opened(log) as again:
        again.load(saved)
        for batch in given[5:]:
            again.step(batch)
    run = report.load(log)
    assert [step.number for step in run.steps] == list(range(1, 13))
    begins = [each.selection.step for each in run.chosen]
    assert begins == sorted(set(begins)) and run.resumed == (5,) and run.ended
    assert run.evaluations == () and "resumed at step 5" in report.text([run])


def test_a_log_that_begins_with_a_resume_has_no_start(log: Path) -> None:
    rewrite(log, [{"event": "resume", "step": 6, "round": 1}, *[x for x in lines(log) if x["event"] in ("step", "round")][9:]])
    run = report.load(log)
    assert run.start.units == () and run.units and run.loose
    assert "what they trained is not known" in report.text([run])
    assert "Costs of units" in report.page([run])


def test_only_the_last_of_several_runs_in_one_file_is_told(log: Path) -> None:
    rewrite(log, [*lines(log), *lines(log)])
    run = report.load(log)
    assert len(run.steps) == 12 and run.earlier == 1
    assert "1 earlier run" in report.text([run])


def test_a_run_that_has_not_taken_a_step_has_a_page(log: Path) -> None:
    told = lines(log)
    for upto in (2, 3):
        rewrite(log, told[:upto])
        page = report.page([report.load(log)])
        assert "has no end" in page and ("Selection map" in page) == (upto == 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"event": "sta', "holds no whole line"),
        (b"not json\n", "line 1"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\n", "not a run log"),
        (b'{"a": 1}\n', "no line in it says"),
        (b"[1, 2]\n", "no line in it says"),
        (b"3\n", "no line in it says"),
        (b'{"event": "round"}\n', "line 1"),
        (b'{"event": "start", "origin": {}, "full": {"seconds": "1", "bytes": 1, "macs": 1}, "units": {}}\n', "line 1"),
        (b'{"event": "start", "origin": {}, "full": {"seconds": NaN, "bytes": 1, "macs": 1}, "units": {}}\n', "line 1"),
        (b'{"event": "resume", "step": 1}\n7\n', "line 2"),
        (b'{"event": "resume", "step": null}\n', "line 1"),
        (b'{"event": "resume", "step": 1}\n{"event": "step", "step": 1, "loss": [], "seconds": 1}\n', "line 2"),
        (b'{"event": "resume", "step": 1}\n{"event": "step", "step": 1, "loss": 1e999, "seconds": 1}\n', "line 2"),
        (b"[" * 100_000 + b"\n", "not a run log"),
    ],
    ids=range(15),
)
def test_what_is_no_run_log_is_told_so(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(LogError, match=said) as caught:
        report.load(tmp_path)
    assert isinstance(caught.value, PliantError)


def test_whatever_a_line_holds_there_is_a_page_or_a_clear_error(log: Path) -> None:
    told = list({line["event"]: line for line in reversed(lines(log))}.values())[::-1]  # the first line of each kind
    refused = 0
    for line in told:
        spots = [(line, key) for key in line]
        spots += [(inner, key) for inner in line.values() if isinstance(inner, dict) for key in list(inner)[:2]]
        for holder, key in spots:
            was = holder[key]
            for odd in (None, BAD, -1, 1e308, []):
                holder[key] = odd
                rewrite(log, told)
                try:
                    run = report.load(log)
                except LogError:
                    refused += 1
                else:
                    assert report.text([run])
                    assert odd not in (BAD, 1e308) or BAD not in report.page([run])
            holder[key] = was
    assert refused > 100


@pytest.mark.parametrize("recipe", [recipes.full(), recipes.head(), recipes.green_trainer(macs=0.8)])
def test_recipes_that_count_instead_of_timing_have_a_page(recipe: object, tmp_path: Path) -> None:
    run = report.load(train(tmp_path, 4, replace(recipe, when=recipes.full().when)))  # type: ignore[type-var]
    page = report.page([run])
    assert "Mean step" in page and "Seconds are measured but not predicted" in page
    assert ("Compute as a share" in page) == ("green" in run.start.facts["policy"])


def test_events_of_others_are_passed_over(log: Path) -> None:
    before = report.load(log)
    runlog.append(log, [{"event": "weather", "rain": True}])
    assert report.load(log) == before


def test_the_page_shows_the_figures_of_the_terminal(place: Path) -> None:
    flags = ["--data", tiny.DATA, "--size", "8", "--batch", "10", "--scratch", "--device", "cpu", "--epochs", "2"]
    shown = command.run(["train", "--model", tiny.MODEL, *flags, "--measure-memory", "--time", "100%", "--out", "run"])
    assert shown.exit_code == 0, shown.output
    said, run = command.text(shown), report.load("run")
    page, best = report.page([run]), run.best
    assert best is not None and run.step_seconds is not None and run.bytes is not None
    assert f"best {markup.percent(best.accuracy)} at step {best.step}; {markup.seconds(run.step_seconds)} per step" in said
    assert f"training took {markup.seconds(run.seconds)} with" in said
    assert f"beyond inference: {markup.size(run.bytes)} measured" in said
    full = next(line for line in lines(place / "run" / "run.jsonl") if line["event"] == "summary")
    assert run.full.seconds == full["full_step_seconds"] and f"steps of {markup.seconds(run.full.seconds)}" in said
    assert f"full training: {markup.seconds(full['full_seconds'])}" in page
    for figure in (
        markup.percent(best.accuracy),
        markup.seconds(run.seconds),
        markup.seconds(run.step_seconds),
        markup.size(run.bytes),
    ):
        assert f"<b>{figure}</b>" in page
    assert run.total_steps == len(run.steps) == 14 and run.options["data"] == tiny.DATA
    rates = [step.lr for step in run.steps]
    assert rates[0] == 0.03 and all(a is not None and b is not None and b < a for a, b in pairwise(rates))
    found = run.by_class[0]
    assert set(found.names) == {"top", "left", "rows", "columns"} and sum(found.confusion.values()) == 20
    assert sum(found.confusion.get((i, i), 0) for i in range(4)) / 20 == pytest.approx(best.accuracy)
    assert "the last 6 of every epoch" in page and "Results by class" in page and "Learning rate" in page


def test_joules_are_shown_where_there_was_a_meter(log: Path) -> None:
    assert "<dt>Energy</dt>" not in report.page([report.load(log)])
    runlog.append(log, [{"event": "summary", "joules": 1234.0, "seconds": 12.0}])
    run = report.load(log)
    assert "<dt>Energy</dt><dd><b>1.23 kJ</b>" in report.page([run]) and "Energy: no meter" not in report.page([run])
    both = tables.comparison(report.named([run, replace(run, result={})]))
    assert both.columns[-2] == "energy" and [row[-2] for row in both.rows] == ["1.23 kJ", "–"]


def test_results_by_class_name_the_usual_mistake(log: Path) -> None:
    line = {"event": "classes", "step": 12, "weights": "best", "split": "validation", "classes": ["cat", "dog", "<b>"]}
    runlog.append(log, [{**line, "confusion": [[0, 0, 1], [0, 1, 2], [0, 2, 1], [1, 1, 2]]}])
    run = report.load(log)
    assert [row[1:] for row in tables.by_class(run.by_class[0]).rows] == [
        ("dog (2)", "4", "25.0%", "100.0%"),
        ("–", "2", "100.0%", "50.0%"),
        ("–", "0", "–", "0.0%"),
    ]
    page = report.page([run])
    assert "&lt;b&gt;" in page and "validation split, best weights (step 12): 50.0%, 3 of 6 samples" in page
    runlog.append(log, [{**line, "confusion": [[0, 3, 1]]}])
    with pytest.raises(LogError, match="there is no class 3"):
        report.load(log)


def test_a_run_is_announced_before_anything_is_measured(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    begins = {"event": "run", "options": {"data": "digits", "lr": 0.1, "exact": False}, "total_steps": 40}
    runlog.append(log, [begins])
    run = report.load(log)
    assert run.options == {"data": "digits", "lr": "0.1"} and tiles.progress(run) == tiles.Progress(0.0, "starting")
    runlog.append(log, [{"event": "evaluated", "step": 0, "accuracy": 0.1, "loss": 2.0, "seconds": 0.0}])
    assert "measuring what each layer costs" in report.page([report.load(log)])
    other = train(tmp_path / "other", 4) / "run.jsonl"
    runlog.append(log, lines(other))
    run = report.load(log)
    assert run.earlier == 0 and run.total_steps == 40 and run.evaluations[0].step == 0 and len(run.steps) == 4
    runlog.append(log, [begins])
    assert report.load(log).earlier == 1 and not report.load(log).steps


def test_the_rest_of_a_run_takes_as_long_as_its_steps_so_far(log: Path) -> None:
    run = replace(report.load(log), ended=False, total_steps=48, began=(1000.0, 0), written=1030.0)
    assert run.seconds_left == 90.0
    assert tiles.progress(run) == tiles.Progress(0.25, "step 12 of 48 (25%), 90 s left")
    resumed = replace(run, began=(1000.0, 6))
    assert resumed.seconds_left == 180.0


# ---------------------------------------------------------------- what it says


class Reader(HTMLParser):
    """Every element of a page with its attributes, and whether all that was opened is closed."""

    VOID = ("meta", "link", "path", "circle")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_map_has_a_cell_per_unit_and_round(folder: Path) -> None:
    run = report.load(folder)
    read = Reader(report.page([run]))
    assert not read.open
    cells = [attributes for _, attributes in read.found if attributes.get("role") == "gridcell"]
    assert len(cells) == len(run.units) * len(run.rounds)
    values = [float(cell["data-value"] or "") for cell in cells]
    assert values == [round.value(unit) for unit in run.units for round in run.rounds]
    chosen = [cell["data-state"] == "chosen" for cell in cells]
    assert chosen == [round.trained(unit) == 1 for unit in run.units for round in run.rounds]
    assert any(chosen) and not all(chosen)
    costs = [attributes["data-cost"] for tag, attributes in read.found if tag == "tr" and "data-cost" in attributes]
    alone = [run.start.costs[unit] for unit in run.units]
    assert all(markup.seconds(cost.seconds) in (told or "") for told, cost in zip(costs, alone, strict=True))


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = report.page([report.load(folder)])
    outside = [
        value for _, attributes in Reader(page).found for key, value in attributes.items() if key in ("src", "href", "action")
    ]
    assert outside == ["data:,", "#main"]
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "connect-src" not in page
    assert "connect-src 'self'" in unescape(report.page([report.load(folder)], live=True))


def test_nothing_of_a_log_gets_out_of_its_quotes(folder: Path, tmp_path: Path) -> None:
    run = report.load(hostile(tmp_path / BAD.replace("/", "_"), folder))
    for page in (report.page([run]), report.page([run, run]), report.body([run])):
        read = Reader(page)
        assert not read.open and "<script>alert" not in page and page.count("pwned") > 10
        assert sum(tag == "script" for tag, _ in read.found) == ("<html" in page)
        assert not any(key.startswith("on") for _, attributes in read.found for key in attributes)
    outside = re.sub(r"```text\n[^`]*```", "", report.markdown([run]))
    assert "pwned" in outside and not re.search(r"(?<!\\)[<>]", outside)


def test_every_form_says_the_numbers_of_the_log(folder: Path) -> None:
    run, told = report.load(folder), lines(folder / "run.jsonl")
    for said in (report.text([run]), report.markdown([run]), report.page([run])):
        for line in told:
            if line["event"] == "round":
                assert markup.seconds(line["cost"]["seconds"]) in said and markup.size(line["cost"]["bytes"]) in said
                assert markup.seconds(line["asked"]["seconds"]) in said
            if line["event"] == "memory":
                assert markup.size(line["measured"]) in said
            if line["event"] == "evaluated":
                assert markup.percent(line["accuracy"]) in said
        assert "What was not measured" in said and "Energy: no meter was read." in said


def test_the_map_in_characters(folder: Path) -> None:
    run = report.load(folder)
    drawn = tables.strip(run).splitlines()[: len(run.units)]
    for line, unit in zip(drawn, run.units, strict=True):
        name, cells = line.rsplit(maxsplit=1)
        assert name == unit and [cell == "█" for cell in cells] == [round.trained(unit) == 1 for round in run.rounds]


def test_tables_of_markdown_keep_their_columns() -> None:
    table = markup.Table("", ("a|b", "n"), [("x|y`z", "1"), ("<b>\n", "2")])
    for line in table.markdown().splitlines():
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert "\\<b\\>" in table.markdown()


# ---------------------------------------------------------------- several runs


def test_runs_are_compared_by_accuracy_and_time(folder: Path, log: Path) -> None:
    fast = report.load(folder)
    told = lines(log)
    for line in told:
        if line["event"] == "step":
            line["seconds"] += 1.0
        if line["event"] == "evaluated":
            line["accuracy"] /= 2
    rewrite(log, told)
    slow = replace(report.load(log), name="slow")
    silent = replace(fast, name="silent", evaluations=())
    assert tables.front([fast, slow, silent]) == [0]
    rows = tables.comparison([fast, slow, silent]).rows
    assert [row[0] for row in rows] == ["chain ★", "slow", "silent"]
    assert rows[1][2] == "45.0% validation" and rows[2][2] == "–"
    page = report.page([fast, slow, silent])
    assert page.count('class="dot ') == 2 and "No accuracy in the log of silent." in page and page.count('class="map"') == 3
    assert "No accuracy in the log of silent, silent." in report.page([silent, silent])
    assert report.text([fast, slow]).startswith("Runs side by side") and report.markdown([fast, slow]).startswith("# Runs")


def test_runs_of_one_name_are_told_apart(folder: Path) -> None:
    run = report.load(folder)
    assert [each.name for each in report.named([run, run, run])] == ["chain", "chain (2)", "chain (3)"]


# ---------------------------------------------------------------- figures


def test_blocks_follow_the_names_and_long_lines_are_thinned() -> None:
    assert [name for name, _ in blocks(["0.weight", "0.bias", "2.weight"])] == ["0", "2"]
    names = ["net.embed", "net.layers.3.q", "net.layers.3.k", "net.head"]
    assert [name for name, _ in blocks(names)] == ["embed", "layers.3", "head"]
    assert blocks(["alone"]) == [("alone", ["alone"])] and blocks([]) == []
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    assert len(figures.thinned(points)) <= 400 and figures.thinned(points[:10]) == points[:10]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (5, 5), (-3, -3), (0, 1e-7), (1e9, 3e9), (0.1, 0.1001), (-1, 7)])
def test_ticks_span_what_they_measure(low: float, high: float) -> None:
    marks = figures.ticks(low, high)
    assert marks[0] <= low + 1e-12 and marks[-1] >= high - 1e-12 and 2 <= len(marks) <= 8
    assert marks == sorted(set(marks))


# ---------------------------------------------------------------- the command


def test_the_command_writes_pages_and_markdown_and_prints_text(folder: Path, tmp_path: Path) -> None:
    shown = command.run(["report", str(folder)])
    assert shown.exit_code == 0 and "report.html" in command.text(shown)
    assert (folder / "report.html").read_text(encoding="utf-8") == report.page([report.load(folder)])
    out = tmp_path / "new" / "all.html"
    assert command.run(["report", str(folder), str(folder), "--out", str(out)]).exit_code == 0
    assert "chain (2)" in out.read_text(encoding="utf-8")
    assert command.run(["report", str(folder), "--format", "text"]).output == report.text([report.load(folder)])
    markdown = tmp_path / "report.md"
    assert command.run(["report", str(folder), "--format", "md", "--out", str(markdown)]).exit_code == 0
    assert markdown.read_text(encoding="utf-8") == report.markdown([report.load(folder)])
    shown = command.run(["report", str(folder), "--out", str(out / "in a file.html")])
    assert shown.exit_code == 1 and "all.html" in "".join(shown.output.split("\n"))


def test_a_name_that_is_not_utf8_is_shown_with_a_mark(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "markdown", lambda runs: "caf\udce9")
    shown = command.run(["report", str(folder), "--format", "md", "--out", str(tmp_path / "report.md")])
    assert shown.exit_code == 0 and (tmp_path / "report.md").read_text(encoding="utf-8") == "caf?"


# ---------------------------------------------------------------- notebooks


def test_a_notebook_shows_selections_profiles_and_sessions(tmp_path: Path) -> None:
    with opened(tmp_path / "run.jsonl") as session:
        assert "nothing is chosen yet" in session._repr_html_()
        for batch in batches(4):
            session.step(batch)
        whole, chosen, costs = (each._repr_html_() for each in (session, session.selection, session.profile))
        names, full = [unit.name for unit in session.selection.units], session.profile.full
    for html in (whole, chosen, costs):
        assert not Reader(html).open and "<table" in html and "<script" not in html and "style" not in html
    assert all(f">{name}</th>" in chosen for name in names)
    assert chosen in whole and "asked" in whole
    assert markup.seconds(full.seconds) in costs


def test_what_a_notebook_shows_is_escaped_and_short() -> None:
    many = tuple(Unit(f"{BAD}{i}", ()) for i in range(50))
    html = Selection(many, Cost(), {}, 0.0, values={unit.name: 1.0 for unit in many})._repr_html_()
    assert "<script>" not in html and "… and 30 more" in html and not Reader(html).open
    assert "<script>" not in replace(chain_profile([1.0], [1.0]), origin={"device": BAD})._repr_html_()


def test_a_run_that_has_not_chosen_yet_is_one_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"event": "evaluated", "step": 0, "accuracy": 0.1, "loss": 2.3}\n{"event": "start", "units"')
    shown = command.run(["report", str(tmp_path)])
    assert shown.exit_code == 1 and "logged too little" in command.text(shown)
    log.write_bytes(b"PK\x03\x04\x80\x81\n")
    shown = command.run(["report", str(tmp_path)])
    assert shown.exit_code == 1 and "holds no text" in command.text(shown)


def test_a_damaged_byte_costs_its_line_at_most_and_is_told(tmp_path: Path) -> None:
    log = train(tmp_path / "run", 6) / "run.jsonl"
    whole, lines = report.load(log), log.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"step": 3,' in line and b'"event": "step"' in line)
    log.write_bytes(b"".join([*lines[:at], b"\xff" + lines[at], *lines[at + 1 :]]))
    run = report.load(log)
    assert [step.number for step in run.steps] == [n for n in range(1, 7) if n != 3] and len(run.chosen) == len(whole.chosen)
    assert any(text == f"line {at + 1} of the log is damaged and was left out" for _, text in run.notes)
    log.write_bytes(b"".join([*lines, b'{"event": "note", "step": 6, "text": "caf\xe9"}\n']))
    assert report.load(log).notes[-1] == (6, "caf\ufffd") and len(report.load(log).steps) == 6
    assert command.run(["report", str(log), "--format", "text"]).exit_code == 0
