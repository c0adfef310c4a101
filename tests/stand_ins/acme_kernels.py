"""Stands in for a library of kernels, each inside of an autograd function."""

import torch

seen = []


def shifted(x, shift=0.0):
    """In plain Python, and of operators that its rule does not know of."""
    seen.append((type(x), tuple(x.shape)))
    return (x + shift).cumsum(-1)


def twice_shifted(x):
    return shifted(x, shift=1.0) * 2


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, bias=None):
        seen.append((type(x), tuple(x.shape)))
        ctx.factor = factor
        return x * factor if bias is None else x * factor + bias

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


class NewForm(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=1.0, shift=0.0):
        return x * factor + shift

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


class ManyInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        return sum(tensors)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class Twice(Scale):
    pass


class OnDevice(torch.autograd.Function):
    """As kernels often are: a parameter called ``out``, defaults before what is given, and no meta tensors."""

    @staticmethod
    def forward(ctx, x, out=None, factor=1.0, bias=0.0):
        assert x.device.type != "meta"
        seen.append((type(x), tuple(x.shape)))
        ctx.factor = factor
        return x * factor + bias

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None, None


on_device = OnDevice.apply


class OwnApply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

    @staticmethod
    def apply(x):
        return super(OwnApply, OwnApply).apply(x)


def scaled(x, factor):
    return Scale.apply(x, factor)
