"""Layers and models as ONNX graphs, run by ONNX Runtime: its operators are the reference from outside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import membydesign as mbd
from membydesign.filter.kernels import onnx_operator
from membydesign.layers import AttentionBelief, FilterLayer, SequenceLayer

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from membydesign.integrations.onnx import export  # noqa: E402

LINEAR_ATTENTION = {
    "covariance_reset",
    "deltanet",
    "gated_deltanet",
    "kda",
    "linear_attention",
    "retnet",
    "gla",
    "mamba2",
}
IMPOSSIBLE = {"low_rank", "mesa_net", "gated_kalmanet"}
"""Designs whose steps factorise matrices. All that are in neither set run as a Scan."""
OWN = mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(groups=2), mbd.Dense(prior=3.0), title="My memory")


def session_of(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def closeness(ours, theirs):
    """The largest difference, relative to the largest number."""
    return float((torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max().clamp_min(1.0))


def largest_difference(layer, exported, pieces, batch):
    """The largest difference of outputs and states between a layer and its graph over pieces of a sequence."""
    session, belief, state, worst = session_of(exported.path), None, {}, 0.0
    with torch.no_grad():
        for T in pieces:
            x = torch.randn(batch, T, layer.hidden_size)
            y, belief = layer(x, belief)
            theirs = session.run(None, {"x": x.numpy(), **state})
            state = dict(zip(exported.inputs[1:], theirs[1:], strict=True))
            ours = [y, *(part for _, part in belief.parts())]
            worst = max(worst, *map(closeness, ours, theirs))
    return worst


def trained(layer):
    """A layer whose step parameters depend on its input, as after training."""
    with torch.no_grad():
        for name, x in layer.named_parameters():
            if not x.any():
                x.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return layer


def test_which_operator_runs_which_design():
    """Without tracing; the slow test below shows that it is true of every layer."""
    operators = {name: onnx_operator(design).operator for name, design in mbd.catalogue.items()}
    expected = {name: "LinearAttention" if name in LINEAR_ATTENTION else "Scan" for name in mbd.catalogue}
    assert operators == {**expected, **dict.fromkeys(IMPOSSIBLE)}
    assert "MesaNet computes cholesky_solve" in onnx_operator(mbd.catalogue["mesa_net"]).reason


QUICK = {
    "gated_deltanet": mbd.make_layer("gated_deltanet", 32, num_heads=2, head_dim=16),
    "own design": mbd.MemoryLayer(OWN, 32, num_heads=2, head_dim=8, method="recurrent"),
    "attention": mbd.make_layer("attention", 32, num_heads=4, head_dim=8, num_key_heads=2),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_graph_computes_what_the_layer_does(name, tmp_path):
    torch.manual_seed(0)
    layer = trained(QUICK[name])
    exported = export(layer, tmp_path / "layer.onnx")
    assert exported.difference is not None
    assert exported.difference < 1e-5
    assert largest_difference(layer, exported, (20, *[1] * 10, 3), batch=3) < 1e-5
    assert largest_difference(layer, exported, (1, 5), batch=1) < 1e-5


class _Unsure(nn.Module):
    """A module of a user's own around a filter."""

    def forward(self, q, k, v):
        options: dict[str, Any] = {"log_decay": -0.1, "process_noise": 0.1, "write_noise": 0.2}
        out = mbd.filter_sequence(
            mbd.catalogue["bayesian_layer"], q, k, v, **options, return_variance=True, return_evidence=True
        )
        return out.output, out.variance, out.write_log_evidence, out.log_evidence


@pytest.mark.filterwarnings("ignore")  # of torch's exporter, which the user calls here
def test_torch_exports_a_module_around_a_filter(tmp_path):
    torch.manual_seed(0)
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 2, 5, 2, 4), dim=-1)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(_Unsure(), (q, k, v), dynamo=True, dynamic_shapes=[dynamic] * 3, verbose=False)
    assert program is not None
    program.save(tmp_path / "filter.onnx")
    session = session_of(tmp_path / "filter.onnx")
    inputs = torch.nn.functional.normalize(torch.randn(3, 3, 40, 2, 4), dim=-1)
    names = [each.name for each in session.get_inputs()]
    theirs = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    for ours, other in zip(_Unsure()(*inputs), theirs, strict=True):
        assert closeness(ours, other) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in mbd.layers.LAYERS if name not in QUICK])
