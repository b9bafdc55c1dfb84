"""Numbers and tables as people read them: in HTML that is safe to show, in Markdown, in plain text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

NOTHING = "–"  # shown where a number is not known


def plain(text: object) -> str:
    """On one line, without characters that cannot be shown.

    >>> plain("two\\nlines")
    'two lines'
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in said)


# ---------------------------------------------------------------- HTML


class Html(str):
    """Text that is HTML already. Whatever else `tag` is given is escaped, so nothing unsafe gets in by being forgotten."""


def tag(name: str, /, *content: str, **attributes: str | float | bool | None) -> Html:
    """An element. In names of attributes, an underscore is a hyphen, and one at the end is dropped; False and None omit one.

    >>> tag("td", "a < b", Html("<i></i>"), class_="n", data_cost="5 ms", hidden=True)
    '<td class="n" data-cost="5 ms" hidden>a &lt; b<i></i></td>'
    """
    given = ""
    for key, value in attributes.items():
        word = key.rstrip("_").replace("_", "-")
        if value is True:
            given += f" {word}"
        elif value is not None and value is not False:
            given += f' {word}="{html.escape(plain(value))}"'
    if name in ("path", "meta", "link"):
        return Html(f"<{name}{given}/>")
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def join(content: Iterable[str]) -> Html:
    """One after the other, escaped where they are not HTML."""
    return Html("".join(each if isinstance(each, Html) else html.escape(plain(each)) for each in content))


# ---------------------------------------------------------------- numbers


def seconds(amount: float | None) -> str:
    """
    >>> seconds(0.01234), seconds(2.5), seconds(754), seconds(7300), seconds(None)
    ('12.3 ms', '2.5 s', '12 min 34 s', '2 h 1 min', '–')
    """
    if amount is None:
        return NOTHING
    if abs(amount) >= 3600:
        hours, rest = divmod(round(amount), 3600)
        return f"{hours} h {rest // 60} min"
    if abs(amount) >= 100:
        minutes, rest = divmod(round(amount), 60)
        return f"{minutes} min {rest} s"
    return _scaled(amount, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def size(amount: float | None) -> str:
    """
    >>> size(0), size(2500), size(40e6)
    ('0 B', '2.5 kB', '40 MB')
    """
    return NOTHING if amount is None else _scaled(amount, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def macs(amount: float | None) -> str:
    """
    >>> macs(62_781_184)
    '62.8 MMAC'
    """
    if amount is None:
        return NOTHING
    return _scaled(amount, ((1e12, "TMAC"), (1e9, "GMAC"), (1e6, "MMAC"), (1e3, "kMAC"), (1.0, "MAC")))


def joules(amount: float | None) -> str:
    return NOTHING if amount is None else _scaled(amount, ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")))


def share(amount: float | None) -> str:
    """Of a whole.

    >>> share(0.41259)
    '0.413'
    """
    return NOTHING if amount is None else f"{amount:.3f}"


def percent(amount: float | None) -> str:
    return NOTHING if amount is None else f"{amount:.1%}"


def number(amount: float | None) -> str:
    """
    >>> number(0.0001234), number(1234567.0)
    ('0.000123', '1.23e+06')
    """
    return NOTHING if amount is None else f"{amount:.3g}".replace("-", "−")


def _scaled(amount: float, units: Sequence[tuple[float, str]]) -> str:
    scale, unit = next((u for u in units if abs(amount) >= u[0] * 0.9995), units[-1] if amount else (1.0, units[-1][1]))
    shown = amount / scale
    digits = f"{shown:.0f}" if abs(shown) >= 99.95 else f"{shown:.3g}"
    return f"{digits} {unit}".replace("-", "−")


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title; the first `words` columns are text, the others numbers, aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def first(self, most: int) -> Table:
        """No more rows than that, and a last one that says how many are left out."""
        if len(self.rows) <= most:
            return self
        rest = (f"… and {len(self.rows) - most} more", *[""] * (len(self.columns) - 1))
        return replace(self, rows=[*self.rows[:most], rest])

    def html(self) -> Html:
        """A table that screen readers can walk: a caption, a header for every column and every row."""
        head = (tag("th", name, scope="col", class_=self._class(i)) for i, name in enumerate(self.columns))
        body = (
            tag(
                "tr",
                tag("th", row[0], scope="row"),
                *(tag("td", text, class_=self._class(i)) for i, text in enumerate(row) if i),
            )
            for row in self.rows
        )
        return tag("table", tag("caption", self.title), tag("thead", tag("tr", *head)), tag("tbody", *body))

    def _class(self, column: int) -> str | None:
        return "n" if column >= self.words else None

    def markdown(self) -> str:
        line = "|" + "|".join("---" if i < self.words else "--:" for i in range(len(self.columns))) + "|"
        rows = ["| " + " | ".join(in_markdown(cell) for cell in row) + " |" for row in (self.columns, *self.rows)]
        return "\n".join([rows[0], line, *rows[1:]])

    def text(self) -> str:
        """
        >>> print(Table("", ("unit", "ms"), [("head", "1.25"), ("stem", "10")]).text())
        unit    ms
        head  1.25
        stem    10
        """
        lines = [[plain(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def cell(text: str, i: int) -> str:
            return text.ljust(widths[i]) if i < self.words else text.rjust(widths[i])

        return "\n".join("  ".join(cell(text, i) for i, text in enumerate(line)).rstrip() for line in lines)


def in_markdown(text: str) -> str:
    for mark in "\\|`*_[]<>#":
        text = text.replace(mark, f"\\{mark}")
    return plain(text)
