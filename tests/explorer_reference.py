"""What the explorer shows, computed by `filter_step` and by the paper's equations for u, beta and the gain."""

import math
import random
from typing import Any

import torch

from membydesign import Belief, catalogue, filter_step
from membydesign.design import Dense, Diagonal

D, M, A, B = 16, 6, 0, 1
DESIGNS = (
    "bayesian_layer",
    "bayesian_layer_diagonal",
    "stationary_bayesian_layer",
    "gated_deltanet",
    "deltanet",
    "linear_attention",
)
PAPER = {"rho": 0.92, "l2": 0.05, "r2": 0.05, "p0": 3, "decay": 1, "seed": 2, "target": 40, "distractor": 60}


def written(s):
    """The identities of the writes, in order."""
    if s.get("writes"):
        return ["ABCDEF".index(part[0]) for part in s["writes"].split() for _ in range(int(part[1:] or 1))]
    return [*range(M)] * s["seed"] + [B] * s["target"] + [A] * s["distractor"]


def expected(name, s, t):
    """The same numbers from `filter_step`, and from the paper's equations for u, beta and the gain."""
    eye = torch.eye(D, dtype=torch.float64)
    keys = eye[:M].clone()
    keys[B] = s["rho"] * eye[0] + math.sqrt(1 - s["rho"] ** 2) * eye[1]
    values = torch.eye(M, dtype=torch.float64)
    design = catalogue[name]
    parameters = {"write_noise": s["r2"]}
    kept = name in DESIGNS[:3]
    if kept:
        design = design.replace(covariance=(Diagonal if "diagonal" in name else Dense)(float(s["p0"])))
    variance = {0: "process_noise", 1: "process_noise", 2: "stationary_variance"}.get(
        DESIGNS.index(name), "prior_variance"
    )
    parameters[variance] = s["p0"] if variance == "stationary_variance" else s["l2"]
    if any(parameter.name == "log_decay" for parameter in design.step_parameters):
        parameters["log_decay"] = math.log(s["decay"])
    belief = Belief.prior(design, 2, 1, D, M, dtype=torch.float64)
    read = before = torch.zeros(2, M, dtype=torch.float64)
    order, gain = written(s)[:t], None
    for i, identity in enumerate(order):
        k, before = keys[identity], read
        if i == t - 1:
            gain = gain_of(name, s, belief, k)
        output, belief = filter_step(
            design, belief, keys[[A, B], None], k.expand(2, 1, D), values[identity].expand(2, 1, M), **parameters
        )
        read = output[:, 0]
    difference = (read[1, B] - read[1, A]).item()
    result = {
        "retrieval": torch.tensor(difference, dtype=torch.float64).sigmoid().item(),
        "margin": 2 * torch.tensor(difference, dtype=torch.float64).sigmoid().item() - 1,
        "readout_B": read[1, B].item(),
        "readout_A": read[1, A].item(),
        "readout_at_A": read[0, A].item(),
        "change_B": (read[1, B] - before[1, B]).item(),
        "change_A": (read[1, A] - before[1, A]).item(),
        **dict.fromkeys(("gain", "gain_at_B", "warp", "variance_A", "variance_B", "long_axis", "short_axis")),
    }
    if gain is not None:
        k = keys[order[-1]]
        along = (k @ gain).item()
        result |= {"gain": along, "gain_at_B": (keys[B] @ gain).item()}
        result["warp"] = math.degrees(math.atan2((gain - along * k).norm().item(), along))
    if kept:
        P = belief.covariance[0, 0].squeeze(0)
        P = P.diag() if P.ndim == 1 else P
        axes = torch.linalg.eigvalsh(P[:2, :2]).clamp(min=0).sqrt()
        result |= {"variance_A": (keys[A] @ P @ keys[A]).item(), "variance_B": (keys[B] @ P @ keys[B]).item()}
        result |= {"short_axis": axes[0].item(), "long_axis": axes[1].item()}
    return result


def gain_of(name, s, belief, k):
    """The gain beta u of a write."""
    if name in DESIGNS[:3]:
        P = belief.covariance[0, 0].squeeze(0)
        P, eye, a = P.diag() if P.ndim == 1 else P, torch.eye(D, dtype=torch.float64), s["decay"]
        noise = s["p0"] * (1 - a * a) if name == "stationary_bayesian_layer" else s["l2"]
        u = (a * a * P + noise * eye) @ k
        return u / (s["r2"] + k @ u)
    return s["l2"] * k / (s["r2"] + s["l2"] * (k @ k))


def random_requests(count):
    random.seed(0)
    for i in range(count):
        settings: dict[str, Any] = {name: 10 ** random.uniform(-2.5, 1) for name in ("l2", "r2", "p0")}
        settings |= {"rho": random.uniform(0, 0.99), "decay": random.choice([1.0, random.uniform(0.5, 1)])}
        settings |= {"seed": random.randint(0, 2), "target": random.randint(0, 15), "distractor": random.randint(0, 15)}
        if i % 4 == 0:
            settings["writes"] = " ".join(f"{random.choice('ABCDEF')}{random.randint(1, 9)}" for _ in range(5))
        yield DESIGNS[i % len(DESIGNS)], settings, random.randint(0, len(written(settings)))
