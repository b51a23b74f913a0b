"""Answers of models: scores as RULER's, generation, resumption, tables and heat maps."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from membydesign.evaluation.generation import batch_for, generate_greedy
from membydesign.evaluation.niah import NIAH
from membydesign.evaluation.niah import scores as niah_scores
from membydesign.evaluation.niah.haystack import Essays
from membydesign.evaluation.niah.run import Answered, answer, contained, read_answers, ruler_score
from membydesign.experiments.shared import niah_figures, niah_tables
from models.family import fresh_model, model_of, some_ids
from tiny_tokenizers import bytes_tokenizer

ESSAYS = Essays(" ".join(f"This is sentence {i} of the essay." for i in range(300)))
BYTES = bytes_tokenizer()
TASKS = ["niah_single_1", "niah_multikey_1", "niah_multivalue"]


class Finder:
    """Not a model but something that reads needles, if they stand in the first part of the text, and says them."""

    def __init__(self, share: float = 1.0, die_after: int | None = None) -> None:
        self.share, self.left, self.asked = share, die_after, 0
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def get_input_embeddings(self):
        return torch.nn.Embedding(257, 1)

    def eval(self):
        return self

    def generate(self, ids, attention_mask, max_new_tokens, do_sample, use_cache):
        assert not do_sample
        assert use_cache
        if self.left == 0:
            raise KeyboardInterrupt
        self.left = None if self.left is None else self.left - 1
        self.asked += len(ids)
        rows = []
        for row, mask in zip(ids, attention_mask, strict=True):
            text = str(BYTES.decode(row[mask.bool()]))
            needles = re.findall(r"special magic \w+ for (\S+) is: (\S+)\.", text[: int(self.share * len(text))])
            query = text.rsplit("?", 1)[1]
            said = "; ".join(value for key, value in needles if key in query).upper()
            new = BYTES(said)["input_ids"][:max_new_tokens]
            rows.append(torch.tensor([*row.tolist(), *new, *[0] * (max_new_tokens - len(new))]))
        return torch.stack(rows)


def niah() -> NIAH:
    return NIAH(BYTES, ESSAYS)


def ask(model, **options) -> list[Answered]:
    return answer(model, niah(), **{"tasks": TASKS, "lengths": [1500, 2000], "samples": 5, **options})


# Scores


def test_the_score_is_rulers():
    """`string_match_all`: the share of references that a prediction contains, in small letters, averaged."""
    assert ruler_score(["a 123 b", "456"], [["123"], ["456"]]) == 100.0
    assert ruler_score(["a 123 b", "none"], [["123"], ["456"]]) == 50.0
    assert ruler_score(["1 and 2", "3"], [["1", "2", "3", "4"], ["3"]]) == 75.0
    assert ruler_score(["ABC-Def"], [["abc-dEF"]]) == 100.0
    assert ruler_score(["12 34"], [["1234"]]) == 0.0
    assert contained("7654321, 1234567", ["1234567", "1111111"]) == (True, False)


def test_what_is_kept_of_a_sample():
    made = niah().sample("niah_multikey_1", 1500, 2)
    one = Answered.of(made, f" {made.answers[0]}.")
    assert (one.score, one.correct) == (100.0, (True,))
    assert one.depths == (made.queried[0].depth,)
    assert sorted((*one.depths, *one.other_depths)) == [needle.depth for needle in made.needles]
    several = niah().sample("niah_multivalue", 1500, 2)
    half = Answered.of(several, " and ".join(several.answers[1:3]))
    assert (half.score, half.correct) == (50.0, (False, True, True, False))
    assert half.depths == tuple(needle.depth for needle in several.queried)


# Running


def test_everything_is_asked_and_found():
    steps = []
    found = ask(Finder(), progress=lambda done, total: steps.append((done, total)))
    assert [one.key for one in found] == [(task, n, i) for task in TASKS for n in (1500, 2000) for i in range(5)]
    assert {one.score for one in found} == {100.0}
    assert steps[0] == (0, 30)
    assert steps[-1] == (30, 30)
    assert {one.prompt_sha256 for one in found} == {niah().sample(*one.key).fingerprint for one in found}


def test_batches_have_one_task_and_length():
    assert batch_for(2048) == 8
    assert batch_for(100_000) == 1
    assert batch_for(2048, 3) == 3
    sizes = []

    class Counting(Finder):
        def generate(self, ids, *args, **options):
            sizes.append(len(ids))
            return super().generate(ids, *args, **options)

    ask(Counting(), batch_size=3)
    assert sizes == [3, 2] * 6


def test_a_run_that_was_stopped_goes_on_to_the_same(tmp_path):
    whole = ask(Finder(0.5), file=tmp_path / "whole.jsonl", batch_size=2)
    file = tmp_path / "deep" / "stopped.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(Finder(0.5, die_after=4), file=file, batch_size=2)
    assert len(read_answers(file)) == 7
    with file.open("a") as opened:
        opened.write('{"task": "niah_single_1", "len')  # as a kill may leave it
    assert len(read_answers(file)) == 7
    model = Finder(0.5)
    assert ask(model, file=file, batch_size=2) == whole
    assert model.asked == 23
    assert sorted(file.read_text().splitlines()) == sorted((tmp_path / "whole.jsonl").read_text().splitlines())
    assert ask(Finder(die_after=0), file=file) == whole  # nothing is left to ask
    more = ask(model, file=file, samples=6)
    assert [one for one in more if one.index < 5] == whole


def test_other_seeds_are_not_mixed(tmp_path):
    ask(Finder(), file=tmp_path / "a.jsonl", samples=1)
    with pytest.raises(ValueError, match="seed: expected that of .*a.jsonl, 0, got 1"):
        ask(Finder(), file=tmp_path / "a.jsonl", samples=1, seed=1)


def test_other_prompts_are_not_mixed(tmp_path):
    options = {"tasks": ["niah_single_2"], "lengths": [1500], "samples": 1, "file": tmp_path / "a.jsonl"}
    answer(Finder(), niah(), **options)
    other = NIAH(BYTES, Essays("Other essays. They are short."))
    with pytest.raises(ValueError, match="file: expected answers to these samples in .*a.jsonl, got answers to other"):
        answer(Finder(), other, **options)


def test_letters_that_end_lines_elsewhere_do_not_end_lines(tmp_path):
    one = Answered.of(niah().sample("niah_single_2", 1500, 0), "a\u2028b\x85c\rd\ne")
    (tmp_path / "a.jsonl").write_text(json.dumps(one.__dict__, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_answers(tmp_path / "a.jsonl") == [one]


def test_files_of_others_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"task": "x"}\n')
    with pytest.raises(ValueError, match="file: expected lines with task, length, .*got another in line 1"):
        read_answers(tmp_path / "a.jsonl")


def test_too_short_a_length_is_refused_before_anything_is_asked():
    model = Finder()
    with pytest.raises(ValueError, match="length: expected at least .* tokens for niah_multivalue .*, got 900"):
        ask(model, tasks=["niah_single_2", "niah_multivalue"], lengths=[2000, 900])
    assert not model.asked


def test_a_tokenizer_with_more_tokens_than_the_model():
    with pytest.raises(ValueError, match="tokenizer: expected tokens below the model's vocabulary size 61, got token"):
        ask(fresh_model(), samples=1)


# Generation


def test_a_batch_says_what_each_prompt_alone_would():
    """Greedy search by hand, token by token, without a cache or padding."""
    model = model_of("bayesian_layer+attention")
    prompts = [some_ids(n, seed=n).tolist() for n in (5, 9, 2)]
    found = generate_greedy(model, prompts, 6)
    for prompt, said in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(6):
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
        assert said == ids[0, len(prompt) :].tolist()
    assert generate_greedy(model, prompts, 6, use_cache=False) == found


def test_a_checkpoints_own_ways_to_sample_change_nothing():
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    plain = generate_greedy(model, [[5, 7, 9]], 12)
    assert len(plain[0]) == 12
    own = model.generation_config
    own.update(do_sample=True, temperature=0.3, top_k=3, repetition_penalty=9.0, eos_token_id=[plain[0][8]])
    stop = plain[0].index(plain[0][8])
    assert generate_greedy(model, [[5, 7, 9]], 12) == [plain[0][:stop]]
    assert model.generation_config is own


# Scores by task, length and depth


@pytest.fixture(scope="module")
def pair() -> tuple[list[Answered], list[Answered]]:
    return ask(Finder(), samples=20), ask(Finder(0.5), samples=20)


def test_deciles():
    assert [niah_scores.decile(d) for d in (0, 0.08, 0.1, 0.49, 0.9, 0.97, 1.0)] == [0, 0, 1, 4, 9, 9, 9]


def test_every_needle_counts_at_its_own_depth(pair):
    _, half = pair
    rows = niah_scores.by_depth(half, niah_scores.task_of)
    assert list(rows) == TASKS
    for task in TASKS:
        mine = [one for one in half if one.task == task]
        for decile, cell in enumerate(rows[task]):
            wanted = [
                correct
                for one in mine
                for depth, correct in zip(one.depths, one.correct, strict=True)
                if decile / 10 <= depth < (decile + 1) / 10 or (decile == 9 and depth == 1)
            ]
            assert (0 if cell is None else cell.count) == len(wanted)
            if cell is not None:
                assert cell.mean == pytest.approx(100 * sum(wanted) / len(wanted))
    counts = [sum(cell.count for cell in cells if cell) for cells in rows.values()]
    assert counts == [40, 40, 160]
    early, late = rows["niah_multivalue"][0], rows["niah_multivalue"][9]
    assert early is not None
    assert late is not None
    assert (early.mean, late.mean) == (100.0, 0.0)


def test_every_task_counts_the_same_at_a_length(pair):
    _, half = pair
    cells = niah_scores.by_depth(half, niah_scores.length_and_task)
    assert set(cells) == {(length, task) for length in (1500, 2000) for task in TASKS}
    rows = niah_scores.over_tasks(cells)
    assert list(rows) == [1500, 2000]
    for length, row in rows.items():
        for decile, cell in enumerate(row):
            shares = []
            for task in TASKS:
                found = [
                    correct
                    for one in half
                    for depth, correct in zip(one.depths, one.correct, strict=True)
                    if (one.task, one.length) == (task, length) and niah_scores.decile(depth) == decile
                ]
                shares += [100 * sum(found) / len(found)] if found else []
            assert cell is not None
            assert cell.mean == pytest.approx(sum(shares) / len(shares))
            of_tasks = [cells[length, task][decile] for task in TASKS]
            assert cell.count == sum(one.count for one in of_tasks if one is not None)


def test_scores_by_task(pair):
    _, half = pair
    rows = niah_scores.by_task(half)
    assert list(rows) == [1500, 2000]
    for length, cells in rows.items():
        for task, cell in cells.items():
            mine = [one for one in half if (one.task, one.length) == (task, length)]
            assert cell.count == 20
            said, right = [one.generation for one in mine], [one.answers for one in mine]
            assert cell.mean == pytest.approx(ruler_score(said, right))
    assert niah_scores.mean_of_tasks(rows[1500]) == pytest.approx(sum(c.mean for c in rows[1500].values()) / 3)


def test_differences_are_of_the_samples_that_both_answered(pair):
    all_, half = pair
    first, second = niah_scores.common(all_[:-7], half)
    assert len(first) == len(second) == len(all_) - 7
    assert [one.key for one in first] == [one.key for one in second]
    cells = niah_scores.difference_by_task(first, second)[1500]
    assert cells["niah_multivalue"].mean == pytest.approx(100 - niah_scores.by_task(half)[1500]["niah_multivalue"].mean)
    gaps = torch.tensor(
        [a.score - b.score for a, b in zip(first, second, strict=True) if a.key[:2] == (TASKS[0], 1500)]
    )
    assert cells[TASKS[0]].standard_error == pytest.approx(float(gaps.std() / len(gaps) ** 0.5))
    by_depth = niah_scores.over_tasks(niah_scores.difference_by_depth(first, second, niah_scores.length_and_task))
    assert by_depth[1500][0].mean == 0.0  # type: ignore[union-attr]
    assert by_depth[1500][9].mean == 100.0  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="results: expected samples of the same task, length and number"):
        niah_scores.common(all_[:3], half[50:])


def test_tables(pair):
    all_, half = pair
    by_task, by_length, of_tasks, of_both = niah_tables.scores_tables(half)
    assert by_task.headings == ["context", "single_1", "multikey_1", "multivalue", "mean"]
    assert [row[0] for row in by_task.rows] == ["1,500", "2,000"]
    assert "(20*)" in str(by_task.rows[0][1])
    assert [row[0] for row in of_tasks.rows] == ["single_1", "multikey_1", "multivalue"]
    assert len(by_length.rows[0]) == len(of_both.rows[0]) == 11
    assert [row[0] for row in of_both.rows] == [
        f"{length} {task}" for length in ("1,500", "2,000") for task in ("single_1", "multikey_1", "multivalue")
    ]
    marked = re.findall(r"\((\d+)\*\)", str(by_length.rows))
    unmarked = re.findall(r"\((\d+)\)", str(by_length.rows))
    assert all(int(n) < 30 for n in marked)
    assert all(int(n) >= 30 for n in unmarked)
    assert len(marked) + len(unmarked) == 20
    first, *_ = niah_tables.difference_tables(all_, half)
    assert re.match(r"\+\d+\.\d ± \d+\.\d \(20\*\)", str(first.rows[0][1]))
    metrics = niah_tables.difference_metrics(all_, half)
    assert metrics["same_prompts"] == metrics["samples"] == 120
    plain = json.loads(json.dumps(niah_tables.scores_metrics(half)))
    assert plain["by_task"]["1500"]["niah_single_1"]["count"] == 20
    cells = plain["by_length_task_and_depth"]["1500"]["niah_multivalue"]
    assert sum(cell["count"] for cell in cells if cell) == 80


def test_heat_maps(pair, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(niah_figures, "save", lambda drawing, path: drawn.append(drawing) or path)
    [(caption, path)] = niah_figures.plot(pair[0], pair[1], ("ours", "theirs"), tmp_path).items()
    assert path == tmp_path / "niah_difference.png"
    assert "Green: ours finds more" in caption
    left, right = drawn[0].axes[:2]
    assert [label.get_text() for label in left.get_yticklabels()] == ["1,500", "2,000"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["single_1", "multikey_1", "multivalue"]
    wanted = niah_scores.difference_by_depth(pair[0], pair[1], niah_scores.task_of)
    few = [cell for task in TASKS for cell in wanted[task] if cell is not None and cell.count < 30]
    assert len(right.patches) == len(few) > 0
    image = right.images[0]
    green, pink = image.cmap(1.0), image.cmap(0.0)
    assert green[1] > max(green[0], green[2])
    assert pink[0] > pink[1]
    assert image.get_clim() == (-15.0, 15.0)
    shown = [cell.mean for cell in wanted["niah_multivalue"] if cell is not None]
    assert image.get_array()[2].compressed().tolist() == pytest.approx(shown)
