"""Convert prompts to tokens, for any Transformers tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class Encoder:
    """Tokenise texts that a model is to continue.

    Special tokens that the tokenizer puts before a text (a beginning-of-text token) are kept. Those that it puts after
    a text are dropped, because a model does not continue a text that has ended.

    Args:
        tokenizer: Transformers tokenizer, or any callable that returns `input_ids` and has `decode`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        whole, plain = self._ids("a", True), self._ids("a", False)
        before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self.before: list[int] = whole[:before]

    def _ids(self, text: str, special: bool) -> list[int]:
        # verbose=False: no warning that a long text exceeds the maximum length of the tokenizer's original model.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def stream(self, text: str) -> list[int]:
        """Tokenise a text without special tokens."""
        return self._ids(text, False)

    def __call__(self, text: str) -> list[int]:
        """Tokenise a prompt."""
        return [*self.before, *self.stream(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Convert tokens to text, skipping special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def padding(self) -> int:
        """Token for padding."""
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self.tokenizer, name, None)
            if isinstance(token, int):
                return token
        return 0


def check_vocabulary(model: Any, largest: int) -> None:
    """Raise an error if a model has no embedding for a token.

    Args:
        model: Transformers model.
        largest: largest token of the input.
    """
    size = model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise ValueError(f"tokenizer: expected tokens below the model's vocabulary size {size}, got token {largest}")
