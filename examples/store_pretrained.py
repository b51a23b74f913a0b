"""Store a trained example in examples/pretrained: weights in half precision, a tokenizer, a text, and a model card.

    python examples/characters.py --steps 2000 --out runs/characters
    python examples/store_pretrained.py characters runs/characters
    python examples/uncertainty.py --seed 0 --out runs/uncertainty
    python examples/store_pretrained.py recall runs/uncertainty

Weights are stored in float16 and computed with in float32. What the card says of quality is measured here, after
the rounding. Nothing is pickled.
"""

# ruff: noqa: E501 - rows of Markdown tables

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import characters
import uncertainty

from membydesign.models import MemoryForCausalLM, next_token_losses
from membydesign.pretrained import PLACE, TEXT

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "model.safetensors"
STRETCH = 50
"""Characters that a passage must share with the training text to count as repeated."""


def store(model: MemoryForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> MemoryForCausalLM:
    """Save a model in half precision with its tokenizer; return it as it loads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: x.half() for name, x in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    loaded = MemoryForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.float32, loaded.dtype
    return loaded.eval()


def repetitions(seen: str, text: str) -> torch.Tensor:
    """Return for each character of a text whether the stretch that it ends is also in a text seen before."""
    known = {seen[i : i + STRETCH] for i in range(len(seen) - STRETCH + 1)}
    return torch.tensor([text[max(0, i + 1 - STRETCH) : i + 1] in known for i in range(len(text))])


@torch.no_grad()
def loss_where(model: MemoryForCausalLM, tokens: torch.Tensor, chosen: torch.Tensor, length: int = 256) -> float:
    """Return the mean loss of chosen tokens, in the windows of `characters.held_out_loss`."""
    kept = len(tokens) // length * length
    windows = tokens[:kept].view(-1, length)
    losses = torch.cat([next_token_losses(model, {"input_ids": w}).view(len(w), -1) for w in windows.split(16)])
    return losses[chosen[:kept].view(-1, length)[:, 1:]].mean().item()


def store_characters(trained: Path, folder: Path) -> str:
    """Store the character model; return its card."""
    report = json.loads((trained / "report.json").read_text(encoding="utf-8"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained)
    before = MemoryForCausalLM.from_pretrained(trained).eval()
    model = store(before, tokenizer, folder)
    corpus = characters.text()
    tokens = torch.tensor(tokenizer(corpus).input_ids)
    cut = len(tokens) * 19 // 20
    losses = [characters.held_out_loss(each, tokens[cut:], 256) for each in (before, model)]
    repeated = repetitions(corpus[:cut], corpus[cut:])
    new = loss_where(model, tokens[cut:], ~repeated)
    start = corpus.index("\n\n", cut) + 2
    text = corpus[start : start + 900]
    (folder / TEXT).write_text(text[: text.rindex("\n") + 1], encoding="utf-8")
    made = report["made"]
    python = made["versions"]["python"]
    return f"""# A small character model

Four Bayesian Layers (width 128, four heads), {report["parameters"]:,} parameters, one token per character. It learned
Python's own help text, and writes something like it.

| | |
|---|---|
| use | `mbd generate example:characters "The statement " --temperature 0.6`, `mbd explore --model example:characters` |
| made by | `python examples/characters.py --steps {report["steps"]} --out runs/characters`, then `python examples/store_pretrained.py characters runs/characters` |
| commit | {made["commit"]} |
| training | {report["steps"]} steps of 8 windows of 256 characters, {made["seconds"]:.0f} s with {_threads(report["threads"])}, PyTorch {made["versions"]["torch"]} |
| data | `pydoc_data.topics` of Python {python}: {len(tokens):,} characters; the last twentieth is held out |
| held-out loss | **{losses[1]:.4f} nats per character** ({losses[1] / 0.6931471805599453:.3f} bits); {losses[0]:.4f} before weights were rounded to float16 |
| where nothing is repeated | {new:.4f} nats: Python's help repeats itself, and {100 * repeated.double().mean():.0f} % of the held-out characters end a stretch of {STRETCH} that is also in the training text |
| files | safetensors in float16 (float32 when loaded), a tokenizer in JSON; nothing is unpickled |

**Limits.** It knows {len(tokenizer)} characters and one text; any other character becomes `<unk>`. Words are mostly English,
sentences mostly have no meaning, and nothing it says about Python should be believed. It was trained on windows of 256
characters, so that what it does on longer texts is a test of its memory and not of its training.

**Licence.** The weights and `{TEXT}`, an excerpt of the held-out text, are made from Python's documentation, which is
copyright © 2001 Python Software Foundation, under the
[PSF License Version 2](https://docs.python.org/3/license.html). The rest of this folder is under Apache-2.0, as this
repository is.
"""


def store_recall(trained: Path, folder: Path) -> str:
    """Store the recall model; return its card."""
    report = json.loads((trained / "report.json").read_text(encoding="utf-8"))
    before = MemoryForCausalLM.from_pretrained(trained).eval()
    names = [*(f"k{i}" for i in range(uncertainty.KEYS)), *(f"v{i}" for i in range(uncertainty.VALUES)), "?"]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    model = store(before, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?"), folder)
    data = uncertainty.sequences(500, torch.Generator().manual_seed(2_000_000), 0.2)
    head = report["recall_head"] - 1
    found = [uncertainty.numbers(data, uncertainty.read(each, data), head) for each in (before, model)]
    (folder / TEXT).write_text(" ".join(names[i] for i in data.ids[0].tolist()) + "\n", encoding="utf-8")
    rows = " | ".join(f"{found[1]['accuracy'][times]:.2f}" for times in uncertainty.WRITTEN)
    doubts = " | ".join(f"{found[1]['variance'][times]['mean']:.2f}" for times in uncertainty.WRITTEN)
    gap = max(abs(found[0]["accuracy"][times] - found[1]["accuracy"][times]) for times in uncertainty.WRITTEN)
    made, told = report["provenance"], found[1]["auroc_never_written"]["variance"]
    return f"""# A small recall model

One Bayesian Layer (width 64, two heads), {report["parameters"]:,} parameters. It reads reports of values of keys, and then
answers for keys; the layer's variance tells which keys were never written.

| | |
|---|---|
| use | `mbd generate example:recall "k3 v7 k5 v1 ? k3" --greedy -n 1` answers `v7`; `mbd explore --model example:recall` |
| tokens | keys `k0` to `k{uncertainty.KEYS - 1}`, values `v0` to `v{uncertainty.VALUES - 1}`, and `?` before the keys that are asked for |
| made by | `python examples/uncertainty.py --seed 0 --out runs/uncertainty`, then `python examples/store_pretrained.py recall runs/uncertainty` |
| commit | {made["commit"]} |
| training | 400 steps of 32 sequences, {made["seconds"]:.0f} s with {_threads(report["threads"])}, PyTorch {made["versions"]["torch"]} |
| data | random sequences of 45 reports about 15 keys, one in five wrong ([how](../../../docs/concepts/uncertainty.md)) |
| files | safetensors in float16 (float32 when loaded), a tokenizer in JSON; nothing is unpickled |

500 sequences that were used for nothing else, after weights were rounded to float16 (accuracies differ by {gap:.4f} at
most from those before):

| key was written | 0 times | once | twice | 4 times | 8 times |
|---|---:|---:|---:|---:|---:|
| answers that are right | {rows} |
| variance of the read, mean, head {head + 1} | {doubts} |

That variance tells keys never written from others with an AUROC of {told:.3f}.

**Limits.** One answer at a time: what follows an answer is not a text. It was trained on 45 reports at most, then
questions; other lengths and orders are untested. Reports are wrong one time in five in training, so that a key written once is
answered with some doubt. Any word that is not a token is read as `?`.

**Licence.** Apache-2.0, as this repository is; the data are random numbers.
"""


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def main() -> None:
    """Store one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    stores: dict[str, Any] = {"characters": store_characters, "recall": store_recall}
    parser.add_argument("name", choices=stores)
    parser.add_argument("trained", type=Path, help="the folder that the training script wrote")
    options = parser.parse_args()
    folder = ROOT / PLACE / options.name
    card = stores[options.name](options.trained, folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size:,} bytes")


if __name__ == "__main__":
    main()
