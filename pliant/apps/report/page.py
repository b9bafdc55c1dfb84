"""Runs → one HTML page that needs nothing else. `tag` escapes whatever comes from a log; scripts run by their hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from pliant.apps.report import figures, tables
from pliant.apps.report.figures import Points, Series
from pliant.apps.report.run import Round, Run, blocks
from pliant.core import text
from pliant.core.text import Html, Table, join, tag
from pliant.cost.peaks import svg_plot

# The map's classes of colour: the least share of the round's largest value, and how that is said.
CLASSES = ((0.1, "over 10 %"), (0.01, "over 1 %"), (0.001, "over 0.1 %"), (0.0001, "over 0.01 %"), (0.0, "less"))
_SMOOTH = 15  # steps
_MANY = 100  # units: a longer map scrolls inside its frame


def page(runs: Sequence[Run], live: bool = False) -> str:
    """The whole document; a `live` one asks its server for news."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(live)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} – Pliant report"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_asset("page.css"))),
    )
    top = tag(
        "header",
        tag("h1", "Pliant report", class_="brand"),
        tag("span", id="pulse", role="status"),
        tag("button", "Dark", id="theme", type="button"),
        class_="top",
    )
    content = tag(
        "body",
        tag("a", "Skip to the report", class_="skip", href="#main"),
        top,
        tag("main", body(runs), id="main"),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", Html(_asset("page.js"))),
        data_live=live,
    )
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n"


def policy(live: bool) -> str:
    """What the page may do: run its own script; ask its own server, if it is live; load nothing."""
    digest = base64.b64encode(hashlib.sha256(_asset("page.js").encode()).digest()).decode()
    connect = "; connect-src 'self'" * live
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:{connect}"


def _asset(name: str) -> str:
    return (files("pliant.apps.report") / name).read_text(encoding="utf-8")


def body(runs: Sequence[Run]) -> Html:
    """All that changes while a run goes on."""
    if len(runs) == 1:
        return join([tag("h2", runs[0].name, class_="title"), _run(runs[0])])
    each = [tag("details", tag("summary", tag("h2", run.name)), _run(run), class_="run") for run in runs]
    return join([tag("h2", f"{len(runs)} runs", class_="title"), _comparison(runs), *each])


def _run(run: Run) -> Html:
    parts = _lead, _promises, _learning, _map, _strip, _split, _roofline, _notes, _gaps
    return tag("div", *(part(run) for part in parts), class_="report")


def _section(title: str, why: str, *content: Html) -> Html:
    return tag("section", tag("h3", title), tag("p", why), *content) if any(content) else Html()


def _figure(title: str, figure: Html, numbers: Table) -> Html:
    return tag("div", tag("h4", title), figure, _numbers(numbers)) if figure else Html()


def _numbers(table: Table) -> Html:
    """The numbers behind a figure, for those who would rather read, or hear, than look."""
    return tag("details", tag("summary", "Numbers"), _scroll(table.title, table.html()), class_="numbers")


