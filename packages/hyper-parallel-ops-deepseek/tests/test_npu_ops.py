"""The NPU operators on all layouts, in plain PyTorch; and on an NPU where there is one (``test_real_npu.py``)."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import (
    CommTrace,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    redistribute_policy,
)
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.placing import mesh_of
from hyper_parallel_ops_deepseek import reference as npu
from hyper_parallel_ops_deepseek.attention_band import Band


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 16


def normed(x, gamma, epsilon=1e-6):
    """The kernel's second result has no gradient."""
    return npu.npu_rms_norm(x, gamma, epsilon=epsilon)


class TestRMSNorm(Quick):
    op = normed
    samples = (sample(tensor(3, 5, 6), tensor(6)), sample(tensor(2, 5, 3), tensor(5, 3), epsilon=0.1))


class TestAddRMSNorm(Quick):
    op = npu.npu_add_rms_norm
    samples = (sample(tensor(5, 6), tensor(5, 6), tensor(6), 0.1),)


class TestRotaryMul(Quick):
    op = npu.npu_rotary_mul
    max_collectives = at_most(all_to_all=1)
    samples = (
        sample(tensor(2, 3, 5, 6), tensor(1, 1, 5, 6), tensor(1, 1, 5, 6)),
        sample(tensor(2, 5, 3, 4), tensor(2, 5, 1, 4), tensor(2, 5, 1, 4), "interleave"),
        sample(tensor(3, 10), tensor(10), tensor(10), "interleave").options(name="pairs_cut_through"),
    )


class TestSwiGLU(Quick):
    op = npu.npu_swiglu
    max_collectives = at_most(all_to_all=1)
    samples = (sample(tensor(5, 6)), sample(tensor(6, 5), dim=0), sample(tensor(2, 1, 10), dim=-1))


COUNTS = torch.tensor([2, 0, 3, 2, 1])
ENDS = torch.tensor([3, 8])


def grouped_rows(x, weight, group_list, bias=None, kind=1):
    lists = {} if bias is None else {"bias": [bias]}
    return npu.npu_grouped_matmul(
        [x], [weight], group_list=group_list, split_item=2, group_type=0, group_list_type=kind, **lists
    )[0]


def grouped_columns(x, grad, group_list):
    return npu.npu_grouped_matmul([x], [grad], group_list=group_list, split_item=3, group_type=2, group_list_type=1)[0]


def paired(a, b, c, d):
    return npu.npu_grouped_matmul([a, b], [c, d])


class TestGroupedMatmulOfRows(Quick):
    op = grouped_rows
    samples = (
        sample(tensor(8, 6), tensor(5, 6, 3), COUNTS),
        sample(tensor(8, 3), tensor(2, 3, 5), ENDS, tensor(2, 5), kind=0),
    )


class TestGroupedMatmulOfColumns(Quick):
    op = grouped_columns
    samples = (sample(tensor(6, 8), tensor(8, 3), COUNTS),)


class TestGroupedMatmulOfPairs(Quick):
    op = paired
    samples = (
        sample(tensor(5, 6), tensor(5, 6), tensor(6, 4), tensor(6, 4)),
        sample(tensor(5, 6), tensor(3, 6), tensor(6, 4), tensor(6, 4)).options(name="of_several_shapes"),
    )


EXPERTS = torch.tensor([[1, 0], [2, 1], [0, 2], [1, 2], [0, 1]])


def there_and_back(tokens, probs, experts):
    rows, where = npu.npu_moe_token_permute(tokens, experts.to(torch.int32))
    return npu.npu_moe_token_unpermute(rows * 2, where, probs=probs)


class Routing(Quick):
    max_collectives: ClassVar = {"all_gather": 1, "all_to_all": 2, "all_reduce": 2, "reduce_scatter": 2}


