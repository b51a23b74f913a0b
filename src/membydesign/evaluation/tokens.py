"""Texts as tokens, for any tokenizer of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class Encoder:
    """What a tokenizer makes of a text that a model is to continue.

    Tokens that the tokenizer puts before a text (a beginning-of-text token) are kept. Tokens that it puts after one are
    not, since a text with an end is not continued.

    Args:
        tokenizer: of Transformers; whatever gives `input_ids` when called and has `decode` will do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        whole, plain = self._ids("a", True), self._ids("a", False)
        before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self.before: list[int] = whole[:before]

    def _ids(self, text: str, special: bool) -> list[int]:
        # Not verbose: it would warn that a long text does not fit the model that the tokenizer was made for.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def stream(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        return self._ids(text, False)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return [*self.before, *self.stream(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def padding(self) -> int:
        """A token for places that no one looks at."""
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self.tokenizer, name, None)
            if isinstance(token, int):
                return token
        return 0


def check_vocabulary(model: Any, largest: int) -> None:
    """Refuse tokens that a model has no embedding for.

    Args:
        model: of Transformers.
        largest: the largest token that it will be given.
    """
    size = model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise ValueError(f"tokenizer: expected one of at most {size} tokens, as the model has, got token {largest}")
