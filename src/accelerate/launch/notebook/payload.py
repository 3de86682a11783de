"""A function and its arguments on their way to other processes.

What a notebook or a script has defined itself is sent by value: functions, classes, and the variables that
the functions use. Modules are imported again over there. cloudpickle does both.
"""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from accelerate.core.errors import LaunchError

# What objects raise that cannot be pickled; there is no common base.
UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)
# Classes whose objects belong to the process that made them.
PROCESS_BOUND = ("Accelerator", "AcceleratorState", "GradientState", "PartialState")


class UnpicklableFunctionError(LaunchError):
    """A function cannot be sent to other processes; it names what stands in the way."""


class ProcessLocalObjectError(LaunchError):
    """A function uses an object that means something in its own process only."""


def write_payload(path: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write what a rank needs to call ``function(*args)``.

    Raises:
        ProcessLocalObjectError: it uses an Accelerator of this process, or a tensor of its
            autograd graph.
        UnpicklableFunctionError: an object that it uses cannot be pickled.
    """
    header = {"path": list(sys.path), "argv": list(sys.argv), "lines": cell_sources()}
    try:
        call = dump_by_value((function, args), where="what is sent to the ranks")
    except UNPICKLABLE as error:
        if isinstance(error, ProcessLocalObjectError):
            raise
        raise UnpicklableFunctionError(
            f"{_function_name(function)} cannot be sent to other processes",
            why=_find_culprit(function, args) or f"{type(error).__name__}: {error}",
            fix="make that object inside the function",
        ) from error
    path.write_bytes(pickle.dumps(header) + call)


def find_shell() -> Any:
    """IPython's shell in this process, or None; nothing is imported."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def cell_of(file: str) -> str | None:
    """Return IPython's name of the cell with this file name, ``"Cell In[3]"``; None for a file."""
    compiler = getattr(find_shell(), "compile", None)
    name_of: Callable[[str], Any] | None = getattr(compiler, "format_code_name", None)
    name_parts = None if name_of is None else name_of(file)
    return None if name_parts is None else " ".join(name_parts)


def cell_sources() -> dict[str, Any]:
    """The text of cells, by their names in tracebacks; they are in no file that others could read."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def dump_by_value(value: Any, *, where: str = "", bare: bool = False) -> bytes:
    """Pickle a value; what ``__main__`` defines, and what no other process could import, go by value.

    Args:
        value: anything.
        where: how a warning calls it if it holds tensors on an accelerator; "" for no warning.
        bare: tensors go as plain values, on the CPU and without a graph.
    """
    buffer = io.BytesIO()
    with _pickle_module_by_value(value):
        seen = _pickle(buffer, value, bare)
    if where and seen:
        size = sum(seen.values()) / 2**20
        warnings.warn(
            f"{where} holds tensors on {', '.join(seen)} ({size:.1f} MiB): every rank copies them to that "
            "same device; send tensors on the CPU, and let prepare place them",
            stacklevel=2,
        )
    return buffer.getvalue()


def _pickle(buffer: io.BytesIO, value: Any, bare: bool) -> dict[str, int]:
    """Pickle; return device -> bytes of the tensors that are not on the CPU."""
    import cloudpickle

    torch = sys.modules.get("torch")
    seen: dict[str, int] = {}

    class FunctionPickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            _refuse_owned(obj)
            if isinstance(obj, CodeType):
                # cloudpickle 3.1.3 leaves out the file, and with it the lines of every traceback.
                reduce: Callable[[CodeType], Any] = self.dispatch_table[CodeType]
                build, parts = reduce(obj)
                return build_code, (build, parts, obj.co_filename)
            if torch is not None and isinstance(obj, torch.Tensor):
                is_on_accelerator = obj.device.type not in ("cpu", "meta")
                if bare and type(obj) is torch.Tensor and (is_on_accelerator or obj.grad_fn is not None):
                    return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                _refuse_graph(obj)
                if is_on_accelerator:
                    size = obj.element_size() * obj.nelement()
                    seen[str(obj.device)] = seen.get(str(obj.device), 0) + size
            return super().reducer_override(obj)

    FunctionPickler(buffer).dump(value)
    return seen


def build_code(build: Callable[..., CodeType], parts: tuple[Any, ...], filename: str) -> CodeType:
    """Return the code object that ``build(*parts)`` makes, from the file that it was compiled from."""
    return build(*parts).replace(co_filename=filename)


def _refuse_owned(obj: Any) -> None:
    for kind in type(obj).__mro__:
        if kind.__name__ in PROCESS_BOUND and kind.__module__.startswith("accelerate.facade."):
            article = "an" if kind.__name__.startswith("A") else "a"
            raise ProcessLocalObjectError(
                f"the function uses {article} {kind.__name__} that was made outside of it",
                why="it belongs to this process; each rank needs its own",
                fix=f"create it inside the function: def train(): ... = {kind.__name__}()",
            )


def _refuse_graph(tensor: Any) -> None:
    if tensor.grad_fn is not None:
        raise ProcessLocalObjectError(
            f"the function uses a tensor of shape {tuple(tensor.shape)} that is the result of "
            f"{type(tensor.grad_fn).__name__.removesuffix('0').removesuffix('Backward')}, with its graph",
            why="the graph of its gradients cannot leave this process",
            fix="pass tensor.detach(), or compute it inside the function",
        )


@contextmanager
def _pickle_module_by_value(value: Any) -> Iterator[None]:
    """Let the module of a function go by value where another process could not import it."""
    import cloudpickle

    call = value[0] if isinstance(value, tuple) and value else value
    module = sys.modules.get(getattr(call, "__module__", None) or "")
    # As test runners may do, it was loaded from a file that is not on the path.
    is_hidden = (
        module is not None
        and module.__name__ != "__main__"
        and getattr(module, "__file__", None) is not None
        and PathFinder.find_spec(module.__name__.partition(".")[0]) is None
    )
    if module is None or not is_hidden:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


# --- which object it is


def _find_culprit(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """``the variable 'lock' of the notebook cannot be pickled: TypeError: ...``; "" when none is found."""
    for name, value in (*_named_arguments(args), *_used_objects(function, set())):
        reason = _why_not_picklable(value)
        if reason:
            return f"{name} ({type(value).__name__}) cannot be pickled: {reason}"
    return ""


def _named_arguments(args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    yield from ((f"argument {number}", value) for number, value in enumerate(args, 1))


def _used_objects(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function refers to, and what the functions among that refer to."""
    while isinstance(function, partial):
        yield from _named_arguments(function.args)
        function = function.func
    if inspect.ismethod(function):
        yield f"the object of {_function_name(function)}", function.__self__
        function = function.__func__
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    used = inspect.getclosurevars(function)
    for label, variables in (("the variable", used.globals), ("the enclosing function's", used.nonlocals)):
        for name, value in variables.items():
            if isinstance(value, FunctionType):
                yield from _used_objects(value, seen)
            else:
                yield f"{label} {name!r}, which {_function_name(function)} uses,", value


def _why_not_picklable(value: Any) -> str:
    """Why a value cannot be pickled; "" if it can."""
    try:
        dump_by_value(value)
    except UNPICKLABLE as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return ""


def _function_name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}()"
