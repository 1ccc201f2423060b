"""device_problem: whether the gradients of some parameters are on the device of this process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_ring._C import device_in_use

__all__ = ["device_problem"]

_ON_NO_DEVICE = ("cpu", "meta")


def device_problem(parameters: Iterable[Tensor]) -> str | None:
    """Return why one process cannot reduce the gradients of the parameters; None if it can.

    One process drives one device, beside the CPU: that of its first collective on a device.

    Args:
        parameters: on any devices.
    """
    devices = {p.device for p in parameters if p.device.type not in _ON_NO_DEVICE}
    used = device_in_use()
    if len(devices) > 1:
        places = " and ".join(sorted(map(str, devices)))
        return f"the parameters are on {places}, {_instead(devices)}"
    if used is not None and devices - {used}:
        return (
            f"this process has used {used}, and the parameters are on {devices.pop()}, "
            f"{_instead({used})}"
        )
    return None


def _instead(devices: Iterable[torch.device]) -> str:
    types = {device.type for device in devices}
    choose = "torch.cuda.set_device(local_rank())" if types == {"cuda"} else "the current device"
    return (
        "and one process drives one device. Start a process for each device, keep the model on "
        f"one of them, and choose it before the first collective, by {choose}"
    )
