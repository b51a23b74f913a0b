"""Samples, field by field, against the rules of NVIDIA/RULER's scripts/data/synthetic/niah.py and synthetic.yaml."""

import json
import re
import uuid
from collections import Counter
from itertools import pairwise

import pytest

from membydesign.evaluation.niah.haystack import DEPTHS, NOISE, Essays, Noise, embedded_prose, read_essays
from membydesign.evaluation.niah.samples import NIAH, Sample, _Drawn
from membydesign.evaluation.niah.tasks import TASKS
from membydesign.evaluation.niah.words import ADJECTIVES, NOUNS
from membydesign.evaluation.tokens import Encoder
from tiny_tokenizers import bytes_tokenizer, words_tokenizer

# haystack, what values are, keys, values, queries
RULER = {
    "niah_single_1": ("noise", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "numbers", 4, 1, 1),
    "niah_multivalue": ("essay", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "numbers", 4, 1, 4),
}
SENTENCES = [f"This is sentence {i} of the essay." for i in range(300)]
ESSAYS = Essays(" ".join(SENTENCES))
LENGTH = 1200

tasks = pytest.mark.parametrize("task", RULER)


def niah(**options) -> NIAH:
    return NIAH(words_tokenizer(), ESSAYS, **options)


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    made = niah()
    return {task: [made.sample(task, LENGTH, index) for index in range(40)] for task in RULER}


def context_of(sample: Sample) -> str:
    return sample.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]


def test_the_tasks_are_rulers():
    assert {t.name: (t.haystack, t.kind, t.keys, t.values, t.queries) for t in TASKS.values()} == RULER


@tasks
def test_needles(task, samples):
    _, kind, keys, values, queries = RULER[task]
    for sample in samples[task]:
        assert len(sample.needles) == keys * values
        assert len({needle.key for needle in sample.needles}) == keys
        assert len({needle.value for needle in sample.needles}) == keys * values
        for needle in sample.needles:
            assert needle.text == f"One of the special magic {kind} for {needle.key} is: {needle.value}."
            assert context_of(sample).count(needle.text) == 1
            adjective, noun = needle.key.split("-")
            assert adjective in ADJECTIVES
            assert noun in NOUNS
            if kind == "numbers":
                assert re.fullmatch("[1-9][0-9]{6}", needle.value)
            else:
                assert uuid.UUID(needle.value).version == 4
                assert str(uuid.UUID(needle.value)) == needle.value
        asked = list(dict.fromkeys(needle.key for needle in sample.queried))
        assert len(asked) == queries
        assert sample.answers == tuple(n.value for key in asked for n in sample.queried if n.key == key)
        assert len(sample.answers) == queries * values
        assert set(sample.queried) <= set(sample.needles)


@tasks
def test_wording(task, samples):
    """Singular if one value is asked for, plural otherwise, and the answer's beginning after the question."""
    _, kind, _, values, queries = RULER[task]
    for sample in samples[task]:
        keys = list(dict.fromkeys(needle.key for needle in sample.queried))
        query = keys[0] if queries == 1 else "{}, {}, {}, and {}".format(*keys)
        one = kind[:-1]
        if queries * values == 1:
            before = f"A special magic {one} is hidden within the following text. Make sure to memorize it. "
            before += f"I will quiz you about the {one} afterwards.\n"
            after = f"\nWhat is the special magic {one} for {query} mentioned in the provided text?"
            prefix = f" The special magic {one} for {query} mentioned in the provided text is"
        else:
            before = f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
            before += f"I will quiz you about the {kind} afterwards.\n"
            after = f"\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
            prefix = f" The special magic {kind} for {query} mentioned in the provided text are"
        assert sample.answer_prefix == prefix
        assert sample.prompt == before + context_of(sample) + after + prefix


def ruler_essay(sentences: list[str], needles: list[str], depths: list[float]) -> str:
    """As RULER puts needles at sorted positions: pieces between them, empty ones too, with a space after each."""
    positions = [0, *sorted(int(len(sentences) * depth) for depth in depths), len(sentences)]
    pieces = []
    for i in range(1, len(positions)):
        pieces.append(" ".join(sentences[positions[i - 1] : positions[i]]))
        if i - 1 < len(needles):
            pieces.append(needles[i - 1])
    return " ".join(pieces)


