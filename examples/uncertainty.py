"""Train a small recall model, then test what the uncertainty of its Bayesian Layer reveals.

    python examples/uncertainty.py --seed 0
    python examples/uncertainty.py --seed 0 --loss all --out runs/uncertainty_all

A sequence reports values of keys, "key value key value …", and then queries 15 keys: three that were never written,
three written once, three twice, three four times, and three eight times. Half of the keys written at least twice change
their value halfway, and one report in five is wrong. The model is trained with cross-entropy only; the layer's variance
and evidence are then read on held-out sequences. One folder receives the figure, the report and the model.
"""

import argparse
import json
import math
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from membydesign.experiments.shared.style import COLOURS, figure, house_style, save
from membydesign.layers import FilterLayer
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.reports.provenance import Provenance

KEYS, VALUES = 64, 32
TIMES = torch.tensor([0, 1, 2, 4, 8]).repeat_interleave(3)  # number of writes of each key of a sequence
ASKED, WRITES = len(TIMES), int(TIMES.sum())
WRITTEN = (0, 1, 2, 4, 8)
BANDS = {"1": (1, 1), "2–3": (2, 3), "4–7": (4, 7)}  # earlier writes of a key, for evidence


class Sequences(NamedTuple):
    """Token sequences with annotations. N = WRITES + ASKED counts key tokens: first those written, then those queried.

    Attributes:
        ids: tokens, [B,2·WRITES+1+ASKED]: alternating keys and values, a separator, the queried keys.
        answer: true value of each key token at its last write, as a token, [B,N].
        before: number of earlier writes of the key, [B,N].
        since: tokens since its last write, [B,N]; meaningless where `before` is 0.
        known: whether the written value had been written to the same key before, [B,WRITES].
    """

    ids: Tensor
    answer: Tensor
    before: Tensor
    since: Tensor
    known: Tensor


def sequences(count: int, generator: torch.Generator, wrong: float) -> Sequences:
    """Generate random sequences; reports are wrong with probability `wrong`."""

    def shuffled(n: int) -> Tensor:
        return torch.rand(count, n, generator=generator).argsort(1)

    def another(value: Tensor) -> Tensor:
        return (value + torch.randint(1, VALUES, value.shape, generator=generator)) % VALUES

    names = shuffled(KEYS)[:, :ASKED]
    written = torch.arange(ASKED).repeat_interleave(TIMES)[shuffled(WRITES)]
    queried = shuffled(ASKED)
    key = torch.cat((written, queried), 1)  # index, among the sequence's 15 keys, of each key token, [B,N]
    place = torch.cat((2 * torch.arange(WRITES), 2 * WRITES + 1 + torch.arange(ASKED)))
    earlier = (key[:, :, None] == written[:, None]) & (place[:, None] > place[:WRITES])
    before = earlier.sum(2)
    last = (earlier * (place[:WRITES] + 1)).amax(2)  # a write is complete with its value token

    first = torch.randint(VALUES, (count, ASKED), generator=generator)
    changes = (torch.rand(count, ASKED, generator=generator) < 0.5) & (TIMES > 1)
    second = torch.where(changes, another(first), first)
    changed = second.gather(1, key), first.gather(1, key)
    true = torch.where(before >= TIMES[key] / 2, *changed)[:, :WRITES]
    right = torch.rand(count, WRITES, generator=generator) >= wrong
    reported = torch.where(right, true, another(true))
    known = (earlier[:, :WRITES] & (reported[:, :, None] == reported[:, None])).any(2)

    token = names.gather(1, key)
    pairs = torch.stack((token[:, :WRITES], KEYS + reported), 2).flatten(1)
    separator = torch.full((count, 1), KEYS + VALUES)
    ids = torch.cat((pairs, separator, token[:, WRITES:]), 1)
    answer = torch.where(before > TIMES[key] / 2, *changed)  # a write that changes a value does not count
    return Sequences(ids, KEYS + answer, before, place - last, known)


def at_keys(x: Tensor) -> Tensor:
    """Select the key tokens of [B,T,…], [B,N,…]."""
    return torch.cat((x[:, 0 : 2 * WRITES : 2], x[:, -ASKED:]), 1)


def make_model() -> MemoryForCausalLM:
    """Make a model with one Bayesian Layer of two heads.

    Its convolution of width 2 sees a key together with its value only at the value's token, so pairs are written, and
    have their evidence, there.
    """
    return MemoryForCausalLM(
        MemoryConfig(
            vocab_size=KEYS + VALUES + 1,
            hidden_size=64,
            layers=["bayesian_layer"],
            num_heads=2,
            intermediate_size=128,
            initializer_range=0.1,  # near 1/√64; from 0.02 many seeds learn to bind far later
            layer_options={"bayesian_layer": {"short_convolution": 2}},
        )
    )


