"""Train recall models that may abstain: a gate that sees the memory's variance, compared with softmax confidence.

    python examples/abstaining.py
    python examples/abstaining.py --steps 800 --seeds 5 --out runs/abstaining

The task is that of `examples/uncertainty.py`: reports of keys' values, one in five wrong, half of the keys change their
value, and a fifth of the queries ask for keys that were never written. Two models are trained on all queries with
cross-entropy, from the same starting weights and on the same sequences:

- plain: the softmax of the logits;
- gated: p = g · softmax + (1 − g) · uniform, with g = σ(w · [log variance of each head's read] + b), so that the loss
  itself rewards a variance that tells what the memory knows.

Each answers when it is confident enough, and abstains otherwise. Confidence is the largest probability; for the plain
model also the negative variance of its reads, which nothing was trained for. The figure shows accuracy against the
share of queries answered, on held-out sequences.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # the task and its model are those of another example
from uncertainty import ASKED, KEYS, VALUES, at_keys, auroc, make_model, sequences

from membydesign.experiments.shared.style import COLOURS, figure, house_style, save
from membydesign.reports.provenance import Provenance

SHARES = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


class Recall(nn.Module):
    """A recall model that returns probabilities of the values, and the variance of its reads.

    Args:
        gated: whether the variance enters the probabilities.
    """

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.model = make_model()
        self.gate = nn.Linear(self.model.config.num_heads, 1) if gated else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, 2.0)  # starts by trusting the softmax

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log probabilities at the key tokens, [B,N,VALUES], and log variances of the reads, [B,N,H]."""
        out = self.model(ids, return_variance=True)
        log_variance = at_keys(out.variances[0][..., 0]).log()
        log_p = at_keys(out.logits)[..., KEYS : KEYS + VALUES].log_softmax(-1)
        if self.gate is None:
            return log_p, log_variance
        logit = self.gate(log_variance)
        known = nn.functional.logsigmoid(logit) + log_p
        unknown = nn.functional.logsigmoid(-logit) - torch.tensor(float(VALUES)).log()
        return torch.logaddexp(known, unknown.expand_as(known)), log_variance


