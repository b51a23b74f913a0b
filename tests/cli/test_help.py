"""What a new user reads first: help, and what Tab completes."""

import pytest
from rich.cells import cell_len
from typer.main import get_command
from typer.testing import CliRunner

from membydesign import catalogue
from membydesign.cli.app import app
from membydesign.experiments import EXPERIMENTS, STUDIES


def mbd(*words: str, **environment: str):
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80", **environment}, prog_name="mbd")
    assert result.exit_code == 0, result.output
    return result.output


def commands(command, path=()):
    """Every command and group, by the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(get_command(app)))
PATHS = list(COMMANDS)


def unwrapped(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_is_short_for_help_everywhere(path):
    assert mbd(*path, "-h") == mbd(*path, "--help")


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_an_example_and_explains_every_argument(path):
    text = mbd(*path, "-h")
    assert f"For example: mbd {' '.join(path)}".rstrip() in unwrapped(text)
    assert max(map(cell_len, text.splitlines())) <= 80
    for parameter in COMMANDS[path].params:
        assert getattr(parameter, "help", None), parameter.name
    purpose = (COMMANDS[path].help or "").splitlines()[0]
    assert len(purpose) <= 80
    assert purpose.endswith(".")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("reproduce", "Skip finished runs and continue interrupted ones."),
        ("reproduce", "smoke: a one-minute check that the pipeline runs; its numbers are meaningless"),
        ("compare", "Designs that were added to the catalogue since are then run too."),
        ("bench", "Timing rounds; the median is reported."),
        ("kernels check", "Run every kernel in Triton's interpreter and compile it for real GPUs."),
        ("evaluate niah", "Keep finished work and continue interrupted work."),
    ],
)
def test_the_words_of_help(command, words):
    assert words in unwrapped(mbd(*command.split(), "-h"))


def completed(line: str) -> list[str]:
    """What bash is offered at the end of a line."""
    words = line.split()
    index = len(words) - (not line.endswith(" "))
    return mbd(_MBD_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(index)).split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mbd cat", ["catalogue"]),
        ("mbd catalogue ", list(catalogue)),
        ("mbd catalogue bay", ["bayesian_layer", "bayesian_layer_diagonal"]),
        ("mbd reproduce ", list(EXPERIMENTS)),
        ("mbd reproduce collision --preset ", ["smoke", "cpu", "paper"]),
        ("mbd reproduce --preset p", ["paper"]),
        ("mbd reproduce mqar --preset cpu", ["cpu", "cpu-long"]),
        ("mbd reproduce mqar --variant b", ["base", "block"]),
        ("mbd compare ", list(STUDIES)),
        ("mbd compare --preset s", ["smoke"]),
        ("mbd compare --only bayesian_layer,delta", ["bayesian_layer,deltanet", "bayesian_layer,deltaproduct"]),
        ("mbd bench --only speed,m", ["speed,models", "speed,memory"]),
        ("mbd evaluate niah model --tasks niah_single_", ["niah_single_1", "niah_single_2", "niah_single_3"]),
        ("mbd generate model prompt --dtype b", ["bfloat16"]),
    ],
)
def test_tab_completes_names(line, offered):
    assert completed(line) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(shell):
    assert "_MBD_COMPLETE" in mbd(_MBD_COMPLETE=f"source_{shell}")
    assert "--install-completion" in mbd("-h")
