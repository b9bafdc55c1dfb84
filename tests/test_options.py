"""The options of the commands come from one dataclass: every field is an option with its help, limit and default."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pliant import cli
from pliant.apps.train import Options
from pliant.cli.options import Given, train_options

run = CliRunner().invoke


def parameters(command: str) -> dict[str, Any]:
    importlib.import_module(f"pliant.cli.{command}")  # the group imports a command when it is called
    group: Any = typer.main.get_command(cli.app)
    return {parameter.name: parameter for parameter in group.commands[command].params}


def test_every_field_is_an_option_of_train() -> None:
    found = parameters("train")
    assert set(found) == {field.name for field in fields(Options)} | {"config", "as_json"}
    for field in fields(Options):
        option = found[field.name]
        assert option.opts == [f"--{field.name.replace('_', '-')}"] and option.default is None
        assert option.help == field.metadata["help"]
        shown = field.metadata["unset"] or ("" if field.default is None or field.default is False else str(field.default))
        assert (option.show_default or "") == shown
        least = field.metadata["least"]
        if least is not None:
            refused = run(cli.app, ["train", option.opts[0], str(least - 1)])
            assert refused.exit_code == 2 and option.opts[0] in refused.output


@pytest.mark.parametrize(("command", "changed"), [("compare", {"epochs": "1", "lr": "0.1", "size": "32"}), ("plan", {})])
def test_commands_that_share_options_show_their_own_defaults(command: str, changed: dict[str, str]) -> None:
    shared = {
        name: option for name, option in parameters(command).items() if name in ("epochs", "lr", "size", "batch", "device")
    }
    own = {"epochs": "3", "lr": "0.03", "size": "64", "batch": "16", "device": "cuda if there is one"} | changed
    assert {name: option.show_default for name, option in shared.items()} == {name: own[name] for name in shared}
    assert "lr" in shared and "batch" in shared


def test_a_command_gets_what_was_given_and_its_own_defaults() -> None:
    seen: list[Given] = []
    app = typer.Typer()

    @app.command()
    @train_options("batch", "scratch", epochs=7, lr=0.5)
    def command(*, given: Given, other: int = 1) -> None:
        seen.append({**given, "other": other})

    assert run(app, []).exit_code == 0 and run(app, ["--lr", "0.25", "--scratch", "--other", "2"]).exit_code == 0
    assert seen == [{"epochs": 7, "lr": 0.5, "other": 1}, {"epochs": 7, "lr": 0.25, "scratch": True, "other": 2}]
    assert run(app, ["--batch", "0"]).exit_code == 2 and run(app, ["--no-scratch"]).exit_code == 2
    with pytest.raises(ValueError, match="nonsense"):
        train_options("nonsense")