class TestTokenPermute(Routing):
    op = npu.npu_moe_token_permute
    samples = (sample(tensor(5, 6), EXPERTS), sample(tensor(5, 3), EXPERTS[:, 0], num_out_tokens=4))


class TestTokenUnpermute(Routing):
    op = npu.npu_moe_token_unpermute
    samples = (
        sample(tensor(6, 5), torch.tensor([4, 0, 5, 1, 3, 2], dtype=torch.int32), tensor(3, 2)),
        sample(tensor(3, 5), torch.tensor([2, 0, 1], dtype=torch.int32)),
    )


class TestThereAndBack(Routing):
    op = there_and_back
    samples = (sample(tensor(5, 6), tensor(5, 2), EXPERTS),)


def attention(query, key, value, layout, mask=None, heads=4, **options):
    """Scores in float32 on NPUs; the result of one device is computed alike."""
    return npu.npu_fusion_attention(query, key, value, heads, layout, atten_mask=mask, scale=0.5, **options)[:3]


BSND = tensor(3, 4, 8, 2), tensor(3, 6, 4, 2), tensor(3, 6, 4, 2)
MASK = torch.randint(0, 2, (3, 1, 4, 6), generator=torch.Generator().manual_seed(0)).bool()
MASK[..., 0] = False
# What the kernel wants under sparse_mode 2 to 4; the definition does not read it.
PATTERN = torch.ones(2, 2, dtype=torch.bool).triu(1)


class TestFusionAttention(Quick):
    op = attention
    max_layouts = 8
    rtol = 1e-6
    atol = 1e-6
    samples = (
        sample(*BSND, "BSND", MASK, heads=8).options(name="grouped_heads_and_mask"),
        sample(
            tensor(2, 5, 4, 2), tensor(2, 5, 4, 2), tensor(2, 5, 4, 3), "BNSD", PATTERN, heads=5, sparse_mode=3
        ).options(name="uneven_heads_causal"),
        sample(*BSND, "BSND", MASK[0, 0], heads=8, sparse_mode=1).options(name="mask_of_queries_and_keys"),
        sample(tensor(2, 3, 16), tensor(2, 3, 8), tensor(2, 3, 8), "BSH", heads=8).options(name="heads_times_features"),
        sample(
            tensor(6, 2, 8), tensor(6, 2, 8), tensor(6, 2, 8), "SBH", ~torch.eye(6).bool(),
            pre_tockens=1, next_tockens=0,
        ).options(name="band_and_mask"),
        sample(
            tensor(7, 4, 2), tensor(7, 4, 2), tensor(7, 4, 2), "TND", PATTERN,
            actual_seq_qlen=(3, 7), actual_seq_kvlen=(3, 7), sparse_mode=2, sink=tensor(4),
        ).options(name="packed_sequences_and_sink"),
        sample(
            tensor(7, 4, 2), tensor(9, 2, 2), tensor(9, 2, 2), "TND", PATTERN,
            actual_seq_qlen=(3, 3, 7), actual_seq_kvlen=(3, 5, 9), sparse_mode=3,
        ).options(name="packed_sequences_causal"),
        sample(
            tensor(7, 4, 2), tensor(9, 4, 2), tensor(9, 4, 2), "TND", PATTERN,
            actual_seq_qlen=(3, 7), actual_seq_kvlen=(4, 9), sparse_mode=4, pre_tockens=1, next_tockens=0,
        ).options(name="packed_sequences_band"),
        sample(
            tensor(7, 4, 2), tensor(7, 4, 2), tensor(7, 4, 2), "TND", actual_seq_qlen=(2, 7), actual_seq_kvlen=(2, 7),
        ),
        sample(tensor(2, 5, 4, 2), tensor(2, 6, 4, 2), tensor(2, 6, 4, 2), "BSND", PATTERN, sparse_mode=3).options(
            name="more_keys_causal"
        ),
        sample(
            tensor(1, 5, 8), tensor(1, 6, 8), tensor(1, 6, 8), "BSH", PATTERN, sparse_mode=2, pse=tensor(1, 4, 5, 6)
        ).options(name="causal_from_the_first_and_pse"),
        sample(
            tensor(2, 4, 5, 2), tensor(2, 4, 6, 2), tensor(2, 4, 6, 2), "BNSD", PATTERN,
            sparse_mode=4, pre_tockens=2, next_tockens=1,
        ).options(name="band_from_the_last"),
    )  # fmt: skip


