import os
import signal

# A run in the background begins with Ctrl-C ignored, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels for GPUs run in Triton's interpreter; it must know before anything imports Triton.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import settings

# The same examples on every machine, so that a red run can be repeated; one thread, since tests run side by side.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")
torch.set_num_threads(1)
