"""Put generated tables into the README: `python benchmarks/readme.py`.

Whatever stands between `<!-- table: FILE -->` and `<!-- end -->` becomes the table of that result file, above a line that says
where and when it was measured.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The text with every table taken from its file."""

    def table(found: re.Match[str]) -> str:
        table = (ROOT / found[2]).read_text(encoding="utf-8").removeprefix("<!-- generated; do not edit -->\n")
        facts, setting, rows = table.split("\n\n", 2)
        return f"{found[1]}{rows.strip()}\n\n({facts}; {setting})\n{found[3]}"

    return BLOCK.sub(table, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