@pytest.mark.ranks(4)
def test_a_mask_sharded_by_sections_does_not_cut_the_queries():
    """A rank's rows would be two ranges, and the band is counted from the first of one."""
    values = [torch.randn(6, 2, 8, dtype=torch.float64) for _ in range(3)]
    mask, mesh = ~torch.eye(6).bool(), mesh_of((4,))
    given = [distribute_tensor(v, mesh, [Replicate()]) for v in values]
    packed = distribute_tensor(mask, mesh, [PackedShard(0, (4, 2))])
    band = {"pre_tockens": 1, "next_tockens": 0}
    with redistribute_policy("auto"):
        out = attention(*given, "SBH", packed, **band)[0]
    given = [x.to_local() for x in given]
    torch.testing.assert_close(out.full_tensor(), attention(*given, "SBH", mask, **band)[0])


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements)


def counted(call):
    with CommTrace() as trace:
        out = call()
    return out, trace.counts


@pytest.mark.ranks(4)
def test_heads_are_counted_per_rank_and_nothing_is_communicated():
    q, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 2, 4)
    want = npu.npu_fusion_attention(q, k, k, 8, "BSND", scale=0.5)
    args = spread(q, Shard(2)), spread(k, Replicate()), spread(k, Replicate())
    got, collectives = counted(lambda: npu.npu_fusion_attention(*args, 8, "BSND", scale=0.5))
    assert collectives == {}
    assert [o.placements[0] for o in got[:4]] == [Shard(2), Shard(1), Shard(1), Replicate()]
    assert got[4:] == want[4:]
    torch.testing.assert_close(got[0].full_tensor(), want[0])


@pytest.mark.ranks(4)
def test_queries_stay_sharded_where_the_masks_say_what_they_see():
    q, k = torch.randn(2, 6, 4, 4), torch.randn(2, 5, 4, 4)
    mask = torch.rand(6, 5) < 0.3
    mask[:, 0] = False
    args = spread(q, Shard(1)), spread(k, Replicate()), spread(k, Replicate())
    of_queries = spread(mask, Shard(0))
    got, collectives = counted(lambda: npu.npu_fusion_attention(*args, 4, "BSND", atten_mask=of_queries, scale=0.5))
    assert collectives == {}
    assert [o.placements[0] for o in got[:4]] == [Shard(1), Shard(2), Shard(2), Replicate()]
    want = npu.npu_fusion_attention(q, k, k, 4, "BSND", atten_mask=mask, scale=0.5)
    torch.testing.assert_close(got[0].full_tensor(), want[0])


