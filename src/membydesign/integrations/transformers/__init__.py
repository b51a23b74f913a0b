"""Transformers' own models on this library's kernels, and with Bayesian layers (docs/howto/transformers.md).

`accelerate` puts the kernels under the recurrent layers of a model. Importing this package also registers the classes
of models that `membydesign.retrofit.retrofit` made of Transformers models, so that `from_pretrained` reads them.
"""

from membydesign.install import install_hint

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"membydesign.integrations.transformers needs {error.name}: {install_hint('models')}", name=error.name
    ) from error

from membydesign.integrations.transformers.acceleration import Acceleration, accelerate
from membydesign.integrations.transformers.hybrids import HYBRIDS, retrofit_transformers

__all__ = ["HYBRIDS", "Acceleration", "accelerate", "retrofit_transformers"]
