"""Optional dependencies, imported when they are first needed."""

import importlib
from types import ModuleType
from typing import Final

from stretto.errors import StrettoError

EXTRA_OF: Final = {
    "pyarrow": "data",
    "pyarrow.compute": "data",
    "pyarrow.dataset": "data",
    "pyarrow.ipc": "data",
    "pyarrow.parquet": "data",
    "defusedxml.ElementTree": "handwriting",
    "HersheyFonts": "handwriting",
    "rapidfuzz.distance": "handwriting",
    "PIL.Image": "video",
    "plotly.graph_objects": "report",
    "plotly.offline": "report",
    "sacrebleu": "translate",
    "sacrebleu.metrics": "translate",
    "tokenizers": "translate",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pytorch_optimizer": "tuning",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "triton": "gpu",
    "triton.backends.compiler": "gpu",
    "triton.compiler": "gpu",
    "triton.language": "gpu",
    "triton.runtime.interpreter": "gpu",
    "ziglang": "compiler",
    "jax": "peers",
    "lhotse": "peers",
    "lhotse.dataset": "peers",
    "transformers.trainer_pt_utils": "peers",
}


def optional(module: str) -> ModuleType:
    """Import `module`, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRA_OF[module]
        raise StrettoError(
            f"this needs the package {module.partition('.')[0]!r}, which could not be imported ({error})",
            fix=f"Install it with: pip install 'stretto[{extra}]'.",
        ) from error
