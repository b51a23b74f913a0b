"""The contract that every design must pass, oracles and random problems: for our tests and for yours.

Random problems and oracles need torch alone; the contract, which is a class of tests, needs pytest.
"""

from typing import TYPE_CHECKING, Any

from membydesign.testing.closeness import assert_close
from membydesign.testing.oracles import Conditioned, condition, transition_matrices
from membydesign.testing.problems import Problem, random_problem, state_after

if TYPE_CHECKING:
    from membydesign.testing.contract import DesignContract, assert_states_close, assert_within_table

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from membydesign.testing import contract

    return getattr(contract, name)
