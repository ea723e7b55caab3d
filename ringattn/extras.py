"""Packages that are installed only if asked for."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_extras(user: str) -> Iterator[None]:
    """Where a framework is missing, say what needs it and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "jax", "flax"):
            raise
        how = f"{user} needs {error.name}, which is not installed: pip install 'ringattn[{error.name}]'"
        raise ModuleNotFoundError(how, name=error.name) from None
