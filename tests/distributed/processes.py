"""Run checks in processes that talk by gloo: `launch("checks_of_filters")` runs every `check_…` of that module."""

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

FOLDER = Path(__file__).parent


def launch(module: str, processes: int = 2) -> dict[str, str]:
    """Run all checks of a module; return for each "passed", or the tracebacks of the processes that failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "distributed.processes", module, folder]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(processes)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in range(processes)
        ]
        try:
            logs = [process.communicate(timeout=600)[0].decode() for process in started]
        finally:
            for process in started:
                process.kill()
        results: dict[str, str] = {}
        for rank in range(processes):
            for file in sorted(Path(folder).glob(f"*.{rank}")):
                earlier = results.get(file.stem, "passed")
                results[file.stem] = file.read_text() if earlier == "passed" else f"{earlier}\n{file.read_text()}"
        if all(result == "passed" for result in results.values()):
            assert all(process.returncode == 0 for process in started), "\n".join(logs)[-4000:]
    return results


def main(module: str, folder: str, rank: int, processes: int) -> None:
    """Run the checks of a module in one of the processes."""
    import torch

    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=processes)
    checks = vars(importlib.import_module(f"distributed.{module}"))
    for name, check in checks.items():
        if not name.startswith("check_"):
            continue
        torch.manual_seed(0)
        try:
            check()
            result = "passed"
        except Exception:
            result = traceback.format_exc()
        (Path(folder) / f"{name}.{rank}").write_text(result)
        if result != "passed":
            os._exit(1)  # the others may wait for this process, and fail when it is gone
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # all is checked; threads of gloo that still run would abort the end of Python, now and then


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
