import pytest
import torch
from transformers.initialization import guard_torch_init_functions

from layers.contract import WIDTH, LayerContract, shaken, tokens
from membydesign.layers import (
    GLA,
    KDA,
    LAYERS,
    MLSTM,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    LinearAttention,
    Longhorn,
    Mamba2,
    MemoryLayer,
    PreconditionedDeltaNet,
    RetNet,
    make_layer,
)
from membydesign.testing import assert_close

CASES = {
    "gated_deltanet": lambda: GatedDeltaNet(WIDTH, 2, 8, value_dim=6),
    "gated_deltanet_without_convolution": lambda: GatedDeltaNet(WIDTH, 2, 8, value_dim=6, short_convolution=None),
    "gated_deltanet_without_gate": lambda: GatedDeltaNet(WIDTH, 2, 8, output_gate=False),
    "gated_deltanet_with_shared_keys": lambda: GatedDeltaNet(WIDTH, 4, 8, value_dim=6, num_key_heads=2),
    "deltanet": lambda: DeltaNet(WIDTH, 2, 8, value_dim=6),
    "deltanet_with_gate": lambda: DeltaNet(WIDTH, 2, 8, short_convolution=None, output_gate=True),
    "kda": lambda: KDA(WIDTH, 2, 8, value_dim=6),
    "kda_without_convolution": lambda: KDA(WIDTH, 2, 8, short_convolution=None),
    "longhorn": lambda: Longhorn(WIDTH, 2, 8),
    "longhorn_without_convolution": lambda: Longhorn(WIDTH, 3, 8, value_dim=5, short_convolution=None),
    "linear_attention": lambda: LinearAttention(WIDTH, 2, 8, value_dim=6),
    "retnet": lambda: RetNet(WIDTH, 2, 8),
    "retnet_with_convolution": lambda: RetNet(WIDTH, 2, 8, value_dim=6, short_convolution=3),
    "gla": lambda: GLA(WIDTH, 2, 8),
    "gla_with_convolution": lambda: GLA(WIDTH, 2, 8, value_dim=6, short_convolution=3),
    "mamba2": lambda: Mamba2(WIDTH, 4, 8),
    "mamba2_with_groups": lambda: Mamba2(WIDTH, 4, 8, value_dim=6, num_key_heads=2),
    "mamba2_with_convolution_of_one": lambda: Mamba2(WIDTH, 2, 8, short_convolution=1),
    "mamba2_without_convolution": lambda: Mamba2(WIDTH, 2, 8, short_convolution=None),
    "preconditioned_deltanet": lambda: PreconditionedDeltaNet(WIDTH, 2, 8, value_dim=6),
    "gated_deltanet_2": lambda: GatedDeltaNet2(WIDTH, 2, 8, value_dim=6),
    "deltaproduct": lambda: GatedDeltaProduct(WIDTH, 2, 8, value_dim=6),
    "deltaproduct_bare": lambda: GatedDeltaProduct(
        WIDTH, 2, 8, writes_per_token=3, short_convolution=None, output_gate=False, forget_gate=False
    ),
    "comba": lambda: Comba(WIDTH, 2, 8, value_dim=6),
    "comba_without_gate": lambda: Comba(WIDTH, 2, 8, short_convolution=None, output_gate=False),
    "mlstm": lambda: MLSTM(WIDTH, 2, 8, value_dim=6),
}
NAMES = (
    *("deltanet", "gated_deltanet", "kda", "longhorn", "linear_attention", "retnet", "gla", "mamba2"),
    *("mesa_net", "gated_kalmanet", "kla", "palimpsa", "kalman_delta_isotropic", "kalman_delta_diagonal", "vla"),
    *("preconditioned_deltanet", "gated_deltanet_2", "deltaproduct", "comba", "mlstm"),
)


RELATIVES = (PreconditionedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, Comba)


def contract_for(name: str) -> type:
    class Case(LayerContract):
        def make(self):
            return CASES[name]()

    return Case