@pytest.mark.parametrize("task", [name for name in RULER if RULER[name][0] == "essay"])
def test_needles_stand_between_sentences(task, samples):
    for sample in samples[task]:
        depths = [needle.depth for needle in sample.needles]
        assert depths == sorted(depths)
        assert len(set(depths)) == len(depths)
        assert {round(100 * depth) for depth in depths} <= set(DEPTHS)
        words = " ".join(SENTENCES).split()[: sample.units]
        sentences = re.findall(r"[^.]+\.|[^.]+$", " ".join(words))
        sentences = [sentence.strip() for sentence in sentences]
        needles = [needle.text for needle in sample.needles]
        assert context_of(sample) == ruler_essay(sentences, needles, depths)


def test_the_depths_are_forty_and_each_is_drawn():
    assert len(DEPTHS) == len(set(DEPTHS)) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[2], DEPTHS[-2], DEPTHS[-1]) == (0, 3, 5, 97, 100)
    made = niah()
    drawn = Counter(
        round(100 * needle.depth)
        for index in range(200)
        for needle in made._made(_Drawn.of("niah_multiquery", LENGTH, 0, index), 50).needles
    )
    assert set(drawn) == set(DEPTHS)
    assert max(drawn.values()) < 3 * 20  # 800 draws of 40 depths


def test_noise(samples):
    lines_of_depths = Counter()
    for sample in samples["niah_single_1"]:
        lines = context_of(sample).split("\n")
        [needle] = sample.needles
        assert len(lines) == sample.units + 1
        place = lines.index(needle.text)
        assert needle.depth == place / sample.units
        assert place < sample.units  # RULER draws from the lines, so that one always follows
        assert lines[:place] + lines[place + 1 :] == [NOISE] * sample.units
        lines_of_depths[place] += 1
    assert len(lines_of_depths) > 10
    assert NOISE.count(".") == 5


def test_places_at_the_ends_and_twice():
    words = "This is sentence 0 of the"
    assert ESSAYS.hide(["A.", "B.", "C."], [0.0, 0.0, 1.0], 6) == f" A.  B. {words} C. "
    lines = Noise().hide(["A.", "B.", "C."], [0.0, 0.5, 5 / 6], 6).split("\n")
    assert lines == ["A.", NOISE, NOISE, NOISE, "B.", NOISE, NOISE, "C.", NOISE]


# Length


@pytest.mark.parametrize("tokenizer", [words_tokenizer(), bytes_tokenizer(), words_tokenizer(begin=True)], ids=range(3))
@tasks
def test_as_much_haystack_as_fits(task, tokenizer):
    made = NIAH(tokenizer, ESSAYS)
    encode = Encoder(tokenizer)
    for length in (1150, 1700):
        sample = made.sample(task, length, 3)
        assert list(sample.token_ids) == encode(sample.prompt)
        assert len(sample.token_ids) + 128 <= length
        longer = made._made(_Drawn.of(task, length, 0, 3), sample.units + 1)
        assert len(longer.token_ids) + 128 > length


def test_few_tokenisations_are_enough():
    calls = 0

    def counting(text, **options):
        nonlocal calls
        calls += len(text) > 2000
        return words_tokenizer()(text, **options)

    made = NIAH(counting, ESSAYS)
    for index in range(10):
        made.sample("niah_multikey_1", 4000, index)
    assert calls <= 40


def test_a_haystack_that_is_too_short_begins_anew():
    short = Essays("One sentence. Another sentence here. ")
    sample = NIAH(words_tokenizer(), short).sample("niah_single_2", 900, 0)
    assert context_of(sample).count("Another sentence here.") > 20
    plain = context_of(sample).replace(sample.needles[0].text, "")
    assert Counter(plain.split()).keys() == {"One", "sentence.", "Another", "sentence", "here."}
    assert short.sentences(10) == 4
    assert short.text(3, 8) == "sentence here. One sentence. Another"


def named_length(error: ValueError) -> int:
    [number] = re.findall(r"at least ([0-9,]+)", str(error))
    return int(number.replace(",", ""))


@tasks
def test_a_length_that_is_too_short_is_refused_with_the_shortest_that_would_do(task):
    made = niah()
    with pytest.raises(ValueError, match=f"^length: expected at least [0-9,]+ tokens for {task} .*, got 150") as caught:
        made.sample(task, 150, 0)
    needed = named_length(caught.value)
    assert len(made._made(_Drawn.of(task, 150, 0, 0), made._least(TASKS[task])).token_ids) + 128 == needed
    with pytest.raises(ValueError, match="^length: expected at least") as caught:
        made.check_length(task, needed - 5, 30)
    least = named_length(caught.value)
    made.check_length(task, least + 20, 30)
    for index in range(3):
        assert len(made.sample(task, least + 20, index).token_ids) + 128 <= least + 20


