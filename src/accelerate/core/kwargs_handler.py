"""The base of kwargs handlers: objects that carry options to one component."""

from __future__ import annotations

import copy
from typing import Any


class KwargsHandler:
    """The options of one component, passed in ``Accelerator(kwargs_handlers=[...])``.

    Every argument of a subclass has a default; most subclasses are dataclasses.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return every field with a copy of its value."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if name[0] != "_"})

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their default, as arguments for the component.

        The others are left out, so that the component's own defaults stay in force.
        """
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}