for name in CASES:
    globals()[f"Test_{name}"] = contract_for(name)


@pytest.mark.parametrize("name", NAMES)
class TestByName:
    def test_made_by_name(self, name):
        assert name in LAYERS
        layer = make_layer(name, WIDTH, 2, 8)
        y, _ = layer(tokens(1, 5, dtype=torch.float32))
        assert y.shape == (1, 5, WIDTH)

    def test_made_without_storage(self, name):
        with torch.device("meta"):
            layer = make_layer(name, WIDTH, 2, 8)
            layer.reset_parameters()
            y, belief = layer(torch.empty(3, 20, WIDTH))
            y, _ = layer(torch.empty(3, 1, WIDTH), belief)
        assert y.shape == (3, 1, WIDTH)
        assert y.is_meta

    def test_parameters_made_without_storage_are_started_later(self, name):
        with torch.device("meta"):
            layer = make_layer(name, WIDTH, 2, 8)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(torch.nan)
        layer.reset_parameters()
        maps = ("proj", "o_norm", "norm", "dt_head.weight", "ogate", *(f"{m}.weight" for m in "qkv"))
        still = [n for n, p in layer.named_parameters() if p.isnan().any() and not any(m in n for m in maps)]
        assert not still

    def test_starting_values_leave_loaded_weights_alone(self, name):
        """Transformers calls initialisers again after loading; flags on parameters tell it what to leave."""
        layer = shaken(make_layer(name, WIDTH, 2, 8))
        loaded = {n: p.detach().clone() for n, p in layer.named_parameters()}
        for parameter in layer.parameters():
            parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        with guard_torch_init_functions():
            layer.reset_parameters()
        for n, p in layer.named_parameters():
            assert torch.equal(p, loaded[n]), n

    def test_autocast(self, name):
        layer = shaken(make_layer(name, WIDTH, 2, 8))
        x = tokens(2, 9, dtype=torch.float32)
        wanted = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            y, belief = layer(x)
            layer(x[:, :1], belief)
        assert (y - wanted).abs().max() < 0.1 * (1 + wanted.abs().max())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_step_parameters_are_wide(self, name, dtype):
        layer = make_layer(name, WIDTH, 2, 8).to(dtype)
        inputs, _ = layer.step_inputs(tokens(1, 3, dtype=dtype), None, None)  # pyright: ignore[reportCallIssue]
        for parameter in inputs.parameters.values():
            assert isinstance(parameter, float) or parameter.dtype == torch.float32


def test_a_convolution_of_one_token_starts_as_silu_alone():
    torch.manual_seed(0)
    one, none = (Mamba2(WIDTH, 2, 8, short_convolution=width).double() for width in (1, None))
    none.load_state_dict({name: p for name, p in one.state_dict().items() if "conv1d" not in name})
    x = tokens(2, 5)
    torch.testing.assert_close(one(x)[0], none(x)[0])


class TestStateSize:
    """The paper's table of MQAR models: 8192 numbers each, without convolutions."""

    def test_as_in_the_table(self):
        assert MemoryLayer("bayesian_layer", 128, 4, 32).state_size() == (4 * 32**2, 4 * 32**2, 0)
        assert MemoryLayer("bayesian_layer", 128, 4, 32).state_size().recurrent == 8192
        assert GatedDeltaNet(128, 4, 32, value_dim=64).state_size() == (8192, 0, 3 * (128 + 128 + 256))
        assert GatedDeltaNet(128, 4, 32, value_dim=64, short_convolution=None).state_size().total == 8192
        assert Mamba2(128, 8, 32, value_dim=32).state_size() == (8192, 0, 3 * (256 + 2 * 32))
        assert Mamba2(128, 8, 32, value_dim=32).state_size().recurrent == 8192
        assert Mamba2(128, 8, 32, short_convolution=1).state_size().total == 8192

    def test_of_the_others(self):
        assert LinearAttention(128, 4, 32).state_size() == (4 * 32 * 33, 0, 0)
        assert Longhorn(128, 4, 16).state_size() == (256 * 16, 0, 3 * 256)
        assert RetNet(128, 4, 32).state_size() == GLA(128, 4, 32).state_size() == (4 * 32 * 64, 0, 0)