def test_tokens_for_the_answer_may_be_fewer():
    assert len(niah(new_tokens=10).sample("niah_single_2", 700, 0).token_ids) in (688, 689, 690)


# The same again


@tasks
def test_a_sample_depends_on_its_number_alone(task, samples):
    made = niah()
    assert made.sample(task, LENGTH, 17) == samples[task][17]
    assert made.sample(task, LENGTH, 3) == samples[task][3]
    prompts = {sample.fingerprint for sample in samples[task]}
    assert len(prompts) == 40
    others = [made.sample(task, LENGTH, 3, seed=1), made.sample(task, LENGTH + 1, 3)]
    assert {other.answers for other in others}.isdisjoint({sample.answers for sample in samples[task]})


def test_values_and_depths_are_those_of_every_tokenizer(samples):
    other = NIAH(bytes_tokenizer(), ESSAYS).sample("niah_multivalue", LENGTH, 5)
    same = samples["niah_multivalue"][5]
    assert other.needles == same.needles
    assert other.prompt != same.prompt


# Haystacks


def test_essays_from_files(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps({"text": "Second  essay.\nIt has two sentences."}))
    (tmp_path / "a.txt").write_text("First essay\tof Dr. Smith, e.g. in the U.S. It ends here.")
    (tmp_path / "c.csv").write_text("not,read")
    essays = read_essays(tmp_path)
    assert " ".join(essays.words).startswith("First essay of Dr. Smith, e.g. in the U.S. It ends here. Second essay.")
    assert read_essays(tmp_path / "b.json").sentences(6) == 2
    assert read_essays(tmp_path / "b.json").fingerprint != essays.fingerprint == read_essays(tmp_path).fingerprint


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('He said "no." Then he left! Did he? Yes.', ['He said "no."', "Then he left!", "Did he?", "Yes."]),
        ("Dr. Smith met J. Doe at 3.5 m. It was late.", ["Dr. Smith met J. Doe at 3.5 m.", "It was late."]),
        (
            "Costs e.g. Rent and so on... Next (really.) And end",
            ["Costs e.g. Rent and so on...", "Next (really.)", "And end"],
        ),
        ("No capital. follows here. 12 does.", ["No capital. follows here.", "12 does."]),
    ],
)
def test_sentences(text, sentences):
    essays = Essays(text)
    count = essays.sentences(len(essays.words))
    starts = [essays.start_of(i) for i in range(count)] + [len(essays.words)]
    assert [essays.text(a, b) for a, b in pairwise(starts)] == sentences


def test_the_embedded_haystack_is_prose():
    prose = embedded_prose()
    assert len(prose.split()) > 10_000
    assert not re.search(r"::=|>>>|\n|  |[{}\[\]<>=\\|_]", prose)
    essays = read_essays("embedded")
    assert essays.sentences(5000) > 150
    assert len(set(prose.split(". "))) > 0.95 * len(prose.split(". "))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing", None, "essays: expected 'embedded', a file or a folder, got no such path"),
        ("empty.txt", " \n ", "essays: expected words in"),
        ("list.json", "[1]", 'essays: expected JSON with {"text": "…"}'),
        ("broken.json", "{", "essays: expected UTF-8 text, or JSON, in"),
    ],
)
def test_essays_that_are_none(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_essays(tmp_path / name)


def test_a_folder_without_essays(tmp_path):
    with pytest.raises(ValueError, match=r"essays: expected .txt or .json files in"):
        read_essays(tmp_path)


def test_a_task_that_is_none():
    with pytest.raises(ValueError, match="^task: expected one of niah_single_1, .*, got 'niah_single_9'"):
        niah().sample("niah_single_9", 1000, 0)


# Tokens


def test_what_a_tokenizer_puts_before_a_prompt_stays_and_what_it_puts_behind_does_not():
    encode = Encoder(words_tokenizer(begin=True))
    plain = Encoder(words_tokenizer()).stream("To be or not")
    assert encode("To be or not") == [0, *plain]
    assert encode.stream("To be or not") == plain
    assert encode.decode([0, *plain, 1]) == "To be or not"
    assert encode.padding == 1
    assert Encoder(bytes_tokenizer()).padding == 0
