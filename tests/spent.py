"""What a test has cost, however busy the machine is."""

import os


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