def train(model: MemoryForCausalLM, options: argparse.Namespace) -> list[float]:
    """Train with cross-entropy at the key tokens; with `--loss known` only where the key was written before."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95))
    warmup = max(1, min(50, options.steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * step / options.steps))
    )
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[float] = []
    columns = (
        TextColumn("step {task.completed}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=options.steps)
        for _ in range(options.steps):
            batch = sequences(32, generator, options.wrong)
            answer = batch.answer if options.loss == "all" else batch.answer.masked_fill(batch.before == 0, -100)
            optimizer.zero_grad()
            logits = at_keys(model(batch.ids).logits)
            loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}")
    return losses


class Reads(NamedTuple):
    """Outputs of the trained model at queries and writes.

    Attributes:
        variance: variance of the layer's read at each queried key, [B,ASKED,H].
        entropy: entropy of the model's softmax there, in nats, [B,ASKED].
        correct: whether its most likely token is the answer, [B,ASKED].
        log_evidence: log evidence of each write, at its value token, [B,WRITES,H].
    """

    variance: Tensor
    entropy: Tensor
    correct: Tensor
    log_evidence: Tensor


@torch.no_grad()
def read(model: MemoryForCausalLM, data: Sequences) -> Reads:
    """Run the model over held-out sequences."""
    batches = []
    for ids, answer in zip(data.ids.split(100), data.answer[:, -ASKED:].split(100), strict=True):
        out = model(ids, return_variance=True, return_evidence=True)
        log_p = out.logits[:, -ASKED:].log_softmax(-1)
        batches.append(
            Reads(
                out.variances[0][:, -ASKED:, :, 0],
                -(log_p.exp() * log_p).sum(-1),
                log_p.argmax(-1) == answer,
                out.log_evidences[0][:, 1 : 2 * WRITES : 2],
            )
        )
    return Reads(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def accuracy_without(model: MemoryForCausalLM, head: int, data: Sequences) -> float:
    """Measure the accuracy on written keys when a head's read is set to zero."""
    read_out = model.model.mixers()[0].get_submodule("o_proj")

    def silence(_: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        heads = inputs[0].unflatten(-1, (model.config.num_heads, -1)).clone()
        heads[..., head, :] = 0
        return (heads.flatten(-2),)

    handle = read_out.register_forward_pre_hook(silence)
    correct = read(model, data).correct
    handle.remove()
    return correct[data.before[:, -ASKED:] > 0].float().mean().item()


@torch.no_grad()
def learned(model: MemoryForCausalLM, data: Sequences) -> dict[str, dict[str, list[float]]]:
    """Average the learned drift and noises over tokens of each kind, for each head."""
    layer, embedded = model.model.mixers()[0], model.model.embeddings(data.ids)
    assert isinstance(layer, FilterLayer)
    inputs, _ = layer.step_inputs(model.model.layers[0].get_submodule("mixer_norm")(embedded), None, None)
    kinds = {"keys": slice(0, 2 * WRITES, 2), "values": slice(1, 2 * WRITES, 2), "keys asked for": slice(-ASKED, None)}
    return {
        name: {kind: x[:, place].transpose(0, 2).flatten(1).mean(1).tolist() for kind, place in kinds.items()}
        for name, x in inputs.parameters.items()
        if isinstance(x, Tensor)
    }


def auroc(high: Tensor, low: Tensor) -> float:
    """Compute the probability that a member of `high` exceeds one of `low`; a tie counts half."""
    if not len(high) or not len(low):
        return math.nan
    return ((high[:, None] > low).double().mean() + 0.5 * (high[:, None] == low).double().mean()).item()


def spread(x: Tensor) -> dict[str, float]:
    """Return mean, standard deviation and count."""
    return {"mean": x.mean().item(), "std": x.std().item(), "count": len(x)}


def numbers(data: Sequences, reads: Reads, recall: int) -> dict:
    """Compute all numbers of the report: for the recall head, and for the mean over heads where stated."""
    before, since = data.before[:, -ASKED:], data.since[:, -ASKED:]
    variance, everywhere = reads.variance[..., recall], reads.variance.mean(-1)
    evidence, written = reads.log_evidence[..., recall], data.before[:, :WRITES]
    new, known, right = before == 0, before > 0, reads.correct
    scores = {"variance": variance, "variance, mean over heads": everywhere, "entropy": reads.entropy}
    by_age = {}
    for times in WRITTEN[1:]:
        of_key = before == times
        edges = since[of_key].double().quantile(torch.linspace(0, 1, 6, dtype=torch.double))
        edges[-1] += 1
        parts = [of_key & (since >= a) & (since < b) for a, b in pairwise(edges)]
        by_age[times] = [{"tokens": since[p].double().mean().item(), **spread(variance[p])} for p in parts if p.any()]
    bands = {name: (written >= low) & (written <= high) for name, (low, high) in BANDS.items()}
    return {
        "accuracy": {times: right[before == times].float().mean().item() for times in WRITTEN},
        "variance": {times: spread(variance[before == times]) for times in WRITTEN},
        "variance_by_age": by_age,
        "entropy": {times: spread(reads.entropy[before == times]) for times in WRITTEN},
        "auroc_never_written": {name: auroc(x[new], x[known]) for name, x in scores.items()},
        "auroc_wrong_answer": {name: auroc(x[known & ~right], x[known & right]) for name, x in scores.items()},
        "evidence": {
            "first write": spread(evidence[written == 0]),
            **{f"{name}, known value": spread(evidence[band & data.known]) for name, band in bands.items()},
            **{f"{name}, new value": spread(evidence[band & ~data.known]) for name, band in bands.items()},
        },
        "auroc_new_value": {
            name: auroc(-evidence[band & ~data.known], -evidence[band & data.known]) for name, band in bands.items()
        },
    }


def draw(path: Path, data: Sequences, reads: Reads, results: dict, recall: int) -> Path:
    """Plot four panels: variance by writes and by age, evidence of writes, and what each score can distinguish."""
    before = data.before[:, -ASKED:]
    blue, orange, teal = COLOURS["bayesian"], COLOURS["key_A"], COLOURS["key_B"]

    def boxes(axes, groups: list[Tensor], places: list[float], colour: str, width: float) -> None:
        style = {part: {"color": colour} for part in ("boxprops", "whiskerprops", "capprops", "medianprops")}
        shown = [group.tolist() for group in groups]
        axes.boxplot(shown, positions=places, widths=width, showfliers=False, whis=(5, 95), **style)

    with house_style():
        drawing, ((by_writes, by_age), (of_writes, tells)) = figure(2, 2, width=8, height=6.2)
        for head in range(reads.variance.shape[-1]):
            colour = blue if head == recall else "0.6"
            groups = [reads.variance[..., head][before == times] for times in WRITTEN]
            boxes(by_writes, groups, [i + 0.36 * (head - 0.5) for i in range(5)], colour, 0.28)
            label = f"head {head + 1}: accuracy without it {results['accuracy_without_head'][head]:.2f}"
            by_writes.plot([], [], color=colour, label=label)
        counts = [results["variance"][times]["count"] for times in WRITTEN]
        by_writes.set_xticks(range(5), [f"{t}\n({n})" for t, n in zip(WRITTEN, counts, strict=True)], fontsize=8)
        by_writes.set(
            yscale="log",
            xlabel="how often the key was written (and count)",
            ylabel=r"variance of the read, $q^\top Pq$",
        )
        by_writes.set_title("(a) Variance when a key is asked for")
        by_writes.set_ylim(top=2.2 * by_writes.get_ylim()[1])
        by_writes.legend(fontsize=7)

        for times, shade in zip(WRITTEN[1:], (0.35, 0.55, 0.75, 1.0), strict=True):
            points = results["variance_by_age"][times]
            x, y = [p["tokens"] for p in points], [p["mean"] for p in points]
            label = f"written {times}×, at least {min(p['count'] for p in points)} a point"
            by_age.errorbar(x, y, [p["std"] for p in points], color=blue, alpha=shade, marker="o", ms=3, label=label)
        never = results["variance"][0]
        by_age.axhline(never["mean"], color=orange, label="never written, ± std")
        by_age.axhspan(never["mean"] - never["std"], never["mean"] + never["std"], color=orange, alpha=0.15, lw=0)
        by_age.set(xlabel="tokens since the last write", ylabel="variance, mean ± std")
        by_age.set_ylim(0, 1.6 * (never["mean"] + never["std"]))
        by_age.set_title(f"(b) … and how long ago (head {recall + 1})")
        by_age.legend(fontsize=7)

        written, evidence = data.before[:, :WRITES], reads.log_evidence[..., recall]
        boxes(of_writes, [evidence[written == 0]], [0], "0.4", 0.28)
        labels = [f"0\n({results['evidence']['first write']['count']})"]
        for i, (name, (low, high)) in enumerate(BANDS.items(), start=1):
            band = (written >= low) & (written <= high)
            boxes(of_writes, [evidence[band & data.known]], [i - 0.18], teal, 0.28)
            boxes(of_writes, [evidence[band & ~data.known]], [i + 0.18], orange, 0.28)
            counts = [int((band & x).sum()) for x in (data.known, ~data.known)]
            labels.append(f"{name}\n({counts[0]} | {counts[1]})")
        for label, colour in (("a value it had before", teal), ("a value new to the key", orange)):
            of_writes.plot([], [], color=colour, label=label)
        of_writes.set_xticks(range(4), labels, fontsize=8)
        of_writes.set(xlabel="earlier writes of the key (and count)", ylabel="log evidence of the write, nats")
        of_writes.set_title(f"(c) How expected a write was (head {recall + 1})")
        low, high = of_writes.get_ylim()
        of_writes.set_ylim(top=high + 0.25 * (high - low))
        of_writes.legend(fontsize=7, loc="upper left")

        names = ("variance", "variance, mean over heads", "entropy")
        for i, (name, colour) in enumerate(zip(names, (blue, "#9ec5e5", "0.6"), strict=True)):
            heights = [results[f"auroc_{decision}"][name] for decision in ("never_written", "wrong_answer")]
            label = {"variance": f"variance, head {recall + 1}", "entropy": "softmax entropy"}.get(name, name)
            places = [j + 0.27 * (i - 1) for j in range(2)]
            bars = tells.bar(places, [h - 0.5 for h in heights], 0.25, bottom=0.5, color=colour, label=label)
            tells.bar_label(bars, [f"{h:.3f}" for h in heights], fontsize=7)
        tells.axhline(0.5, color="0.3", lw=0.8, ls=":")
        tells.set_xticks(range(2), ["never written,\nor written", "wrong answer, or right\n(written keys)"])
        tells.set(ylim=(0.45, 1.2), ylabel="AUROC (0.5: chance)")
        tells.set_yticks([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
        tells.set_title("(d) What each can tell apart")
        tells.legend(fontsize=7, loc="upper right")
        return few_colours(save(drawing, path))


def few_colours(path: Path) -> Path:
    """Convert an image to a palette, which shrinks the file to a third."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64)
    small.save(path, optimize=True)
    return path


@torch.no_grad()
def cost(model: MemoryForCausalLM, ids: Tensor) -> float:
    """Return the time of a forward pass with variance and evidence relative to one without; best of ten."""
    best = {False: math.inf, True: math.inf}
    for uncertainty in (False, True) * 10:
        started = time.perf_counter()
        model(ids, return_variance=uncertainty, return_evidence=uncertainty)
        best[uncertainty] = min(best[uncertainty], time.perf_counter() - started)
    return best[True] / best[False]


def main(arguments: list[str] | None = None) -> None:
    """Train a model, measure its uncertainty, and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--wrong", type=float, default=0.2, help="probability that a report is wrong")
    parser.add_argument(
        "--loss", choices=("known", "all"), default="known", help="key tokens with a loss: those written before, or all"
    )
    parser.add_argument("--held-out", type=int, default=500, help="sequences to measure on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/uncertainty"))
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    started = time.perf_counter()
    model = make_model()
    losses = train(model, options)
    seconds = time.perf_counter() - started
    model.eval()

    # The recall head is the one whose silencing hurts accuracy most, on sequences used for nothing else.
    generator = torch.Generator().manual_seed(1_000_000 + options.seed)
    selection = sequences(max(20, options.held_out // 5), generator, options.wrong)
    without = [accuracy_without(model, head, selection) for head in range(model.config.num_heads)]
    recall = without.index(min(without))
    data = sequences(options.held_out, generator, options.wrong)
    reads = read(model, data)
    results = {"recall_head": recall + 1, "accuracy_without_head": without, **numbers(data, reads, recall)}

    report = {
        "provenance": asdict(Provenance.now("uncertainty", f"loss {options.loss}", seconds)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "cost_of_asking": cost(model, data.ids[:32]),
        **results,
        "learned": learned(model, selection),
        "losses": losses,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    rounded = json.loads(json.dumps(report), parse_float=lambda x: round(float(x), 4))
    (options.out / "report.json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    figure_path = draw(options.out / "uncertainty.png", data, reads, results, recall)
    brief = {name: rounded[name] for name in (*results, "cost_of_asking") if name != "variance_by_age"}
    print(json.dumps(brief, indent=1, ensure_ascii=False))
    print(f"{seconds:.0f} s of training; {figure_path}")


if __name__ == "__main__":
    main()
