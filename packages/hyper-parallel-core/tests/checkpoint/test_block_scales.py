"""Weights of 8 and 4 bits with scales: any block of what they stand for."""

import pytest
import torch

from hyper_parallel import CheckpointError
from hyper_parallel.checkpoint.block_scales import block_size_of, with_scales_applied
from hyper_parallel.checkpoint.deferred.tensor import deferred, value_of
from hyper_parallel.checkpoint.deferred.values import KnownValue

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def files(**tensors):
    return {name.replace("__", "."): deferred(KnownValue(tensor)) for name, tensor in tensors.items()}


def check(tensor, want):
    value = value_of(tensor)
    assert (tuple(tensor.shape), tensor.dtype) == (tuple(want.shape), torch.float32)
    assert torch.equal(value.whole(), want)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        ends = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in want.shape]
        assert torch.equal(value.block(tuple(map(tuple, ends))), want[tuple(slice(*end) for end in ends)])


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize(("shape", "block"), [((96, 64), (16, 32)), ((9, 5), (4, 4)), ((3, 10, 14), (8, 4))])
def test_float8_with_a_scale_for_each_block(shape, block, stated):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)), generator=generator)
    factors = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    found = with_scales_applied(
        files(a__weight=numbers, a__weight_scale_inv=scales, b__scale=torch.ones(3)), block if stated else None
    )
    assert sorted(found) == ["a.weight", "b.scale"]
    check(found["a.weight"], numbers.float() * factors)


def test_one_scale_for_all():
    numbers = torch.randn(4, 6).to(torch.float8_e5m2)
    scales = {"a__qscale_weight": torch.tensor(0.5), "a__qscale_act": torch.tensor(2.0)}
    found = with_scales_applied(files(a__weight=numbers, **scales), None)
    assert list(found) == ["a.weight"]
    check(found["a.weight"], numbers.float() / 2)


def test_four_bits_two_by_two_with_powers_of_two():
    packed = torch.randint(0, 256, (6, 32), dtype=torch.uint8)
    powers = torch.randint(120, 130, (6, 2), dtype=torch.uint8)
    numbers = E2M1[torch.stack([packed & 15, packed >> 4], -1).long()].flatten(-2)
    want = numbers * torch.exp2(powers.float() - 127).repeat_interleave(32, -1)
    for scales in (powers, powers.view(torch.float8_e8m0fnu)):
        found = with_scales_applied(files(a__weight=packed.view(torch.int8), a__scale=scales), (128, 128))
        check(found["a.weight"], want)


def test_mxfp4():
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    powers = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    numbers = E2M1[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
    want = (numbers * torch.exp2(powers.float() - 127)[..., None]).flatten(-2).transpose(-2, -1)
    found = with_scales_applied(files(up_blocks=blocks, up_scales=powers), None)
    assert list(found) == ["up"]
    check(found["up"], want)


def test_bytes_of_others_stay_as_they_are():
    tensors = files(a__weight=torch.ones(4, 4, dtype=torch.int8), a__scale=torch.ones(4), b_blocks=torch.ones(3))
    assert with_scales_applied(tensors, None) == tensors


def test_scales_that_do_not_fit():
    numbers = torch.ones(10, 10).to(torch.float8_e4m3fn)
    with pytest.raises(
        CheckpointError, match=r"a.weight of shape \(10, 10\) has scales of shape \(7, 1\), which are not"
    ):
        with_scales_applied(files(a__weight=numbers, a__weight_scale_inv=torch.ones(7, 1)), (4, 4))


def test_the_configuration_beside_the_files_says_the_size_of_blocks(tmp_path):
    assert block_size_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [128, 64]}}')
    assert block_size_of(tmp_path) == block_size_of(tmp_path / "model.safetensors") == [128, 64]
    (tmp_path / "config.json").write_text('{"quantization_config": 3}')
    assert block_size_of(tmp_path) is None
