"""Options that several commands share, so that each is written once: the fields of `Options`, and those about a trained run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from pliant.apps.train import Options

_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}

Given = dict[str, Any]
"""The options that the user gave, by name."""

# Of commands that use a trained run.
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or a weight file of it (.safetensors).", show_default=False)
]
Weights = Annotated[str, typer.Option(help="Those of the best evaluation, or the last: best or last.")]
Factory = Annotated[str | None, typer.Option(help="package.module:factory, if the model was made by one.", show_default=False)]
InputColumn = Annotated[
    str | None, typer.Option(help="Column of a table that holds the file or the text.", show_default="by its name")
]
SkipUnreadable = Annotated[bool, typer.Option("--skip-unreadable", help="Leave out what cannot be read, and say so.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")]


def train_options(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands that have a parameter `given: Given`: options of `pliant train` take its place.

    All of them by default, else those with these names and those that have another default here. The command receives the
    options that the user gave, and the other defaults.
    """
    unknown = {*names, *defaults} - {field.name for field in fields(Options)}
    if unknown:
        raise ValueError(f"Options has no field {sorted(unknown)[0]!r}.")

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        wanted = [field for field in fields(Options) if not (names or defaults) or field.name in (*names, *defaults)]
        shared = [_parameter(field, defaults.get(field.name, field.default)) for field in wanted]

        def expanded() -> Iterator[inspect.Parameter]:
            for parameter in signature.parameters.values():
                yield from shared if parameter.name == "given" else [parameter]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {field.name: values.pop(field.name) for field in wanted}
            command(given=defaults | {name: value for name, value in given.items() if value is not None}, **values)

        parameters = list(expanded())
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(field: Field[Any], default: Any) -> inspect.Parameter:
    """The default is None, "not given", so that a file of options or a resumed run can decide; the help shows the real one."""
    types = str(field.type).split(" | ")
    kind = str if "str" in types else _TYPES[types[0]]
    shown = "" if default is None or default is False else str(default)
    if default == field.default:
        shown = field.metadata["unset"] or shown
    option = typer.Option(
        f"--{field.name.replace('_', '-')}",
        help=field.metadata["help"],
        min=field.metadata["least"],
        show_default=shown or False,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
