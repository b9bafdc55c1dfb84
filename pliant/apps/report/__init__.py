"""Run logs as one self-contained HTML page, Markdown, or plain text.

>>> from pliant import report
>>> runs = [report.load("run.jsonl")]      # doctest: +SKIP
>>> html = report.page(runs)               # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.apps.report import tables
from pliant.apps.report.page import body, page, policy
from pliant.apps.report.reading import LogError, NothingYet, Tail, load, log_of, named
from pliant.apps.report.run import Run
from pliant.core.text import Table, in_markdown, plain

__all__ = ["LogError", "NothingYet", "Run", "Tail", "body", "load", "log_of", "markdown", "named", "page", "policy", "text"]


def markdown(runs: Sequence[Run]) -> str:
    """The report in Markdown: the same tables, with the selection map in characters."""
    out = [] if len(runs) == 1 else ["# Runs side by side", tables.comparison(runs).markdown()]
    for run in runs:
        out.append(f"# {in_markdown(run.name)}")
        for title, parts in tables.parts(run):
            out.append(f"## {title}")
            for part in parts:
                if isinstance(part, Table):
                    out += [in_markdown(part.title), part.markdown()]
                elif isinstance(part, list):
                    out.append("\n".join(f"- {in_markdown(line)}" for line in part))
                else:
                    out.append("```text\n" + part.replace("`", "'") + "\n```")
    return "\n\n".join(out) + "\n"


def text(runs: Sequence[Run]) -> str:
    """The report as plain text, for a terminal."""
    out = [] if len(runs) == 1 else [tables.comparison(runs).title, tables.comparison(runs).text()]
    for run in runs:
        name = plain(run.name)
        out.append(f"{name}\n{'═' * len(name)}")
        for title, parts in tables.parts(run):
            out.append(f"{title}\n{'─' * len(title)}")
            for part in parts:
                if isinstance(part, Table):
                    out += [part.title, part.text()]
                else:
                    out.append("\n".join(f"• {plain(line)}" for line in part) if isinstance(part, list) else part)
    return "\n\n".join(out) + "\n"