class TestBadArguments:
    @pytest.mark.parametrize("heads", [3, 8])
    @pytest.mark.parametrize("make", [GatedDeltaNet, Mamba2])
    def test_heads_of_keys_that_do_not_divide(self, make, heads):
        with pytest.raises(ValueError, match=f"^num_key_heads: expected a divisor of num_heads = 4, got {heads}"):
            make(24, 4, 8, num_key_heads=heads)

    @pytest.mark.parametrize("make", [Longhorn, Mamba2])
    def test_heads_that_do_not_divide(self, make):
        with pytest.raises(
            ValueError, match=r"^num_heads: expected a divisor of 2·hidden_size = 48 \(or a value_dim\)"
        ):
            make(24, 5, 8)
        assert make(24, 5, 8, value_dim=3).state_size().mean == 5 * 8 * 3

    @pytest.mark.parametrize("name", NAMES)
    def test_numbers_below_one(self, name):
        with pytest.raises(ValueError, match="^num_heads: expected a whole number of at least 1, got 0"):
            make_layer(name, 24, 0, 8)
        with pytest.raises(ValueError, match="^value_dim: expected a whole number of at least 1, got 0"):
            make_layer(name, 24, 2, 8, value_dim=0)
        if name not in ("linear_attention", "mlstm"):
            with pytest.raises(ValueError, match="^short_convolution: expected a whole number of at least 1, got 0"):
                make_layer(name, 24, 2, 8, short_convolution=0)

    def test_no_heads_of_keys(self):
        with pytest.raises(ValueError, match="^num_key_heads: expected a whole number of at least 1, got 0"):
            GatedDeltaNet(24, 4, 8, num_key_heads=0)

    def test_rows_that_cannot_turn(self):
        with pytest.raises(ValueError, match="^head_dim: expected an even D, .* got 7"):
            RetNet(24, 2, 7)

    def test_options_of_others(self):
        with pytest.raises(ValueError, match="^norm_eps: expected an option of longhorn"):
            make_layer("longhorn", 24, 2, 8, norm_eps=1e-6)


@pytest.mark.parametrize("make", [GatedDeltaNet, DeltaNet, KDA, Longhorn, *RELATIVES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1, 1])
class TestSaturation:
    """Gates whose sigmoid is 0 or 1 in their type write nothing or everything, and training goes on."""

    def test_neither_raises_nor_spoils_gradients(self, make, dtype, sign):
        layer = make(WIDTH, 2, 8).to(dtype)
        gate = layer.dt_head if isinstance(layer, Longhorn) else layer.b_proj
        with torch.no_grad():
            gate.weight.mul_(1e4)
            gate.weight.abs_().mul_(sign)
        x = tokens(2, 40, dtype=dtype).abs().requires_grad_()
        y, belief = layer(x)
        y.square().sum().backward()
        layer(x[:, :1].detach(), belief.detach())
        assert torch.isfinite(y).all()
        for p in (x, *layer.parameters()):
            assert p.grad is not None
            assert torch.isfinite(p.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_of_one_writes_all(dtype):
    layer = GatedDeltaNet(WIDTH, 2, 8).to(dtype)
    torch.nn.init.constant_(layer.b_proj.weight, 1e4)
    x = tokens(1, 1, dtype=dtype).abs()
    inputs, _ = layer.step_inputs(x, None, None)
    _, belief = layer(x)
    written = torch.einsum("bthd,bthm->bhdm", inputs.k, inputs.v)
    assert_close(belief.memory.mean, written, 4 * torch.finfo(dtype).eps)
