"""A page for each command of `mbd`, written from the command's own help."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from typer.main import get_command

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "reference/commands"

INDEX = """\
# Commands

`mbd` comes with the extra `command` ([Install](../../start/install.md)). `mbd COMMAND --help` prints what these
pages say.

| command | what it does |
|---|---|
"""


def pages() -> dict[str, str]:
    """Return the index and a page for each command."""
    from membydesign.cli.app import app

    commands = dict(_leaves(get_command(app), "mbd"))
    index = INDEX
    for name, command in commands.items():
        index += f"| [`{name}`]({_file(name)}) | {_help(command).splitlines()[0]} |\n"
    written = {f"{FOLDER}/{_file(name)}": page(name, command) for name, command in commands.items()}
    return {f"{FOLDER}/index.md": index, **written}


def page(name: str, command: Any) -> str:
    """Return the page of one command: usage, help, arguments and options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
    usage = " ".join([name, *(_metavar(p) if p.required else f"[{_metavar(p)}]" for p in arguments), "[OPTIONS]"])
    text = f"# {name}\n\n```text\n{usage}\n```\n\n{_help(command)}\n"
    if arguments:
        text += "\n## Arguments\n\n| argument | meaning |\n|---|---|\n"
        text += "".join(f"| `{_metavar(p)}` | {_cell(p.help or '')} |\n" for p in arguments)
    if options:
        text += "\n## Options\n\n| option | meaning | default |\n|---|---|---|\n"
        text += "".join(f"| {_spelling(p)} | {_cell(p.help or '')} | {_default(p)} |\n" for p in options)
    return text


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands that do something, with their full names."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for each, child in below.items():
        yield from _leaves(child, f"{name} {each}")


def _file(name: str) -> str:
    return name.removeprefix("mbd ").replace(" ", "-") + ".md"


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "").replace("\f", "").strip()


def _metavar(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _spelling(parameter: Any) -> str:
    value = "" if parameter.is_flag or parameter.count else f" {parameter.metavar or parameter.type.name.upper()}"
    return ", ".join(f"`{spelling}{value}`" for spelling in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.is_flag or default in (None, (), "") or callable(default):
        return ""
    if isinstance(default, list | tuple):
        default = ", ".join(map(str, default))
    return f"`{getattr(default, 'value', default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
