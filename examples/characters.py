"""Train a character model of about a million parameters on text that ships with every Python, and generate from it.

    python examples/characters.py                                            # four Bayesian Layers
    python examples/characters.py --layers bayesian_layer,attention          # a hybrid: layers alternate
    mbd generate runs/characters "The "

The text is Python's own help, `pydoc_data.topics`; its last twentieth is held out. One folder receives the model with
its tokenizer, the loss curve, a generated sample, and a report.
"""

import argparse
import json
import math
import pydoc_data.topics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from membydesign.experiments.shared.style import COLOURS, house_style
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.reports.provenance import Provenance


def text() -> str:
    """Return Python's help, sorted by topic."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def character_tokenizer(corpus: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character."""
    tokens = ["<unk>", *sorted(set(corpus))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>", clean_up_tokenization_spaces=False
    )


def batches(tokens: torch.Tensor, batch: int, length: int, seed: int):
    """Yield batches of random windows of the text, endlessly."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts])


@torch.no_grad()
def held_out_loss(model: MemoryForCausalLM, tokens: torch.Tensor, length: int) -> float:
    """Return the mean loss per character in nats, over the whole held-out text."""
    model.eval()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    loss = sum(model(w, labels=w).loss.item() * len(w) for w in windows.split(16)) / len(windows)
    model.train()
    return loss


def main() -> None:
    """Train a model, generate a sample, and save everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="bayesian_layer", help="layer names; the four blocks cycle through them")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the first layer, as JSON")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--characters", type=int, default=600, help="length of the generated sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/characters"))
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    corpus = text()
    tokenizer = character_tokenizer(corpus)
    tokens = torch.tensor(tokenizer(corpus).input_ids)
    cut = len(tokens) * 19 // 20
    names = options.layers.split(",")
    model = MemoryForCausalLM(
        MemoryConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden_size,
            layers=[names[i % len(names)] for i in range(4)],
            num_heads=4,
            layer_options={names[0]: options.options},
            intermediate_size=3 * options.hidden_size,
        )
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(tokens):,} characters, layers {', '.join(model.config.layers)}")

    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    warmup = max(1, min(50, options.steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / options.steps)),
    )
    data = batches(tokens[:cut], options.batch, options.length, options.seed)
    losses, held_out = [], {0: held_out_loss(model, tokens[cut:], options.length)}
    started = time.perf_counter()
    columns = TextColumn("step {task.completed}"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=options.steps)
        for step in range(1, options.steps + 1):
            batch = next(data)
            optimizer.zero_grad()
            loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % 100 == 0 or step == options.steps:
                held_out[step] = held_out_loss(model, tokens[cut:], options.length)
            rate = step * batch.numel() / (time.perf_counter() - started)
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}, {rate:,.0f} characters/s")
    seconds = time.perf_counter() - started

    model.eval()
    prompt = "The statement "
    start = tokenizer(prompt, return_tensors="pt").input_ids
    torch.manual_seed(options.seed)
    output = model.generate(start, max_new_tokens=options.characters, do_sample=True, temperature=0.6, pad_token_id=0)
    sample = tokenizer.decode(output[0])
    print(f"held-out loss {held_out[options.steps]:.3f} nats per character after {seconds:.0f} s\n\n{sample}")

    options.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "sample.txt").write_text(sample + "\n", encoding="utf-8")
    report = {
        "layers": model.config.layers,
        "made": asdict(Provenance.now("characters", "example", seconds)),
        "parameters": parameters,
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "losses": {step + 1: round(losses[step], 4) for step in range(0, options.steps, max(1, options.steps // 50))},
        "held_out": {step: round(x, 4) for step, x in held_out.items()},
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(options.out / "loss.png", losses, held_out, ", ".join(names))


def draw(path: Path, losses: list[float], held_out: dict[int, float], title: str) -> None:
    """Plot the training loss of every step and the held-out loss."""
    with house_style():
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(5, 3))
        axes.plot(range(1, len(losses) + 1), losses, color=COLOURS["bayesian"], alpha=0.4, label="each step")
        axes.plot(list(held_out), list(held_out.values()), "o-", color=COLOURS["delta"], label="held-out text")
        axes.set(xlabel="step", ylabel="nats per character", title=f"Character model: {title}")
        axes.legend()
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    main()