def _scroll(label: str, content: Html) -> Html:
    """What is wider than the screen scrolls by itself, also by keyboard."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def _pair(*figures: Html) -> Html:
    """Figures side by side, where there is room."""
    return tag("div", *figures, class_="pair") if any(figures) else Html()


# ---------------------------------------------------------------- sections


def _lead(run: Run) -> Html:
    """The numbers to remember, and who ran what."""
    torn = tag("p", "The log’s last line was cut short: this page ends with the last whole one.", class_="warn")
    known = (tile for tile in (_step_tile(run), _memory_tile(run), _accuracy_tile(run), _trained_tile(run)) if tile)
    tiles = [
        tag("div", tag("dt", name), tag("dd", tag("b", amount), *(tag("span", line) for line in more)))
        for name, amount, *more in known
    ]
    facts = [tag("div", tag("dt", row[0]), tag("dd", row[1])) for row in tables.facts(run).rows]
    return join([torn if run.torn else Html(), tag("dl", *tiles, class_="tiles"), tag("dl", *facts, class_="facts")])


Tile = tuple[str, ...]  # a name, a number, what it means; empty where nothing is known


def _step_tile(run: Run) -> Tile:
    step, full = run.step_seconds, run.full.seconds
    if step is None:
        return ()
    if not full:
        return "Median step", text.seconds(step), "measured"
    asked = run.chosen[-1].selection.asked.get("seconds") if run.chosen else None
    promise = f"asked {text.share(asked / full)}; " if asked is not None else ""
    return "Median step", text.share(step / full), "of a full step", f"{promise}{text.seconds(step)}"


def _memory_tile(run: Run) -> Tile:
    if not run.chosen or not run.full.bytes:
        return ()
    peak, asked = run.bytes, run.chosen[-1].selection.asked.get("bytes")
    promise = f"asked {text.size(asked)}" if asked is not None else ""
    if peak is None:
        predicted = max(each.selection.cost.bytes for each in run.chosen)
        return "Training memory", text.size(predicted), "predicted, not measured", promise
    return "Training memory", text.size(peak), "measured", promise


def _accuracy_tile(run: Run) -> Tile:
    score = run.accuracy
    if score is None:
        return ()
    first = next(each for each in run.evaluations if each.split == score.split)
    since = f"{text.percent(first.accuracy)} at step {first.step}" if first is not score else ""
    return "Accuracy", text.percent(score.accuracy), f"{score.split}, step {score.step}", since


def _trained_tile(run: Run) -> Tile:
    if not run.chosen:
        return ()
    last = run.chosen[-1].selection
    return "Trained", f"{len(last.units)} of {len(run.units)}", f"units in round {last.round}"


def _promises(run: Run) -> Html:
    """Asked, predicted and measured over the steps of the run."""
    why = "What a step may cost, what the plan said it would, and what it did."
    return _section("Asked, predicted, measured", why, _pair(*(_promise(run, each) for each in tables.limited(run))))


def _promise(run: Run, resource: str) -> Html:
    """One resource, as a share of a plain full step where that is known."""
    full = getattr(run.full, resource) or 0.0
    asked, predicted, measured = (list[tuple[float, float]]() for _ in range(3))
    for each in run.chosen:
        first = each.selection.step + 1
        last = max(each.steps[-1].number if each.steps else first, first)
        told = each.selection.asked.get(resource), tables.predicted(run, each, resource), tables.measured(each, resource)
        for points, amount in zip((asked, predicted, measured), told, strict=True):
            points += [(x, amount / (full or 1.0)) for x in (first, last)] if amount is not None else []
    series = [
        Series("asked", asked, "stairs", "asked"),
        Series("predicted", predicted, "stairs", "predicted"),
        Series("measured (median)" if resource == "seconds" else "measured", measured, "stairs", "measured"),
    ]
    if resource == "seconds":  # a step that something disturbed would hide the rest: it is drawn at the upper edge
        top = 1.25 * max((y for each in series for _, y in each.points), default=0.0)
        taken = [(s.number, min(s.seconds / (full or 1.0), top)) for s in run.steps if s.seconds is not None]
        series.insert(0, Series("each step", taken, "dots", "each"))
    name, write = tables.RESOURCES[resource]
    title = f"{name.capitalize()} as a share of a full step ({write(full)})" if full else f"{name.capitalize()} per step"
    label = f"{title}, over the steps of the run: {', '.join(s.name for s in series if s.points)}"
    return _figure(title, figures.chart(label, series, text.number if full else write, 0.0), tables.promises(run, resource))


def _learning(run: Run) -> Html:
    losses = [(step.number, step.loss) for step in run.steps if step.loss is not None]
    smooth: Points = figures.smoothed(losses, _SMOOTH)
    loss = [Series(f"mean of {_SMOOTH}", smooth, "line", "measured")]
    loss.insert(0, Series("each step", losses, "dots" if smooth else "line", "each" if smooth else "measured"))
    told = f"training loss, from {text.number(losses[0][1])} to {text.number(losses[-1][1])}" if losses else ""
    splits = dict.fromkeys(each.split for each in run.evaluations)
    accuracy = []
    for split, look in zip(splits, ("measured", "predicted", "asked"), strict=False):
        points = [(e.step, e.accuracy) for e in run.evaluations if e.split == split and e.accuracy is not None]
        accuracy.append(Series(split, points, "line", look))
    said = "; ".join(f"{s.name} accuracy, {text.percent(s.points[-1][1])} at the end" for s in accuracy if s.points)
    drawn = _pair(
        _figure("Training loss", figures.chart(told, loss, text.number), tables.learning(run)),
        _figure("Accuracy", figures.chart(said, accuracy, lambda share: f"{100 * share:g} %"), tables.evaluations(run)),
    )
    return _section("Learning", "Loss of every step, and accuracy wherever the model was evaluated.", drawn)


# ---------------------------------------------------------------- what was chosen


def _map(run: Run) -> Html:
    """Units × rounds: the colour is the value, the size the share of the round's steps in which the unit was trained."""
    rounds = run.rounds
    if not rounds or not run.units:
        return Html()
    rows = []
    for _, names in blocks(run.units):
        for name in names:
            header = tag("th", tag("span", name), scope="row", title=name)
            cells = (_cell(round, name) for round in rounds)
            rows.append(tag("tr", header, *cells, class_="first" if name == names[0] else None, data_cost=_alone(run, name)))
    heads = [tag("th", str(round.number), scope="col") for round in rounds]
    table = tag(
        "table",
        tag("thead", tag("tr", tag("th", "round", scope="col"), *heads)),
        tag("tbody", *rows),
        class_="map",
        role="grid",
        aria_label="Selection map: units by rounds",
        style=f"--w:{max(22, min(64, 640 // len(rounds)))}px",
    )
    why = (
        "Every unit from the input (top) to the loss, in every round. Colour is what it is worth; large cells are what was "
        "trained. Point at a cell, or walk with the arrow keys."
    )
    frame = tag("div", table, class_=f"scroll frame{' long' * (len(run.units) > _MANY)}")
    return _section("Selection map", why, *_map_keys(), frame, _numbers(tables.units(run)))


