"""Language models whose layers are memories, for Transformers: `MemoryModel` and `MemoryForCausalLM`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from membydesign.errors import FilterError
from membydesign.layers import FilterLayer, SequenceLayer, Uncertainty
from membydesign.models.arguments import LOSS, check_call
from membydesign.models.cache import MemoryCache, unchanged_on_error
from membydesign.models.checkpoint import check_folder
from membydesign.models.configuration import MemoryConfig
from membydesign.models.context_parallelism import loss_of_all, refuse_with_stretch, stretch_of
from membydesign.models.finite import FiniteCheck, named
from membydesign.models.generation import MemoryGenerationMixin
from membydesign.models.outputs import MemoryCausalLMOutput, MemoryModelOutput
from membydesign.models.padding import Padding, padding_of, restarts
from membydesign.models.swiglu import SwiGLU

if TYPE_CHECKING:
    from membydesign.filter import Stretch
    from membydesign.layers import LayerBelief
    from membydesign.models.context_parallelism import Split

logger = logging.get_logger(__name__)


class MemoryBlock(GradientCheckpointingLayer):
    """x + layer(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: MemoryConfig, name: str) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = config.make_layer(name)
        self.mlp = None
        if config.intermediate_size:
            self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_dropout)

    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: bool = False,
        stretch: Stretch | None = None,
    ) -> tuple[Tensor, LayerBelief, Uncertainty]:
        """Mix x, [B,T,hidden_size]; return the result, the new belief, and the requested uncertainty."""
        requests: dict[str, Any] = {} if stretch is None else {"stretch": stretch}
        if isinstance(self.mixer, FilterLayer):
            variance = return_variance and self.mixer.design.has_variance
            requests |= {"return_variance": variance, "return_evidence": return_evidence}
        mixed, new, *uncertainty = self.mixer(self.mixer_norm(x), belief, cu_seqlens=cu_seqlens, **requests)
        x = x + mixed
        if self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, new, uncertainty[0] if uncertainty else Uncertainty()