def test_every_layer_is_exported_or_refused_by_name(name, tmp_path):
    torch.manual_seed(0)
    layer = mbd.make_layer(name, 32, num_heads=2, head_dim=16)
    operator = onnx_operator(layer.design, 16, layer.value_dim).operator if isinstance(layer, FilterLayer) else None
    if operator is None:
        with pytest.raises(ValueError, match=f"got {type(layer).__name__}: "):
            export(layer, tmp_path / "layer.onnx")
        return
    exported = export(trained(layer), tmp_path / "layer.onnx", check=False)
    assert exported.operators == (operator,)
    assert largest_difference(layer, exported, (20, *[1] * 100), batch=2) < 1e-5


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A hybrid of the Bayesian Layer, Gated DeltaNet with its convolutions, and attention."""
    pytest.importorskip("transformers")
    from membydesign.models import MemoryConfig, MemoryForCausalLM

    torch.manual_seed(0)
    layers = ["bayesian_layer", "gated_deltanet", "attention"]
    config = MemoryConfig(vocab_size=61, hidden_size=32, num_heads=2, layers=layers, initializer_range=0.3)
    model = trained(MemoryForCausalLM(config).train())
    exported = export(model, tmp_path_factory.mktemp("onnx") / "model.onnx")
    assert model.training
    return model.eval(), exported


def test_logits_of_prefill_and_100_steps(hybrid):
    model, exported = hybrid
    session, cache, state = session_of(exported.path), None, {}
    for T in (17, *[1] * 100):
        ids = torch.randint(61, (2, T))
        with torch.no_grad():
            out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits, *new = session.run(None, {"input_ids": ids.numpy(), **state})
        state = dict(zip(exported.inputs[1:], new, strict=True))
        assert closeness(out.logits, logits) < 1e-5


def test_it_generates_the_same_tokens(hybrid):
    model, exported = hybrid
    prompt = torch.randint(1, 61, (2, 9))  # no 0, which `generate` would take for padding
    with torch.no_grad():
        ours = model.generate(prompt, max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0)
    session, state, ids, theirs = session_of(exported.path), {}, prompt, [prompt]
    for _ in range(100):
        logits, *new = session.run(None, {"input_ids": ids.numpy(), **state})
        state = dict(zip(exported.inputs[1:], new, strict=True))
        ids = torch.from_numpy(logits[:, -1:]).argmax(-1)
        theirs.append(ids)
    assert len(ours[0].unique()) > 5
    assert torch.equal(torch.cat(theirs, 1), ours)


def test_the_state_at_the_start_may_be_left_out(hybrid):
    model, exported = hybrid
    session, ids = session_of(exported.path), torch.randint(61, (3, 6)).numpy()
    defaults = {each.name: each for each in session.get_overridable_initializers()}
    assert list(defaults) == list(exported.inputs[1:])
    beliefs = [layer.initial_belief() for layer in model.model.mixers()]
    parts = [part.detach().numpy() for belief in beliefs for _, part in belief.parts()]
    state = dict(zip(exported.inputs[1:], parts, strict=True))
    for left_out, given in zip(
        session.run(None, {"input_ids": ids}), session.run(None, {"input_ids": ids, **state}), strict=True
    ):
        assert (left_out == given).all()


def test_the_graph_names_its_axes_and_no_file(hybrid):
    _, exported = hybrid
    session = session_of(exported.path)
    assert session.get_inputs()[0].shape == ["batch", "time"]
    assert session.get_outputs()[0].shape == ["batch", "time", 61]
    assert exported.operators == ("Scan", "LinearAttention", "attention")
    assert b".py" not in exported.path.read_bytes()
    described = session.get_modelmeta().custom_metadata_map["membydesign"]
    assert '"layer 0 (bayesian_layer)": "Scan"' in described


class _Own(SequenceLayer):
    """A layer of a user's own that does not say how its state starts."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x, belief=None, *, cu_seqlens=None):
        return self.map(x), belief or AttentionBelief(x, x)

    def state_size(self):
        return None

    def reset_parameters(self):
        pass


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (mbd.make_layer("mesa_net", 16, num_heads=2, head_dim=4), "got MesaNet: a step of MesaNet computes cholesky"),
        (mbd.make_layer("low_rank", 16, num_heads=2, head_dim=4), "low-rank covariance computes cholesky_inverse"),
        (mbd.make_layer("hyena", 16, num_heads=2, head_dim=4), "got Hyena: its Fourier transforms have a size"),
        (_Own(), "got _Own: it does not override initial_belief"),
        (mbd.make_layer("kda", 16, num_heads=2, head_dim=4).bfloat16(), "got A_log in torch.bfloat16 on cpu"),
        (nn.Linear(3, 3), "expected a MemoryForCausalLM, or a layer of membydesign.layers, got Linear"),
    ],
)
def test_what_cannot_be_exported_says_why(model, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        export(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_differs_is_not_accepted(tmp_path, monkeypatch):
    from membydesign.integrations import onnx

    monkeypatch.setattr(onnx, "_difference", lambda *_: 0.1)
    with pytest.raises(ArithmeticError, match=r"within 0.0001 of the largest output, got a difference of 0.1"):
        export(QUICK["attention"], tmp_path / "layer.onnx")
    assert not list(tmp_path.iterdir())


def test_the_page_lists_what_each_design_becomes():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "export.md").read_text()
    listed = {
        operator: set(line.split("|")[2].replace("`", "").replace(" ", "").split(","))
        for line in page.splitlines()
        for operator in ("LinearAttention", "Scan", "not exported")
        if line.startswith((f"| `{operator}`", f"| {operator}"))
    }
    assert listed["LinearAttention"] == LINEAR_ATTENTION
    assert listed["not exported"] == IMPOSSIBLE
    assert listed["Scan"] == set(mbd.catalogue) - LINEAR_ATTENTION - IMPOSSIBLE
