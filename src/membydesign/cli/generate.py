"""`mbd generate`: continue a prompt with a language model."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from membydesign.cli.loading import (
    Accelerate,
    Device,
    Dtype,
    Model,
    Tokenizer,
    accelerated,
    dtype_of,
    load_model,
    load_tokenizer,
    usable_device,
)
from membydesign.cli.output import AsJson, fail
from membydesign.cli.requirements import need_models
from membydesign.files import to_json

if TYPE_CHECKING:
    import torch
    from transformers import TextStreamer


def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Stop after this many tokens.")
    ] = 200,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Below 1, more predictable; above 1, more random. Default: 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample among the likeliest tokens of total probability P.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Sample among the K likeliest tokens; 0 means all.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 1, makes repeated tokens less likely.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", metavar="", help="Always take the likeliest token instead of sampling.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The same seed gives the same text. Default: random.")
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", metavar="", help="Print the prompt before the new text.")] = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    accelerate: Accelerate = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt and print the text as it is generated.

    For example: `mbd generate my-model "Once upon a time" --temperature 0.8 --seed 1`

    The model may be one of this package, a Gated DeltaNet of flash-linear-attention, or any causal language model that
    Transformers reads. Your options take precedence over the model's generation_config.json; without either, tokens are
    sampled from the model's distribution. Text goes to standard output and speed to standard error:
    `echo "Dear Sir," | mbd generate my-model - > letter.txt`
    """
    need_models("generate")
    import torch

    from membydesign.models.quiet import quiet

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    _check(sampling, repetition_penalty, greedy)
    text = _prompt(prompt)
    quiet()
    device = usable_device(device)
    words = load_tokenizer(tokenizer or model)
    lm = load_model(model, dtype_of(dtype), device)
    if accelerate:
        accelerated(lm)

    inputs = words(text, return_tensors="pt")
    ids = inputs["input_ids"].long()
    if not ids.shape[1] and words.bos_token_id is not None:
        ids = torch.tensor([[words.bos_token_id]])
    if not ids.shape[1]:
        raise fail("PROMPT: expected at least one token, got none")
    size = lm.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= size:
        raise fail(f"--tokenizer: expected one of at most {size} tokens, as the model has, got token {int(ids.max())}")

    options = _options(lm.generation_config, sampling, repetition_penalty, greedy)
    eos = lm.generation_config.eos_token_id
    if lm.generation_config.pad_token_id is None:
        options["pad_token_id"] = eos[0] if isinstance(eos, list) else eos or 0
    seed = secrets.randbelow(2**31) if seed is None else seed
    torch.manual_seed(seed)
    streamer = None if as_json else _stream(words, echo)
    ids = ids.to(lm.device)
    started = time.perf_counter()
    out = lm.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=streamer, **options
    )
    seconds = time.perf_counter() - started
    new = out.shape[1] - ids.shape[1]
    if not as_json:
        speed = f"{new} tokens in {seconds:.2f} s, {new / seconds:.1f} tokens/s"
        Console(stderr=True, soft_wrap=True).print(f"{speed}{'' if greedy else f', seed {seed}'}", highlight=False)
        return
    before, after = (words.decode(row, skip_special_tokens=True) for row in (ids[0], out[0]))
    ended = int(out[0, -1]) in (eos if isinstance(eos, list) else [eos])
    facts = {
        "model": model,
        "prompt": text,
        "text": after[len(before) :],
        "prompt_tokens": ids.shape[1],
        "new_tokens": new,
        "finish": "end" if ended else "length",
        "seconds": seconds,
        "tokens_per_second": new / seconds,
        "seed": None if greedy else seed,
        "options": options,
    }
    print(to_json(facts), end="")


def _check(sampling: dict[str, Any], repetition_penalty: float | None, greedy: bool) -> None:
    options = [f"--{name.replace('_', '-')}" for name, value in sampling.items() if value is not None]
    if greedy and options:
        raise fail(f"--greedy: expected no {', '.join(options)} with it, since nothing is drawn")
    for name, value, most in (
        ("--temperature", sampling["temperature"], float("inf")),
        ("--top-p", sampling["top_p"], 1.0),
        ("--repetition-penalty", repetition_penalty, float("inf")),
    ):
        if value is not None and not 0 < value <= most:
            hint = " (or --greedy)" if name == "--temperature" else ""
            raise fail(f"{name}: expected a number above 0{' up to 1' if most == 1 else ''}{hint}, got {value}")


def _prompt(prompt: str) -> str:
    return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt


def _options(own: Any, sampling: dict[str, Any], repetition_penalty: float | None, greedy: bool) -> dict[str, Any]:
    """What `generate` is told: the user's word first, then the model's, then nothing that bends its distribution."""
    options: dict[str, Any] = {"do_sample": not greedy, "num_beams": 1}
    if not greedy:
        for name, plain in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
            said = [x for x in (sampling[name], getattr(own, name, None)) if x is not None]
            options[name] = said[0] if said else plain
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    return options


def _stream(words: Any, echo: bool) -> TextStreamer:
    from transformers import TextStreamer

    class Stream(TextStreamer):
        """Prints each token at once, and not by words as its parent does, which would hold back text without spaces.

        The prompt is decoded along with what follows, since some tokenizers drop the space that a text begins with.
        """

        def put(self, value: torch.Tensor) -> None:
            self.token_cache.extend(value.flatten().tolist())
            text = self.text()
            if self.next_tokens_are_prompt:
                self.next_tokens_are_prompt = False
                self.print_len = 0 if echo else len(text)
            if text.endswith("\ufffd"):  # a letter of several tokens, not whole yet
                return
            self.on_finalized_text(text[self.print_len :])
            if text.endswith("\n"):  # start over, so that decoding stays short
                self.token_cache = self.token_cache[-1:]
                text = self.text()
            self.print_len = len(text)

        def text(self) -> str:
            return self.tokenizer.decode(self.token_cache, **self.decode_kwargs)  # pyright: ignore

    return Stream(words, skip_special_tokens=True)
