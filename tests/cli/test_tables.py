"""Tables in terminals of every width."""

import os
import re
import struct
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.text import Text
from typer.testing import CliRunner

from membydesign import catalogue
from membydesign.cli.app import app
from membydesign.cli.output import UNLIMITED
from membydesign.cli.tables import Column, Group, layout_of, show_table

WIDTHS = (200, 120, 100, 80, 60, 40)
WORDS = {
    word
    for name, design in catalogue.items()
    for part in design.assumptions()
    for word in (name, *re.findall(r"\w+", part))
}


def mbd(*words: str, width: int) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("width", WIDTHS)
def test_the_catalogue_fits_and_no_word_is_broken(width):
    output = mbd("catalogue", width=width)
    assert max(map(cell_len, output.splitlines())) <= width
    assert set(re.findall(r"[\w-]+", output)) >= WORDS
    if width != 100:
        assert set(output.split()) >= {word for design in catalogue.values() for word in design.exactness.split()[:-1]}


def test_the_catalogue_is_a_table_with_fewer_columns_then_a_list():
    rows = {}
    for width in WIDTHS:
        rows[width] = next(line for line in mbd("catalogue", width=width).splitlines() if line.startswith("kda"))
    assert rows[120].split() == ["kda", "DiagonalDecay", "ObserveMemory", "Reset", "covariance", "reset", "D·M"]
    assert rows[100].split() == ["kda", "DiagonalDecay", "ObserveMemory", "Reset", "D·M"]
    assert "Not shown in so narrow a terminal: exactness." in mbd("catalogue", width=100)
    assert rows[80].split() == rows[60].split() == ["kda"]
    assert "  exactness: covariance reset; state per head: D·M" in mbd("catalogue", width=60)


@pytest.mark.parametrize("width", [80, 60, 40])
@pytest.mark.parametrize("name", catalogue)
def test_the_equations_of_a_design_fit(name, width):
    output = mbd("catalogue", name, width=width)
    assert max(map(cell_len, output.splitlines())) <= width
    description = str(catalogue[name].describe()).split()
    assert output.split()[: len(description) + 1] == [*description, "kernels"]


def test_a_file_gets_whole_lines(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "x y " * 100
    show_table([Column("a"), Column("b")], [Group([["1", long]])])
    assert long.strip() in capsys.readouterr().out
    assert not sys.stdout.isatty()


MEASURED = """
import os, sys
from membydesign.cli.output import console
widths = [console().width]
os.dup2(os.pipe()[1], 1)  # standard output goes to a pipe, as with | less
widths.append(console().width)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # and nobody sits at a terminal
widths.append(console().width)
open(sys.argv[1], "w").write(" ".join(map(str, widths)))
"""


def test_a_real_terminal_and_a_pipe_at_it(tmp_path):
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path / "widths")]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environment, check=True)
    os.close(terminal)
    os.close(screen)
    assert (tmp_path / "widths").read_text() == f"60 60 {UNLIMITED}"


def layout(cells: list[str], width: int, *spare: int):
    columns = [Column("a", spare=number) for number in spare]
    return layout_of(columns, [[Text(cell) for cell in cells]], width)


def test_which_columns_stay():
    cells = ["long-words", "long-words", "long-words"]
    assert layout(cells, 34, 0, 1, 2) == ([0, 1, 2], [10, 10, 10])
    assert layout(cells, 33, 0, 1, 2) == ([0, 1], [10, 10])
    assert layout(cells, 33, 0, 2, 1) == ([0, 2], [10, 10])
    assert layout(cells, 10, 0, 1, 2) == ([0], [10])
    assert layout(cells, 9, 0, 1, 2) is None
    assert layout(cells, 33, 0, 0, 0) is None


def test_long_cells_take_three_lines_at_most():
    text = "one two three four five six"  # 27 wide; in three lines, ten
    assert layout([text], 27, 0) == ([0], [27])
    assert layout([text], 20, 0) == ([0], [20])
    assert layout([text], 10, 0) == ([0], [10])
    assert layout([text], 9, 0) is None
    assert layout(["D·M + D²"], 7, 0) is None  # short cells stay whole


def test_brackets_are_text(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show_table([Column("[bold]")], [Group([["[/foo] a[b]"]])], title="[red]", caption="[x]")
    assert capsys.readouterr().out.split() == ["[red]", "[bold]", "[/foo]", "a[b]", "[x]"]


def test_groups_share_their_columns(monkeypatch, capsys):
    groups = [Group([["a", "1"]], Text("first")), Group([["a long name", "22"]], Text("second"))]
    columns = [Column(""), Column("number", right=True)]
    monkeypatch.setenv("COLUMNS", "40")
    show_table(columns, groups)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["               number", "first", "  a                 1", "second", "  a long name      22"]
    monkeypatch.setenv("COLUMNS", "16")
    show_table(columns, groups)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["first", "  a", "    number: 1", "second", "  a long name", "    number: 22"]
