"""A PyTorch-native trainer for language models with long contexts."""

from importlib.metadata import version as _version

_OLDEST_TORCH, _FIRST_UNKNOWN_TORCH = (2, 11), (2, 15)


def _check_torch(installed: str) -> None:
    """Raise an ImportError that says what to install, before a private name of torch is missed somewhere deeper."""
    if not _OLDEST_TORCH <= tuple(int(part) for part in installed.split(".")[:2]) < _FIRST_UNKNOWN_TORCH:
        raise ImportError(
            f"torch {installed} is installed; torchtitan needs torch 2.11 to 2.14, whose private context-parallel "
            "names it uses; pip install torch==2.13.0"
        )


_check_torch(_version("torch"))
