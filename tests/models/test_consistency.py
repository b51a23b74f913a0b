"""One model, many ways to run it, one result: whole, by token, in pieces, padded, packed, and generating."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from membydesign.models import MemoryCache
from membydesign.testing import assert_close
from models.family import FAMILY, KINDS, cases, model_of, padded_batch, some_ids

TOLERANCE = 1e-4
LENGTHS = (23, 9, 1, 14)
PROMPTS = [some_ids(n, seed=n) for n in (11, 5, 1)]
SHORT, LONG = 24, 200
EVERY = ["bayesian_layer", *(case for case in FAMILY if "+" in case)]
"""Cases whose generation is long in every run of the tests; the others' is in the slow ones."""


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def separate(case: str):
    """Rows of several lengths, and the logits of each by itself."""
    rows = [some_ids(n, seed=n) for n in LENGTHS]
    return rows, [model_of(case)(row[None], use_cache=False).logits[0] for row in rows]


def in_pieces(case: str, ids, bounds, mask=None):
    model = model_of(case)
    memory = MemoryCache(len(model.model.layers))
    logits = []
    for start, end in pairwise(bounds):
        seen = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], seen, past_key_values=memory).logits)
    assert memory.get_seq_length() == bounds[-1]
    return torch.cat(logits, 1)


@cases()
def test_token_by_token_is_the_whole(case):
    ids = some_ids(2, 21)
    whole = model_of(case)(ids).logits
    assert whole.std() > 0.1
    assert_close(in_pieces(case, ids, range(22)), whole, TOLERANCE)


@cases()
def test_any_split_is_the_whole(case):
    ids = some_ids(2, 70)
    whole = model_of(case)(ids).logits
    generator = torch.Generator().manual_seed(2)
    for pieces in (2, 3, 5):
        cuts = torch.randperm(69, generator=generator)[: pieces - 1].sort().values + 1
        assert_close(in_pieces(case, ids, [0, *cuts.tolist(), 70]), whole, TOLERANCE)


@cases()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_sequences(case, side):
    rows, wanted = separate(case)
    ids, mask = padded_batch(rows, side)
    logits = model_of(case)(ids, mask).logits
    for i, row in enumerate(wanted):
        assert_close(logits[i, mask[i].bool()], row, TOLERANCE)


@cases()
@pytest.mark.parametrize("step", [1, 8])
def test_a_padded_batch_in_pieces_is_its_sequences(case, step):
    """Some sequences are all padding in the first pieces."""
    rows, wanted = separate(case)
    ids, mask = padded_batch(rows)
    logits = in_pieces(case, ids, [*range(0, 23, step), 23], mask)
    for i, row in enumerate(wanted):
        assert_close(logits[i, mask[i].bool()], row, TOLERANCE)


@cases()
def test_padding_between_turns_is_left_out(case):
    """Each turn of two conversations is padded by itself; the mask of the second turn covers both or itself."""
    model = model_of(case)
    first, second = [some_ids(6), some_ids(3, seed=2)], [some_ids(2, seed=3), some_ids(5, seed=4)]
    (ids, mask), (more, more_mask) = padded_batch(first), padded_batch(second)
    for last_mask in (torch.cat((mask, more_mask), 1), more_mask):
        memory = model(ids, mask).past_key_values
        logits = model(more, last_mask, past_key_values=memory).logits
        for i, turns in enumerate(zip(first, second, strict=True)):
            alone = model(torch.cat(turns)[None]).logits[0, len(turns[0]) :]
            assert_close(logits[i, more_mask[i].bool()], alone, TOLERANCE)


@cases()
def test_a_packed_row_is_its_sequences(case):
    rows, wanted = separate(case)
    packed, bounds = torch.cat(rows)[None], F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    model = model_of(case)
    for way in (
        {"cu_seqlens": bounds},
        {"cu_seqlens": bounds, "use_cache": False},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 23, "max_length_k": 23},
        {"position_ids": positions},
        {"position_ids": positions, "use_cache": False},
    ):
        assert_close(model(packed, **way).logits[0], torch.cat(wanted), TOLERANCE, str(list(way)))
    hidden = torch.cat([model.model(row[None]).last_hidden_state[0] for row in rows])
    for way in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": positions}):
        assert_close(model.model(packed, **way).last_hidden_state[0], hidden, TOLERANCE, str(list(way)))


def test_a_packed_row_may_begin_inside_a_document():
    """Positions that begin at 4 and then anew: two sequences, as cu_seqlens would say."""
    ids, model = some_ids(1, 9), model_of("bayesian_layer")
    found = model(ids, position_ids=torch.tensor([[4, 5, 6, 0, 1, 2, 3, 4, 5]])).logits
    assert_close(found, model(ids, cu_seqlens=torch.tensor([0, 3, 9])).logits, TOLERANCE)


@cases()
def test_a_packed_prompt_goes_on_as_a_batch(case):
    model = model_of(case)
    rows = [some_ids(n, seed=n) for n in (6, 2, 9)]
    memory = model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 6, 8, 17])).past_key_values
    after = some_ids(3, 4)
    logits = model(after, past_key_values=memory).logits
    for i, row in enumerate(rows):
        alone = model(torch.cat((row, after[i]))[None]).logits[0, len(row) :]
        assert_close(logits[i], alone, TOLERANCE)


def by_hand(case: str, prompt, tokens: int):
    """Greedy decoding without `generate`."""
    model = model_of(case)
    out, found = model(prompt[None], use_cache=True), []
    for _ in range(tokens):
        found.append(out.logits[:, -1].argmax(-1, keepdim=True))
        out = model(found[-1], past_key_values=out.past_key_values)
    return torch.cat(found, 1)[0]


def generated(case: str, ids, mask, tokens: int, **way):
    greedy = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    return model_of(case).generate(ids, attention_mask=mask, **greedy, **way)[:, ids.shape[1] :]


def assert_every_way_generates_the_same(case: str, tokens: int, tokens_without_cache: int):
    ids, mask = padded_batch(PROMPTS)
    batch = generated(case, ids, mask, tokens)
    assert batch.shape == (3, tokens)
    assert len(batch.unique()) > 3
    assert generated(case, ids, mask, tokens, prefill_chunk_size=4).equal(batch)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        assert generated(case, prompt[None], torch.ones_like(prompt)[None], tokens)[0].equal(row)
    assert by_hand(case, PROMPTS[0], tokens).equal(batch[0])
    n = tokens_without_cache
    assert generated(case, ids, mask, n, use_cache=False).equal(batch[:, :n])


@cases([case for case in FAMILY if case not in EVERY], quick=KINDS)
def test_every_way_generates_the_same_tokens(case):
    assert_every_way_generates_the_same(case, SHORT, 8)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY)
def test_every_way_generates_the_same_200_tokens(case):
    assert_every_way_generates_the_same(case, LONG, 24)


@pytest.mark.slow
@cases()
def test_every_way_generates_the_same_200_tokens_also_without_a_cache(case):
    assert_every_way_generates_the_same(case, LONG, LONG)
