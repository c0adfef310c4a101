"""``parallelize``: a whole model in one call, against the same model on one process."""

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    DTensor,
    ParallelDims,
    RowwiseParallel,
    parallel_report,
    parallelize,
    shard_batch,
)

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 67,
}  # fmt: skip


def qwen3(seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**{**SMALL, **changes})
    return transformers.Qwen3ForCausalLM(config)


def tokens(rows=4, length=12):
    """Rows with unequally many labels, so that a mean of means would be another number."""
    ids = torch.randint(0, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels}


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_gradients(model, single):
    for (name, got), want in zip(model.named_parameters(), single.parameters(), strict=True):
        error = (whole(got.grad) - want.grad).norm() / want.grad.norm()
        assert error < 1e-5, (name, error)


def step_of_one_device(**changes):
    single = qwen3(**changes)
    output = single(**tokens())
    output.loss.backward()
    return single, output


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "degrees", [{}, {"tp": 2}, {"tp": 4}, {"tp": 2, "dp_replicate": 2}, {"dp_replicate": 2}], ids=str
)
@pytest.mark.parametrize("as_dtensor", [False, True])
def test_gradients_of_one_device(degrees, as_dtensor):
    single, _ = step_of_one_device()
    dims = ParallelDims(**degrees)
    model = parallelize(qwen3(), dims)
    batch = shard_batch(tokens(), dims, as_dtensor=as_dtensor)
    output = model(**batch)
    assert output.past_key_values is None
    assert isinstance(output.logits, DTensor) == (dims.tp > 1 or (as_dtensor and dims.sizes()["batch"] > 1))
    output.loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"tp": 4}], ids=str)
def test_tied_embeddings(degrees):
    single, _ = step_of_one_device(tie_word_embeddings=True)
    dims = ParallelDims(**degrees)
    model = parallelize(qwen3(tie_word_embeddings=True), dims)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(**shard_batch(tokens(), dims)).loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(2)
def test_an_optimizer_built_before_is_an_error():
    model = qwen3()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, ParallelDims(tp=2))
    model(**tokens()).loss.backward()
    with pytest.raises(RuntimeError, match="Build the SGD after parallelize"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_a_cache_that_is_asked_for_in_training():
    model = parallelize(qwen3(), ParallelDims(tp=2))
    assert model(**tokens(), use_cache=True).past_key_values is not None
    assert model.eval()(**tokens()).past_key_values is not None


@pytest.mark.ranks(4)
def test_collectives_of_a_layer():
    """One gather and one scatter per half layer, and one all-reduce for the gradients of its norms."""
    dims = ParallelDims(tp=2, dp_shard=1, dp_replicate=2)
    model = parallelize(qwen3(), dims)
    batch = shard_batch(tokens(), dims)
    report = parallel_report(model, batch)
    assert all(p.grad is None for p in model.parameters())
    for name in ("model.layers.0", "model.layers.1"):
        assert report.sent[name].forward == {"all_gather": 2, "reduce_scatter": 2}
        assert report.sent[name].backward == {"all_gather": 2, "reduce_scatter": 2}
    with CommTrace() as trace:
        model(**batch).loss.backward()
    over_tp = [e for e in trace.events if e.axis_names == ("tp",) and e.phase == "backward" and e.op == "all_reduce"]
    assert [e.change for e in over_tp].count("gradients of 4 parameters") == 2
    assert len(over_tp) == 3  # and the last norm's
    text = str(report)
    for expected in ("tp=2", "sequence_parallel=True", "whole", "model.layers.0: forward 2 all_gather"):
        assert expected in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activation_checkpointing(checkpointing):
    single, _ = step_of_one_device()
    model = parallelize(qwen3(), ParallelDims(tp=2), checkpointing=checkpointing)
    model(**tokens()).loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(2)
def test_plain_logits_and_a_whole_sequence():
    single, wanted = step_of_one_device()
    model = parallelize(qwen3(), ParallelDims(tp=2), sequence_parallel=False, loss_parallel=False)
    output = model(**tokens())
    assert not isinstance(output.logits, DTensor)
    torch.testing.assert_close(output.logits, wanted.logits)
    output.loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_generate(degrees):
    single, model = qwen3().eval(), parallelize(qwen3(), ParallelDims(**degrees)).eval()
    ids = tokens()["input_ids"]
    for sampled in (False, True):
        options = {"max_new_tokens": 4, "do_sample": sampled, "top_k": 5, "pad_token_id": 0}
        torch.manual_seed(3)
        wanted = single.generate(ids, **options)
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, **options), wanted)