# Queries and keys, sparse_mode, and how many keys before and behind its own place a query sees.
BANDS = [
    (6, 6, 0, 9, 0),
    (6, 7, 0, 2, 1),
    (6, 4, 0, 1, -1),
    (6, 6, 2, 0, 0),
    (5, 7, 2, 0, 0),
    (7, 4, 2, 0, 0),
    (5, 7, 3, 0, 0),
    (5, 7, 4, 2, 1),
    (7, 5, 4, 1, 3),
    (5, 7, 4, 3, -2),
    (6, 6, 4, 2147483647, 2147483647),
]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_a_part_of_the_queries_sees_the_same_keys(band):
    queries, keys, mode, *tokens = band
    mask = torch.rand(queries, keys, generator=torch.Generator().manual_seed(0)) < 0.2
    whole = npu.left_out(queries, keys, mask, tokens, mode, torch.device("cpu"))
    seen = Band(mode, *((2147483647, 0) if mode in (2, 3) else tokens), (queries,), (keys,))
    assert not seen.some_see_nothing()
    for start in range(queries):
        for stop in range(start + 1, queries + 1):
            given = {"sparse_mode": mode, "atten_mask": mask[start:stop], "pre_tockens": 0, "next_tockens": 0}
            end = seen.cut_samples(given, start, stop)
            rest = given["pre_tockens"], given["next_tockens"]
            assert mode == 0 or min(rest) >= 0
            part = npu.left_out(stop - start, end, given["atten_mask"], rest, given["sparse_mode"], mask.device)
            assert torch.equal(part, whole[start:stop, :end])
            assert whole[start:stop, end:].all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_queries_stay_sharded_under_any_band(band):
    torch.manual_seed(0)
    queries, keys, mode, before, after = band
    plain = [torch.randn(1, n, 4, 2).requires_grad_() for n in (queries, keys, keys)]
    mask = torch.rand(queries, keys) < 0.2
    options = {"sparse_mode": mode, "pre_tockens": before, "next_tockens": after, "scale": 0.5}
    want = npu.npu_fusion_attention(*plain, 4, "BSND", atten_mask=mask, **options)
    want[0].square().sum().backward()
    args = [spread(x.detach(), p).requires_grad_() for x, p in zip(plain, (Shard(1), *[Replicate()] * 2), strict=True)]
    mask = spread(mask, Shard(0) if mode == 0 else Replicate())
    with CommTrace() as trace:
        got = npu.npu_fusion_attention(*args, 4, "BSND", atten_mask=mask, **options)
        assert trace.counts == {}
        got[0].square().sum().backward()
    assert got[0].placements == (Shard(1),)
    for have, expected in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(have.full_tensor(), expected)
    for have, expected in zip(args, plain, strict=True):
        torch.testing.assert_close(have.grad.full_tensor(), expected.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {"sparse_mode": 4, "pre_tockens": -1},  # the last query sees nothing
        {"pse": torch.zeros(1, 4, 3, 6)},  # of the last queries
        {"actual_seq_qlen": (3, 6), "actual_seq_kvlen": (3, 6)},
    ],
    ids=["unseen", "compressed", "lengths"],
)
def test_queries_that_cannot_be_cut_are_refused(options):
    q = spread(torch.randn(1, 6, 4, 2), Shard(1))
    k = spread(torch.randn(1, 6, 4, 2), Replicate())
    pattern = spread(PATTERN, Replicate())
    with implicit_replication(), pytest.raises(ValueError, match="no strategy takes"):
        npu.npu_fusion_attention(q, k, k, 4, "BSND", **({"sparse_mode": 2, "atten_mask": pattern} | options))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", [2, 3])
