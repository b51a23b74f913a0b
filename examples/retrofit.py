r"""Retrofit a Gated DeltaNet, and measure how close the new layers are to the teacher's, before and after Phase A.

    python examples/characters.py --layers gated_deltanet --out runs/teacher \
        --options '{"value_dim": 32, "norm_eps": 1e-6}'
    python examples/retrofit.py runs/teacher                 # every variant, untrained
    python examples/retrofit.py runs/teacher --steps 100     # and after 100 steps of Phase A
    python examples/retrofit.py --head-dim 256               # a random teacher with heads of that size

All layers are replaced. Each line prints the NMSE of every layer on held-out text of the character model.
"""

import argparse
from pathlib import Path

import torch
from characters import batches, character_tokenizer, text

from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.retrofit import freeze, phase_a_losses, phase_a_mask, retrofit

CHOICES = {
    "rotation, from the teacher": {},
    "rotation_real, from the teacher": {"transition": "rotation_real"},
    "rotation, fresh": {"start": "fresh"},
    "scalar, fresh": {"transition": "scalar", "start": "fresh"},
    "rotation, from the teacher, no convolutions": {"convolution": "drop"},
    "rotation, fresh, no convolutions": {"convolution": "drop", "start": "fresh"},
}


def teacher_of(folder: Path | None, head_dim: int, vocabulary: int) -> MemoryForCausalLM:
    """Load the model that `characters.py` saved, or make a random Gated DeltaNet with four layers of two heads."""
    if folder is not None:
        return MemoryForCausalLM.from_pretrained(folder)
    options = {"gated_deltanet": {"value_dim": head_dim, "norm_eps": 1e-6}}
    sizes = {"vocab_size": vocabulary, "hidden_size": 2 * head_dim, "num_heads": 2}
    return MemoryForCausalLM(MemoryConfig(**sizes, layers=["gated_deltanet"] * 4, layer_options=options)).eval()


@torch.no_grad()
def held_out(teacher: MemoryForCausalLM, student: MemoryForCausalLM, windows: torch.Tensor) -> str:
    """Format the NMSE of each layer."""
    return " ".join(f"{x:.3f}" for x in phase_a_losses(teacher, student, {"input_ids": windows}).nmse.mean(1))


def main() -> None:
    """Print one line per variant, and one per report during training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "teacher", type=Path, nargs="?", help="folder written by characters.py; default: a random model"
    )
    parser.add_argument("--head-dim", type=int, default=32, help="head size of a random teacher")
    parser.add_argument("--choices", default="", help="only variants whose names contain this")
    parser.add_argument("--steps", type=int, default=0, help="training steps of Phase A")
    parser.add_argument("--every", type=int, default=25, help="steps between reports")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=4, help="number of held-out windows of 1,024 characters")
    options = parser.parse_args()

    torch.manual_seed(0)
    corpus = text()
    tokenizer = character_tokenizer(corpus)
    tokens = torch.tensor(tokenizer(corpus).input_ids)
    cut = len(tokens) * 19 // 20
    windows = tokens[cut : cut + 1024 * options.held_out].view(-1, 1024)
    teacher = teacher_of(options.teacher, options.head_dim, len(tokenizer))
    layers = range(len(teacher.model.layers))
    for name, choice in CHOICES.items():
        if options.choices not in name:
            continue
        student = retrofit(teacher, layers, **choice)
        print(f"{name}: {held_out(teacher, student, windows)}", flush=True)
        freeze(student, phase_a_mask(student, layers))
        optimiser = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], options.learning_rate)
        data = batches(tokens[:cut], options.batch, options.length, seed=0)
        for step in range(1, options.steps + 1):
            optimiser.zero_grad()
            phase_a_losses(teacher, student, {"input_ids": next(data)}).losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimiser.step()
            if step % options.every == 0:
                print(f"    {step} steps: {held_out(teacher, student, windows)}", flush=True)


if __name__ == "__main__":
    main()
