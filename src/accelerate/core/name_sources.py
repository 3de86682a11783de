"""Short forms for tables of public names: each function returns the sources of several names."""

from __future__ import annotations

from accelerate.core.lazy_names import LazyCall, NameSource, ObjectNameSource

# Names of Megatron-LM's module that ``accelerate.utils`` has too. Its others (``initialize``,
# ``prepare_data_loader``) are called like names of other modules, which a star import would hide.
PARTIAL_REEXPORTS = {
    "accelerate.utils.megatron_lm": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep "
        "avg_losses_across_data_parallel_group gather_across_data_parallel_groups"
    )
}


def exports(text: str) -> dict[str, NameSource]:
    """Return the names of one file, from ``"file: name name"``; ``public=own`` where the own name differs."""
    file, _, names = text.partition(": ")
    pairs = (name.partition("=") for name in names.split())
    return {public: f"{file}:{own_name or public}" for public, _, own_name in pairs}


def words(text: str) -> list[str]:
    """Return a new list of the words of ``text``."""
    return text.split()


def constants(texts: str = "", **values: object) -> dict[str, NameSource]:
    """Return constants of the API that no code here needs; ``NAME=text`` for one-word texts."""
    pairs = dict(pair.split("=") for pair in texts.split())
    return {name: ObjectNameSource(value) for name, value in {**pairs, **values}.items()}


def package_checks(names: str) -> dict[str, NameSource]:
    """Return ``is_<name>_available`` for packages; ``name=requirement`` if it is not just that package."""
    each = (name.partition("=") for name in names.split())
    return {
        f"is_{name}_available": LazyCall("core.packages:make_checker", need or name) for name, _, need in each
    }


def device_checks(types: str) -> dict[str, NameSource]:
    """Return ``is_<type>_available`` for device types."""
    return {
        f"is_{type}_available": LazyCall("facade.device_availability:device_checker", type)
        for type in types.split()
    }


def package_requirements(names: str) -> dict[str, NameSource]:
    """Return the decorators ``require_<name>`` of tests, by what ``is_<name>_available`` answers."""
    maker = "facade.client_test_utils:package_decorator"
    return {
        f"require_{name}": LazyCall(maker, f"accelerate.utils.imports:is_{name}_available", name)
        for name in names.split()
    }


def device_requirements(how_many: str, types: str) -> dict[str, NameSource]:
    """Return the decorators ``require_<how many><type>`` of tests; ``name=type`` where the type is another.

    Args:
        how_many: ``"single_"``, ``"multi_"``, ``"non_"``; empty for one or more.
        types: device types; ``type_or_type`` for either.
    """
    each = (name.partition("=") for name in types.split())
    return {
        f"require_{how_many}{name}": LazyCall(
            "facade.client_test_utils:device_decorator", type or name, how_many
        )
        for name, _, type in each
    }


def all_names(modules: str) -> dict[str, str]:
    """Return the request for all names of these public modules."""
    return dict.fromkeys((f"accelerate.{module}" for module in modules.split()), "*")
