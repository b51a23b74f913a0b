"""What agrees with the paper and what does not, for every kind of statement."""

import json
import math

import pytest

from membydesign.reports.comparison import (
    About,
    Bound,
    Comparison,
    Ordering,
    by_claim,
    check_of,
    claims_verdict,
    failing,
    highest,
    lowest,
    numbers,
    printed,
    rising,
    verdict,
)
from membydesign.reports.verdict import Judge

LOSSES = {"ours": 1.50, "kda": 1.60, "gdn": 1.70}


@pytest.mark.parametrize(
    ("check", "agrees"),
    [
        (Comparison("", "", 0.88, 0.884, 0.005), True),
        (Comparison("", "", 0.88, 0.886, 0.005), False),
        (Comparison("", "", 0.88, math.nan, 0.005), False),
        (About("", "", 88, 86.1, 2), True),
        (About("", "", 88, 85.9, 2), False),
        (About("", "", 88, math.nan, 2), False),
        (Bound("", "", "> 0", 1e-9), True),
        (Bound("", "", "> 0", 0.0), False),
        (Bound("", "", "≥ 0", 0.0), True),
        (Bound("", "", ">= 0", -1e-9), False),
        (Bound("", "", "< -0.5", -0.6), True),
        (Bound("", "", "<−.5", -0.4), False),
        (Bound("", "", "≤ 1e-6", 1e-6), True),
        (Bound("", "", "<= 1e-6", 1.1e-6), False),
        (Bound("", "", "> 0", math.nan), False),
        (Bound("", "", "< 0", math.nan), False),
        (lowest("", "", "ours", LOSSES), True),
        (lowest("", "", "ours", LOSSES, margin=0.09), True),
        (lowest("", "", "ours", LOSSES, margin=0.11), False),
        (lowest("", "", "kda", LOSSES), False),
        (lowest("", "", "ours", {**LOSSES, "tie": 1.50}), False),
        (lowest("", "", "ours", {**LOSSES, "diverged": math.nan}), False),
        (highest("", "", "gdn", LOSSES), True),
        (highest("", "", "ours", LOSSES), False),
        (rising("", "", ["ours", "kda", "gdn"], LOSSES), True),
        (rising("", "", ["ours", "gdn", "kda"], LOSSES), False),
        (Ordering("", "", [["kda", "ours"], ["gdn"]], LOSSES), True),
        (Ordering("", "", [["kda", "gdn"], ["ours"]], LOSSES), False),
    ],
)
def test_agreement(check, agrees):
    assert check.agrees is agrees
    row = check.as_dict()
    assert row["agrees"] is agrees
    assert len(check.shown()) == 3
    if "nan" not in str(check):
        assert check_of(json.loads(json.dumps(row))) == check


def test_a_row_without_a_kind_is_a_number():
    row = {"claim": "c", "quantity": "q", "paper": 1.0, "ours": 1.1, "tolerance": 0.2, "agrees": True}
    assert check_of(row) == Comparison("c", "q", 1.0, 1.1, 0.2)


@pytest.mark.parametrize(
    ("check", "shown"),
    [
        (printed("", "", "0.50", 0.5), ("0.50", "0.50000", "0.005")),
        (printed("", "", "57", 57.2), ("57", "57.200", "0.5")),
        (Comparison("", "", 57, 57, 0), ("57", "57", "exact")),
        (Comparison("", "", 0.88, 0.9, 0.02), ("0.88", "0.90000", "0.02")),
        (Comparison("", "", 2500, 2498, 5), ("2500", "2498.000", "5")),
        (About("", "", 88, 87.4, 2), ("≈ 88", "87.40", "2")),
        (Bound("", "", "> 0", 0.42661), ("> 0", "0.4266", "—")),
        (Bound("", "", "> 0.5", 0.500001), ("> 0.5", "0.500001", "—")),
        (lowest("", "", "kda", LOSSES, 0.1), ("kda lowest", "ours 1.5, kda 1.6, gdn 1.7", "by > 0.1")),
        (highest("", "", "gdn", LOSSES), ("gdn highest", "ours 1.5, kda 1.6, gdn 1.7", "—")),
        (lowest("", "", "a", {"a": 1.00001, "b": 1.00002}), ("a < b", "a 1.00001, b 1.00002", "—")),
        (rising("", "", ["b", "a"], {"a": math.nan, "b": 1.0}), ("b < a", "b 1, a nan", "—")),
    ],
)
def test_how_they_are_shown(check, shown):
    assert check.shown() == shown


def test_different_numbers_look_different():
    assert numbers([12345.6, 12345.7]) == ["12345.6", "12345.7"]
    assert numbers([1234567.0, 2e-15, math.inf]) == ["1234567", "2e-15", "inf"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bound("", "gain", "about 3", 1.0), "paper: expected >, ≥, < or ≤ .*'gain', got 'about 3'"),
        (lambda: Bound("", "gain", "> 1.2.3", 1.0), "got '> 1.2.3'"),
        (lambda: About("", "gain", 3, 3, 0), "within: expected a number above 0 for 'gain', got 0"),
        (lambda: lowest("", "", "mamba", LOSSES), "order: expected each of .*'gdn', 'kda', 'ours'.* once, got .*mamba"),
        (lambda: rising("", "", ["kda"], LOSSES), "order: expected each of"),
        (lambda: rising("", "", ["kda"], {"kda": 1.0}), "order: expected two groups or more"),
        (lambda: lowest("", "", "kda", {"kda": 1.0}), "order: expected two groups or more, none empty"),
        (lambda: lowest("", "loss", "kda", LOSSES, -1), "margin: expected at least 0 for 'loss', got -1"),
        (lambda: check_of({"kind": "guess"}), "kind: expected one of number, about, bound, ordering, got 'guess'"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_claim_holds_if_all_its_comparisons_agree():
    good, bad = Bound("A", "", "> 0", 1.0), Bound("B", "", "> 0", -1.0)
    also_bad = Bound("C", "", "> 0", -1.0)
    checks = [good, bad, good, Bound("B", "", "> 0", 1.0), also_bad]
    assert list(by_claim(checks)) == ["A", "B", "C"]
    assert failing(checks) == ["B", "C"]
    assert verdict(checks) == "3 of 5 comparisons agree"
    assert claims_verdict(checks) == "1 of 3 claims hold; these do not: B; C"
    assert claims_verdict([good, bad]) == "1 of 2 claims hold; this does not: B"
    assert claims_verdict([good]) == "1 of 1 claim holds"
    assert claims_verdict([]) == "no claim was compared"


def test_a_claim_that_was_not_tested_is_not_counted():
    good, small = Bound("A", "x", "> 0", 1.0), Bound("B", "y", "> 0", -1.0, tested=False)
    assert claims_verdict([good, small]) == "1 of 1 claim holds; not tested at this size: B"
    assert claims_verdict([small]) == "no claim was tested at this size"
    assert verdict([good, small]) == "1 of 1 comparisons agree"
    assert (small.as_dict()["agrees"], small.as_dict()["tested"]) == (None, False)
    assert check_of(small.as_dict()) == small
    assert check_of(good.as_dict()) == good
    assert "tested" not in good.as_dict()
    judge = Judge("cpu")
    assert judge.claims([good, small]).good is True
    assert judge.claim([small]) == ("not tested at this size", None)
