"""AWS Trainium and Inferentia, through their own torch device."""

from __future__ import annotations

import re

from accelerate.device.base import Device, DeviceProbeHost


class Neuron(Device):
    """Trainium, through TorchNeuron. Not run on one (the package needs the driver): tested with a fake.

    A device is a logical core. Earlier packages of the same name worked through XLA and have no such
    device. Source: AWS Neuron documentation 2.33.0, "What is TorchNeuron?", "How to use torch.distributed on
    Neuron" and "torch.compile on Neuron" (both neuron), "Reference: Neuron Runtime environment variables"
    (NEURON_RT_VISIBLE_CORES, NEURON_LOGICAL_NC_CONFIG) and "Neuron Sysfs User Guide".
    """

    type = "neuron"
    backend = "neuron"
    visible_variable = "NEURON_RT_VISIBLE_CORES"
    distributed_type = "MULTI_NEURON"
    priority = 20
    dtypes = frozenset({"bf16"})
    extension = "torch_neuronx"
    node_patterns = ("dev/neuron[0-9]*",)
    out_of_memory_messages = ("out of memory", "NRT_RESOURCE")
    compile_backend = "neuron"

    def is_usable(self) -> bool:
        return int(self.module.device_count()) > 0

    def count_physical(self, machine: DeviceProbeHost) -> int:
        cores = 0
        for node in machine.find_device_nodes(*self.node_patterns):
            # The first Trainium has two cores per device, and older drivers do not say so.
            cores += int(machine.read(f"sys/devices/virtual/neuron_device/{node.name}/core_count") or 2)
        # Later generations join two cores to a logical one unless configured otherwise.
        has_many_cores = cores > 2 * len(machine.find_device_nodes(*self.node_patterns))
        config = machine.env.get("NEURON_LOGICAL_NC_CONFIG", "")
        default = 2 if has_many_cores else 1
        return cores // (int(config) if config.isdigit() and int(config) else default)

    def visible_devices(self, machine: DeviceProbeHost) -> str | None:
        """Return the cores as a list; the variable holds numbers and ranges, ``"0-3,8"``."""
        text = super().visible_devices(machine)
        return None if text is None else re.sub(r"(\d+)-(\d+)", _expand_range, text)


def _expand_range(match: re.Match[str]) -> str:
    return ",".join(str(number) for number in range(int(match[1]), int(match[2]) + 1))


PLUGIN: Device = Neuron()
