"""Made-up checkpoints with the names and shapes that flash-linear-attention writes, and its forward pass, in loops."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

RELEASED = {  # the options of the Gated DeltaNet of 340M parameters that was released in December 2024
    "model_type": "gated_deltanet",
    "architectures": ["GatedDeltaNetForCausalLM"],
    "attn": None,
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "conv_size": 4,
    "eos_token_id": 2,
    "expand_v": 1,
    "fuse_cross_entropy": True,
    "head_dim": 256,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "norm_first": False,
    "num_heads": 4,
    "num_hidden_layers": 24,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "use_gate": True,
    "use_short_conv": True,
    "vocab_size": 32000,
}
SMALL = {
    **RELEASED,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 5,
    "intermediate_size": 7,
    "vocab_size": 31,
}
TODAY = {  # options that came later
    "allow_neg_eigval": False,
    "attnres_block_size": None,
    "fuse_linear_cross_entropy": False,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "num_v_heads": None,
    "use_l2warp": False,
}


def shapes(options: dict[str, Any], *, december: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that flash-linear-attention stores for these options."""
    d, keys = options["hidden_size"], options["num_heads"] * options["head_dim"]
    heads = options.get("num_v_heads") or options["num_heads"]
    values, inner = heads * int(options["head_dim"] * options["expand_v"]), options["intermediate_size"]
    if inner is None:
        inner = 256 * ((int(d * options["hidden_ratio"] * 2 / 3) + 255) // 256)
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,), "mlp_norm.weight": (d,)}
    layer |= {f"attn.{name}_proj.weight": (keys, d) for name in "qk"}
    layer |= {"attn.v_proj.weight": (values, d), "attn.o_proj.weight": (d, values)}
    layer |= {f"attn.{name}_proj.weight": (heads, d) for name in "ab"}
    layer |= {f"attn.{name}": (heads,) for name in ("A_log", "dt_bias", *(["D"] if december else []))}
    layer |= {"attn.o_norm.weight": (values // heads,)}
    if options["use_gate"]:
        layer |= {"attn.g_proj.weight": (values, d)}
    if options["use_short_conv"]:
        sizes = {"q": keys, "k": keys, "v": values}
        layer |= {f"attn.{name}_conv1d.weight": (n, 1, options["conv_size"]) for name, n in sizes.items()}
    if december:
        layer |= {"mlp.gate_proj.weight": (2 * inner, d)}
    else:
        layer |= {"mlp.gate_proj.weight": (inner, d), "mlp.up_proj.weight": (inner, d)}
    layer |= {"mlp.down_proj.weight": (d, inner)}
    found: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (options["vocab_size"], d)}
    for i in range(options["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    found |= {"model.norm.weight": (d,)}
    if december or not options["tie_word_embeddings"]:
        found |= {"lm_head.weight": (options["vocab_size"], d)}
    return found


def tensors(options: dict[str, Any], *, december: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights with those names and shapes, large enough for every part to matter."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes(options, december=december).items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        wide = len(shape) == 2 and "embeddings" not in name
        found[name] = (1 + 0.3 * x if "norm" in name else x / shape[1] ** 0.5 if wide else x).to(dtype)
    if options["tie_word_embeddings"] and "lm_head.weight" in found:
        found["lm_head.weight"] = found["model.embeddings.weight"].clone()
    return found


def write(folder: Path, options: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    """A folder as `save_pretrained` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(options))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    places: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def logits(tokens: list[int], options: dict[str, Any], w: dict[str, Tensor]) -> Tensor:
    """The forward pass of flash-linear-attention's Gated DeltaNet, token by token and head by head: [T,vocab_size]."""
    eps, D = options["norm_eps"], options["head_dim"]
    x = w["model.embeddings.weight"][tokens]
    for i in range(options["num_hidden_layers"]):
        layer = {name.removeprefix(f"model.layers.{i}."): t for name, t in w.items() if f"model.layers.{i}." in name}
        x = x + _mixed(rms_norm(x, layer["attn_norm.weight"], eps), options, layer, D, eps)
        x = x + _mlp(rms_norm(x, layer["mlp_norm.weight"], eps), layer)
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return rms_norm(x, w["model.norm.weight"], eps) @ head.T


def _mlp(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
    y = x @ layer["mlp.gate_proj.weight"].T
    gate, up = (y, x @ layer["mlp.up_proj.weight"].T) if "mlp.up_proj.weight" in layer else y.chunk(2, -1)
    return (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


def _mixed(x: Tensor, options: dict[str, Any], layer: dict[str, Tensor], D: int, eps: float) -> Tensor:
    T = len(x)
    heads = options.get("num_v_heads") or options["num_heads"]
    shared = heads // options["num_heads"]
    projected = {}
    for name in "qkv":
        y = x @ layer[f"attn.{name}_proj.weight"].T
        if options["use_short_conv"]:
            taps, size = layer[f"attn.{name}_conv1d.weight"][:, 0], options["conv_size"]
            line = torch.cat((y.new_zeros(size - 1, y.shape[1]), y))
            y = torch.stack([(line[t : t + size].T * taps).sum(1) for t in range(T)])
        projected[name] = F.silu(y)
    out = []
    M = projected["v"].shape[1] // heads
    states = x.new_zeros(heads, D, M)
    beta = torch.sigmoid(x @ layer["attn.b_proj.weight"].T)
    decay = -layer["attn.A_log"].exp() * F.softplus(x @ layer["attn.a_proj.weight"].T + layer["attn.dt_bias"])
    for t in range(T):
        row = []
        for h in range(heads):
            at = slice((h // shared) * D, (h // shared + 1) * D)
            q, k = (y[t, at] / (y[t, at].square().sum() + 1e-6).sqrt() for y in (projected["q"], projected["k"]))
            v = projected["v"][t, h * M : (h + 1) * M]
            S = states[h] * decay[t, h].exp()
            S = S + beta[t, h] * torch.outer(k, v - S.T @ k)
            states[h] = S
            y = rms_norm(S.T @ (q * D**-0.5), layer["attn.o_norm.weight"], eps)
            if options["use_gate"]:
                y = y * F.silu(layer["attn.g_proj.weight"][h * M : (h + 1) * M] @ x[t])
            row.append(y)
        out.append(torch.cat(row))
    return torch.stack(out) @ layer["attn.o_proj.weight"].T
