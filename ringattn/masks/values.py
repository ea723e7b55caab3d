"""Values that wrappers of modules hand on as they are.

FSDP, DDP and accelerate walk what a module is called with, and rebuild lists, dicts, named tuples and dataclasses from
their parts, to cast tensors or to move them. A `Value` is a frozen dataclass whose fields such a walk does not find.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """The base of frozen dataclasses that layers may be called with; `replace` is their dataclasses.replace."""

    _fields_by_name: ClassVar[dict[str, Field[Any]]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        cls._fields_by_name = cls.__dataclass_fields__  # type: ignore[attr-defined]
        del cls.__dataclass_fields__  # type: ignore[attr-defined]  # by which a walk knows a dataclass

    def replace(self, /, **changes: Any) -> Self:
        """The same value with other fields."""
        given = {name: getattr(self, name) for name, f in fields(self).items() if f.init}
        return type(self)(**{**given, **changes})

    __replace__ = replace  # for copy.replace


def fields(of: Value | type[Value]) -> Mapping[str, Field[Any]]:
    return of._fields_by_name
