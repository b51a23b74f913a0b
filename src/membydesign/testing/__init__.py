"""The contract that every design must pass, oracles and random problems: for our tests and for yours. Needs pytest."""

from membydesign.testing.closeness import assert_close
from membydesign.testing.contract import DesignContract, assert_states_close, assert_within_table
from membydesign.testing.oracles import Conditioned, condition, transition_matrices
from membydesign.testing.problems import Problem, random_problem, state_after

__all__ = [
    "Conditioned",
    "DesignContract",
    "Problem",
    "assert_close",
    "assert_states_close",
    "assert_within_table",
    "condition",
    "random_problem",
    "state_after",
    "transition_matrices",
]
