"""Without Transformers, importing models says what to install."""

import importlib
import re
import sys

import pytest
import typer

from membydesign.cli.requirements import need_models
from membydesign.install import install_hint


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "transformers" or name.startswith("membydesign.models"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_the_error_names_the_package_and_how_to_install_it():
    expected = re.escape(f"membydesign.models needs transformers: {install_hint('models')}")
    with pytest.raises(ImportError, match=f"^{expected}$"):
        importlib.import_module("membydesign.models")


def test_the_command_still_has_words_of_its_own(capsys):
    with pytest.raises(typer.Exit):
        need_models("generate")
    assert "mbd generate needs transformers, which is not installed: pip install" in capsys.readouterr().err
