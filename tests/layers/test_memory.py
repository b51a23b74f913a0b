import membydesign as mbd
from layers.contract import WIDTH, LayerContract
from membydesign.layers import MemoryLayer

ROTATING = mbd.catalogue["bayesian_layer"].replace(transition=mbd.DampedRotation())
REAL = mbd.catalogue["bayesian_layer"].replace(transition=mbd.DampedRotation(noise="real"))
GROUPED = mbd.catalogue["bayesian_layer"].replace(write=mbd.ObserveMemory(groups=3))
DESIGNS = {**mbd.catalogue, "rotating": ROTATING, "real": REAL, "grouped": GROUPED}


def contract_for(name: str, short_convolution: int | None) -> type:
    class Case(LayerContract):
        def make(self):
            return MemoryLayer(DESIGNS[name], WIDTH, 2, 8, value_dim=6, short_convolution=short_convolution)

    return Case


for name in DESIGNS:
    globals()[f"Test_{name}"] = contract_for(name, None)
for name in ("bayesian_layer", "kda"):
    globals()[f"Test_{name}_with_convolution"] = contract_for(name, 4)
