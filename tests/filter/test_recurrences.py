"""Relatives that keep no covariance: the contract, and the formulas of their papers, written out as dense matrices."""

from dataclasses import replace

import torch.nn.functional as F

from membydesign import catalogue
from membydesign.testing import DesignContract, assert_close

DESIGNS = {
    "gated_deltanet_2": catalogue["gated_deltanet_2"],
    "deltaproduct": catalogue["deltaproduct"],
    "preconditioned_deltanet": catalogue["preconditioned_deltanet"],
    "comba": catalogue["comba"],
    "mlstm": catalogue["mlstm"],
}
WAYS = {
    "Recurrent": {"method": "recurrent"},
    "Chunk": {"method": "chunk", "chunk_size": 4},  # so that a few tokens are several chunks, the last one ragged
    "Native": {"method": "chunk", "backend": "native"},
}
LONG_LOOPS = ("deltaproduct", "mlstm")


def with_unit_keys(problem):
    """Delta rules are stable for keys of length one."""
    parameters = dict(problem.parameters)
    if "earlier_keys" in parameters:
        parameters["earlier_keys"] = F.normalize(parameters["earlier_keys"], dim=-1)
    return replace(problem, k=F.normalize(problem.k, dim=-1), parameters=parameters)


class Contract(DesignContract):
    __test__ = False

    def prepare(self, problem):
        return with_unit_keys(problem)

    def test_output_is_linear_in_the_values(self):
        """The values of a token's earlier writes are step parameters."""
        problem = self.problem()
        parameters = {n: 2 * x if n == "earlier_values" else x for n, x in problem.parameters.items()}
        doubled = replace(problem, v=2 * problem.v, parameters=parameters)
        assert_close(doubled.filter().output, 2 * problem.filter().output, 1e-12)


for _name, _design in DESIGNS.items():
    for _way, _options in WAYS.items():
        _more = {"design": _design, "__test__": True, **_options}
        if _way == "Recurrent" and _name not in LONG_LOOPS:
            _more["test_65536_tokens_in_float32"] = None
        if _way != "Recurrent":
            _more["test_every_kernel_equals_the_loop"] = _more["test_bad_arguments_are_refused_by_name"] = None
            _more["test_the_loop_equals_an_oracle"] = None
        _title = f"Test{_way}_{_name}"
        globals()[_title] = type(_title, (Contract,), _more)
