# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm: batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from torch_ring.collectives.allreduce import allreduce
from torch_ring.collectives.promised_series import series_of
from torch_ring.collectives.reduce_op import Sum
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` with the statistics of the batches of all ranks together.

    It works on the CPU and on GPUs. Ranks may have batches of different sizes, even empty ones. The
    output, the gradient of the input and the running statistics equal those of one process with the
    joined batch. The gradients of weight and bias are this rank's part of the sum, which
    DistributedOptimizer reduces like any other gradient. Every rank must run forward, and backward,
    equally often; one that has called `join` counts as an empty batch. Gradients can be
    differentiated again (``create_graph=True``).

    Cost: an allgather of 2 C + 1 float64 numbers in forward; in backward an allreduce of 2 C
    numbers, float32, or float64 for a float64 input. On a GPU, passes that repeat themselves agree
    once for many layers (docs/internals/devices.md#promised-series).

    Under ``torch.utils.checkpoint`` forward runs twice, and updates the running statistics once.

    Args:
        num_features: C of an input of shape [N, C, ...].
        eps: added to the variance, so that it is not zero.
        momentum: the weight of a new batch in the running statistics; None: all batches weigh
            the same.
        affine: whether the layer has a weight and a bias for each channel.
        track_running_stats: whether it keeps running statistics for evaluation; if not, an
            evaluation normalises with this rank's batch.
        process_set: the ranks whose batches belong together, this one among them; by default all.
        device: the device of parameters and buffers; None: torch's default device.
        dtype: the dtype of parameters and buffers; None: torch's default dtype.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {input.size(1)}")
        if not input.is_floating_point():
            raise ValueError(f"expected an input of floating point, got {input.dtype}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalise a batch. Collective in training only.

        Args:
            input: this rank's batch, shape [N, C, ...], floating point. N may differ between ranks.

        Returns:
            The normalised batch, with the shape and dtype of `input`.

        Raises:
            ValueError: another shape or dtype, or fewer than two values per channel over all ranks.
        """
        if not self.training:
            return super().forward(input)
        # A forward inside a backward is a checkpoint's, which has tracked this batch already.
        is_again = torch._C._current_graph_task_id() != -1
        if self.process_set.size() == 1:
            if not is_again:
                return super().forward(input)
            # On copies: this forward must save as many tensors as the first one.
            mean = None if self.running_mean is None else self.running_mean.clone()
            variance = None if self.running_var is None else self.running_var.clone()
            return F.batch_norm(input, mean, variance, self.weight, self.bias, True, 0.0, self.eps)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.process_set, id(self)
        )
        if self.track_running_stats and self.running_mean is not None and not is_again:
            self._track(mean, variance * (count / (count - 1)))
        result: Tensor = output
        return result

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # the average of all batches
            factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every batch normalisation in a module by one of this class.

        Args:
            module: changed in place, with all its submodules.
            process_set: the ranks whose batches belong together, this one among them; by default
                all.

        Returns:
            `module`, or its replacement if it is a batch normalisation itself.

        Raises:
            ValueError: a lazy layer has not seen any input.
        """
        converted: dict[torch.nn.Module, SyncBatchNorm] = {}  # a layer may have several names

        def convert(layer: torch.nn.Module) -> torch.nn.Module:
            if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
                if layer not in converted:
                    converted[layer] = cls._of(layer, process_set)
                return converted[layer]
            for name, child in layer._modules.items():
                if child is not None:
                    layer._modules[name] = convert(child)
            return layer

        return convert(module)

    @classmethod
    def _of(cls, module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        """Return a SyncBatchNorm that shares the parameters and buffers of `module`."""
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise ValueError("run a batch through lazy layers before you convert them")
        converted = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_set,
            device="meta",
        )
        converted._parameters.update(module._parameters)
        converted._buffers.update(module._buffers)
        converted.training = module.training
        return converted


def convert_sync_batchnorm(
    module: torch.nn.Module, process_set: ProcessSet = global_process_set
) -> torch.nn.Module:
    """Replace every batch normalisation in `module` by a :class:`SyncBatchNorm`.

    Parameters and buffers stay the same objects, so an optimizer made before still trains them.

    Args:
        module: changed in place, with all its submodules.
        process_set: the ranks whose batches belong together, this one among them; by default all.

    Returns:
        `module`, or its replacement if it is a batch normalisation itself.

    Raises:
        ValueError: a lazy layer has not seen any input.
    """
    return SyncBatchNorm.convert_sync_batchnorm(module, process_set)


class _Normalize(torch.autograd.Function):
    """Returns the normalised input, and the mean, biased variance and count behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        process_set: ProcessSet,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _wide(x)
        mean, variance, count = _joint_statistics(wide, process_set, layer)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.has_bias = bias is not None
        ctx.eps = eps
        ctx.count = count
        ctx.process_set = process_set
        ctx.layer = layer
        normalized = (wide - _per_channel(mean, x)) * _per_channel(scale, x)
        if weight is not None:
            normalized = normalized * _per_channel(weight, x)
        if bias is not None:
            normalized = normalized + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the statistics depend on x, too
            mean, scale = _differentiable_statistics(_wide(x), ctx)
        dims = _all_but_channels(x)
        centred = _wide(x) - _per_channel(mean, x)
        gradient = _wide(gradient)
        own = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        weight_gradient = own[1] * scale if weight is not None else None
        bias_gradient = own[0] if ctx.has_bias else None
        total = _mean_of_ranks(own, ctx)
        # The derivatives through the mean and through the variance, S. Ioffe and C. Szegedy,
        # "Batch normalization", ICML 2015, section 3.
        through = _per_channel(total[0], x) + centred * _per_channel(total[1] * scale**2, x)
        factor = scale if weight is None else scale * weight
        input_gradient = (gradient - through) * _per_channel(factor, x)
        return input_gradient.to(x.dtype), weight_gradient, bias_gradient, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of the arithmetic, float32 or more: 16 bits are too few."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _mean_of_ranks(sums: Tensor, ctx: Any) -> Tensor:
    """Return the sum over ranks divided by the number of values in a channel; differentiable."""
    count: Tensor = ctx.count
    series = None if torch.is_grad_enabled() else series_of(ctx.process_set, sums)
    if series is None:
        return allreduce(sums, op=Sum, process_set=ctx.process_set) / count
    return series.sum(sums.clone(), ctx.layer) / count


def _differentiable_statistics(x: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
    """Return forward's mean and scale of each channel, as differentiable functions of x."""
    dims = _all_but_channels(x)
    mean = _mean_of_ranks(x.sum(dims), ctx)
    variance = _mean_of_ranks((x - _per_channel(mean, x)).square().sum(dims), ctx)
    return mean, torch.rsqrt(variance + ctx.eps)


def _joint_statistics(
    x: Tensor, process_set: ProcessSet, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of each channel, and the number of its values on all ranks.

    They are computed from each rank's count, mean and sum of squared deviations (T. Chan, G. Golub
    and R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
    1979), a method that stays exact when the mean is large. A rank that has joined counts as one
    with an empty batch. On a device the host does not wait for them.
    """
    channels = x.shape[1]
    own_count = x.numel() // channels if channels else 0
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if own_count:
        variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
        own = torch.cat([own.new_tensor([own_count]), mean.double(), variance.double() * own_count])
    series = series_of(process_set, own)
    if series is None:
        engine = engine_of(process_set)
        rows = engine.submit("allgather", own.unsqueeze(0), None, None, True, joinable=True).wait()
    else:
        rows = series.gather(own, layer)
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    count = counts.sum()
    if own_count <= 1 and float(count) <= 1:
        raise ValueError(f"more than one value per channel is needed in training: {x.shape}")
    mean = (counts * means).sum(0) / count
    squares = (squares + counts * (means - mean) ** 2).sum(0)
    return mean.to(x.dtype), (squares / count).to(x.dtype), count
