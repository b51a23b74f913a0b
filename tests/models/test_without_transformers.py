"""Without Transformers, importing models says what to install."""

import subprocess
import sys

CODE = """
import sys
sys.modules["transformers"] = None
import membydesign  # needs torch alone
try:
    from membydesign.models import MemoryConfig
except ImportError as error:
    print(error)
from membydesign.cli.say import need_models
import typer
try:
    need_models("generate")
except typer.Exit:
    print("exit")
"""


def test_the_error_names_the_package_and_how_to_install_it():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("membydesign.models needs transformers: pip install 'memory-by-design[models]")
    assert last == "exit"
    assert "mbd generate needs transformers, which is not installed" in done.stderr