def _map_keys() -> tuple[Html, Html]:
    def key(look: str, size: float, text: str) -> Html:
        return tag("li", tag("i", class_=look, style=f"--s:{size}"), text)

    values = [key(f"v{5 - i}", 1, text) for i, (_, text) in enumerate(CLASSES)]
    what = tag("li", "Value, as a share of the round’s largest", class_="what")
    sizes = [key("v4", 1, "chosen"), key("v4", 0.5, "for part of the round"), key("v4", 0, "not")]
    return (
        tag("ul", what, *values, key("v0", 1, "0 or below"), class_="legend cells"),
        tag("ul", *sizes, class_="legend cells"),
    )


def shade(round: Round, unit: str) -> str:
    """The class that a value's colour comes from: v5 is the highest, v0 is nothing or less, vx is not known."""
    value = round.value(unit)
    if value is None:
        return "vx"
    if value <= 0:
        return "v0"
    return f"v{5 - next(i for i, (least, _) in enumerate(CLASSES) if value >= least * round.largest)}"


def _cell(round: Round, unit: str) -> Html:
    value, trained = round.value(unit), round.trained(unit)
    state = "chosen" if trained == 1 else "not chosen" if not trained else f"chosen in {trained:.0%} of the round’s steps"
    return tag(
        "td",
        tag("i"),
        tag("span", f"{text.number(value)}, {state}", class_="sr"),
        class_=shade(round, unit),
        role="gridcell",
        tabindex="-1",
        data_value=None if value is None else repr(value),
        data_state=state,
        style=f"--s:{trained:.2g}",
    )


def _alone(run: Run, unit: str) -> str | None:
    """What a step with this unit alone costs, if the log says."""
    cost, full = run.start.costs.get(unit), run.full
    if cost is None:
        return None
    amounts = [text.seconds(cost.seconds), f"{text.share(cost.seconds / full.seconds)} of a full step"] if full.seconds else []
    amounts += [text.size(cost.bytes)] if full.bytes else []
    return ", ".join([*amounts, text.macs(cost.macs)] if full.macs else amounts)