@pytest.mark.ranks(4)
def test_generate_after_training_on_dtensors():
    single, dims = qwen3(), ParallelDims(tp=2)
    model = parallelize(qwen3(), dims)
    for _ in range(2):
        model(**shard_batch(tokens(), dims, as_dtensor=True)).loss.backward()
        found = model.eval().generate(tokens()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(
            found, single.generate(tokens()["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
        )
        model.train()


@pytest.mark.ranks(2)
def test_a_copy_generates_by_itself():
    model = parallelize(qwen3(), ParallelDims(tp=2)).eval()
    other = copy.deepcopy(model)
    ids, options = tokens()["input_ids"], {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    for parameter in model.parameters():
        parameter.detach().zero_()
    assert torch.equal(other.generate(ids, **options), wanted)


@pytest.mark.ranks(2)
def test_values_of_rank_0_count():
    rank = torch.distributed.get_rank()
    model, single = parallelize(qwen3(seed=rank), ParallelDims(dp_replicate=2)), qwen3(seed=0)
    for got, want in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(whole(got), want)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.ranks(4)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_module_and_a_plan_of_ones_own(checkpointing):
    torch.manual_seed(0)
    net = Net().double()
    single = copy.deepcopy(net)
    plan = {"layers.*.0": ColwiseParallel(use_local_output=False), "layers.*.2": RowwiseParallel()}
    dims = ParallelDims(tp=2)
    parallelize(net, dims, plan=plan, checkpointing=checkpointing)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net(shard_batch({"x": x}, dims)["x"]).pow(2).sum().div(2).backward()
    single(x).pow(2).sum().div(4).backward()
    check_gradients(net, single)


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused():
    for degrees, options, message in [
        ({"tp": 2}, {"checkpointing": "some"}, "checkpointing is one of none, full, selective, got 'some'"),
        ({"dp_shard": 2}, {"sequence_parallel": True}, "needs a tp axis of several ranks"),
        ({"tp": 2}, {"plan": {"lm_head": ColwiseParallel()}, "loss_parallel": True}, "leave it None"),
    ]:
        with pytest.raises(ValueError, match=message):
            parallelize(qwen3(), ParallelDims(**degrees), **options)
    with pytest.raises(TypeError, match="plan maps names of modules to styles"):
        parallelize(qwen3(), ParallelDims(tp=2), plan={"lm_head": "colwise"})
    with pytest.raises(ValueError, match="no plan is known for Net"):
        parallelize(Net(), ParallelDims(tp=2))
    model = parallelize(qwen3(), ParallelDims(tp=2))
    with pytest.raises(ValueError, match="is sharded already"):
        parallelize(model, ParallelDims(tp=2))
    with pytest.raises(ValueError, match="was not given to parallelize"):
        parallel_report(Net())
    for degrees, name in [({"pp": 2, "dp_shard": 1}, "pp=2"), ({"cp": 2}, "cp=2"), ({"ep": 2}, "ep=2")]:
        with pytest.raises(NotImplementedError, match=name):
            parallelize(qwen3(), ParallelDims(**degrees))


@pytest.mark.ranks(2)
def test_whole_parameters_are_told():
    """Two key heads on two ranks are split, one is not."""
    with pytest.warns(UserWarning, match=r"of the parameters' bytes are whole on every rank of tp: model.layers"):
        parallelize(qwen3(num_key_value_heads=1, head_dim=32), ParallelDims(tp=2))


class LossOfItsOwn(transformers.Qwen3ForCausalLM):
    """Hands on nothing to its loss, as models with pictures do not."""

    accepts_loss_kwargs = False

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=self.config.vocab_size)
        return output


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_the_loss_is_over_the_tokens_of_all_data_ranks(given):
    """The first data rank has fewer labels; a number that the caller gives is the one that counts."""
    torch.manual_seed(0)
    model, single = (
        (transformers.Qwen3ForCausalLM if given else LossOfItsOwn)(transformers.Qwen3Config(**SMALL)),
        qwen3(),
    )
    dims = ParallelDims(dp_replicate=2)
    parallelize(model, dims)
    batch = tokens()
    more = {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum() / 2} if given else {}
    with CommTrace() as trace:
        loss = model(**shard_batch(batch, dims, check=False), **more).loss
    assert trace.counts["all_reduce"] == (0 if given else 1)
    loss.backward()
    wanted = single(**batch).loss
    wanted.backward()
    check_gradients(model, single)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total / 2, wanted.detach())