def test_packed_tokens_gather_keys_and_values(mode):
    q, ends = torch.randn(7, 4, 2), (3, 7)
    lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "scale": 0.5}
    causal = {"sparse_mode": mode, "atten_mask": PATTERN}
    want = npu.npu_fusion_attention(q, q, q, 4, "TND", **lengths, **causal)[0]
    x, causal["atten_mask"] = spread(q, Shard(0)), spread(PATTERN, Replicate())
    got, collectives = counted(lambda: npu.npu_fusion_attention(x, x.clone(), x.clone(), 4, "TND", **lengths, **causal))
    assert collectives == {"all_gather": 2}
    assert got[0].placements == (Shard(0),)
    torch.testing.assert_close(got[0].full_tensor(), want)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("layout", "lengths"),
    [("BSND", {}), ("TND", {"actual_seq_qlen": (2, 8), "actual_seq_kvlen": (3, 4)})],
    ids=["samples", "packed"],
)
def test_queries_that_see_nothing_need_all_keys(layout, lengths):
    """They get the mean of all values, which a rank with fewer keys cannot tell."""
    q, k = torch.randn(8, 4, 2), torch.randn(4, 4, 2)
    if layout == "BSND":
        q, k = q.unsqueeze(0), k.unsqueeze(0)
    options = {"sparse_mode": 3, "scale": 0.5, "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1)} | lengths
    want = npu.npu_fusion_attention(q, k, k, 4, layout, **options)[0]
    args = [spread(q, Shard(q.ndim - 3)), spread(k, Replicate()), spread(k, Replicate())]
    with implicit_replication(), redistribute_policy("auto"):
        got = npu.npu_fusion_attention(*args, 4, layout, **options)[0]
    torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.ranks(4)
def test_attention_is_that_of_pytorch():
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    left_out = torch.ones(5, 5).triu(1).bool()
    for options in ({}, {"sparse_mode": 2}, {"sparse_mode": 3}, {"sparse_mode": 4, "next_tockens": 0}):
        got = npu.npu_fusion_attention(q, k, v, 4, "BNSD", atten_mask=left_out, scale=8**-0.5, **options)[0]
        torch.testing.assert_close(got, want)
    everything = npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=8**-0.5, sparse_mode=3)[0]  # without a mask
    torch.testing.assert_close(everything, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.ranks(4)
def test_dropout_over_sharded_heads_is_refused():
    q = spread(torch.randn(2, 4, 4, 4), Shard(2))
    with pytest.raises(ValueError, match="no strategy takes"):
        npu.npu_fusion_attention(q, q, q, 4, "BSND", keep_prob=0.5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("count", [8, 5])
def test_sharded_tokens_travel_once_to_their_rows_and_once_back(count):
    torch.manual_seed(0)
    tokens, probs, experts = torch.randn(count, 6), torch.rand(count, 2), torch.randint(0, 5, (count, 2))
    plain = tokens.clone().requires_grad_()
    want = there_and_back(plain, probs, experts)
    want.square().sum().backward()
    mine, chances, choice = (spread(x, Shard(0)) for x in (tokens, probs, experts))
    mine.requires_grad_()
    with CommTrace() as trace:
        rows, where = npu.npu_moe_token_permute(mine, choice)
        assert trace.counts == {"all_gather": 1, "all_to_all": 1}
        out = npu.npu_moe_token_unpermute(rows * 2, where, probs=chances)
        assert trace.counts == {"all_gather": 1, "all_to_all": 2}
        out.square().sum().backward()
    assert trace.counts == {"all_gather": 1, "all_to_all": 4}
    assert [x.placements[0] for x in (rows, where, out)] == [Shard(0), Replicate(), Shard(0)]
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_experts_in_packed_form_cost_nothing():
    """The fused experts of an NPU integration, their features sharded: one pending sum at the end."""
    torch.manual_seed(0)
    x, up, down = torch.randn(8, 6), torch.randn(5, 6, 8), torch.randn(5, 4, 6)
    want = grouped_rows(npu.npu_swiglu(grouped_rows(x, up, COUNTS)), down, COUNTS)
    parts = spread(x, Replicate()), spread(up, PackedShard(2, (4, 4))), spread(down, Shard(1))
    counts = spread(COUNTS, Replicate())
    out, collectives = counted(
        lambda: grouped_rows(npu.npu_swiglu(grouped_rows(parts[0], parts[1], counts)), parts[2], counts)
    )
    assert collectives == {}
    assert out.placements == (Partial(),)
    torch.testing.assert_close(out.full_tensor(), want)


@pytest.mark.ranks(4)
def test_norm_over_a_sharded_dim_costs_one_number_per_row():
    x, gamma = spread(torch.randn(3, 8), Shard(1)), spread(torch.rand(8), Shard(0))
    (out, rstd), collectives = counted(lambda: npu.npu_rms_norm(x, gamma))
    assert collectives == {"all_reduce": 1}
    assert (out.placements, rstd.placements) == ((Shard(1),), (Replicate(),))
    whole = x.full_tensor()
    torch.testing.assert_close(out.full_tensor(), F.rms_norm(whole, (8,), gamma.full_tensor(), 1e-6))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"amsgrad": True}], ids=str)