class MemoryPreTrainedModel(PreTrainedModel):
    """Loading, saving and starting values, shared by the models."""

    config_class = MemoryConfig
    config: MemoryConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embeddings"
    _no_split_modules = ["MemoryBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a saved model, from safetensors only; a folder is checked before anything is built."""
        source = pretrained_model_name_or_path
        folder = None if source is None else Path(source, kwargs.get("subfolder") or "")
        loaded_otherwise = kwargs.get("state_dict") is not None or kwargs.get("variant") is not None
        if folder is not None and (folder / "config.json").is_file() and not loaded_otherwise:
            check_folder(folder)
        return super().from_pretrained(source, *model_args, **{**kwargs, "use_safetensors": True})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        own = type(module).__module__.startswith("membydesign.layers") and hasattr(module, "reset_parameters")
        if own or isinstance(module, SequenceLayer):
            # Transformers marks what it loaded; starting values are for the rest.
            loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            kept = [p.clone() for p in loaded]
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
            for parameter, value in zip(loaded, kept, strict=True):
                parameter.copy_(value)


class MemoryModel(MemoryPreTrainedModel):
    """Embedding, blocks, final norm.

    Args:
        config: what it is made of.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([MemoryBlock(config, name) for name in config.layers])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.split: Split | None = None
        self.post_init()

    def mixers(self) -> list[SequenceLayer]:
        """The sequence layer of each block."""
        return [block.mixer for block in self.layers]  # pyright: ignore[reportReturnType]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: bool = False,
        stretch: Stretch | None = None,
        **kwargs: Any,
    ) -> MemoryModelOutput:
        """Run over tokens.

        Args:
            input_ids: [B,T]; or `inputs_embeds`.
            attention_mask: [B,T] or, with a cache, [B,past+T]: zero for padding, on either side. Padded tokens are
                taken out before the layers and come back as zeros.
            position_ids: only restarts are read: with B = 1, no padding and no cache, a position 0 begins a packed
                sequence, as Transformers' collators write it.
            past_key_values: beliefs from an earlier call, updated in place; unchanged if this call raises.
            inputs_embeds: [B,T,hidden_size], instead of `input_ids`.
            use_cache: whether to return beliefs; default as configured, and not while training.
            output_hidden_states: whether to return the output of every block.
            cu_seqlens: boundaries of packed sequences, [N+1], with B = 1. `cu_seq_lens_q` is another name for it.
            return_variance: whether to return how unsure each layer's reads are; None for all layers if the whole piece
                is padding.
            return_evidence: whether to return how expected each layer's writes were.
            stretch: for sequences that are split in time over processes: which tokens these are, from
                `membydesign.Stretch.of`, which then has the boundaries of packed sequences. `context_parallel` makes a
                model find out by itself.
        """
        cu_seqlens = kwargs.pop("cu_seq_lens_q", None) if cu_seqlens is None else cu_seqlens
        check_call(self, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids: expected exactly one of input_ids and inputs_embeds, got {got}")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        stretch = stretch_of(self, x, stretch, cu_seqlens)
        if stretch is not None:
            given = {"past_key_values": past_key_values, "use_cache": use_cache, "position_ids": position_ids}
            refuse_with_stretch(**given, attention_mask=attention_mask)
            attention_mask, cu_seqlens, use_cache = None, None, False
        if x.ndim != 3 or not (x.shape[1] or stretch) or x.shape[2] != self.config.hidden_size:
            if input_ids is not None:
                raise ValueError(f"input_ids: expected shape [B,T] with T at least 1, got {list(input_ids.shape)}")
            expected = f"[B,T,{self.config.hidden_size}] (hidden_size) with T at least 1"
            raise ValueError(f"inputs_embeds: expected shape {expected}, got {list(x.shape)}")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and self.gradient_checkpointing and self.training:
            logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing. Setting it to False.")
            use_cache = False
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = self._cache(past_key_values, use_cache)
        cu_seqlens = restarts(cu_seqlens, position_ids, attention_mask, past_key_values)
        B, T = x.shape[:2]
        padding = padding_of(attention_mask, B, T, 0 if cache is None else cache.get_seq_length())
        if padding is not None and cu_seqlens is not None:
            raise ValueError("attention_mask: expected no padding with cu_seqlens, got some")
        states: list[Tensor] = []
        uncertainties = [Uncertainty()] * len(self.layers)
        if padding is None or len(padding.places.indices):
            x, uncertainties, beliefs = self._run(
                x,
                "the embeddings" if inputs_embeds is None else "inputs_embeds",
                padding,
                cu_seqlens,
                cache,
                states if output_hidden_states else None,
                return_variance,
                return_evidence,
                stretch,
            )
        elif past_key_values is None:
            raise ValueError("attention_mask: expected at least one token that is not padding, got none")
        else:  # nothing to remember from a piece of a prompt that is padding in every sequence
            x = torch.zeros_like(x)
            states = [x] * (len(self.layers) + 1)
            beliefs = [layer.belief for layer in past_key_values.layers]
        if cache is not None:
            cache.advance(beliefs, T)
        return MemoryModelOutput(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
            variances=tuple(u.variance for u in uncertainties) if return_variance else None,
            log_evidences=tuple(u.log_evidence for u in uncertainties) if return_evidence else None,
        )

    def _run(
        self,
        x: Tensor,
        source: str,
        padding: Padding | None,
        cu_seqlens: Tensor | None,
        cache: MemoryCache | None,
        states: list[Tensor] | None,
        *requests: Any,
    ) -> tuple[Tensor, list[Uncertainty], list[LayerBelief | None]]:
        """Run all blocks and the norm over tokens without padding; append hidden states to `states` if it is a list.

        Also returns the new beliefs, if there is a cache, which itself is only read.
        """

        def padded(y: Tensor | None) -> Any:
            return y if padding is None or y is None else padding.places.spread(y)

        def kept(y: Tensor) -> Tensor:
            if states is None:
                return y
            states.append(padded(y))  # and go on from it, so that gradients reach what the caller gets
            return states[-1] if padding is None else padding.places.pack(states[-1])

        if padding is not None:
            x, cu_seqlens = padding.places.pack(x), padding.cu_seqlens
        check = FiniteCheck()
        check.see(x, source, None if source == "inputs_embeds" else self.embeddings, "embeddings")
        uncertainties: list[Uncertainty] = []
        beliefs: list[LayerBelief | None] = []
        for i, block in enumerate(self.layers):
            belief = None if cache is None else cache.layers[i].belief
            place = f"layer {i} ({self.config.layers[i]})"
            try:
                x, belief, uncertainty = block(kept(x), belief, cu_seqlens, *requests)
            except (FilterError, ValueError) as error:
                if belief is not None and str(error).startswith(("belief", "initial")):
                    raise ValueError(f"past_key_values: expected a cache of this model; layer {i}: {error}") from error
                check.read()  # the reason may be an earlier block
                explained = named(error, place, block)
                if explained is error:
                    raise
                raise explained from error
            check.see(x, place, block)
            if cache is not None:
                beliefs.append(belief)
            uncertainties.append(Uncertainty(*map(padded, uncertainty)))
        x = self.norm(x)
        check.see(x, "the last norm", self.norm, "norm")
        check.read()
        x = padded(x)
        if states is not None:
            states.append(x)
        return x, uncertainties, beliefs

    def _cache(self, past: MemoryCache | None, use_cache: bool) -> MemoryCache | None:
        if past is None:
            return MemoryCache(len(self.layers)) if use_cache else None
        if not isinstance(past, MemoryCache) or len(past.layers) != len(self.layers):
            got = f"one of {len(past.layers)} layers" if isinstance(past, MemoryCache) else type(past).__name__
            raise ValueError(f"past_key_values: expected a MemoryCache of {len(self.layers)} layers, got {got}")
        return past


class MemoryForCausalLM(MemoryPreTrainedModel, MemoryGenerationMixin):
    """A language model: `MemoryModel` and a linear map to logits.

    Args:
        config: what it is made of.

    Examples:
        >>> model = MemoryForCausalLM(MemoryConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_heads=2))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.model = MemoryModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_variance: bool = False,
        return_evidence: bool = False,
        stretch: Stretch | None = None,
        **kwargs: Any,
    ) -> MemoryCausalLMOutput:
        """Compute logits of the next tokens, and the loss of labels.

        Args:
            input_ids: as in `MemoryModel.forward`.
            attention_mask: as in `MemoryModel.forward`.
            position_ids: as in `MemoryModel.forward`.
            past_key_values: as in `MemoryModel.forward`.
            inputs_embeds: as in `MemoryModel.forward`.
            labels: [B,T], usually the `input_ids`: the token after t is predicted at t; -100 is left out. The first
                token of a packed sequence is left out by itself, since nothing of its own precedes it.
            use_cache: as in `MemoryModel.forward`.
            output_hidden_states: as in `MemoryModel.forward`.
            cu_seqlens: as in `MemoryModel.forward`.
            logits_to_keep: how many of the last tokens get logits, or which; 0 for all.
            return_variance: as in `MemoryModel.forward`.
            return_evidence: as in `MemoryModel.forward`.
            stretch: as in `MemoryModel.forward`; the loss is then that of all processes' targets, in each of them.
        """
        cu_seqlens = kwargs.pop("cu_seq_lens_q", None) if cu_seqlens is None else cu_seqlens
        check_call(self, kwargs, LOSS)
        stretch = stretch_of(self.model, input_ids if inputs_embeds is None else inputs_embeds, stretch, cu_seqlens)
        if stretch is not None:
            refuse_with_stretch(position_ids=position_ids, logits_to_keep=logits_to_keep if labels is not None else 0)
            cu_seqlens = None
        cu_seqlens = restarts(cu_seqlens, position_ids, attention_mask, past_key_values)
        with unchanged_on_error(past_key_values):
            out = self.model(
                input_ids,
                attention_mask,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                output_hidden_states=output_hidden_states,
                cu_seqlens=cu_seqlens,
                return_variance=return_variance,
                return_evidence=return_evidence,
                stretch=stretch,
                return_dict=True,
            )
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(out.last_hidden_state[:, kept])
            check = FiniteCheck()
            check.see(logits, "the logits", self.lm_head, "lm_head")
            check.read()
            loss = None
            if labels is not None:
                if labels.shape != logits.shape[:2]:
                    expected = f"one for each of the logits, {list(logits.shape[:2])}"
                    raise ValueError(f"labels: expected {expected}, got {list(labels.shape)}")
                if cu_seqlens is not None:
                    T = out.last_hidden_state.shape[1]
                    starts = cu_seqlens[1:-1].to(labels.device, torch.long)
                    first = torch.zeros(1, T, dtype=torch.bool, device=labels.device).index_fill(
                        1, starts[starts < T], True
                    )
                    labels = labels.masked_fill(first[:, kept], -100)
                if stretch is None:
                    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
                else:
                    loss = loss_of_all(self, logits, labels, stretch, **kwargs)
            return MemoryCausalLMOutput(
                loss=loss,
                logits=logits,
                past_key_values=out.past_key_values,
                hidden_states=out.hidden_states,
                variances=out.variances,
                log_evidences=out.log_evidences,
            )
