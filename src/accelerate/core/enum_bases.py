"""The bases of the public enumerations: members equal their text."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any


class EnumWithContains(EnumMeta):
    """A metaclass of enumerations that supports ``"text" in Class``."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)  # type: ignore[call-arg]
        except ValueError:
            return False
        return True


class BaseEnum(str, Enum, metaclass=EnumWithContains):
    """A text enumeration: ``Class.MEMBER == "value"`` and ``str(Class.MEMBER) == "value"``."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values of all members, in order."""
        return [member.value for member in cls]


class StringEnum(str, Enum, metaclass=EnumWithContains):
    """A text enumeration that prints as Python's own do: ``str(Class.MEMBER) == "Class.MEMBER"``."""