def train(model: Recall, options: argparse.Namespace, seed: int) -> list[float]:
    """Train on every key token, written before or not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=options.steps, pct_start=0.1)
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(options.steps):
        batch = sequences(32, generator, options.wrong)
        optimizer.zero_grad()
        log_p, _ = model(batch.ids)
        loss = nn.functional.nll_loss(log_p.flatten(0, 1), (batch.answer - KEYS).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"  step {step + 1}: loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def answers(model: Recall, options: argparse.Namespace, seed: int) -> dict[str, Tensor]:
    """Answer the queries of held-out sequences, [queries]: right or not, confidence, variance, written or not."""
    data = sequences(options.held_out, torch.Generator().manual_seed(1_000_000 + seed), options.wrong)
    log_p, log_variance = (torch.cat(x)[:, -ASKED:] for x in zip(*map(model, data.ids.split(100)), strict=True))
    best = log_p.max(-1)
    return {
        "right": (best.indices == data.answer[:, -ASKED:] - KEYS).flatten(),
        "confidence": best.values.exp().flatten(),
        "variance": log_variance.mean(-1).flatten(),
        "written": (data.before[:, -ASKED:] > 0).flatten(),
        "log_p": log_p.gather(-1, (data.answer[:, -ASKED:] - KEYS)[..., None]).flatten(),
    }


def accuracy_by_share(right: Tensor, confidence: Tensor) -> Tensor:
    """Return the accuracy among the n most confident answers, for every n."""
    sorted_right = right[confidence.argsort(descending=True, stable=True)].double()
    return sorted_right.cumsum(0) / torch.arange(1, len(right) + 1)


def judged(right: Tensor, confidence: Tensor, written: Tensor) -> dict[str, object]:
    """Summarise a confidence: accuracy at some shares, the area under the curve, and what it tells apart."""
    curve = accuracy_by_share(right, confidence)
    return {
        "accuracy_by_share": {str(s): curve[max(0, round(s * len(curve)) - 1)].item() for s in SHARES},
        "area": curve.mean().item(),
        "auroc_right": auroc(confidence[right], confidence[~right]),
        "auroc_written": auroc(confidence[written], confidence[~written]),
        "curve": curve[max(1, len(curve) // 100) - 1 :: max(1, len(curve) // 100)].tolist(),
    }


def measure(options: argparse.Namespace, seed: int) -> dict[str, object]:
    """Train both models with a seed, and judge their confidences."""
    found: dict[str, object] = {}
    for name in ("plain", "gated"):
        torch.manual_seed(seed)
        model = Recall(name == "gated")
        losses = train(model, options, seed)
        got = answers(model.eval(), options, seed)
        right, written = got["right"], got["written"]
        found[name] = {
            "loss": sum(losses[-20:]) / len(losses[-20:]),
            "accuracy_written": right[written].double().mean().item(),
            "log_score": got["log_p"].mean().item(),
            "softmax": judged(right, got["confidence"], written),
            "variance": judged(right, -got["variance"], written),
            "gate": None if model.gate is None else model.gate.weight[0].tolist(),
        }
    return found


LINES = {
    ("plain", "softmax"): ("softmax confidence", "0.35", "-"),
    ("plain", "variance"): ("variance alone, untrained for it", COLOURS["key_A"], "--"),
    ("gated", "softmax"): ("gated by variance", COLOURS["bayesian"], "-"),
}


def draw(path: Path, seeds: list[dict]) -> Path:
    """Plot accuracy against the share answered, and what the confidences tell apart."""
    with house_style():
        drawing, (left, right) = figure(1, 2, width=8, height=3.4)
        for (model, kind), (label, colour, line) in LINES.items():
            curves = torch.tensor([each[model][kind]["curve"] for each in seeds])
            share = torch.linspace(1 / curves.shape[1], 1, curves.shape[1])
            for curve in curves:
                left.plot(share, curve, color=colour, lw=0.7, alpha=0.4, ls=line)
            left.plot(share, curves.mean(0), color=colour, lw=2, ls=line, label=label)
        left.set(xlabel="share of queries answered", ylabel="accuracy of the answers")
        left.set_title("(a) Abstaining", loc="left")
        left.legend(fontsize=8)
        for i, ((model, kind), (_, colour, _)) in enumerate(LINES.items()):
            for j, decision in enumerate(("auroc_written", "auroc_right")):
                values = [each[model][kind][decision] for each in seeds]
                height = sum(values) / len(values)
                bar = right.bar(j + 0.27 * (i - 1), height - 0.5, 0.25, bottom=0.5, color=colour)
                right.bar_label(bar, [f"{height:.3f}"], fontsize=7)
        right.set_xticks(range(2), ["written,\nor never written", "right, or wrong"])
        right.set(ylim=(0.5, 1.08), ylabel="AUROC (0.5: chance)")
        right.set_title("(b) What each tells apart", loc="left")
        return save(drawing, path)


def main(arguments: list[str] | None = None) -> None:
    """Train with every seed, and write report and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--wrong", type=float, default=0.2, help="probability that a report is wrong")
    parser.add_argument("--held-out", type=int, default=500, help="sequences to measure on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/abstaining"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    started, seeds = time.perf_counter(), []
    for seed in range(options.seeds):
        kept = options.out / f"seed{seed}.json"  # finished seeds are kept, so a stopped run continues
        settings = {"steps": options.steps, "wrong": options.wrong, "held_out": options.held_out, "seed": seed}
        stored = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if stored.get("settings") != settings:
            print(f"seed {seed}", flush=True)
            stored = {"settings": settings, "results": measure(options, seed)}
            rounded = json.loads(json.dumps(stored), parse_float=lambda x: round(float(x), 5))
            kept.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
        seeds.append(stored["results"])
    provenance = asdict(Provenance.now("abstaining", f"steps {options.steps}", time.perf_counter() - started))
    summary = {
        f"{model}, {kind}": {
            **{
                number: [round(each[model][kind][number], 4) for each in seeds]
                for number in ("area", "auroc_right", "auroc_written")
            },
            "accuracy_by_share": {
                str(s): [round(each[model][kind]["accuracy_by_share"][str(s)], 4) for each in seeds] for s in SHARES
            },
        }
        for model, kind in LINES
    }
    report = {
        "provenance": provenance,
        "accuracy_written": {m: [round(each[m]["accuracy_written"], 4) for each in seeds] for m in ("plain", "gated")},
        "log_score": {m: [round(each[m]["log_score"], 4) for each in seeds] for m in ("plain", "gated")},
        **summary,
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    print(draw(options.out / "abstaining.png", seeds))


if __name__ == "__main__":
    main()
