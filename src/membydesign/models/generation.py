"""How models generate: with beliefs as their cache, and with the uncertainty of each token if it is requested."""

from __future__ import annotations

from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from membydesign.models.arguments import no_attentions
from membydesign.models.cache import MemoryCache, unchanged_on_error
from membydesign.models.outputs import MemoryGenerateBeamOutput, MemoryGenerateOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_STEPS = "uncertainty_steps"
_NO_WAY_BACK = "and a belief cannot forget its last tokens"
_CHUNKS_FROM_A_CACHE = Version("5.22")
"""The Transformers whose chunked prefill starts after the tokens that a cache holds; before, it read them twice."""

_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_CONTINUOUS = (
    "generate_batch: continuous batching keeps pages of keys and values, and a memory keeps beliefs. Pad the prompts "
    "and call generate(**tokenizer(prompts, padding=True, padding_side='left', return_tensors='pt')) instead: padding "
    "changes nothing and costs nothing"
)


class _Step(NamedTuple):
    """What the layers said where they chose a token: an entry for each layer, [rows,...], or None."""

    variances: tuple[Tensor | None, ...] | None
    log_evidences: tuple[Tensor | None, ...] | None


class MemoryGenerationMixin(GenerationMixin):
    """`generate` for a model whose cache is a `MemoryCache`.

    `generate(..., return_dict_in_generate=True, return_variance=True)` returns `variances`, and `return_evidence=True`
    returns `log_evidences`, of each generated token (`MemoryGenerateOutput`).

    Transformers knows a model that generates by "GenerationMixin" in the name of a base class.
    """

    @wraps(GenerationMixin.generate)  # pyright: ignore[reportAttributeAccessIssue]
    def generate(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Generate as Transformers does; if that raises, a cache in `past_key_values` is as before the call."""
        with unchanged_on_error(kwargs.get("past_key_values")):
            return super().generate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: continuous batching keeps pages of keys and values."""
        raise NotImplementedError(_CONTINUOUS)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: continuous batching keeps pages of keys and values."""
        raise NotImplementedError(_CONTINUOUS)

    def _prepare_generation_config(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_generation_config(generation_config, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        alpha = getattr(prepared[0], "penalty_alpha", None)
        if alpha is not None and prepared[0].get_generation_mode() == GenerationMode.CONTRASTIVE_SEARCH:
            # Here, because Transformers next asks to trust code from the Hub, which would refuse it too.
            why = f"since contrastive search tries tokens and takes them back, {_NO_WAY_BACK}"
            raise ValueError(f"penalty_alpha: expected None, {why}, got {alpha!r}")
        return prepared

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        if generation_config.output_attentions:
            raise no_attentions()
        if getattr(generation_config, "is_assistant", False):
            why = f"since drafted tokens may have to be taken back, {_NO_WAY_BACK}"
            raise ValueError(
                f"assistant_model: expected a model whose cache can be cropped, {why}, got {type(self).__name__}"
            )
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            requests = {name: getattr(generation_config, name, None) for name in _DRAFTS}
            name, value = next(((n, repr(v)) for n, v in requests.items() if v), ("assistant_model", ""))
            if name == "assistant_model":
                value = type(generation_mode_kwargs.get(name)).__name__
            why = f"since drafted tokens may have to be taken back, {_NO_WAY_BACK}"
            raise ValueError(f"{name}: expected None, {why}, got {value}")
        super()._validate_generation_mode(  # pyright: ignore[reportAttributeAccessIssue]
            generation_mode, generation_config, generation_mode_kwargs
        )

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache, size = model_kwargs.get("past_key_values"), generation_config.prefill_chunk_size
        again = size is not None and cache is not None and cache.get_seq_length() > 0
        if again and Version(transformers.__version__) < _CHUNKS_FROM_A_CACHE:
            raise ValueError(
                "prefill_chunk_size: expected None with a cache that holds tokens, since Transformers "
                f"{transformers.__version__} would read them again ({_CHUNKS_FROM_A_CACHE} does not), got {size}"
            )
        return super()._prefill(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids, generation_config, model_kwargs, *args, **kwargs
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation is not None:
                raise ValueError(
                    "cache_implementation: expected None, since a memory has one kind of cache, of constant size, "
                    f"got {generation_config.cache_implementation!r}"
                )
            model_kwargs["past_key_values"] = MemoryCache(len(self.model.layers))  # pyright: ignore[reportAttributeAccessIssue]
            return None
        return super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, model_kwargs, *args, **kwargs
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As Transformers does, which looks for `inputs_embeds` in this signature; token types are left out."""
        kwargs.pop(_STEPS, None)
        return super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        steps = model_kwargs.get(_STEPS)
        if steps is not None:
            steps.append(_Step(_last(outputs.variances), _last(outputs.log_evidences)))
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _with_uncertainty(super()._sample, input_ids, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _beam_search(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _with_uncertainty(super()._beam_search, input_ids, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def _with_uncertainty(decode: Callable[..., Any], input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a decoding method and, if requested, add the uncertainty of each token to its output."""
    requests = [name for name in ("return_variance", "return_evidence") if kwargs.get(name)]
    if not requests:
        return decode(input_ids, *args, **kwargs)
    if not kwargs["generation_config"].return_dict_in_generate:
        raise ValueError(
            f"{requests[0]}: expected return_dict_in_generate=True with it, since tokens alone have no place for it, "
            "got False"
        )
    steps: list[_Step] = []
    output = decode(input_ids, *args, **kwargs, **{_STEPS: steps})
    beams = getattr(output, "beam_indices", None)
    count = output.sequences.shape[1] - input_ids.shape[1] if beams is None else beams.shape[1]
    kind = MemoryGenerateOutput if beams is None else MemoryGenerateBeamOutput
    return kind(
        **{field.name: getattr(output, field.name) for field in fields(output)},
        variances=_of_tokens([step.variances for step in steps[:count]], beams),
        log_evidences=_of_tokens([step.log_evidences for step in steps[:count]], beams),
    )


def _last(parts: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...] | None:
    """What each layer said at the last token; copied, so that the rest of a prompt is not held."""
    return None if parts is None else tuple(None if x is None else x[:, -1].clone() for x in parts)


def _of_tokens(steps: list[tuple[Tensor | None, ...] | None], beams: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """For each layer what it said at each step, [rows,steps,...], in rows of the final sequences."""
    if not steps or steps[0] is None:
        return None
    layers = zip(*(step for step in steps if step is not None), strict=True)
    return tuple(None if parts[0] is None else _in_rows(torch.stack(parts, 1), beams) for parts in layers)


def _in_rows(x: Tensor, beams: Tensor | None) -> Tensor:
    """Steps of running beams, [beams,steps,...], as those of the sequences that came of them, with zeros after an end.

    Args:
        x: what was said of each running beam at each step.
        beams: the beam that each token of a sequence was chosen from, [rows,steps], and -1 after its end; or None.
    """
    if beams is None:
        return x
    beams = beams.to(x.device)
    rows = x[beams.clamp(min=0), torch.arange(beams.shape[1], device=x.device)]
    return rows * (beams >= 0).to(x.dtype).view(*beams.shape, *[1] * (x.ndim - 2))
