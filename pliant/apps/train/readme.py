"""RUN/README.md: what a run's folder holds and how to use it, for whoever finds it later."""

from __future__ import annotations

import os
import shlex

from pliant import __version__
from pliant.apps import models
from pliant.apps.data.inputs import Inputs
from pliant.apps.train.options import Options, Result
from pliant.core.text import in_markdown

_NEW = {"images": "new/", "audio": "new/", "text": "new.csv", "arrays": "new/"}
_SEES = {"images": ["new/a.jpg", "new/b.jpg"], "audio": ["new/a.wav", "new/b.wav"], "text": ["a text", "another"]}


def readme(
    options: Options, path: str | os.PathLike[str], classes: tuple[str, ...], inputs: Inputs, result: Result | None
) -> str:
    """The text of the file; without a result the run is not finished."""
    run = shlex.quote(os.fspath(path))
    code = options.model.partition("@")[0] if models.is_code(options.model) else ""
    also = f" --model {code}" if code else ""
    given = f", model={code!r}" if code else ""
    kind = inputs.kind
    some = ", ".join(in_markdown(name) for name in classes[:8]) + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")
    fence = "`" if "`" not in options.data + options.model else "``"
    lines = [
        f"# {in_markdown(os.path.basename(os.path.abspath(path)))}",
        "",
        f"{fence}{options.model}{fence} trained on {fence}{options.data}{fence} by Pliant {__version__}. Classes: {some}.",
        "",
    ]
    if result is None:
        lines += ["The run is not finished. To continue it:", "", f"    pliant train --resume --out {run}{also}", ""]
    else:
        best = f"best {result.best.accuracy:.1%} at step {result.best.step}"
        lines += [f"Validation accuracy: last {result.accuracy:.1%}, {best}.", ""]
        lines += [f"- {line}" for line in result.outcome.lines()] + [""]
    lines += [
        "## Use it",
        "",
        f"    pliant predict {run} {_NEW[kind]}{also}         # classify new {kind}",
        f"    pliant evaluate {run}{also}              # accuracy for each class; add other data to test on them",
        f"    pliant export {run} --to onnx{also}      # a file for other runtimes; or --to torch",
        f"    pliant report {run}                # the run as a page",
        "",
        "In Python:",
        "",
        "```py",
        "import pliant, torch",
        "",
        f"trained = pliant.load({os.fspath(path)!r}{given})",
        f"batch = trained.inputs({_SEES.get(kind, ['new/a.npy'])!r})",
        "with torch.no_grad():",
        f"    logits = {'trained.logits(batch)' if options.model.startswith('hf:') else 'trained.model(batch)'}",
        "print([trained.classes[i] for i in logits.argmax(1)])",
        "```",
        "",
        "## Files",
        "",
        "| file | what it holds |",
        "|---|---|",
        "| `best.safetensors` | the weights with the best validation accuracy, and all that is needed to use them |",
        "| `last.safetensors` | the weights at the end |",
        "| `run.jsonl` | the run log: what was chosen, what it cost, how accurate it was |",
        "| `run.json` | the options of the run |",
        "| `state.pt` | what `--resume` continues from; not needed to use the model |",
    ]
    if options.skip_unreadable:
        lines.append("| `skipped.csv` | the samples that could not be read, and why |")
    return "\n".join([*lines, ""])