def test_adamw_is_that_of_pytorch(options):
    torch.manual_seed(0)
    numbers = {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-8, "betas": (0.9, 0.99)}
    plain = torch.nn.Parameter(torch.randn(5, 6))
    optimizer = torch.optim.AdamW([plain], **numbers, **options)
    parameter = spread(plain.detach().clone(), Shard(0))
    first, second, largest = (torch.zeros_like(parameter) for _ in range(3))
    for step in range(3):
        plain.grad = torch.randn(5, 6)
        optimizer.step()
        gradient = spread(plain.grad, Replicate())
        extra = options | ({"max_grad_norm": largest} if "amsgrad" in options else {})
        out = npu.npu_apply_adam_w(
            0.9**step, 0.99**step, 0.1, 0.01, 0.9, 0.99, 1e-8, gradient, **extra, out=(parameter, first, second)
        )
        assert out[0] is parameter
    assert parameter.placements == (Shard(0),)
    torch.testing.assert_close(parameter.full_tensor(), plain.detach())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mode", "size", "placement", "exchanges"),
    [
        ("interleave", 8, Shard(2), 0),
        ("interleave", 6, Shard(2), 0),  # the last rank has nothing
        ("interleave", 10, Shard(2), 1),
        ("half", 12, PackedShard(2, (6, 6)), 0),
        ("half", 10, PackedShard(2, (5, 5)), 0),
        ("half", 8, Shard(2), 1),
    ],
)
def test_rotated_elements_travel_only_where_their_partners_are_elsewhere(mode, size, placement, exchanges):
    torch.manual_seed(0)
    plain = [torch.randn(2, 3, size).requires_grad_(), torch.randn(3, size).requires_grad_(), torch.randn(3, size)]
    want = npu.npu_rotary_mul(*plain, mode)
    want.square().sum().backward()
    x = spread(plain[0].detach(), placement).requires_grad_()
    cosines, sines = (spread(t.detach(), Replicate()).requires_grad_() for t in plain[1:])
    with CommTrace() as trace:
        out = npu.npu_rotary_mul(x, cosines, sines, mode)
        assert trace.counts == ({"all_to_all": exchanges} if exchanges else {})
        out.square().sum().backward()
    assert trace.counts.get("all_to_all", 0) == 2 * exchanges
    assert out.placements == (placement,)
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(x.grad.full_tensor(), plain[0].grad)
    torch.testing.assert_close(cosines.grad.full_tensor(), plain[1].grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("placement", "exchanges"), [(PackedShard(1, (6, 6)), 0), (Shard(1), 1)], ids=str)
def test_halves_travel_only_where_the_other_is_elsewhere(placement, exchanges):
    torch.manual_seed(0)
    plain = torch.randn(3, 12).requires_grad_()
    want = npu.npu_swiglu(plain)
    want.square().sum().backward()
    x = spread(plain.detach(), placement).requires_grad_()
    with CommTrace() as trace:
        out = npu.npu_swiglu(self=x)
        assert trace.counts == ({"all_to_all": exchanges} if exchanges else {})
        out.square().sum().backward()
    assert trace.counts.get("all_to_all", 0) == 2 * exchanges
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_adamw_takes_a_pending_gradient():
    parameter = spread(torch.ones(5), Shard(0))
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    gradient = spread(torch.full((5,), 2.0), Partial())
    npu.npu_apply_adam_w(1, 1, 0.1, 0, 0.9, 0.99, 1e-8, gradient, out=(parameter, first, second))
    torch.testing.assert_close(parameter.full_tensor(), torch.full((5,), 0.9))