def _strip(run: Run) -> Html:
    """The model as blocks, from input to output; a bar for each unit says how often it was trained."""
    if not run.chosen:
        return Html()
    drawn = []
    for block, names in blocks(run.units):
        shares = [run.trained(name) for name in names]
        bars = (tag("i", style=f"--h:{s:.1%}", title=f"{name}: {s:.0%}") for name, s in zip(names, shares, strict=True))
        many = f"{len(names)} unit{'s' * (len(names) > 1)}"
        said = tag("span", f"{block}: trained in {sum(shares) / len(shares):.0%} of steps, {many}", class_="sr")
        box, label = tag("div", *bars, aria_hidden="true"), tag("b", block, aria_hidden="true")
        drawn.append(tag("li", said, box, label, style=f"flex-grow:{len(names)}"))
    why = "Blocks from input to output. Each bar is a unit; its height is the share of all steps in which it was trained."
    return _section("What was trained", why, tag("ol", *drawn, class_="strip"))


# ---------------------------------------------------------------- what it cost


def _split(run: Run) -> Html:
    drawn = []
    for resource, title in (("seconds", "Time of a step"), ("bytes", "Live tensors at a step’s peak")):
        write = tables.RESOURCES[resource][1]
        rows = []
        for what, split in tables.splits(run, resource):
            amounts = [(part, getattr(split[part], resource)) for part in tables.PARTS if part in split]
            pieces = [(part, max(amount, 0.0), f"{part} {write(amount)}") for part, amount in amounts]
            rows.append((what, pieces, write(sum(amount for _, amount in amounts))))
        label = "; ".join(f"{what}: {', '.join(text for _, _, text in pieces)}" for what, pieces, _ in rows)
        drawn.append(_figure(title, figures.bars(label, rows), tables.split(run, resource)))
    if not any(drawn):
        return Html()
    keys = (
        ("forward", "forward, and its activations"),
        ("dX", "dX: gradients on their way"),
        ("dW", "dW: gradients of weights"),
        ("optimizer", "optimizer"),
    )
    key = tag("ul", *(tag("li", tag("i", class_=part), text) for part, text in keys), class_="legend")
    why = (
        "As the profile predicts it. What is not chosen costs no dW, and no dX where nothing before it is chosen. "
        "Budgets count memory beyond inference’s own peak; here it is whole."
    )
    return _section("Where time and memory go", why, key, *drawn)


def _roofline(run: Run) -> Html:
    if run.roof is None:
        return Html()
    plot = Html(svg_plot(run.roof.rows, run.roof.peaks, "Backward pass"))
    why = "How fast each unit’s backward pass runs against what this device can do. Hollow dots wait for memory."
    return _section("Roofline", why, _scroll("Roofline", plot), _numbers(tables.roofline(run.roof)))


def _notes(run: Run) -> Html:
    items = [tag("li", tag("b", f"step {step}"), " ", text) for step, text in run.notes]
    notes = tag("ul", *items, class_="notes") if items else Html()
    return _section("Notes", "What the session said while it ran.", notes)


def _gaps(run: Run) -> Html:
    items = tag("ul", *(tag("li", text) for text in tables.gaps(run)), class_="notes")
    return _section("What was not measured", "So that nothing here is taken for more than it is.", items)


def _comparison(runs: Sequence[Run]) -> Html:
    """Accuracy against time, and all runs in one table."""
    points: list[tuple[str, float, float]] = []
    places: dict[int, int] = {}
    for i, run in enumerate(runs):
        if run.accuracy is not None and run.accuracy.accuracy is not None:
            places[i] = len(points)
            points.append((run.name, run.seconds, run.accuracy.accuracy))
    label = "; ".join(f"{name}: {text.percent(share)} in {text.seconds(took)}" for name, took, share in points)
    title, front = "Accuracy against training time", [places[i] for i in tables.front(runs)]
    plot = join([tag("h4", title), figures.scatter(f"{title}. {label}", points, front)]) if points else Html()
    missing = ", ".join(run.name for i, run in enumerate(runs) if i not in places)
    note = tag("p", f"No accuracy in the log of {missing}.") if missing else Html()
    table = tables.comparison(runs)
    why = "Up and to the left is better; the line joins the runs that no other one beats."
    return _section("Runs side by side", why, plot, note, _scroll(table.title, table.html()))
