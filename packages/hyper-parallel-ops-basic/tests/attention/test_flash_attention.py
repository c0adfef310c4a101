"""Flash attention by the entry points of its packages, on stand-ins for them, against the same on one device."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from hyper_parallel import CommTrace, Partial, Replicate, Shard, distribute_tensor, implicit_replication
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of

sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))

import flash_attn
import flash_attn_interface as flash_attn_3
from plain_flash_attention import gradients, packed_attention


def qkv(batch, heads, kv_heads, queries, keys, features=2, values=2):
    return (
        tensor(batch, queries, heads, features),
        tensor(batch, keys, kv_heads, features),
        tensor(batch, keys, kv_heads, values),
    )


def plain_counts(op):
    """With the plain starts of sequences, as inside of a model that is sharded."""

    @functools.wraps(op)
    def run(*args, **kwargs):
        with implicit_replication():
            return op(*args, **kwargs)

    return run


class OnAll(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20


class TestDense(OnAll):
    op = flash_attn.flash_attn_func
    samples = (
        sample(*qkv(3, 5, 5, 4, 6)),
        sample(*qkv(2, 4, 4, 5, 5), causal=True).options(name="causal"),
        sample(*qkv(2, 4, 4, 3, 6), causal=True, softmax_scale=0.3, softcap=2.0).options(name="more_keys"),
        sample(*qkv(2, 4, 4, 6, 3), causal=True).options(name="more_queries"),
        sample(*qkv(2, 8, 2, 5, 5), causal=True).options(name="grouped_heads"),
        sample(*qkv(1, 6, 2, 5, 5), window_size=(1, 0)).options(name="sliding_window"),
        sample(*qkv(1, 4, 2, 5, 5), window_size=(1, 1)).options(name="window_ahead"),
        sample(*qkv(1, 4, 4, 7, 5), window_size=(2, -1)).options(name="window_without_end"),
        sample(*qkv(2, 4, 4, 5, 5), alibi_slopes=tensor(4, grad=False), causal=True).options(name="slopes"),
        sample(*qkv(3, 4, 4, 5, 5), alibi_slopes=tensor(3, 4, grad=False)).options(name="slopes_of_samples"),
        sample(*qkv(3, 4, 2, 4, 4), causal=True, return_attn_probs=True).options(name="statistics"),
    )


class TestPackedKeys(OnAll):
    op = flash_attn.flash_attn_kvpacked_func
    samples = (sample(tensor(3, 5, 4, 2), tensor(3, 5, 2, 2, 2), causal=True),)


class TestAllPacked(OnAll):
    op = flash_attn.flash_attn_qkvpacked_func
    samples = (sample(tensor(3, 5, 3, 4, 2), causal=True, return_attn_probs=True),)


STARTS = torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32)
MORE = torch.tensor([0, 4, 5, 9, 12], dtype=torch.int32)  # other lengths


@plain_counts
def sequences(q, k, v, of_keys=STARTS, **options):
    return flash_attn.flash_attn_varlen_func(q, k, v, STARTS, of_keys, 4, 4, **options)


class TestSequences(OnAll):
    op = sequences
    samples = (
        sample(tensor(9, 4, 2), tensor(9, 4, 2), tensor(9, 4, 2)),
        sample(tensor(9, 4, 2), tensor(9, 2, 2), tensor(9, 2, 2), causal=True).options(name="causal"),
        sample(tensor(9, 2, 2), tensor(9, 2, 2), tensor(9, 2, 2), causal=True, window_size=(1, 0)).options(
            name="sliding_window"
        ),
        sample(tensor(11, 2, 2), tensor(11, 2, 2), tensor(11, 2, 2), causal=True).options(name="tokens_of_no_sequence"),
        sample(tensor(9, 2, 2), tensor(12, 2, 2), tensor(12, 2, 2), MORE, causal=True).options(name="other_lengths"),
        sample(tensor(9, 2, 2), tensor(9, 2, 2), tensor(9, 2, 2), STARTS, dropout_p=0.0).options(
            name="laid_out_starts"
        ),
        sample(tensor(9, 4, 2), tensor(9, 4, 2), tensor(9, 4, 2), causal=True, return_attn_probs=True).options(
            name="statistics"
        ),
    )


@plain_counts
def packed_sequences(q, kv):
    return flash_attn.flash_attn_varlen_kvpacked_func(q, kv, STARTS, STARTS, 4, 4, causal=True)


class TestPackedSequences(OnAll):
    op = packed_sequences
    samples = (sample(tensor(9, 4, 2), tensor(9, 2, 2, 2)),)


@plain_counts
def all_packed_sequences(qkv):
    return flash_attn.flash_attn_varlen_qkvpacked_func(qkv, STARTS, 4, causal=True)


class TestAllPackedSequences(OnAll):
    op = all_packed_sequences
    samples = (sample(tensor(9, 3, 4, 2)),)


class TestVersion3(OnAll):
    op = flash_attn_3.flash_attn_func
    samples = (sample(*qkv(2, 4, 2, 5, 5), causal=True, return_attn_probs=True),)


class TestAllPackedOfVersion3(OnAll):
    op = flash_attn_3.flash_attn_qkvpacked_func
    samples = (
        sample(tensor(3, 5, 3, 4, 2), causal=True, return_attn_probs=True),
        # Query, key and value heads side by side.
        sample(tensor(3, 5, 8, 2), causal=True, num_heads_q=4, return_attn_probs=True).options(name="grouped_heads"),
    )


@plain_counts
def sequences_3(q, k, v):
    return flash_attn_3.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 4, 4, causal=True)


class TestSequencesOfVersion3(OnAll):
    op = sequences_3
    samples = (sample(tensor(9, 4, 2), tensor(9, 2, 2), tensor(9, 2, 3)),)


# -- torch.nn.attention.varlen ---------------------------------------------------------------------------------------


@varlen._varlen_attn.register_kernel("cpu")
def _(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None, *_):
    out, sums = packed_attention(q, k, v, cu_seq_q, cu_seq_k, scale=scale, window=window_size, causal=is_causal)
    return out.contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def _(
    grad, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None, window_size=None
):  # fmt: skip
    def run(q, k, v):
        return packed_attention(q, k, v, cu_seq_q, cu_seq_k, scale=scale, window=window_size, causal=is_causal)

    # Kernels run with autograd switched off, for this thread.
    with ThreadPoolExecutor(1) as other:
        return tuple(x.contiguous() for x in other.submit(gradients, run, (q, k, v), grad).result())


@plain_counts
def torch_varlen(q, k, v, **options):
    return varlen.varlen_attn(q, k, v, STARTS, STARTS, 4, 4, **options)


class TestTorchVarlen(OnAll):
    op = torch_varlen
    samples = (
        sample(tensor(9, 4, 2), tensor(9, 4, 2), tensor(9, 4, 2)),
        sample(tensor(9, 4, 2), tensor(9, 2, 2), tensor(9, 2, 2), window_size=(-1, 0), enable_gqa=True).options(
            name="causal"
        ),
        sample(
            tensor(9, 4, 2), tensor(9, 4, 2), tensor(9, 4, 2), return_aux=varlen.AuxRequest(lse=True), scale=0.3
        ).options(name="statistics"),
    )


# -- what it costs, and what is refused ------------------------------------------------------------------------------


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements).requires_grad_()


def counted(call):
    with CommTrace() as trace:
        out = call()
    return out, trace.counts


def test_the_stand_in_is_attention():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 5, 4, 8).unbind())
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    got = flash_attn.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(got, want)
    gradients_of = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)]
    torch.testing.assert_close(*gradients_of)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 5, 5, causal=True)
    torch.testing.assert_close(packed.view_as(want), want)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("groups", [8, 2], ids=["key_heads_alike", "key_heads_whole"])
def test_heads_cost_nothing_forward(groups):
    q, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, groups, 4)
    along = Shard(2) if groups == 8 else Replicate()
    args = spread(q, Shard(2)), spread(k, along), spread(k, along)
    out, forward = counted(lambda: flash_attn.flash_attn_func(*args, causal=True))
    assert forward == {}
    assert out.placements == (Shard(2),)
    _, backward = counted(lambda: out.sum().backward())
    assert backward == ({} if groups == 8 else {"all_reduce": 2})  # of the whole keys and values
    torch.testing.assert_close(out.full_tensor(), flash_attn.flash_attn_func(q, k, k, causal=True))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("packed", [False, True], ids=["samples", "packed"])
def test_sharded_tokens_gather_keys_and_values(packed):
    q = spread(torch.randn(9, 4, 2) if packed else torch.randn(1, 9, 4, 2), Shard(0 if packed else 1))
    run = sequences if packed else flash_attn.flash_attn_func
    out, forward = counted(lambda: run(q, q.clone(), q.clone(), causal=True))
    assert forward == {"all_gather": 2}
    assert out.placements == q.placements
    _, backward = counted(lambda: out.sum().backward())
    assert backward == {"reduce_scatter": 2}


@pytest.mark.ranks(4)
def test_starts_of_sequences_are_not_read_where_they_are_the_same(monkeypatch):
    """Reading them waits for the device."""
    q = spread(torch.randn(9, 4, 2), Shard(0))
    monkeypatch.setattr(flash_attn.flash_attn_interface, "packed_attention", lambda q, k, v, *_, **__: (q + 0, q))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("read"))
    sequences(q, q, q, causal=True)


@pytest.mark.ranks(4)
def test_sharded_starts_are_gathered_once():
    """As they come from a padding mask of a batch over data ranks."""
    q, starts = torch.randn(9, 4, 2), distribute_tensor(STARTS, mesh_of((4,)), [Shard(0)])
    heads = spread(q, Shard(1))
    run = flash_attn.flash_attn_varlen_func
    out, collectives = counted(lambda: run(heads, heads, heads, starts, starts, 4, 4, causal=True))
    assert collectives == {"all_gather": 1}
    torch.testing.assert_close(out.full_tensor(), run(q, q, q, STARTS, STARTS, 4, 4, causal=True))


@pytest.mark.ranks(4)
def test_a_pending_query_is_reduced():
    q = torch.randn(2, 3, 4, 2)
    pending = distribute_tensor(q, mesh_of((4,)), [Replicate()]).redistribute(placements=[Partial()])
    torch.testing.assert_close(
        flash_attn.flash_attn_func(pending, pending, pending).full_tensor(), flash_attn.flash_attn_func(q, q, q)
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("dim", "options"),
    [(2, {"dropout_p": 0.5}), (1, {"window_size": (1, 1), "alibi_slopes": torch.ones(4)}), (3, {})],
    ids=["drop", "slopes", "E"],
)
def test_what_a_kernel_cannot_do_in_pieces_is_refused(dim, options):
    q = spread(torch.randn(2, 4, 4, 8), Shard(dim))
    with implicit_replication(), pytest.raises(ValueError, match=r"FlashAttnFunc.apply: no strategy takes"):
        flash_attn.flash_attn_func(q, q, q, **options)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("window", [(1, 1), (0, 2), (2, -1), (-1, 3)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (5, 9), (9, 5)])
def test_queries_stay_sharded_under_any_window(window, queries, keys):
    torch.manual_seed(0)
    plain = [torch.randn(1, n, 4, 2).requires_grad_() for n in (queries, keys, keys)]
    want = flash_attn.flash_attn_func(*plain, window_size=window)
    want.square().sum().backward()
    args = [spread(x.detach(), p).requires_grad_() for x, p in zip(plain, (Shard(1), *[Replicate()] * 2), strict=True)]
    out, forward = counted(lambda: flash_attn.flash_attn_func(*args, window_size=window))
    assert forward == {}
    assert out.placements == (Shard(1),)
    out.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    for have, expected in zip(args, plain, strict=True):
        torch.testing.assert_close(have.grad.full_tensor(), expected.grad)
